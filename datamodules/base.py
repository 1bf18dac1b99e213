"""Batches of a corpus by number, and where a resumed run goes on: the base of all data modules.

A kind of batches writes `training_source`, `evaluation_source`, `prompt_source` and `order`; a
corpus below it writes `documents(split)`; loaders, ranks and resuming are here.
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


def outside(least: int, most: float = math.inf, /, **values: int | None) -> list[str]:
    """Returns a clause for every argument that is not from `least` to `most`; None is."""
    given = {key: value for key, value in values.items() if value is not None}
    few = [
        f"{key}={value} must be at least {least}" for key, value in given.items() if value < least
    ]
    many = [f"{key}={value} must be at most {most}" for key, value in given.items() if value > most]
    return few + many


def none_of(choices: Sequence[str], **values: str) -> list[str]:
    """Returns a clause for every argument that is none of the choices."""
    wrong = {key: value for key, value in values.items() if value not in choices}
    named = " or ".join(map(repr, choices))
    return [f"{key}={value!r} must be {named}" for key, value in wrong.items()]


def refuse(problems: Sequence[str]) -> None:
    """Raises a ValueError of the clauses, if there are any."""
    if problems:
        raise ValueError("; ".join(problems) + ".")


# The data module


class LanguageDataModule(TextCorpus):
    """A text corpus as batches, of which batch n is a pure function of (seed, n, rank, world size).

    A stopped run so goes on with the batch it would have seen. Evaluation scores every token of a
    split exactly once, whatever the number of ranks.

    Args:
        batch_size: Rows per device and micro-batch when training (B); the most with global_batch.
        global_batch: Rows of a step over all devices. These share them, in micro-batches
            of the largest divisor of a device's share that is at most batch_size, and accumulate
            the rest, so that step n has the same rows on any number of devices. With null a step
            has batch_size x trainer.accumulate_grad_batches x devices.
        eval_batch_size: Rows per device when evaluating; null takes batch_size.
        seed: Seed of the data order, non-negative; the splits do not depend on it.
        num_workers: Processes that build batches ahead of training; 0 builds them in the training
            process.
        predict_file: Prompts for `predict`: txt, one a line, or jsonl or parquet with the field
            ``prompt``.
        validation_split: Documents that training validates on: those of ``val``, or of ``test``
            where ``val`` is kept for a report that must not have been tuned on.
        **kwargs: See `TextCorpus`.

    Raises:
        ValueError: An argument is out of its range; the message lists all of them.
    """

    rows: ClassVar[str] = "windows"
    """What the rows of batches are."""
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
        refuse(self._problems())

    def _problems(self) -> list[str]:
        """Returns a clause for every argument outside its range."""
        return [
            *outside(1, batch_size=self.batch_size, eval_batch_size=self.eval_batch_size),
            *outside(1, global_batch=self.global_batch),
            *outside(0, seed=self.seed),
            *outside(0, most_workers(), num_workers=self.num_workers),
            *none_of(("val", "test"), validation_split=self.validation_split),
        ]

    # What a kind of batches writes

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Positions that a model needs: tokens of a window, slots of a sentence."""

    def row_tokens(self, split: Split) -> int:
        """Returns how many tokens a row has when a split is scored, on average; here a window's."""
        return self.block_size

    def unit_tokens(self) -> int:
        """Returns the tokens of what `StepBatch` counts: of a row, on average."""
        return self.row_tokens("train")

    def step_batch(self, devices: int, accumulate: int = 1) -> StepBatch:
        """Returns the batch of an optimiser step, and how devices share it.

        Args:
            devices: Processes that train.
            accumulate: ``trainer.accumulate_grad_batches``; with `global_batch` it follows, and 1
                stands for no choice.

        Raises:
            ValueError: If `global_batch` cannot be divided among the devices, or is given next to
                another accumulation.
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
        """Most that a device takes at once when training, and what it counts."""
        return self.batch_size, "rows"

    def _shared_step(self, devices: int) -> StepBatch | None:
        """Returns the batch of a step if its size is stated, or None if micro-batches decide it."""
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
    """Whether rows of an evaluation can overlap (`eval_stride`)."""

    def rows_per_target(self, split: Split, batches: int | None = None) -> float:
        """Returns positions computed for a target when a split is scored; 1 unless rows overlap.

        Args:
            split: which.
            batches: that are scored, the first ones; None: all.
        """
        return 1.0

    @abstractmethod
    def training_source(self) -> CountedSource:
        """Returns the training batches of this rank by number.

        Raises:
            ValueError: The train split is too small for one batch.
        """

    @abstractmethod
    def evaluation_source(self, split: Split) -> BatchSource:
        """Returns the batches of this rank that score every token of a split once.

        Raises:
            ValueError: The split is empty.
        """

    def _refuse_empty(self, split: Split, size: int) -> None:
        """Raises a ValueError if there is nothing to score in a split of that size."""
        if not size:
            raise ValueError(f"The {split} split is empty. {self.how_to_get(split)}")
        lengths = self._lengths_of_rows.get(split)
        if lengths is not None and lengths.min() > self.block_size:
            raise ValueError(
                f"block_size={self.block_size} is too short: the shortest question of the {split} "
                f"split has {lengths.min()} tokens with its answer, the longest {lengths.max()}. "
                f"Set block_size={lengths.max()} or above."
            )

    # Questions that are too long

    def _leave_out(
        self, lengths: Mapping[Split, np.ndarray], stage: str | None, cure: str = ""
    ) -> None:
        """Leaves rows that are longer than block_size out of evaluation, and warns of them.

        Args:
            lengths: Tokens of each row (N,), of splits whose rows cannot be cut.
            stage: See `setup`.
            cure: More that helps in training, in words that go on after "block_size".

        Raises:
            ValueError: Such a row would be trained on.
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
                f"than block_size={self.block_size} and left out: accuracies and losses cover "
                f"the rest. To have all, set block_size={rows.max()}."
            )

    def _fitting(self, split: Split) -> np.ndarray | None:
        """Returns the numbers of the rows that are evaluated, None for all."""
        lengths = self._lengths_of_rows.get(split)
        return None if lengths is None else np.flatnonzero(lengths <= self.block_size)

    def left_out(self, split: Split) -> int:
        """Returns how many questions of a split are too long for block_size to be evaluated."""
        lengths = self._lengths_of_rows.get(split)
        return 0 if lengths is None else int((lengths > self.block_size).sum())

    @abstractmethod
    def prompt_source(self, prompts: Sequence[str]) -> BatchSource:
        """Returns batches whose every token is scored, with ``prompt``, the list of texts.

        Raises:
            ValueError: A prompt is longer than a row can be.
        """

    @abstractmethod
    def order(self) -> dict[str, Any]:
        """Returns what decides, next to text and world size, what batch n holds; plain values."""

    # Loaders

    def setup(self, stage: str | None = None) -> None:
        # Opens the store; has the trainer accumulate what `global_batch` asks for.
        super().setup(stage)
        if stage == "fit" and self.trainer is not None:
            trainer = self.trainer
            batch = self.step_batch(trainer.world_size, trainer.accumulate_grad_batches)
            trainer.accumulate_grad_batches = batch.accumulate

    def train_dataloader(self) -> BatchLoader:
        """Returns the training loader, which goes on where the trainer stands.

        Raises:
            ValueError: The train split is too small for one batch, or a limit of the trainer cuts
                a step of `global_batch`.
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
        """Has the optimiser step of a resumed run begin with training batch `n`."""
        if self._training is not None:
            self._training.first = n

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        # Returns the validation loader; an empty list where there is no such split by choice.
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
            ValueError: There is none.
        """
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> BatchLoader:
        """Returns the loader of the prompts in `predict_file`.

        Raises:
            ValueError: There is no such file, or a prompt is longer than a window.
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
        """Returns ``rank`` and ``world_size``, as sources take them; 0 of 1 without a trainer."""
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
        """Returns the data that a checkpoint was trained on, not yet prepared.

        Only tensors and plain values are unpickled, and only classes of this project, or of
        packages that the user has named, are built.

        Args:
            checkpoint_path: The file.
            map_location: Not used: data hold no tensors of it.
            hparams_file: Not used: the recipe is in the checkpoint.
            weights_only: Not used: other values are never unpickled.
            **kwargs: Init arguments that replace the saved ones.

        Raises:
            ValueError: It is no checkpoint of this project, was trained without such data, or
                brings code along.
        """
        content = read_file(Path(checkpoint_path))
        trust([public_path(cls)])
        try:
            recipe = content["recipe"]["data"]
            arguments = {**recipe["init_args"], **kwargs}
            data: Self = build({**recipe, "init_args": arguments}, cls)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{checkpoint_path}: recipe.data gives no {cls.__name__} ({error}); take a "
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
        """What decides the rows of a step on any number of devices, or None if they do, too."""
        return None if self._shared_step(1) is None else self._whole_order()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Warns of data or an order unlike the checkpoint's; refuses another BOS or EOS.
        self._refuse_other_special_tokens(state_dict)
        if state_dict["fingerprint"] != self.fingerprint:
            rank_zero_warn(
                f"The checkpoint was trained on the data {state_dict['fingerprint']}, this run has "
                f"{self.fingerprint}: another text, split or tokenizer. Set the data arguments of "
                "the first run to go on with the same."
            )
        before, now = state_dict["order"], self._whole_order()
        # Where one run alone states the batch of a step, ``ResumeState`` compares the rows.
        one_states = ("world_size" in before) != ("world_size" in now)
        changed = [
            f"{key} was {before.get(key)}, is {now[key]}"
            for key in now
            if before.get(key) != now[key] and (key in before or not one_states)
        ]
        if changed:
            rank_zero_warn(
                f"The order of the training data is not the checkpoint's ({'; '.join(changed)}): a "
                "resumed run will see some text twice and others never in the current epoch."
            )


def limited_batches(available: int, limit: float) -> int:
    """Returns the batches of an epoch under the trainer's limit, a number or a share."""
    batches = int(available * limit) if isinstance(limit, float) else min(available, limit)
    return max(1, batches)  # at 0 the trainer does not train


def _refuse_cut_steps(trainer: Any, epoch_batches: int, accumulate: int) -> None:
    """Raises a ValueError if epochs end within a step; for trials of a few batches they may."""
    tries = getattr(trainer, "fast_dev_run", False) or getattr(trainer, "overfit_batches", 0)
    if epoch_batches % accumulate and not tries:
        whole = max(1, epoch_batches // accumulate) * accumulate
        raise ValueError(
            f"trainer.limit_train_batches ({trainer.limit_train_batches}) ends an epoch after "
            f"{epoch_batches} micro-batches, within a step of global_batch, which has {accumulate} "
            f"on this number of devices. Set it to {whole}."
        )


def _refuse_scheduled_accumulation(trainer: Any) -> None:
    """Raises a ValueError if the accumulation changes: the normaliser would not follow."""
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
