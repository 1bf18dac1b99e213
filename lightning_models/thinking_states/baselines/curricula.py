"""Curricula that remove a chain of thought in stages, the models trained by them, and iCoT.

A stage is an integer that grows with the epochs before a batch. Draws are a function of the seed
and the row's id, which is unique within a run, so that the loss agrees with the data's counter, and
a resumed run with an uninterrupted one.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_models.optim import OptimizerConfig
from lightning_models.outputs import Mean
from lightning_models.runtime import on_device, seeded_generator
from lightning_models.thinking_states.baselines.text import (
    CHAIN,
    Batch,
    ChainConfig,
    ChainLayout,
    Segment,
    TextLM,
    TextRows,
    shortened,
)
from lightning_models.thinking_states.rows import chain_of

_UNIFORM, _OFFSET = range(2)  # purpose of a row's draws, the second entry of their key


MAX_EXTRA = 100
"""Maximum number of tokens that removal smoothing removes in advance."""


class Stages(Protocol):
    """A curriculum."""

    @property
    def final(self) -> int:
        """The first stage without a chain, which is the last one."""
        ...

    def at(self, epochs: float) -> int:
        """Returns the stage after ``epochs`` epochs, at most ``final``."""
        ...

    def kept(self, batch: Batch, stage: int, separator: tuple[int, ...]) -> tuple[Segment, Tensor]:
        """Returns the rest of the chains, and the mask of rows that learn its end (B,) bool.

        Args:
            batch: Batch of questions. Its ``epochs``, the epochs before it, determine the stage.
            stage: Stage of batches without ``epochs``.
            separator: Tokens before each step.
        """
        ...


@dataclass(frozen=True)
class StepStages:
    """Removes the first s steps of a chain at stage s, and all steps after ``last`` (Coconut)."""

    epochs_per_stage: float
    """Epochs per stage."""
    last: int
    """The last stage with a chain."""
    first: int = 0
    """Stage of the first epoch."""
    uniform_prob: float = 0.0
    """Probability that a row's stage is drawn uniformly from 0 to its number of steps."""
    seed: int = 0
    """Seed of the draws."""

    @property
    def final(self) -> int:
        """The stage at which all steps are removed."""
        return self.last + 1

    def at(self, epochs: float) -> int:
        """Returns the stage after ``epochs`` epochs."""
        return min(self.first + math.floor(epochs / self.epochs_per_stage + 1e-9), self.final)

    def of_rows(self, batch: Batch, stage: int) -> Tensor:
        """Returns the stage of each row (B,) int64; see ``Stages.kept``."""
        ids = batch["sequence_id"]
        if "epochs" not in batch:
            return torch.full_like(ids, stage)
        stages = torch.full_like(ids, self.at(batch["epochs"]))
        if not self.uniform_prob:
            return stages
        draws = row_draws(ids, 2, self.seed, _UNIFORM)  # (B, 2): whether to draw, and the stage
        drawn = (draws[:, 1] * (num_steps(batch) + 1)).long()
        return torch.where(draws[:, 0] < self.uniform_prob, drawn, stages)

    def removed(self, batch: Batch, stages: Tensor) -> Tensor:
        """Returns n, the number of steps removed from rows at ``stages`` (B,), int64 (B,)."""
        steps = num_steps(batch)
        return torch.where(stages > self.last, steps, torch.minimum(stages, steps))

    def kept(self, batch: Batch, stage: int, separator: tuple[int, ...]) -> tuple[Segment, Tensor]:
        """Returns the chains of the remaining steps; see ``Stages.kept``."""
        stages = self.of_rows(batch, stage)
        lengths = batch["step_lengths"]
        order = torch.arange(lengths.shape[1], device=lengths.device)  # (R,)
        removed = order < self.removed(batch, stages)[:, None]  # (B, R)
        left = {**batch, "step_lengths": lengths.masked_fill(removed, 0)}
        return chain_of(left, separator), stages <= self.last


