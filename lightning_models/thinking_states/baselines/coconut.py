"""Coconut: a chain of continuous thought, hidden states that are fed back as inputs.

Latents stand between question and answer, where the first steps stood.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_models.layers import record
from lightning_models.optim import OptimizerConfig
from lightning_models.runtime import on_device
from lightning_models.thinking_states.backbone import AnswerCache, read
from lightning_models.thinking_states.baselines.curricula import (
    ShortenedChain,
    StagedConfig,
    StagedLM,
    StepStages,
    num_steps,
)
from lightning_models.thinking_states.baselines.text import (
    ANSWER,
    CHAIN,
    NOTHING,
    PREFIX,
    QUERY,
    THINKING,
    Batch,
    Segment,
    TextCache,
    TextNetwork,
    TextRows,
    line_up,
)
from lightning_models.thinking_states.rows import (
    Joined,
    aligned_right,
    answer_of,
    constant,
    join,
    query_of,
)

START, END, LATENT = "latent_start", "latent_end", "latent"


@dataclass(frozen=True, kw_only=True)
class CoconutConfig(StagedConfig):
    """Coconut (Hao et al., 2024); values are those of its GSM8K run.

    Raises:
        ValueError: if a value is out of its range, or gradient checkpointing is set.
    """

    special_tokens: ClassVar[tuple[str, ...]] = (START, END, LATENT)
    """Markers around the latents, and the token in their places. The public code begins their
    embeddings with that of ``<<``: name its id in ``special_rows_from``."""

    c_thought: int = 2
    """c, latents for a step (2 on GSM8K, 1 on ProntoQA and ProsQA; 2, 3, 4, 5 and 7 in Table 3 of
    the Thinking States paper)."""
    pad_latent_to_max: bool = True
    """Whether questions with few steps also take the most latents at the last stage."""
    eval_latents: int | None = None
    """Latents of a question outside training (6 to 21 in that table); null: those of the stage."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        if self.c_thought < 1:
            raise ValueError(f"c_thought ({self.c_thought}) must be at least 1")
        if self.eval_latents is not None and self.eval_latents < 0:
            raise ValueError(f"eval_latents ({self.eval_latents}) must not be negative")
        if self.gradient_checkpointing:
            raise ValueError(
                f"gradient_checkpointing ({self.gradient_checkpointing}) would compute layers "
                "again whose keys and values later latents have read from a cache; set it to "
                "false, and batch_size lower if memory is short"
            )

    @property
    def added_positions(self) -> int:
        # the most latents and their two markers, next to a chain's positions
        trained = self.c_thought * self.max_latent_stage
        return super().added_positions + max(trained, self.eval_latents or 0) + 2


# ---- rows


def num_latents(stages: Tensor, steps: Tensor, *, each: int, last: int, pad: bool) -> Tensor:
    """Returns m, the number of latents of each row (B,) int64.

    At stage s there are s times ``each`` of them, whatever the row's number of steps; after the
    last stage the same number, or, without padding, those of the steps that the row has.

    Args:
        stages: s of each row (B,) int64.
        steps: reasoning steps of each row (B,) int64.
        each: c, latents for a step.
        last: the last stage that removes steps.
        pad: whether rows with few steps take the most latents, too.
    """
    most = torch.full_like(steps, last)
    at_end = most if pad else torch.minimum(steps, most)
    return torch.where(stages > last, at_end, stages) * each  # (B,)


