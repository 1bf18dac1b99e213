"""Coconut: a chain of continuous thought between question and answer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_models.optim import OptimizerConfig
from lightning_models.thinking_states.baselines.coconut_layout import CoconutLayout
from lightning_models.thinking_states.baselines.coconut_network import CoconutNetwork, Latents
from lightning_models.thinking_states.baselines.layout import NOTHING, Batch, TextRows
from lightning_models.thinking_states.baselines.staged import StagedConfig, StagedLM
from lightning_models.thinking_states.baselines.stages import StepStages
from lightning_models.thinking_states.baselines.text_cache import TextCache
from lightning_models.thinking_states.rows import aligned_right, constant, join

START, END, LATENT = "latent_start", "latent_end", "latent"


@dataclass(frozen=True, kw_only=True)
class CoconutConfig(StagedConfig):
    """Coconut (Hao et al., 2024); values are those of its GSM8K run.

    Raises:
        ValueError: if a value is out of its range, or gradient checkpointing is asked for.
    """

    special_tokens: ClassVar[tuple[str, ...]] = (START, END, LATENT)
    """Markers around the latents, and what stands in their places. The public code begins their
    embeddings with that of ``<<``: name its id in ``special_rows_from``."""

    c_thought: int = 2
    """c, latents for a step (2 on GSM8K, 1 on ProntoQA and ProsQA; 2, 3, 4, 5 and 7 in Table 3 of
    the Thinking States paper)."""
    pad_latent_to_max: bool = True
    """Whether questions with few steps take the most latents, too, at the last stage."""
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
                "gradient_checkpointing (True) would compute layers again whose keys and values "
                "later latents have read from a cache; set it to false, and batch_size lower if "
                "memory is short"
            )


class CoconutLM(StagedLM):
    """Thinks in hidden states that take the place of the first steps of a chain (arXiv 2412.06769).

    Text: query, start marker, latents, end marker, the steps that are left, answer prefix, answer.
    The input of a latent is the state behind the final norm of the position before it; gradients
    flow back through all of them.
    """

    # NOTE(paper): without pad_latent_to_max the public code evaluates a question with the latents
    # of its own number of steps, which only the solution tells; here with those of the stage.
    config: CoconutConfig
    network: CoconutNetwork

    def __init__(
        self,
        config: CoconutConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: the backbone, its latents and the curriculum.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    def build_network(self) -> CoconutNetwork:
        """Returns a freshly initialised network, or one with trained weights."""
        return CoconutNetwork(self.config)

    def configure_model(self) -> None:
        """Builds the network (once), compiles it.

        Raises:
            ValueError: if the strategy shards parameters: processes meet at every call of a layer,
                but the rows of each have their own number of latents.
        """
        if getattr(self, "_device_mesh", None) is not None:
            raise ValueError(
                "strategy: the parameters of Coconut cannot be sharded, because processes differ "
                "in their number of latents; set trainer.strategy=ddp"
            )
        super().configure_model()

    @property
    def stages(self) -> StepStages:
        """The curriculum."""
        return self.config.step_stages()

    @property
    def layout(self) -> CoconutLayout:
        """Query, latents between markers, the steps that are left, prefix, answer."""
        config = self.config
        return CoconutLayout(
            config.answer_prefix,
            config.step_separator,
            config.lm_on_query,
            stages=self.stages,
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
        """Returns the text whose answer is scored, with the latents of an evaluation."""
        return self.layout.scored_with(batch, self.before_answer(batch), self.latents)

    def pending(self) -> tuple[int, ...]:
        """Returns the end marker, and the answer prefix where there is no chain."""
        return (self.config.special_id(END), *super().pending())

    def read_query(self, cache: TextCache, tokens: Tensor, lengths: Tensor) -> None:
        """Fills the cache with the queries (B, P), the start marker and the latents."""
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
