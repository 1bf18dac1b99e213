"""Curricula that remove a chain of thought in stages, models trained by them, and iCoT.

A stage is a whole number that grows with the epochs before a batch. Draws are a function of the
seed and the row's number, which never comes twice in a run: the loss and the data's counter agree,
and so do a resumed run and one that was never stopped.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_type_hints

import torch
from torch import Tensor, nn

from lightning_models.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from lightning_models.optim import OptimizerConfig
from lightning_models.outputs import Mean
from lightning_models.recipe import resolve_class
from lightning_models.runtime import on_device, seeded_generator
from lightning_models.thinking_states.baselines.text import (
    CHAIN,
    Batch,
    ChainConfig,
    ChainLayout,
    Segment,
    TextLM,
    TextNetwork,
    TextRows,
    shortened,
)
from lightning_models.thinking_states.config import ReasoningConfig
from lightning_models.thinking_states.rows import chain_of

_UNIFORM, _OFFSET = range(2)  # purpose of a row's draws: second number of their key


MOST_EXTRA = 100
"""Most tokens that removal smoothing removes in advance."""


class Stages(Protocol):
    """A curriculum."""

    @property
    def final(self) -> int:
        """The last stage, from which on there is no chain."""
        ...

    def at(self, epochs: float) -> int:
        """Returns the stage after ``epochs`` epochs, at most ``final``."""
        ...

    def kept(self, batch: Batch, stage: int, separator: tuple[int, ...]) -> tuple[Segment, Tensor]:
        """Returns the rest of the chains, and which rows learn where theirs ends (B,) bool.

        Args:
            batch: of questions; its ``epochs``, the number of epochs before it, set the stage.
            stage: for batches without ``epochs``.
            separator: tokens before each step.
        """
        ...


@dataclass(frozen=True)
class StepStages:
    """Stage s without the first s steps of a chain; after ``last`` without all steps (Coconut)."""

    epochs_per_stage: float
    """Epochs of a stage."""
    last: int
    """Stage after which all steps are gone."""
    first: int = 0
    """Stage of the first epoch."""
    uniform_prob: float = 0.0
    """Probability that a row is shown at a stage drawn from 0 to its number of steps."""
    seed: int = 0
    """Of the draws."""

    @property
    def final(self) -> int:
        """The stage at which all steps are gone."""
        return self.last + 1

    def at(self, epochs: float) -> int:
        """Returns the stage after ``epochs`` epochs."""
        return min(self.first + math.floor(epochs / self.epochs_per_stage + 1e-9), self.final)

    def of_rows(self, batch: Batch, stage: int) -> Tensor:
        """Returns the stage at which each row is shown (B,) int64; see ``Stages.kept``."""
        numbers = batch["sequence_id"]
        if "epochs" not in batch:
            return torch.full_like(numbers, stage)
        stages = torch.full_like(numbers, self.at(batch["epochs"]))
        if not self.uniform_prob:
            return stages
        draws = row_draws(numbers, 2, self.seed, _UNIFORM)
        drawn = (draws[:, 1] * (num_steps(batch) + 1)).long()
        return torch.where(draws[:, 0] < self.uniform_prob, drawn, stages)

    def removed(self, batch: Batch, stages: Tensor) -> Tensor:
        """Returns n, the number of steps that are gone (B,), of rows at ``stages`` (B,)."""
        steps = num_steps(batch)
        return torch.where(stages > self.last, steps, torch.minimum(stages, steps))

    def kept(self, batch: Batch, stage: int, separator: tuple[int, ...]) -> tuple[Segment, Tensor]:
        """Returns the chains of the remaining steps; see ``Stages.kept``."""
        stages = self.of_rows(batch, stage)
        lengths = batch["step_lengths"]
        order = torch.arange(lengths.shape[1], device=lengths.device)
        gone = order < self.removed(batch, stages)[:, None]
        left = {**batch, "step_lengths": lengths.masked_fill(gone, 0)}
        return chain_of(left, separator), stages <= self.last


@dataclass(frozen=True)
class TokenStages:
    """Stage r without the first r tokens of a chain (iCoT)."""

    per_epoch: int
    """Delta, tokens removed in an epoch."""
    beyond: int
    """From here on all tokens are gone."""
    smoothing: float | None
    """lambda of the extra tokens removed in advance, P(o) ~ exp(-lambda o); None: none."""
    side: str = "left"
    """The end that is removed first."""
    pretrain_epochs: int = 0
    """Epochs with whole chains."""
    seed: int = 0
    """Of the draws."""

    @property
    def final(self) -> int:
        """The stage at which all tokens are gone."""
        return self.beyond

    def at(self, epochs: float) -> int:
        """Returns r after ``epochs`` epochs."""
        # NOTE(paper): the public code adds one every round(batches of an epoch / Delta) batches,
        # which drifts where that is not whole; here r is Delta times the epochs, rounded down.
        since = max(0.0, epochs - self.pretrain_epochs)
        return min(math.floor(self.per_epoch * since + 1e-9), self.beyond)

    def removed(self, batch: Batch, stage: int, lengths: Tensor) -> Tensor:
        """Returns how many tokens of chains of ``lengths`` (B,) are gone (B,) int64."""
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


def offsets(numbers: Tensor, smoothing: float, seed: int) -> Tensor:
    """Returns o of rows by their number (B,): P(o >= k) = exp(-lambda k), at most MOST_EXTRA.

    Args:
        numbers: of rows (B,) int64.
        smoothing: lambda.
        seed: of the draws.
    """
    level = row_draws(numbers, 1, seed, _OFFSET)[:, 0]
    return (-torch.log1p(-level) / smoothing).long().clamp(max=MOST_EXTRA)


def row_draws(numbers: Tensor, count: int, *key: int) -> Tensor:
    """Returns uniform draws in [0, 1) of rows by their number (B, count) float64."""
    rows = [
        torch.rand(count, generator=seeded_generator(*key, number), dtype=torch.float64)
        for number in numbers.tolist()
    ]
    return torch.stack(rows).to(numbers.device)


# ---- models trained in stages


@dataclass(frozen=True, kw_only=True)
class StagedConfig(ChainConfig):
    """A model whose chain of thought is removed step by step.

    Raises:
        ValueError: if a value is out of its range.
    """

    epochs_per_stage: float = 3
    """Epochs of a stage (3 on GSM8K, 5 on ProntoQA and ProsQA); of large data also a fraction."""
    max_latent_stage: int = 3
    """Stages that remove one more step each; after them all steps are gone (3 on GSM8K)."""
    first_stage: int = 0
    """Stage of the first epoch: 1 where stage 0, the whole chain, was learned elsewhere (``resume``
    3 in the public code: three epochs of stage 0 are taken from a CoT model)."""
    start_from: str | None = None
    """Checkpoint, or folder of a run, of a model on the same data whose backbone training starts
    with, e.g. of a CoTLM; not read where a run is resumed."""
    start_which: Literal["last", "best"] = "last"
    """Checkpoint of a run in ``start_from``: its furthest, or its best by ``checkpoint.monitor``
    (as Coconut's public code starts from the CoT model of best validation accuracy)."""
    uniform_prob: float = 0.0
    """Probability that a row is shown at a stage drawn from 0 to its number of steps (0.3 in the
    authors' analysis)."""
    reset: Literal["epoch", "stage", "never"] = "epoch"
    """When AdamW forgets its moments: in every epoch (Coconut's public code), when the stage
    changes (as in its paper), or never."""
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
        """Returns the curriculum that removes steps."""
        return StepStages(
            self.epochs_per_stage,
            self.max_latent_stage,
            self.first_stage,
            self.uniform_prob,
            self.curriculum_seed,
        )

    def curriculum(self) -> Stages:
        """Returns how the chain is removed."""
        return self.step_stages()


class StagedLM(TextLM):
    """A model that learns in stages, set by the number of epochs before a batch.

    The stage that training has reached is a buffer, so that a checkpoint is scored at its own one:
    batches of an evaluation have no ``epochs``. Before the last stage the model writes the rest of
    its chain; from there on the answer prefix is given, as without reasoning.
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
        self._reached: tuple[int, int] | None = None  # its values, without a device sync
        self.register_load_state_dict_post_hook(_read_again)

    @property
    def stages(self) -> Stages:
        """The curriculum."""
        return self.config.curriculum()

    @property
    def stage(self) -> int:
        """The stage that training has reached; of a checkpoint, its own."""
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

    def on_fit_start(self) -> None:
        """Takes the backbone of ``start_from``, unless a run is resumed.

        Raises:
            CheckpointError: if it cannot be read, or is of another shape.
        """
        super().on_fit_start()
        if self.config.start_from is not None and self.trainer.ckpt_path is None:
            path, which = self.config.start_from, self.config.start_which
            load_backbone(self.network, self.config, path, which)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Updates the stage, resets the optimiser as ``reset`` says, and ranks checkpoints anew.

        Both changes depend on the epochs before the batch, equal on all ranks, and on the latest
        values, which the checkpoint holds. A reset in the middle of an optimiser step equals one at
        its beginning: moments are first read when all its gradients are complete.

        NOTE(paper): the best checkpoint is one of the latest stage. iCoT's public code forgets the
        best as long as there is a chain, and Coconut's advises to keep all, because a model that
        still writes a chain answers better than one that no longer does.

        Raises:
            ValueError: if the batch has no ``epochs``.
        """
        super().on_train_batch_start(batch, batch_idx)
        if "epochs" not in batch:
            raise ValueError(
                f"{type(self).__name__} follows a curriculum, and the batch has no count of "
                "epochs; train on a datamodules.ReasoningDataModule, without "
                "trainer.overfit_batches"
            )
        before, now = self.reached, (int(batch["epochs"]), self.stages.at(batch["epochs"]))
        watched = {"epoch": 0, "stage": 1}.get(self.config.reset)
        if watched is not None and before[watched] != now[watched]:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()
        if before[1] != now[1]:
            for callback in self.trainer.checkpoint_callbacks:
                if hasattr(callback, "rank_anew"):
                    callback.rank_anew()
        if before != now:
            self.progress_made.copy_(torch.tensor(now))
            self._reached = now

    def statistics(self, batch: Batch, rows: TextRows) -> dict[str, torch.Tensor | Mean]:
        """Returns the batch's ``stage``, and ``chain_tokens``: those left in a row on average."""
        stage = self.stages.at(batch["epochs"]) if "epochs" in batch else self.stage
        return {
            "stage": on_device(float(stage), self.device),
            "chain_tokens": Mean((rows.kinds == CHAIN).sum(), float(len(rows.tokens))),
        }


def _read_again(model: nn.Module, _: Any) -> None:
    """Discards the cached values of a buffer that was loaded."""
    assert isinstance(model, StagedLM)
    model._reached = None


# ---- iCoT


@dataclass(frozen=True, kw_only=True)
class ICoTConfig(StagedConfig):
    """Implicit chain of thought by stepwise internalisation (Deng et al., 2024).

    Raises:
        ValueError: if a value is out of its range, or belongs to the other kind of removal.
    """

    removal: Literal["tokens", "steps"] = "tokens"
    """Unit of removal: tokens, as in iCoT's own code; or steps, as in the mode ``no_thoughts``
    of Coconut's code, which the Thinking States paper seems to have run (its stages are set by
    ``epochs_per_stage``, ``max_latent_stage`` and ``first_stage``)."""
    remove_per_epoch: int = 8
    """Delta, tokens removed in an epoch (8 on GSM8K)."""
    remove_all_beyond: int = 39
    """From this number of removed tokens on all are (39 on GSM8K)."""
    removal_smoothing: float | None = 4.0
    """lambda: in each row o more tokens are removed, P(o) ~ exp(-lambda o); null: none."""
    removal_side: Literal["left", "right"] = "left"
    """The end of the chain that is removed first."""
    pretrain_epochs: int = 0
    """Epochs with whole chains before the first token is removed."""
    reset: Literal["epoch", "stage", "never"] = "stage"
    """When AdamW forgets its moments: in every epoch, whenever more is removed (as in iCoT's own
    code), or never."""

    def __post_init__(self) -> None:
        """Checks ranges, and that only fields of the chosen removal are set."""
        super().__post_init__()
        for key, least in (("remove_per_epoch", 1), ("remove_all_beyond", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least {least}")
        if self.pretrain_epochs < 0:
            raise ValueError(f"pretrain_epochs ({self.pretrain_epochs}) must not be negative")
        if self.removal_smoothing is not None and self.removal_smoothing <= 0:
            raise ValueError(
                f"removal_smoothing ({self.removal_smoothing}) must be above 0, or null for none"
            )
        for key in ("first_stage", "uniform_prob"):
            if self.removal == "tokens" and getattr(self, key):
                raise ValueError(
                    f"{key} ({getattr(self, key)}) is of stages of steps; set removal=steps"
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
        """Returns the rest of the chains, and which rows learn its end: none at the last stage."""
        return self.stages.kept(batch, stage, self.step_separator)


class ICoTLM(StagedLM):
    """A chain of thought that is internalised: its first r tokens are removed, and r grows.

    Text: query, the rest of the chain, answer prefix, answer; positions count this text.
    At r = 0 it is CoT, and at the last stage No CoT.

    Args:
        config: the backbone, and how the chain is removed.
        optimizer: optimiser and schedule.
        compile: whether to compile the network with torch.compile (in place).
    """

    # NOTE(paper): the public code also skips a reset where the batch before had no chain left by
    # chance, which ranks see differently; here r alone decides. It also trains the answer's fixed
    # beginning to the end; here it is given once no chain can be before it.
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


# ---- a backbone from another checkpoint


_BACKBONE = "network.backbone."


_BY_TOKEN = ("embed_tokens.weight", "wte.weight", "head.weight")  # a row for each token


def load_backbone(
    network: TextNetwork,
    config: ReasoningConfig,
    path: str,
    which: Literal["last", "best"] = "last",
) -> None:
    """Copies a checkpoint's backbone into the network's.

    Rows of embedding and head are copied as far as the tokenizer goes, and for the tokens that the
    method adds where the checkpoint's method adds the same; otherwise these stay as they are, or
    begin with a copy of ``special_rows_from``.

    Args:
        network: changed in place.
        config: of the network's method.
        path: of a checkpoint, or of a run.
        which: of a run, its furthest checkpoint or its best.

    Raises:
        CheckpointError: if it cannot be read, or its backbone is of another shape.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    whole = StateDictOptions(full_state_dict=True)  # of parameters that are sharded, too
    checkpoint = read_checkpoint(path, which)
    saved: Any = checkpoint.content["state_dict"]
    own: Any = get_model_state_dict(network.backbone, options=whole)
    strange = [key for key, value in own.items() if not _fits(key, value, saved, config.vocab_size)]
    theirs = [key.removeprefix(_BACKBONE) for key in saved if key.startswith(_BACKBONE)]
    strange += [key for key in theirs if key not in own]  # e.g. of a deeper backbone
    if strange:
        raise CheckpointError(
            f"start_from ({path}) holds no backbone of this shape: {strange[0]} is in one of the "
            "two only, or of another size; train both with one tokenizer and with equal sizes"
        )
    added = _adds_the_same(checkpoint, config)
    with torch.no_grad():
        for key, value in own.items():
            _copy(value, saved[_BACKBONE + key], key.endswith(_BY_TOKEN), config, added)
    set_model_state_dict(network.backbone, own, options=whole)


def _fits(key: str, own: Tensor, saved: dict[str, Tensor], rows: int) -> bool:
    theirs = saved.get(_BACKBONE + key)
    if theirs is None:
        return False
    if key.endswith(_BY_TOKEN):
        return theirs.shape[1:] == own.shape[1:] and len(theirs) >= rows
    return theirs.shape == own.shape


def _adds_the_same(checkpoint: Checkpoint, config: ReasoningConfig) -> bool:
    """Returns whether a checkpoint's method adds the same tokens with the same ids."""
    recipe = checkpoint.model_recipe
    kind = resolve_class(recipe["class_path"], nn.Module)
    theirs = get_type_hints(kind.__init__).get("config")
    saved = recipe["init_args"].get("config", {})
    same = getattr(theirs, "special_tokens", ()) == config.special_tokens
    return same and saved.get("vocab_size") == config.vocab_size


def _copy(
    own: Tensor, theirs: Tensor, by_token: bool, config: ReasoningConfig, added: bool
) -> None:
    if not by_token:
        own.copy_(theirs)
        return
    first, count = config.vocab_size, len(config.special_tokens)
    own[:first] = theirs[:first]
    if added:
        own[first : first + count] = theirs[first : first + count]
    elif config.special_rows_from is not None:
        own[first : first + count] = own[config.special_rows_from]
