"""The base of all data: batches by number, for every rank, from where training stands.

A kind of batches writes `training_source`, `evaluation_source`, `prompt_source` and `order`; a
corpus below it writes `documents(split)`; loaders, ranks and resuming are here.
"""

import pickle
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn

from datamodules.corpus import TextCorpus
from datamodules.loader import Batch, BatchLoader, BatchSource, CountedSource, TrainingSource
from datamodules.prompts import read_prompts
from datamodules.recipe import build
from datamodules.store import Split

__all__ = ["Batch", "BatchLoader", "BatchSource", "LanguageDataModule"]


class LanguageDataModule(TextCorpus):
    """A text corpus as batches, of which batch n is a pure function of (seed, n, rank, world size).

    A stopped run so goes on with the batch it would have seen. Evaluation scores every token of a
    split exactly once, whatever the number of ranks.

    Args:
        batch_size: Rows per device and micro-batch when training (B).
        eval_batch_size: Rows per device when evaluating; null takes batch_size.
        seed: Seed of the data order, non-negative; the splits do not depend on it.
        num_workers: Processes that build batches ahead of training; 0 builds them in the training
            process.
        predict_file: Prompts for `predict`: txt, one a line, or jsonl with the field ``prompt``.
        **kwargs: See `TextCorpus`.

    Raises:
        ValueError: An argument is out of its range; the message lists all of them.
    """

    rows: ClassVar[str] = "windows"
    """What the rows of batches are."""
    not_in_source: ClassVar[frozenset[str]] = TextCorpus.not_in_source | {
        "batch_size",
        "eval_batch_size",
        "seed",
        "num_workers",
        "predict_file",
    }

    def __init__(
        self,
        *,
        batch_size: int = 16,
        eval_batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        predict_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.predict_file = predict_file
        problems = self._problems()
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def _problems(self) -> list[str]:
        """Returns a clause for every argument outside its range."""
        lowest = {"batch_size": 1, "eval_batch_size": 1, "seed": 0, "num_workers": 0}
        return [
            f"{key}={getattr(self, key)} must be at least {least}"
            for key, least in lowest.items()
            if getattr(self, key) < least
        ]

    # What a kind of batches writes

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Positions that a model needs: tokens of a window, slots of a sentence."""

    def row_tokens(self, split: Split) -> int:
        """Returns how many tokens a row has when a split is scored, on average; here a window's."""
        return self.block_size

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

    @abstractmethod
    def prompt_source(self, prompts: Sequence[str]) -> BatchSource:
        """Returns batches whose every token is scored, with ``prompt``, the list of texts.

        Raises:
            ValueError: A prompt is longer than a row can be.
        """

    @abstractmethod
    def order(self) -> dict[str, Any]:
        """Returns, in plain values, what decides besides text and world size what batch n holds."""

    # Loaders

    def train_dataloader(self) -> BatchLoader:
        """Returns the training loader, which goes on where the trainer stands.

        Raises:
            ValueError: The train split is too small for one batch.
        """
        source = self.training_source()
        trainer = self.trainer
        if trainer is None:
            return self._loader(TrainingSource(source, epoch_batches=len(source)), start=None)
        _refuse_scheduled_accumulation(trainer)
        epoch_batches = limited_batches(len(source), trainer.limit_train_batches)
        training = TrainingSource(
            source,
            epoch_batches=epoch_batches,
            accumulate=trainer.accumulate_grad_batches,
            repeat=getattr(trainer, "overfit_batches", 0) > 0,  # set by Trainer, not declared
        )
        return self._loader(training, start=self._batches_processed, epoch_batches=epoch_batches)

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Returns the validation loader; an empty list where there is no such split by choice."""
        return self._evaluation_loader("val") if self.expects("val") else []

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

    def _ranks(self) -> tuple[int, int]:
        """Returns (rank, world size), (0, 1) without a trainer."""
        return (
            (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        )

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

        Only tensors and plain values are unpickled, and only classes of this package, or of modules
        that are imported already, are built.

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
        try:
            content = torch.load(checkpoint_path, map_location="cpu", weights_only=True)
            recipe = content["recipe"]["data"]
            arguments = {**recipe["init_args"], **kwargs}
        except (pickle.UnpicklingError, KeyError, TypeError) as error:
            raise ValueError(
                f"{checkpoint_path} holds no recipe of data as plain values; take a checkpoint of "
                "train.py"
            ) from error
        data: Self = build({**recipe, "init_args": arguments}, cls, "recipe.data")
        return data

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: fingerprint, data order and tokenizer."""
        return {
            "fingerprint": self.fingerprint,
            "order": self._whole_order(),
            "tokenizer": self.tokenizer.state(),
        }

    def _whole_order(self) -> dict[str, Any]:
        return {**self.order(), "world_size": self._ranks()[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warns where the data, or their order, are not those of the checkpoint."""
        if state_dict["fingerprint"] != self.fingerprint:
            rank_zero_warn(
                f"The checkpoint was trained on the data {state_dict['fingerprint']}, this run has "
                f"{self.fingerprint}: another text, split or tokenizer. Set the data arguments of "
                "the first run to go on with the same."
            )
        before, now = state_dict["order"], self._whole_order()
        changed = [
            f"{key} was {before[key]}, is {now[key]}" for key in now if before.get(key) != now[key]
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
