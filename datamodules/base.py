"""Base of all data modules: batches by index, and the position at which a run resumes.

A subclass for a type of batch implements `training_source`, `evaluation_source`, `prompt_source`
and `order`; a corpus derived from it implements `documents(split)`. Loaders, ranks and resuming are
here.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from datamodules.corpus import TextCorpus
from datamodules.encoding import most_workers
from datamodules.readers import read_prompts
from datamodules.sources import (
    BatchLoader,
    BatchSource,
    CountedSource,
    Ranks,
    Rows,
    StepBatch,
    TrainingSource,
    divide_rows,
)
from datamodules.store import Split
from lightning_models.checkpoint import read_file
from lightning_models.recipe import build, public_path, trust


def range_problems(minimum: int, maximum: float = math.inf, /, **values: int | None) -> list[str]:
    """Returns a clause for each value outside [`minimum`, `maximum`]; None is always in range."""
    present = {key: value for key, value in values.items() if value is not None}
    too_low = [
        f"{key}={value} must be at least {minimum}"
        for key, value in present.items()
        if value < minimum
    ]
    too_high = [
        f"{key}={value} must be at most {maximum}"
        for key, value in present.items()
        if value > maximum
    ]
    return too_low + too_high


def choice_problems(choices: Sequence[str], **values: str) -> list[str]:
    """Returns a clause for every argument that is not one of the choices."""
    wrong = {key: value for key, value in values.items() if value not in choices}
    options = " or ".join(map(repr, choices))
    return [f"{key}={value!r} must be {options}" for key, value in wrong.items()]


def raise_problems(problems: Sequence[str]) -> None:
    """Raises a ValueError that lists the clauses, if there are any."""
    if problems:
        raise ValueError("; ".join(problems) + ".")


# The data module


class LanguageDataModule(TextCorpus):
    """A text corpus in batches; batch n is a pure function of (seed, n, rank, world size).

    A stopped run therefore resumes with the batch that it would have seen next. Evaluation scores
    every token of a split exactly once, on any number of ranks.

    Args:
        batch_size: Number of rows per device and micro-batch in training (B); with global_batch,
            the maximum.
        global_batch: Number of rows per optimiser step over all devices. Each device splits its
            share into micro-batches of the largest divisor that is at most batch_size and
            accumulates gradients over them, so step n has the same rows on any number of devices.
            With null, a step has batch_size x trainer.accumulate_grad_batches x devices rows.
        eval_batch_size: Number of rows per device in evaluation. Null uses batch_size.
        seed: Seed of the data order, non-negative; the splits do not depend on it.
        num_workers: Number of processes that build batches in advance; 0 builds them in the
            training process.
        predict_file: Prompts for `predict`: txt with one prompt per line, or jsonl or parquet with
            the field ``prompt``.
        validation_split: Split that training validates on: ``val``, or ``test`` if ``val`` is
            reserved for a report that must not have been tuned on.
        **kwargs: See `TextCorpus`.

    Raises:
        ValueError: If arguments are out of range; the message lists all of them.
    """

    rows: ClassVar[str] = "windows"
    """Plural noun for the rows of batches, in messages."""
    not_in_source: ClassVar[frozenset[str]] = TextCorpus.not_in_source | {
        "batch_size",
        "global_batch",
        "eval_batch_size",
        "seed",
        "num_workers",
        "predict_file",
        "validation_split",
    }

    def __init__(
        self,
        *,
        batch_size: int = 16,
        global_batch: int | None = None,
        eval_batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        predict_file: str | None = None,
        validation_split: Literal["val", "test"] = "val",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.batch_size = batch_size
        self.global_batch = global_batch
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.predict_file = predict_file
        self.validation_split: Split = validation_split
        self._lengths_of_rows: dict[Split, np.ndarray] = {}  # of splits with rows too long
        self._training: TrainingSource | None = None
        raise_problems(self._problems())

    def _problems(self) -> list[str]:
        """Returns a clause for every argument outside its range."""
        return [
            *range_problems(1, batch_size=self.batch_size, eval_batch_size=self.eval_batch_size),
            *range_problems(1, global_batch=self.global_batch),
            *range_problems(0, seed=self.seed),
            *range_problems(0, most_workers(), num_workers=self.num_workers),
            *choice_problems(("val", "test"), validation_split=self.validation_split),
        ]

    # Implemented by subclasses for a type of batch

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Number of positions that a model needs: tokens per window, or slots per sentence."""

    def row_tokens(self, split: Split) -> int:
        """Returns the mean number of scored tokens per row of a split; a window's by default."""
        return self.block_size

    def unit_tokens(self) -> int:
        """Returns the mean number of tokens in the unit that `StepBatch` counts: a row."""
        return self.row_tokens("train")

    def step_batch(self, devices: int, accumulate: int = 1) -> StepBatch:
        """Returns the batch of an optimiser step and its division among devices.

        Args:
            devices: Number of training processes.
            accumulate: ``trainer.accumulate_grad_batches``. `global_batch` implies it, and 1 then
                means that it was not set.

        Raises:
            ValueError: If `global_batch` cannot be divided among the devices, or contradicts
                `accumulate`.
        """
        batch = self._shared_step(devices)
        if batch is None:
            micro, unit = self._most_at_once
            size = micro * accumulate * devices
            return StepBatch(
                size=size, micro=micro, accumulate=accumulate, devices=devices, unit=unit
            )
        if accumulate not in (1, batch.accumulate):
            raise ValueError(
                f"trainer.accumulate_grad_batches ({accumulate}) follows from data.global_batch: "
                f"it is {batch.accumulate} on {devices} device{'s' if devices > 1 else ''}. Leave "
                "it out, or set data.global_batch to null."
            )
        return batch

    @property
    def _most_at_once(self) -> tuple[int, str]:
        """Largest training micro-batch of a device, and its unit."""
        return self.batch_size, "rows"

    def _shared_step(self, devices: int) -> StepBatch | None:
        """Returns the batch of a step of fixed size, or None if micro-batches determine it."""
        if self.global_batch is None:
            return None
        return divide_rows(self.global_batch, devices, self.batch_size)

    def _training_rows(self) -> Rows:
        """Returns the arguments of `RowSource` for this rank's training batches."""
        ranks = self._ranks()
        batch = self._shared_step(ranks["world_size"])
        if batch is None:
            return {"batch_size": self.batch_size, **ranks}
        return {"batch_size": batch.micro, "accumulate": batch.accumulate, **ranks}

    may_overlap: ClassVar[bool] = False
    """Whether evaluation rows can overlap (`eval_stride`)."""

    def rows_per_target(self, split: Split, batches: int | None = None) -> float:
        """Returns the positions computed per scored target; 1 unless rows overlap.

        Args:
            split: Split to score.
            batches: Number of batches scored, from the first; all by default.
        """
        return 1.0

    @abstractmethod
    def training_source(self) -> CountedSource:
        """Returns the training batches of this rank by index.

        Raises:
            ValueError: If the train split is too small for one batch.
        """

    @abstractmethod
    def evaluation_source(self, split: Split) -> BatchSource:
        """Returns this rank's batches, which score every token of a split once.

        Raises:
            ValueError: If the split is empty.
        """

    def _refuse_empty(self, split: Split, size: int) -> None:
        """Raises a ValueError if a split of that size has nothing to score."""
        if not size:
            raise ValueError(f"The {split} split is empty. {self.how_to_get(split)}")
        lengths = self._lengths_of_rows.get(split)
        if lengths is not None and lengths.min() > self.block_size:
            raise ValueError(
                f"block_size={self.block_size} is too short: the shortest question of the {split} "
                f"split has {lengths.min()} tokens with its answer, the longest {lengths.max()}. "
                f"Set block_size={lengths.max()} or above."
            )

    # Questions that do not fit

    def _leave_out(
        self, lengths: Mapping[Split, np.ndarray], stage: str | None, cure: str = ""
    ) -> None:
        """Excludes rows longer than block_size from evaluation, and warns about them.

        Args:
            lengths: Length in tokens of each row (N,), for splits whose rows cannot be cut.
            stage: See `setup`.
            cure: A further remedy for training, which continues the sentence after "block_size".

        Raises:
            ValueError: If such a row would be trained on.
        """
        too_long = {
            split: rows for split, rows in lengths.items() if (rows > self.block_size).any()
        }
        self._lengths_of_rows = too_long
        if "train" in too_long and stage in (None, "fit"):
            longest = too_long["train"].max()
            raise ValueError(
                f"block_size={self.block_size} is too short: a question of the train split has "
                f"{longest} tokens with its answer. Set block_size={longest} or above{cure}; rows "
                "are only as wide as they need."
            )
        for split, rows in too_long.items():
            rank_zero_warn(
                f"{self.left_out(split)} of {len(rows)} questions of the {split} split are longer "
                f"than block_size={self.block_size} and are left out of accuracies and losses. To "
                f"include all, set block_size={rows.max()}."
            )

    def _fitting(self, split: Split) -> np.ndarray | None:
        """Returns the indices of the rows to evaluate, or None for all."""
        lengths = self._lengths_of_rows.get(split)
        return None if lengths is None else np.flatnonzero(lengths <= self.block_size)

    def left_out(self, split: Split) -> int:
        """Returns the number of questions of a split that block_size excludes from evaluation."""
        lengths = self._lengths_of_rows.get(split)
        return 0 if lengths is None else int((lengths > self.block_size).sum())

    @abstractmethod
    def prompt_source(self, prompts: Sequence[str]) -> BatchSource:
        """Returns batches that score every token of the prompts, whose texts are in ``prompt``.

        Raises:
            ValueError: If a prompt is longer than a row can be.
        """

    @abstractmethod
    def order(self) -> dict[str, Any]:
        """Returns the settings that, with text and world size, determine batch n; plain values."""

    # Loaders

    def setup(self, stage: str | None = None) -> None:
        # Opens the store, and sets the trainer's accumulation that `global_batch` implies.
        super().setup(stage)
        if stage == "fit" and self.trainer is not None:
            trainer = self.trainer
            batch = self.step_batch(trainer.world_size, trainer.accumulate_grad_batches)
            trainer.accumulate_grad_batches = batch.accumulate

    def train_dataloader(self) -> BatchLoader:
        """Returns the training loader, which starts at the trainer's current batch.

        Raises:
            ValueError: If the train split is too small for one batch, or a limit of the trainer
                cuts a step of `global_batch`.
        """
        source = self.training_source()
        trainer = self.trainer
        if trainer is None:
            accumulate = self.step_batch(1).accumulate
            training = TrainingSource(source, epoch_batches=len(source), accumulate=accumulate)
            return self._loader(training, start=None)
        _refuse_scheduled_accumulation(trainer)
        epoch_batches = limited_batches(len(source), trainer.limit_train_batches)
        batch = self._shared_step(trainer.world_size)
        if batch is not None:
            _refuse_cut_steps(trainer, epoch_batches, batch.accumulate)
        self._training = training = TrainingSource(
            source,
            epoch_batches=epoch_batches,
            accumulate=trainer.accumulate_grad_batches,
            repeat=getattr(trainer, "overfit_batches", 0) > 0,  # set by Trainer, not declared
        )
        return self._loader(training, start=self._batches_processed, epoch_batches=epoch_batches)

    def begin_step(self, n: int) -> None:
        """Makes training batch `n` the first of the resumed optimiser step."""
        if self._training is not None:
            self._training.first = n

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        # An empty list if the user chose not to have this split.
        split = self.validation_split
        training = self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING
        if self.expects(split) or not training:
            return self._evaluation_loader(split)
        if self.trainer is not None:
            cure = self.how_to_get(split)
            rank_zero_info(f"Training without validation: there is no {split} split. {cure}")
        return []

    def test_dataloader(self) -> BatchLoader:
        """Returns the loader of the test split.

        Raises:
            ValueError: If there is none.
        """
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> BatchLoader:
        """Returns the loader of the prompts in `predict_file`.

        Raises:
            ValueError: If the file does not exist, or a prompt is longer than a window.
        """
        if self.predict_file is None:
            raise ValueError("predict needs prompts: set data.predict_file to a txt or jsonl file")
        source = self.prompt_source(read_prompts(Path(self.predict_file).expanduser()))
        return self._loader(source, start=lambda: 0)

    def _evaluation_loader(self, split: Split) -> BatchLoader:
        return self._loader(self.evaluation_source(split), start=lambda: 0)

    def _loader(
        self,
        source: BatchSource,
        *,
        start: Callable[[], int] | None,
        epoch_batches: int | None = None,
    ) -> BatchLoader:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return BatchLoader(
            source,
            start=start,
            epoch_batches=epoch_batches,
            num_workers=self.num_workers,
            pin_memory=on_gpu,
        )

    def _ranks(self) -> Ranks:
        """Returns the arguments ``rank`` and ``world_size``, 0 and 1 without a trainer."""
        trainer = self.trainer
        if trainer is None:
            return {"rank": 0, "world_size": 1}
        return {"rank": trainer.global_rank, "world_size": trainer.world_size}

    def _batches_processed(self) -> int:
        """Returns the number of training batches processed so far, over all epochs and restarts."""
        if self.trainer is None:
            return 0
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total
        return int(total.processed)  # type: ignore[attr-defined]

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns the data module that a checkpoint was trained on, not yet prepared.

        Only tensors and plain values are unpickled, and only classes of this project, or of
        packages that the user has named, are built.

        Args:
            checkpoint_path: Path of the checkpoint.
            map_location: Not used: data modules load no tensors.
            hparams_file: Not used: the recipe is in the checkpoint.
            weights_only: Not used: pickled code is never loaded.
            **kwargs: Init arguments that replace the saved ones.

        Raises:
            ValueError: If it is not a checkpoint of this project, was trained on other data, or
                contains code.
        """
        content = read_file(Path(checkpoint_path))
        trust([public_path(cls)])
        try:
            recipe = content["recipe"]["data"]
            arguments = {**recipe["init_args"], **kwargs}
            data: Self = build({**recipe, "init_args": arguments}, cls)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{checkpoint_path}: recipe.data is not a {cls.__name__} ({error}); use a "
                "checkpoint that was trained on such data"
            ) from error
        return data

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "order": self._whole_order(),
            "tokenizer": self.tokenizer.state(),
        }

    def _whole_order(self) -> dict[str, Any]:
        order = self.order()
        if self._shared_step(1) is None:
            return {**order, "world_size": self._ranks()["world_size"]}
        machine = ("batch_size", "batch_tokens")  # change no step
        stated = ("global_batch", "global_batch_tokens")
        kept = {key: value for key, value in order.items() if key not in machine}
        return {**kept, **{key: getattr(self, key) for key in stated if hasattr(self, key)}}

    @property
    def order_of_steps(self) -> dict[str, Any] | None:
        """Settings that fix a step's rows on any number of devices, or None if nothing does."""
        return None if self._shared_step(1) is None else self._whole_order()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Warns if data or order differ from the checkpoint's; a different BOS or EOS is an error.
        self._refuse_other_special_tokens(state_dict)
        if state_dict["fingerprint"] != self.fingerprint:
            rank_zero_warn(
                f"The checkpoint was trained on the data {state_dict['fingerprint']}, this run has "
                f"{self.fingerprint}: another text, split or tokenizer. Set the data arguments of "
                "the first run to continue with the same data."
            )
        saved, current = state_dict["order"], self._whole_order()
        # If only one of the runs sets the batch of a step, ``ResumeState`` compares the rows.
        one_states = ("world_size" in saved) != ("world_size" in current)
        changed = [
            f"{key} was {saved.get(key)}, is {current[key]}"
            for key in current
            if saved.get(key) != current[key] and (key in saved or not one_states)
        ]
        if changed:
            rank_zero_warn(
                "The order of the training data differs from the checkpoint's "
                f"({'; '.join(changed)}): the resumed run will see some text twice and some "
                "not at all in the current epoch."
            )