@dataclass(frozen=True)
class TokenStages:
    """Removes the first r tokens of a chain at stage r (iCoT)."""

    per_epoch: int
    """Delta, tokens removed per epoch."""
    beyond: int
    """Stage from which on all tokens are removed."""
    smoothing: float | None
    """lambda of the extra tokens o removed in advance, P(o) ~ exp(-lambda o). With None, no extra
    tokens are removed."""
    side: str = "left"
    """The end that is removed first, 'left' or 'right'."""
    pretrain_epochs: int = 0
    """Epochs with whole chains before the first removal."""
    seed: int = 0
    """Seed of the draws."""

    @property
    def final(self) -> int:
        """The stage at which all tokens are removed."""
        return self.beyond

    def at(self, epochs: float) -> int:
        """Returns r after ``epochs`` epochs."""
        # NOTE(paper): the public code adds one every round(batches of an epoch / Delta) batches,
        # which drifts where that is not whole; here r is Delta times the epochs, rounded down.
        since = max(0.0, epochs - self.pretrain_epochs)
        return min(math.floor(self.per_epoch * since + 1e-9), self.beyond)

    def removed(self, batch: Batch, stage: int, lengths: Tensor) -> Tensor:
        """Returns the number of tokens removed from chains of ``lengths`` (B,), int64 (B,)."""
        epochs = batch.get("epochs")
        if epochs is not None:
            stage = self.at(epochs)
        if stage >= self.beyond:
            return lengths
        removed = torch.full_like(lengths, stage)
        if epochs is not None and epochs >= self.pretrain_epochs and self.smoothing is not None:
            removed = removed + offsets(batch["sequence_id"], self.smoothing, self.seed)
        return torch.minimum(removed, lengths)

    def kept(self, batch: Batch, stage: int, separator: tuple[int, ...]) -> tuple[Segment, Tensor]:
        """Returns the rest of the chains; see ``Stages.kept``."""
        chain = chain_of(batch, separator)
        left = shortened(chain, self.removed(batch, stage, chain[1]), self.side)
        if "epochs" in batch:
            stage = self.at(batch["epochs"])
        return left, torch.full_like(chain[1], stage < self.beyond, dtype=torch.bool)


def num_steps(batch: Batch) -> Tensor:
    """Returns the number of reasoning steps of each row (B,) int64."""
    count: Tensor = (batch["step_lengths"] > 0).sum(dim=1)
    return count


def offsets(ids: Tensor, smoothing: float, seed: int) -> Tensor:
    """Draws o for each row (B,) int64, with P(o >= k) = exp(-lambda k), at most MAX_EXTRA.

    Args:
        ids: Ids of the rows (B,) int64.
        smoothing: lambda.
        seed: Seed of the draws.
    """
    level = row_draws(ids, 1, seed, _OFFSET)[:, 0]
    return (-torch.log1p(-level) / smoothing).long().clamp(max=MAX_EXTRA)  # inverse CDF


def row_draws(ids: Tensor, count: int, *key: int) -> Tensor:
    """Draws uniformly from [0, 1) for each row id (B, count) float64, one generator per row."""
    rows = [
        torch.rand(count, generator=seeded_generator(*key, row_id), dtype=torch.float64)
        for row_id in ids.tolist()
    ]
    return torch.stack(rows).to(ids.device)


# ---- models trained in stages


