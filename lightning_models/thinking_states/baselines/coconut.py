"""Coconut: a chain of continuous thought, hidden states that are fed back as inputs.

Latents stand between question and answer, where the first steps stood.
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
    """Coconut (Hao et al., 2024); values are those of its GSM8K run.

    Raises:
        ValueError: if a value is out of its range, or gradient checkpointing is set.
    """

    c_thought: int = 2
    """c, latents for a step (2 on GSM8K, 1 on ProntoQA and ProsQA; 2, 3, 4, 5 and 7 in Table 3 of
    the Thinking States paper)."""
    pad_latent_to_max: bool = True
    """Whether questions with few steps also take the most latents at the last stage."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        if self.c_thought < 1:
            raise ValueError(f"c_thought ({self.c_thought}) must be at least 1")

    @property
    def most_latents(self) -> int:
        return self.c_thought * self.max_latent_stage


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
class CoconutLayout(LatentLayout, ShortenedChain):
    """Query, start, latents, end, the remaining steps, answer prefix, answer."""

    stages: StepStages
    """The curriculum."""
    c_thought: int
    """c, latents for a step."""
    pad_latent_to_max: bool
    """See ``num_latents``."""

    def training(self, batch: Batch, stage: int = 0) -> TextRows:
        """Returns the text of training; see the base."""
        stages = self.stages.of_rows(batch, stage)
        latents = self._latents(batch, stages)
        chain, learned = self.chain(batch, stage)
        prefix = constant(self.answer_prefix, batch["query"])
        return self.thoughtful(batch, latents, (CHAIN, chain), (PREFIX, prefix), learned=learned)

    @property
    def latents_per_step(self) -> int:
        return self.c_thought

    def replaced(self, batch: Batch, stage: int) -> tuple[Tensor, Tensor]:
        # NOTE(paper): from the last stage with a chain on, the last group says all further steps,
        # as in SIM-CoT's code; where a step is missing, that code says the answer, and this nothing
        stages = self.stages.of_rows(batch, stage)
        steps = torch.where(
            stages < self.stages.last, self.stages.removed(batch, stages), num_steps(batch)
        )
        return steps, self._latents(batch, stages) // self.c_thought

    def _latents(self, batch: Batch, stages: Tensor) -> Tensor:
        """Returns m of rows at ``stages`` (B,)."""
        return num_latents(
            stages,
            num_steps(batch),
            each=self.c_thought,
            last=self.stages.last,
            pad=self.pad_latent_to_max,
        )


# ---- model


class CoconutLM(LatentTextLM, StagedLM):
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