def limited_batches(available: int, limit: float) -> int:
    """Returns the batches per epoch under the trainer's limit, a count or a fraction."""
    batches = int(available * limit) if isinstance(limit, float) else min(available, limit)
    return max(1, batches)  # at 0 the trainer does not train


def _refuse_cut_steps(trainer: Any, epoch_batches: int, accumulate: int) -> None:
    """Raises a ValueError if epochs end within a step, except in trials of a few batches."""
    tries = getattr(trainer, "fast_dev_run", False) or getattr(trainer, "overfit_batches", 0)
    if epoch_batches % accumulate and not tries:
        whole = max(1, epoch_batches // accumulate) * accumulate
        raise ValueError(
            f"trainer.limit_train_batches ({trainer.limit_train_batches}) ends an epoch after "
            f"{epoch_batches} micro-batches, within a step of global_batch, which has {accumulate} "
            f"on this number of devices. Set it to {whole}."
        )


def _refuse_scheduled_accumulation(trainer: Any) -> None:
    """Raises a ValueError if the accumulation changes during training."""
    for callback in trainer.callbacks:
        if (
            isinstance(callback, GradientAccumulationScheduler)
            and len(set(callback.scheduling.values())) > 1
        ):
            raise ValueError(
                f"GradientAccumulationScheduler(scheduling={callback.scheduling}) changes the size "
                "of an optimiser step during the run, but batches carry the number of targets of "
                "a step of fixed size. Set trainer.accumulate_grad_batches instead."
            )
