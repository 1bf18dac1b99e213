"""What the two curricula share: where training is in it, and optimisers that start anew."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_models.optim import OptimizerConfig
from lightning_models.outputs import Mean
from lightning_models.thinking_states.baselines.layout import CHAIN, Batch, TextRows
from lightning_models.thinking_states.baselines.stages import Stages, StepStages
from lightning_models.thinking_states.baselines.starting import load_backbone
from lightning_models.thinking_states.baselines.text import ChainConfig, TextLM


@dataclass(frozen=True, kw_only=True)
class StagedConfig(ChainConfig):
    """A model whose chain of thought is taken away step by step.

    Raises:
        ValueError: if a value is out of its range.
    """

    epochs_per_stage: float = 3
    """Epochs of a stage (3 on GSM8K, 5 on ProntoQA and ProsQA); of large data also a fraction."""
    max_latent_stage: int = 3
    """Stages that take one step more away each; behind them all steps are gone (3 on GSM8K)."""
    first_stage: int = 0
    """Stage of the first epoch: 1 where stage 0, the whole chain, was learned elsewhere (``resume``
    3 in the public code: three epochs of stage 0 are taken from a CoT model)."""
    start_from: str | None = None
    """Checkpoint, or folder of a run, of a model on the same data whose backbone training starts
    with, e.g. of a CoTLM; not read where a run is resumed."""
    uniform_prob: float = 0.0
    """Probability that a row is shown at a stage drawn from 0 to its number of steps (0.3 in the
    authors' analysis)."""
    reset: Literal["epoch", "stage", "never"] = "epoch"
    """When AdamW forgets its moments: in every epoch (Coconut's public code), when the stage
    changes (as its paper says), or never."""
    curriculum_seed: int = 0
    """Of what is drawn for each row."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        if not self.epochs_per_stage > 0:
            raise ValueError(f"epochs_per_stage ({self.epochs_per_stage}) must be above 0")
        for key in ("max_latent_stage", "first_stage"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} ({getattr(self, key)}) must not be negative")
        if self.first_stage > self.max_latent_stage + 1:
            raise ValueError(
                f"first_stage ({self.first_stage}) must be at most max_latent_stage + 1 "
                f"({self.max_latent_stage + 1}), where all steps are gone"
            )
        if not 0.0 <= self.uniform_prob <= 1.0:
            raise ValueError(f"uniform_prob ({self.uniform_prob}) must be between 0 and 1")

    def step_stages(self) -> StepStages:
        """Returns the curriculum that takes steps away."""
        return StepStages(
            self.epochs_per_stage,
            self.max_latent_stage,
            self.first_stage,
            self.uniform_prob,
            self.curriculum_seed,
        )


class StagedLM(TextLM):
    """A model that learns in stages, which the epochs behind a batch decide.

    The stage that training has reached is a buffer, so that a checkpoint is scored at its own:
    batches of an evaluation do not say how far training was. Before the last stage the model writes
    what is left of its chain; from there on the answer prefix is given, as without reasoning.
    """

    config: StagedConfig
    progress_made: torch.Tensor
    """Whole epochs behind the latest batch of training, and its stage (2,) int64."""

    def __init__(
        self,
        config: StagedConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; see the methods."""
        super().__init__(config, optimizer, compile)
        start = torch.tensor([0, self.stages.at(0.0)], device="cpu")
        self.register_buffer("progress_made", start)
        self._reached: tuple[int, int] | None = None  # its values, which need no look at a device
        self.register_load_state_dict_post_hook(_look_again)

    @property
    @abstractmethod
    def stages(self) -> Stages:
        """The curriculum."""

    @property
    def stage(self) -> int:
        """The stage that training has reached; of a checkpoint, its own."""
        return self.reached[1]

    @property
    def reached(self) -> tuple[int, int]:
        """Whole epochs behind the latest batch of training, and its stage."""
        if self._reached is None:
            epoch, stage = self.progress_made.tolist()
            self._reached = epoch, stage
        return self._reached

    @property
    def writes_chain(self) -> bool:
        """Whether there is something left of the chain at the stage that training has reached."""
        return self.stage < self.stages.final

    def on_fit_start(self) -> None:
        """Takes the backbone of ``start_from``, unless a run is resumed.

        Raises:
            CheckpointError: if it cannot be read, or is of another shape.
        """
        super().on_fit_start()
        if self.config.start_from is not None and self.trainer.ckpt_path is None:
            load_backbone(self.network, self.config, self.config.start_from)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Notes where in the curriculum training is, and resets the optimiser where that asks.

        What decides are the epochs behind the batch, equal on all ranks, and what was noted last,
        which the checkpoint holds. Resets in the middle of an optimiser step are as good as at its
        beginning: moments are first looked at when all its gradients are there.

        Raises:
            ValueError: if the batch does not say how many epochs are behind it.
        """
        super().on_train_batch_start(batch, batch_idx)
        if "epochs" not in batch:
            raise ValueError(
                f"{type(self).__name__} follows a curriculum, and the batch does not say how many "
                "epochs are behind it; train on a datamodules.ReasoningDataModule, without "
                "trainer.overfit_batches"
            )
        before, now = self.reached, (int(batch["epochs"]), self.stages.at(batch["epochs"]))
        watched = {"epoch": 0, "stage": 1}.get(self.config.reset)
        if watched is not None and before[watched] != now[watched]:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()
        if before != now:
            self.progress_made.copy_(torch.tensor(now))
            self._reached = now

    def statistics(self, batch: Batch, rows: TextRows) -> dict[str, torch.Tensor | Mean]:
        """Returns the batch's ``stage``, and ``chain_tokens``: those left in a row on average."""
        stage = self.stages.at(batch["epochs"]) if "epochs" in batch else self.stage
        return {
            "stage": torch.tensor(float(stage), device=self.device),
            "chain_tokens": Mean((rows.kinds == CHAIN).sum(), float(len(rows.tokens))),
        }


def _look_again(model: nn.Module, _: Any) -> None:
    """Forgets the values of a buffer that was loaded."""
    assert isinstance(model, StagedLM)
    model._reached = None