@dataclass(frozen=True, kw_only=True)
class StagedConfig(ChainConfig):
    """A model whose chain of thought is removed step by step.

    Raises:
        ValueError: If a value is out of range.
    """

    epochs_per_stage: float = 3
    """Epochs per stage (3 on GSM8K, 5 on ProntoQA and ProsQA); a fraction is allowed, for large
    data."""
    max_latent_stage: int = 3
    """Number of stages that remove one more step each (3 on GSM8K). After them all steps are
    removed."""
    first_stage: int = 0
    """Stage of the first epoch. Set 1 to start from a model that has learned stage 0, the whole
    chain (``resume`` 3 in the public code takes three epochs of stage 0 from a CoT model)."""
    uniform_prob: float = 0.0
    """Probability that a row's stage is drawn uniformly from 0 to its number of steps (0.3 in the
    authors' analysis)."""
    reset: Literal["epoch", "stage", "never"] = "epoch"
    """When AdamW resets its moments: in every epoch (Coconut's public code), when the stage changes
    (as in its paper), or never."""
    curriculum_seed: int = 0
    """Seed of the draws for each row."""

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
        """Returns the curriculum that removes steps."""
        return StepStages(
            self.epochs_per_stage,
            self.max_latent_stage,
            self.first_stage,
            self.uniform_prob,
            self.curriculum_seed,
        )

    def curriculum(self) -> Stages:
        """Returns the curriculum of the model."""
        return self.step_stages()


class StagedLM(TextLM):
    """A model trained in stages, which the number of epochs before a batch determines.

    The current stage is a buffer, so that a checkpoint is scored at the stage it was saved at:
    batches of an evaluation have no ``epochs``. Before the last stage the model writes the rest of
    its chain; at the last one the answer prefix is given, as without reasoning.
    """

    config: StagedConfig
    progress_made: torch.Tensor
    """Whole epochs before the latest batch of training, and its stage (2,) int64."""

    def __init__(
        self,
        config: StagedConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)
        start = torch.tensor([0, self.stages.at(0.0)], device="cpu")
        self.register_buffer("progress_made", start)
        self._reached: tuple[int, int] | None = None  # copy on the host, read without a sync
        self.register_load_state_dict_post_hook(_read_again)

    @property
    def batch_keys(self) -> tuple[str, ...]:
        return (*super().batch_keys, "sequence_id")

    @property
    def stages(self) -> Stages:
        """The curriculum."""
        return self.config.curriculum()

    @property
    def stage(self) -> int:
        """The stage that training has reached, which a checkpoint restores."""
        return self.reached[1]

    @property
    def reached(self) -> tuple[int, int]:
        """Whole epochs before the latest batch of training, and its stage."""
        if self._reached is None:
            epoch, stage = self.progress_made.tolist()
            self._reached = epoch, stage
        return self._reached

    @property
    def writes_chain(self) -> bool:
        """Whether the stage that training has reached still has a chain."""
        return self.stage < self.stages.final

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Updates the stage, resets the optimiser, and restarts the ranking of checkpoints. All of
        # it depends on the epochs before the batch, equal on all ranks, and on values that the
        # checkpoint holds. A reset in the middle of an optimiser step equals one at its beginning:
        # moments are first read when all its gradients are complete.
        # NOTE(paper): the best checkpoint is one of the latest stage. iCoT's public code forgets
        # the best as long as there is a chain, and Coconut's advises to keep all, because a model
        # that still writes a chain answers better than one that no longer does.
        super().on_train_batch_start(batch, batch_idx)
        if "epochs" not in batch:
            raise ValueError(
                f"{type(self).__name__} follows a curriculum, and the batch has no count of "
                "epochs; train on a datamodules.ReasoningDataModule, without "
                "trainer.overfit_batches"
            )
        previous, current = self.reached, (int(batch["epochs"]), self.stages.at(batch["epochs"]))
        watched = {"epoch": 0, "stage": 1}.get(self.config.reset)
        if watched is not None and previous[watched] != current[watched]:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()
        if previous[1] != current[1]:
            for callback in self.trainer.checkpoint_callbacks:
                if hasattr(callback, "restart_ranking"):
                    callback.restart_ranking()
        if previous != current:
            self.progress_made.copy_(torch.tensor(current))
            self._reached = current

    def statistics(self, batch: Batch, rows: TextRows) -> dict[str, torch.Tensor | Mean]:
        """Returns the batch's ``stage``, and ``chain_tokens``, the mean number left in a row."""
        stage = self.stages.at(batch["epochs"]) if "epochs" in batch else self.stage
        return {
            "stage": on_device(float(stage), self.device),
            "chain_tokens": Mean((rows.kinds == CHAIN).sum(), float(len(rows.tokens))),
        }


