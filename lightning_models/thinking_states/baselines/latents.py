"""Base of methods with latents, states fed back as inputs, between question and answer.

Coconut, CODI and PCCoT share the layout of rows, the network that feeds states back, scores,
decoding and FLOPs. All of them may add SIM-CoT's decoder (arXiv 2509.20317), which predicts from
each latent the step that it stands for; answers do not depend on it.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_models.layers import record
from lightning_models.output_layer import linear_cross_entropy_each
from lightning_models.outputs import LossOutput, Mean, Term
from lightning_models.runtime import on_device
from lightning_models.thinking_states.backbone import (
    AnswerCache,
    Backbone,
    HiddenStates,
    backbone_flops,
    read,
)
from lightning_models.thinking_states.baselines.text import (
    ANSWER,
    NOTHING,
    PREFIX,
    QUERY,
    THINKING,
    Batch,
    ChainLayout,
    Segment,
    TextCache,
    TextConfig,
    TextLM,
    TextNetwork,
    TextRows,
    line_up,
    shortened,
)
from lightning_models.thinking_states.config import ReasoningConfig
from lightning_models.thinking_states.rows import (
    Joined,
    aligned_right,
    answer_of,
    chain_of,
    constant,
    join,
    query_of,
    within,
)

START, END, LATENT = "latent_start", "latent_end", "latent"


def refuse_idle(config: ReasoningConfig, pairs: Mapping[str, tuple[str, ...]]) -> None:
    """Refuses options that have no effect because the option that they belong to is not set.

    Args:
        config: Configuration, whose unset options have their defaults.
        pairs: Names of options by the option that they belong to.

    Raises:
        ValueError: If an option would have no effect.
    """
    defaults = {field.name: field.default for field in fields(config)}
    for base, keys in pairs.items():
        for key in keys:
            value, switch = getattr(config, key), getattr(config, base)
            if not switch and value != defaults[key]:
                raise ValueError(
                    f"{key} ({value}) does nothing with {base} ({switch}); set {base}, or leave "
                    f"{key} at {defaults[key]}"
                )


@dataclass(frozen=True, kw_only=True)
class LatentConfig(TextConfig):
    """A model with latents before its answer, and SIM-CoT's decoder of their steps.

    Raises:
        ValueError: If a value is out of range, or gradient checkpointing is set.
    """

    special_tokens: ClassVar[tuple[str, ...]] = (START, END, LATENT)
    """Markers around the latents, and the token in a latent's position. Coconut's public code
    initialises them from the embedding of ``<<``: set ``special_rows_from`` to its id."""

    eval_latents: int | None = None
    """Number of latents per question outside training (6 to 21 in Table 3 of the Thinking States
    paper). The default, null, is the number in training, in Coconut at the stage reached."""
    step_weight: float = 0.0
    """lambda, the weight of SIM-CoT's decoder, a copy of the backbone that learns to predict each
    step of the chain from its latents (1 in SIM-CoT). With 0 there is no decoder."""
    step_loss: Literal["token_mean", "token_sum"] = "token_mean"
    """Reduction of the decoder's loss within a question: the mean over a step's tokens and over
    steps, as in SIM-CoT's code on CODI, or the mean over steps of sums over tokens, as in its code
    on Coconut."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        if self.eval_latents is not None and self.eval_latents < 0:
            raise ValueError(f"eval_latents ({self.eval_latents}) must not be negative")
        if not 0 <= self.step_weight < math.inf:
            raise ValueError(f"step_weight ({self.step_weight}) must be finite and not negative")
        refuse_idle(self, {"step_weight": ("step_loss",)})
        if self.step_weight and not self.most_latents:
            raise ValueError(
                f"step_weight ({self.step_weight}) needs latents that say steps, of which training "
                "has none; set num_latents or max_latent_stage to 1 or more, or step_weight to 0"
            )
        if self.gradient_checkpointing:
            raise ValueError(
                f"gradient_checkpointing ({self.gradient_checkpointing}) would compute layers "
                "again whose keys and values later latents have read from a cache; set it to "
                "false, and batch_size lower if memory is short"
            )

    @property
    @abstractmethod
    def most_latents(self) -> int:
        """Maximum number of latents of a question in training."""

    @property
    def added_positions(self) -> int:
        # latents and their two markers, in addition to a chain's positions
        return super().added_positions + max(self.most_latents, self.eval_latents or 0) + 2


