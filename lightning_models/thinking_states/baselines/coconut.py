"""Coconut: a chain of continuous thought, hidden states that are fed back as inputs.

Latents replace the first steps of the chain.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_models.optim import OptimizerConfig
from lightning_models.thinking_states.baselines.curricula import (
    ShortenedChain,
    StagedConfig,
    StagedLM,
    StepStages,
    num_steps,
)
from lightning_models.thinking_states.baselines.latents import (
    LatentConfig,
    LatentLayout,
    LatentNetwork,
    LatentTextLM,
)
from lightning_models.thinking_states.baselines.text import CHAIN, PREFIX, Batch, TextRows
from lightning_models.thinking_states.rows import constant


@dataclass(frozen=True, kw_only=True)
class CoconutConfig(LatentConfig, StagedConfig):
    """Coconut (Hao et al., 2024), with the values of its GSM8K run as defaults.

    Raises:
        ValueError: If a value is out of range, or gradient checkpointing is set.
    """

    c_thought: int = 2
    """c, the number of latents per step (2 on GSM8K, 1 on ProntoQA and ProsQA; 2, 3, 4, 5 and 7 in
    Table 3 of the Thinking States paper)."""
    pad_latent_to_max: bool = True
    """Whether questions with few steps have the maximum number of latents at the last stage."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        if self.c_thought < 1:
            raise ValueError(f"c_thought ({self.c_thought}) must be at least 1")

    @property
    def most_latents(self) -> int:
        return self.c_thought * self.max_latent_stage


# ---- rows


def num_latents(stages: Tensor, steps: Tensor, *, per_step: int, last: int, pad: bool) -> Tensor:
    """Returns m, the number of latents of each row (B,) int64.

    m = c s at stage s, whatever the row's number of steps n. After the last stage S it is c S or,
    without padding, c min(n, S).

    Args:
        stages: Stage s of each row (B,) int64.
        steps: Number of reasoning steps of each row, n (B,) int64.
        per_step: Number of latents per step, c.
        last: The last stage with a chain, S.
        pad: Whether rows with few steps have c S latents after stage S.
    """
    maximum = torch.full_like(steps, last)
    at_end = maximum if pad else torch.minimum(steps, maximum)
    return torch.where(stages > last, at_end, stages) * per_step  # (B,)


@dataclass(frozen=True, kw_only=True)
class CoconutLayout(LatentLayout, ShortenedChain):
    """Query, start, latents, end, the remaining steps, answer prefix, answer."""

    stages: StepStages
    """The curriculum."""
    c_thought: int
    """c, the number of latents per step."""
    pad_latent_to_max: bool
    """See ``num_latents``."""

    def training(self, batch: Batch, stage: int = 0) -> TextRows:
        stages = self.stages.of_rows(batch, stage)
        latents = self._latents(batch, stages)
        chain, learned = self.chain(batch, stage)
        prefix = constant(self.answer_prefix, batch["query"])
        return self.with_latents(batch, latents, (CHAIN, chain), (PREFIX, prefix), learned=learned)

    @property
    def latents_per_step(self) -> int:
        return self.c_thought

    def replaced(self, batch: Batch, stage: int) -> tuple[Tensor, Tensor]:
        # NOTE(paper): from the last stage with a chain on, the last group says all further steps,
        # as in SIM-CoT's code. For a missing step that code says the answer, this one nothing.
        stages = self.stages.of_rows(batch, stage)
        steps = torch.where(
            stages < self.stages.last, self.stages.removed(batch, stages), num_steps(batch)
        )
        return steps, self._latents(batch, stages) // self.c_thought

    def _latents(self, batch: Batch, stages: Tensor) -> Tensor:
        """Returns m (B,) int64 of rows at ``stages`` (B,)."""
        return num_latents(
            stages,
            num_steps(batch),
            per_step=self.c_thought,
            last=self.stages.last,
            pad=self.pad_latent_to_max,
        )


# ---- model


class CoconutLM(LatentTextLM, StagedLM):
    """Thinks in hidden states that replace the first steps of a chain (arXiv 2412.06769).

    Text: query, start marker, latents, end marker, the remaining steps, answer prefix, answer.
    The input of a latent is the state of the position before it, after the final norm; gradients
    flow back through all latents.

    Args:
        config: Configuration of the backbone, its latents and the curriculum.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    # NOTE(paper): without pad_latent_to_max the public code evaluates a question with as many
    # latents as its steps need, which only the solution shows; here the stage sets their number.
    config: CoconutConfig

    def __init__(
        self,
        config: CoconutConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    def build_network(self) -> LatentNetwork:
        return LatentNetwork(self.config)

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
            **self.markers(),
        )

    @property
    def trained_latents(self) -> int:
        return min(self.stage, self.config.max_latent_stage) * self.config.c_thought