def _read_again(model: nn.Module, _: Any) -> None:
    """Discards the host copy of a buffer that was loaded."""
    assert isinstance(model, StagedLM)
    model._reached = None


# ---- iCoT


@dataclass(frozen=True, kw_only=True)
class ICoTConfig(StagedConfig):
    """Implicit chain of thought by stepwise internalisation (Deng et al., 2024).

    Raises:
        ValueError: If a value is out of range, or belongs to the other unit of removal.
    """

    removal: Literal["tokens", "steps"] = "tokens"
    """Unit of removal: tokens, as in iCoT's public code, or steps, as in the mode ``no_thoughts``
    of Coconut's code, which the Thinking States paper seems to have used (with stages set by
    ``epochs_per_stage``, ``max_latent_stage`` and ``first_stage``)."""
    remove_per_epoch: int = 8
    """Delta, tokens removed per epoch (8 on GSM8K)."""
    remove_all_beyond: int = 39
    """Number of removed tokens from which on the whole chain is removed (39 on GSM8K)."""
    removal_smoothing: float | None = 4.0
    """lambda: in each row o more tokens are removed, P(o) ~ exp(-lambda o). With null, none are."""
    removal_side: Literal["left", "right"] = "left"
    """The end of the chain that is removed first."""
    pretrain_epochs: int = 0
    """Epochs with whole chains before the first token is removed."""
    reset: Literal["epoch", "stage", "never"] = "stage"
    """When AdamW resets its moments: in every epoch, whenever more is removed (as in iCoT's public
    code), or never."""

    def __post_init__(self) -> None:
        """Checks ranges, and that only fields of the chosen unit are set."""
        super().__post_init__()
        for key, minimum in (("remove_per_epoch", 1), ("remove_all_beyond", 0)):
            if getattr(self, key) < minimum:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least {minimum}")
        if self.pretrain_epochs < 0:
            raise ValueError(f"pretrain_epochs ({self.pretrain_epochs}) must not be negative")
        if self.removal_smoothing is not None and self.removal_smoothing <= 0:
            raise ValueError(
                f"removal_smoothing ({self.removal_smoothing}) must be above 0, or null for none"
            )
        for key in ("first_stage", "uniform_prob"):
            if self.removal == "tokens" and getattr(self, key):
                raise ValueError(
                    f"{key} ({getattr(self, key)}) needs stages of steps; set removal=steps"
                )

    def curriculum(self) -> Stages:
        if self.removal == "steps":
            return self.step_stages()
        return TokenStages(
            self.remove_per_epoch,
            self.remove_all_beyond,
            self.removal_smoothing,
            self.removal_side,
            self.pretrain_epochs,
            self.curriculum_seed,
        )


@dataclass(frozen=True, kw_only=True)
class ShortenedChain(ChainLayout):
    """Layout of the rest of the chain at each stage."""

    stages: Stages
    """The curriculum."""

    def chain(self, batch: Batch, stage: int) -> tuple[Segment, Tensor]:
        """Returns the rest of the chains, whose end is learned before the last stage."""
        return self.stages.kept(batch, stage, self.step_separator)


class ICoTLM(StagedLM):
    """A chain of thought that is internalised: its first r tokens are removed, and r grows.

    Text: query, the rest of the chain, answer prefix, answer; positions count this text.
    At r = 0 it is CoT, and at the last stage No CoT.

    Args:
        config: Configuration of the backbone and the removal.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    # NOTE(paper): the public code also skips a reset if the previous batch happened to have no
    # chain left, which differs between ranks; here r alone decides. It also trains the answer's
    # fixed beginning to the end; here it is given once no chain can precede it.
    config: ICoTConfig

    def __init__(
        self,
        config: ICoTConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def layout(self) -> ShortenedChain:
        """Query, the rest of the chain, prefix, answer."""
        config = self.config
        return ShortenedChain(
            config.answer_prefix,
            config.step_separator,
            config.lm_on_query,
            stages=self.stages,
        )