# ---- rows


@dataclass(frozen=True, kw_only=True)
class LatentLayout(ChainLayout):
    """Query, start, latents, end, text that a method writes, answer.

    Rows are padded on the left, so that their first latents share a column, and on the right after
    that. Markers and latents are never predicted.
    """

    start: int
    """Id of the marker before the latents."""
    end: int
    """Id of the marker after the latents."""
    latent: int
    """Id in a latent's position, whose embedding only ``pause_latent`` and PCCoT read."""

    def __call__(self, batch: Batch) -> dict[str, float]:
        """Returns the normalisers: ``targets``, and ``spoken``, questions with steps to say."""
        steps, groups = self.replaced(batch, 0)
        return {**super().__call__(batch), "spoken": float(((steps > 0) & (groups > 0)).sum())}

    @property
    def latents_per_step(self) -> int:
        """Number of latents that stand for one step of the chain."""
        return 1

    @abstractmethod
    def replaced(self, batch: Batch, stage: int) -> tuple[Tensor, Tensor]:
        """Returns the numbers of steps that latents stand for and groups of latents, both (B,).

        Args:
            batch: Batch of questions.
            stage: Stage of a curriculum, for batches without ``epochs``.
        """

    def scored_with(self, batch: Batch, middle: Segment, latents: int) -> TextRows:
        """Returns the text whose answer is scored, after ``latents`` latents; see ``scored``."""
        count = torch.full_like(batch["query_lengths"], latents)
        return self.with_latents(batch, count, (PREFIX, middle))

    def with_latents(
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
    """Joins heads and rests so that all rests begin in the same column."""
    tokens, real = aligned_right(head.tokens, head.lengths)
    kinds, _ = aligned_right(head.segment, head.lengths)
    return Joined(
        torch.cat((tokens.masked_fill(~real, 0), rest.tokens), dim=1),  # (B, head + rest)
        head.lengths + rest.lengths,
        torch.cat((kinds.masked_fill(~real, NOTHING), rest.segment), dim=1),
    )


def step_texts(batch: Batch, steps: Tensor, groups: Tensor, separator: tuple[int, ...]) -> Segment:
    """Returns the target texts of groups of latents (B, G, W), and their lengths (B, G).

    Group k says step k, and a row's last group all further steps too, with separators in between.
    An EOS ends a text. Groups without a step have length 0.

    Args:
        batch: Batch of questions.
        steps: Number of leading steps of each row that latents stand for, (B,) int64.
        groups: Number of groups of latents in each row (B,) int64.
        separator: Tokens between two steps.
    """
    # NOTE(paper): SIM-CoT's code on CODI has K + 1 targets, and by a bug cuts each step to the
    # length of the first row's; on Coconut the answer replaces a missing step.
    steps_of_rows, sizes, (answers, ends) = batch["steps"], batch["step_lengths"], answer_of(batch)
    rows, num_groups = len(sizes), int(groups.max())
    eos = answers.gather(1, (ends - 1).clamp(min=0)[:, None])  # (B, 1)
    order = torch.arange(sizes.shape[1], device=sizes.device)  # (R,)
    owner = torch.minimum(order, groups[:, None] - 1)  # (B, R), -1 without latents
    group = torch.arange(num_groups, device=sizes.device)[:, None]  # (G, 1)
    in_group = (owner[:, None] == group) & (order < steps[:, None])[:, None]  # (B, G, R)
    # each group is a separate row, in which the steps of other groups are empty
    batch_of_groups = {
        "steps": steps_of_rows.repeat_interleave(num_groups, dim=0),  # (B G, R, Z)
        "step_lengths": (sizes[:, None] * in_group).flatten(0, 1),  # (B G, R)
    }
    chain = chain_of(batch_of_groups, separator)
    has_text = (chain[1] > 0).long()  # (B G,)
    text = shortened(chain, has_text * len(separator), "left")  # without the first separator
    line = join(text, (eos.repeat_interleave(num_groups, dim=0), has_text))
    return line.tokens.unflatten(0, (rows, num_groups)), line.lengths.view(rows, num_groups)


# ---- network


class Latents(NamedTuple):
    """The positions of latents in rows of tokens.

    Attributes:
        latent: Mask of the tokens that are latents (B, T) bool.
        first: Column of the first latent, the same in every row that has latents; at least 1.
        most: Number of columns that hold latents.
    """

    latent: Tensor
    first: int
    most: int

    @classmethod
    def among(cls, tokens: Tensor, latent_id: int) -> "Latents":
        """Locates latents among tokens (B, T) by their id."""
        latent = tokens == latent_id
        columns = latent.any(dim=0).nonzero()[:, 0].tolist()
        return cls(latent, columns[0] if columns else tokens.shape[1], len(columns))


class LatentNetwork(TextNetwork):
    """The backbone on rows in which some inputs are the state of the position before.

    All columns before the first latent are read at once, then the columns of latents one by one,
    then the rest. Keys and values stay in the graph, so the gradient of later losses flows back
    through all latents. Rows with fewer latents, or none, read text in these columns.

    Args:
        config: The configuration of the backbone.
    """

    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        # NOTE(paper): SIM-CoT's code embeds the decoder's tokens with the model's matrix, which the
        # decoder's loss then also trains; here the decoder is a whole copy.
        self.decoder: Backbone | None = copy.deepcopy(self.backbone) if config.step_weight else None

    def forward(
        self,
        tokens: Tensor,
        *,
        real: Tensor | None = None,
        cache: AnswerCache | None = None,
        at: Tensor | None = None,
        latents: Latents | None = None,
    ) -> HiddenStates:
        """Returns the hidden states of tokens.

        Records ``latents`` with ``states``, a list of the inputs (B, D) of the m columns of
        latents, still in the graph, and ``latent`` (B, m) bool, the mask of latents among them; and
        ``latent_states`` with ``states`` (B, m, D), the normed states that become latents.

        Args:
            tokens: Tokens (B, T) int64.
            real: Mask of tokens that are not padding (B, T) bool. By default none is padding.
            cache: Keys and values of earlier tokens, extended in place.
            at: Index of the token of each row whose states in all layers are returned (B,) int64,
                see `Backbone.forward`. No latent may come after it.
            latents: Positions of the latents. By default there are none.
        """
        if latents is None:
            return super().forward(tokens, real=real, cache=cache, at=at)
        if cache is None:
            cache = AnswerCache(len(tokens), tokens.device)
        if real is None:
            real = torch.ones_like(tokens, dtype=torch.bool)
        h = self.embed(tokens)
        first, end = latents.first, latents.first + latents.most
        more = end < tokens.shape[1]
        hidden = read(self.backbone, cache, h[:, :first], real[:, :first], at=None if more else at)
        parts = [hidden.last]
        fed: list[Tensor] = []
        if latents.most:
            columns = slice(first, end)
            fed, states = self.think(
                cache,
                hidden.last[:, -1],
                h[:, columns],
                real[:, columns],
                latents.latent[:, columns],
            )
            parts += states
        if more:
            index = None if at is None else (at - end).clamp(min=0)  # within the last part
            hidden = read(self.backbone, cache, h[:, end:], real[:, end:], at=index)
            parts.append(hidden.last)
        record("latents", states=fed, latent=latents.latent[:, first:end])
        inputs = torch.stack(fed, dim=1) if fed else None  # (B, m, D)
        last = torch.cat(parts, dim=1)  # (B, T, D)
        record("latent_states", states=last[:, first - 1 : end - 1])  # one column earlier
        return hidden._replace(last=last, latents=inputs)

    def think(
        self, cache: AnswerCache, state: Tensor, h: Tensor, real: Tensor, latent: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Reads the m columns of latents, and returns their inputs (B, D) and states in parts.

        Args:
            cache: Keys and values of the columns before, extended in place.
            state: Normed state of the column before (B, D).
            h: Embeddings of the tokens in these columns (B, m, D).
            real: Mask of the columns that are text or latents (B, m) bool.
            latent: Mask of the latents among them (B, m) bool.
        """
        fed, states = [], []
        for column in range(h.shape[1]):
            fed_back = self.feed_back(self.project(state), column)  # (B, D)
            fed.append(torch.where(latent[:, column, None], fed_back, h[:, column]))  # (B, D)
            is_real = real[:, column : column + 1]
            states.append(read(self.backbone, cache, fed[-1][:, None], is_real).last)  # (B, 1, D)
            state = states[-1][:, 0]
        return fed, states

    def project(self, state: Tensor) -> Tensor:
        """Maps normed states (..., D) to latents (..., D); here the identity."""
        return state

    def pause_latent(self) -> Tensor | None:
        # the token in a latent's position carries no thought, so its embedding is a filler
        token = on_device(self.backbone.config.special_id(LATENT), self.output_matrix.device)
        return self.embed(token)

    def say(self, latents: Tensor, tokens: Tensor) -> Tensor:
        """Returns the decoder's states (N, W, D) that predict tokens (N, W) after latents.

        Args:
            latents: Latents that stand for one step each (N, c, D).
            tokens: Texts of the steps (N, W) int64, padded on the right. The last one is not read.
        """
        assert self.decoder is not None
        text = self.decoder.embed(tokens[:, :-1])  # (N, W - 1, D)
        h = torch.cat((latents.to(text.dtype), text), dim=1)  # (N, c + W - 1, D)
        positions = torch.arange(h.shape[1], device=h.device).expand(len(h), -1)
        last: Tensor = self.decoder(h, positions).last
        return last[:, latents.shape[1] - 1 :]  # the last latent predicts the first token

    def write_steps(self, latents: Tensor, max_tokens: int, vocab_size: int) -> Tensor:
        """Returns the token ids (N, max_tokens) that the decoder writes greedily after latents.

        Args:
            latents: Latents that stand for one step each (N, c, D).
            max_tokens: Number of tokens to write.
            vocab_size: Number of ids that may be written.
        """
        assert self.decoder is not None
        tokens = torch.zeros(len(latents), 1, dtype=torch.int64, device=latents.device)
        for end in range(max_tokens):  # the last token is not read
            states = self.say(latents, tokens)[:, -1]  # (N, D)
            tokens[:, end] = (states @ self.decoder.output_matrix.T)[:, :vocab_size].argmax(dim=-1)
            tokens = torch.nn.functional.pad(tokens, (0, 1))
        return tokens[:, :max_tokens]


# ---- model


class LatentTextLM(TextLM):
    """A language model on rows of text with latents before the answer.

    Answers come after ``latents`` latents and, in some methods, the rest of a chain.
    """

    shards_blocks = False
    config: LatentConfig
    network: LatentNetwork

    @property
    @abstractmethod
    def layout(self) -> LatentLayout:
        """Layout of questions as rows of text with latents."""

    @property
    @abstractmethod
    def trained_latents(self) -> int:
        """Number of latents of a question in training, at the stage it has reached."""

    @property
    def latents(self) -> int:
        """Number of latents of a question outside training."""
        num_latents = self.config.eval_latents
        return self.trained_latents if num_latents is None else num_latents

    def reads_per_latent(self, latents: float) -> float:
        """Returns the number of times that the backbone reads each of ``latents`` latents."""
        return 1.0

    def markers(self) -> dict[str, int]:
        """Returns the ids of the added tokens, by the layout's field names."""
        ids = (self.config.special_id(name) for name in (START, END, LATENT))
        return dict(zip(("start", "end", "latent"), ids, strict=True))

    # ---- training

    def states(self, rows: TextRows, at: Tensor | None = None) -> HiddenStates:
        latents = Latents.among(rows.tokens, self.config.special_id(LATENT))
        hidden: HiddenStates = self.network(
            rows.tokens, real=rows.kinds != NOTHING, latents=latents, at=at
        )
        return hidden

    def losses(self, batch: Batch, rows: TextRows, hidden: HiddenStates) -> LossOutput:
        """Returns the base's terms and, with a decoder, ``steps``: lambda times its loss.

        The decoder's loss is the cross-entropy of each step's text after its latents, reduced by
        ``step_loss`` and averaged over questions with steps. The decoder adds the statistic
        ``step_nll``, nats per token.
        """
        output = super().losses(batch, rows, hidden)
        if self.network.decoder is None:
            return output
        layout, config = self.layout, self.config
        replaced = layout.replaced(batch, self.stage)
        tokens, lengths = step_texts(batch, *replaced, layout.step_separator)
        spoken = lengths > 0  # (B, G)
        row, group = spoken.nonzero(as_tuple=True)  # (N,)
        acc_dtype = torch.promote_types(hidden.last.dtype, torch.float32)
        if len(row):
            assert hidden.latents is not None
            latents = hidden.latents.unflatten(1, (-1, layout.latents_per_step))[row, group]
            tokens, lengths = tokens[row, group], lengths[row, group]  # (N, W), (N,)
            share = 1.0 / spoken.sum(dim=1)[row].to(acc_dtype)  # (N,)
        else:  # an empty text, as each backward pass must reach the decoder
            latents = hidden.last.new_zeros(1, layout.latents_per_step, hidden.last.shape[-1])
            tokens, lengths = rows.tokens.new_zeros(1, 2), rows.tokens.new_zeros(1)
            share = latents.new_ones(1, dtype=acc_dtype)
        targets = tokens.masked_fill(~within(lengths, tokens.shape[1]), -100)
        if config.step_loss == "token_mean":
            share = share / lengths.clamp(min=1)
        total, per_target = linear_cross_entropy_each(
            self.network.say(latents, tokens),
            self.network.decoder.output_matrix,
            targets,
            share[:, None].expand(targets.shape),
        )
        count = spoken.any(dim=1).sum()
        output.terms["steps"] = Term(config.step_weight * total, count, "spoken")
        output.stats["step_nll"] = Mean(per_target.sum(), (targets >= 0).sum())
        return output

    # ---- scoring and decoding

    def scored_rows(self, batch: Batch) -> TextRows:
        return self.layout.scored_with(batch, self.before_answer(batch), self.latents)

    def pending(self) -> tuple[int, ...]:
        """Returns the end marker and, without a chain, the answer prefix."""
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
        """Returns the FLOPs per token of a row of ``context`` tokens, latents not among them.

        Latents and their markers pass through the layers as tokens do, but have no logits. Keys and
        values are cached, so nothing is computed twice. A step decoder is counted in training, as
        if its text were as long as the row.
        """
        latents = self.trained_latents if training else self.latents
        flops = self._flops(context, latents, training)
        if training and self.network.decoder is not None:
            flops += backbone_flops(self.network.decoder, context, training)
        return flops

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of a token of a row of ``context`` tokens.

        Args:
            context: Number of tokens, latents and markers not counted.
            steps: Number of latents of the row. Defaults to the number in an evaluation.
        """
        return self._flops(context, self.latents if steps is None else steps, training=False)

    def _flops(self, context: int, latents: float, training: bool) -> float:
        silent = latents + 2  # the two markers are read once
        reads = (latents * self.reads_per_latent(latents) + 2) / silent
        return backbone_flops(self.network.backbone, context, training, silent, reads)