@dataclass(frozen=True, kw_only=True)
class CoconutLayout(ShortenedChain):
    """Query, start, latents, end, the remaining steps, answer prefix, answer.

    Rows are padded on the left so that their first latents share a column, and on the right after
    that. Nothing predicts markers and latents.
    """

    stages: StepStages
    """The curriculum."""
    c_thought: int
    """c, latents for a step."""
    pad_latent_to_max: bool
    """See ``num_latents``."""
    start: int
    """Marker before the latents."""
    end: int
    """Marker after the latents."""
    latent: int
    """Id in the place of a latent, whose embedding only ``pause_latent`` reads."""

    def training(self, batch: Batch, stage: int = 0) -> TextRows:
        """Returns the text of training; see the base."""
        stages = self.stages.of_rows(batch, stage)
        latents = num_latents(
            stages,
            num_steps(batch),
            each=self.c_thought,
            last=self.stages.last,
            pad=self.pad_latent_to_max,
        )
        chain, learned = self.chain(batch, stage)
        prefix = constant(self.answer_prefix, batch["query"])
        return self.thoughtful(batch, latents, (CHAIN, chain), (PREFIX, prefix), learned=learned)

    def scored_with(self, batch: Batch, middle: Segment, latents: int) -> TextRows:
        """Returns the text whose answer is scored, after ``latents`` latents; see ``scored``."""
        count = torch.full_like(batch["query_lengths"], latents)
        return self.thoughtful(batch, count, (PREFIX, middle))

    def thoughtful(
        self,
        batch: Batch,
        latents: Tensor,
        *middle: tuple[int, Segment],
        learned: Tensor | None = None,
    ) -> TextRows:
        """Returns rows with ``latents`` (B,) between the query and ``middle``."""
        query = batch["query"]
        head = line_up((QUERY, query_of(batch)), (THINKING, constant((self.start,), query)))
        thoughts, _ = constant([self.latent] * int(latents.max()), query)
        rest = line_up(
            (THINKING, (thoughts, latents)),
            (THINKING, constant((self.end,), query)),
            *middle,
            (ANSWER, answer_of(batch)),
        )
        return self.predict(_side_by_side(head, rest), learned)


def _side_by_side(head: Joined, rest: Joined) -> Joined:
    """Returns rows whose heads end together and whose rests begin together."""
    tokens, real = aligned_right(head.tokens, head.lengths)
    kinds, _ = aligned_right(head.segment, head.lengths)
    return Joined(
        torch.cat((tokens.masked_fill(~real, 0), rest.tokens), dim=1),
        head.lengths + rest.lengths,
        torch.cat((kinds.masked_fill(~real, NOTHING), rest.segment), dim=1),
    )


# ---- network


class Latents(NamedTuple):
    """Where latents are.

    Attributes:
        latent: Which tokens are latents (B, T) bool.
        first: The column in which they begin, in every row that has any; at least 1.
        most: Columns that hold latents.
    """

    latent: Tensor
    first: int
    most: int

    @classmethod
    def among(cls, tokens: Tensor, latent_id: int) -> "Latents":
        """Returns where latents are among tokens (B, T), by their id."""
        latent = tokens == latent_id
        columns = latent.any(dim=0).nonzero()[:, 0].tolist()
        return cls(latent, columns[0] if columns else tokens.shape[1], len(columns))


class CoconutNetwork(TextNetwork):
    """The backbone on rows in which some inputs are the state of the position before.

    Up to the first latent all columns are read at once, then one column for each latent, then the
    rest. Keys and values are kept in between, with their graph: the gradient of later losses flows
    back through all latents. Rows with fewer latents, or none, read text in these columns.
    """

    def forward(
        self,
        tokens: Tensor,
        *,
        real: Tensor | None = None,
        cache: AnswerCache | None = None,
        latents: Latents | None = None,
    ) -> Tensor:
        """Returns the normed states (B, T, D) of tokens.

        Records ``latents``: ``states``, a list of the inputs (B, D) of each of the m columns of
        latents, part of the graph, and ``latent`` (B, m) bool, which of them are latents.

        Args:
            tokens: (B, T) int64.
            real: which of them are text (B, T) bool; None: all.
            cache: of earlier tokens, extended in place.
            latents: their columns; None: none.
        """
        if latents is None:
            return super().forward(tokens, real=real, cache=cache)
        if cache is None:
            cache = AnswerCache(len(tokens), tokens.device)
        if real is None:
            real = torch.ones_like(tokens, dtype=torch.bool)
        h = self.backbone.embed(tokens)
        end = latents.first + latents.most
        parts = [read(self.backbone, cache, h[:, : latents.first], real[:, : latents.first]).last]
        fed = []
        for column in range(latents.first, end):
            own = latents.latent[:, column, None]
            state = self.feed_back(parts[-1][:, -1], column - latents.first)  # (B, D)
            fed.append(torch.where(own, state, h[:, column]))  # (B, D)
            here = real[:, column : column + 1]
            parts.append(read(self.backbone, cache, fed[-1][:, None], here).last)
        if end < tokens.shape[1]:
            parts.append(read(self.backbone, cache, h[:, end:], real[:, end:]).last)
        record("latents", states=fed, latent=latents.latent[:, latents.first : end])
        return torch.cat(parts, dim=1)

    def pause_latent(self) -> Tensor:
        # the token in a latent's place says nothing, so its embedding reads as filler
        token = on_device(self.backbone.config.special_id(LATENT), self.output_matrix.device)
        return self.backbone.embed(token)


# ---- model


class CoconutLM(StagedLM):
    """Thinks in hidden states that take the place of the first steps of a chain (arXiv 2412.06769).

    Text: query, start marker, latents, end marker, the remaining steps, answer prefix, answer.
    The input of a latent is the state after the final norm of the position before it; gradients
    flow back through all of them.

    Args:
        config: the backbone, its latents and the curriculum.
        optimizer: optimiser and schedule.
        compile: whether to compile the network with torch.compile (in place).
    """

    # NOTE(paper): without pad_latent_to_max the public code evaluates a question with the latents
    # of its own number of steps, which only the solution shows; here with those of the stage.
    shards_blocks = False
    config: CoconutConfig
    network: CoconutNetwork

    def __init__(
        self,
        config: CoconutConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    def build_network(self) -> CoconutNetwork:
        return CoconutNetwork(self.config)

    @property
    def layout(self) -> CoconutLayout:
        """Query, latents between markers, the remaining steps, prefix, answer."""
        config = self.config
        return CoconutLayout(
            config.answer_prefix,
            config.step_separator,
            config.lm_on_query,
            stages=config.step_stages(),
            c_thought=config.c_thought,
            pad_latent_to_max=config.pad_latent_to_max,
            start=config.special_id(START),
            end=config.special_id(END),
            latent=config.special_id(LATENT),
        )

    @property
    def latents(self) -> int:
        """The latents of a question outside training."""
        config = self.config
        if config.eval_latents is not None:
            return config.eval_latents
        return min(self.stage, config.max_latent_stage) * config.c_thought

    def states(self, rows: TextRows) -> Tensor:
        """Returns the normed states (B, T, D) of rows of text; see ``CoconutNetwork``."""
        latents = Latents.among(rows.tokens, self.config.special_id(LATENT))
        h: Tensor = self.network(rows.tokens, real=rows.kinds != NOTHING, latents=latents)
        return h

    def scored_rows(self, batch: Batch) -> TextRows:
        return self.layout.scored_with(batch, self.before_answer(batch), self.latents)

    def pending(self) -> tuple[int, ...]:
        """Returns the end marker, and the answer prefix where there is no chain."""
        return (self.config.special_id(END), *super().pending())

    def read_query(self, cache: TextCache, tokens: Tensor, lengths: Tensor) -> None:
        start = constant((self.config.special_id(START),), tokens)
        joined = join((tokens, lengths), start)
        head, real = aligned_right(joined.tokens, joined.lengths)
        thoughts, _ = constant([self.config.special_id(LATENT)] * self.latents, tokens)
        latent = torch.ones_like(thoughts, dtype=torch.bool)
        self.network(
            torch.cat((head, thoughts), dim=1),
            real=torch.cat((real, latent), dim=1),
            cache=cache,
            latents=Latents(
                torch.cat((torch.zeros_like(real), latent), dim=1), head.shape[1], self.latents
            ),
        )

    # ---- compute

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per token of a row of ``context`` tokens; latents are not counted.

        They and their markers cost what tokens cost: keys and values are kept, so that nothing is
        computed twice.
        """
        return self._flops(context, self.latents, training)

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of a token of a row of ``context`` tokens.

        Args:
            context: tokens, latents and markers not counted.
            steps: latents of the row; None: those of an evaluation.
        """
        return self._flops(context, self.latents if steps is None else steps, training=False)

    def _flops(self, context: int, latents: float, training: bool) -> float:
        positions = context + latents + 2
        return super().flops_per_token(round(positions), training) * positions / context
