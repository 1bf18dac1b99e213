"""Base class of analyses: selects batches and validations, writes and logs reports."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import pandas as pd
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, ones_like

from callbacks.analysis.report import AnalysisReport, as_tiles, say_step
from callbacks.hooks import EvaluationHooks, check_minimum, gather
from callbacks.logging import log_details, log_images, log_text
from callbacks.random_state import undisturbed
from callbacks.trainer_state import tokenizer_of
from lightning_models.atomic_files import check_folder


class NothingToAnalyseError(ValueError):
    """Raised if a model records no statistics that an analysis needs, or cannot be analysed."""


def nothing_recorded(model: Any, missing: str) -> NothingToAnalyseError:
    """Returns the error for a model that does not record what an analysis needs."""
    return NothingToAnalyseError(
        f"{type(model).__name__} records no {missing}, so there is nothing to analyse"
    )


class Recorder:
    """Collects the statistics that a model records while it scores a batch.

    Args:
        names: Statistics to keep, as the model names them.
    """

    def __init__(self, *names: str) -> None:
        self._records: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def consumers(self) -> dict[str, Callable[..., None]]:
        """Returns the recording functions by name of the statistic."""
        return {name: partial(self._take, name) for name in self._records}

    def _take(self, name: str, **values: Any) -> None:
        self._records[name].append(values)

    def recorded(self, name: str) -> list[dict[str, Any]]:
        """Returns every record of a statistic, in order."""
        return self._records[name]

    def latest(self, name: str) -> dict[str, Any]:
        """Returns the last record of a statistic; empty if the model records none."""
        return next(reversed(self._records[name]), {})


class Findings:
    """Tables by name, collected batch by batch and appended over ranks."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[pd.DataFrame]] = defaultdict(list)

    def __bool__(self) -> bool:
        return any(name in self for name in self._parts)

    def __contains__(self, name: str) -> bool:
        return any(len(part) for part in self._parts.get(name, ()))

    def add(self, name: str, rows: pd.DataFrame | Mapping[str, Any] | list[dict[str, Any]]) -> None:
        """Adds rows to the table of that name."""
        self._parts[name].append(pd.DataFrame(rows))

    def append(self, other: "Findings") -> None:
        """Appends all rows of other tables."""
        for name, parts in other._parts.items():
            self._parts[name] += parts

    def tables(self) -> dict[str, pd.DataFrame]:
        """Returns the tables with at least one row, by name."""
        return {name: self[name] for name in self._parts if name in self}

    def __getitem__(self, name: str) -> pd.DataFrame:
        """Returns the table of that name, empty if no rows were added."""
        added = self._parts.get(name, [])
        parts = [part for part in added if len(part)]
        if len(parts) > 1:  # concatenated once
            parts = self._parts[name] = [pd.concat(parts, ignore_index=True)]
        return next((part for part in parts or added if len(part.columns)), pd.DataFrame())


class Analysis(EvaluationHooks, ABC):
    """Analyses the first batches of every n-th validation during training, and of standalone ones.

    Tests are analysed too if ``of_tests`` is set. An analysis collects tables from batches
    (``_collect``) and makes one report of the tables of all ranks (``_report``), which is written
    to files and passed to the loggers. Some analyses also score the batches with other settings,
    which is expensive (``_sweeps``). Checkpoints hold the number of past validations.

    Args:
        every_n_validations: Analyse every n-th validation during training. If 0, none of them.
        num_batches: Number of batches of a validation to analyse.
        output: Folder of the files. If null, the folder ``tag`` in the run's log folder.
        sweep_every_n_validations: Sweep over settings at every n-th analysed validation during
            training. If 0, at none of them. Standalone validations always sweep.

    Raises:
        ValueError: If a number is too low.
    """

    of_tests = False
    tag: ClassVar[str]
    """Name of the files' folder."""
    reads: ClassVar[str] = "windows"
    """Type of the analysed batches, one of ``LanguageModel.reads``."""
    image_tag: ClassVar[str]
    """Group of its figures and scalars in TensorBoard."""
    cards: ClassVar[tuple[str, ...]] = ("*",)
    """Patterns of scalars to show in TensorBoard, at most ten cards with the figures."""

    def __init__(
        self,
        every_n_validations: int,
        num_batches: int,
        output: str | None = None,
        sweep_every_n_validations: int = 0,
    ) -> None:
        check_minimum("num_batches", num_batches, 1)
        check_minimum("every_n_validations", every_n_validations, 0)
        check_minimum("sweep_every_n_validations", sweep_every_n_validations, 0)
        self.every_n_validations = every_n_validations
        self.num_batches = num_batches
        self.output = output
        self.sweep_every_n_validations = sweep_every_n_validations
        self._validations = 0
        self._loaded_step = 0
        self._folder = Path()
        self._findings: Findings | None = None
        self._unable = self._unable_to_sweep = False
        self._sweeps = False

    # ---- for subclasses

    @abstractmethod
    def _collect(
        self, tokenizer: Any, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        """Adds the findings of a batch; called on all ranks, with the model in eval mode.

        Args:
            tokenizer: Tokenizer of the data, or None.
            pl_module: The model.
            batch: Batch of the type that the model reads.
            findings: Tables to add to.

        Raises:
            NothingToAnalyseError: If the model cannot be analysed; later batches are left out.
        """

    @abstractmethod
    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> AnalysisReport:
        """Returns the report of the findings of all ranks; called on rank 0."""

    def _text_report(self, tokenizer: Any, pl_module: Any, findings: Findings) -> AnalysisReport:
        """Returns the tables and figures of a single text, the most important ones first.

        By default they are the collected tables.
        """
        return AnalysisReport(tables=findings.tables())

    # ---- a text, without a trainer

    def analyse_text(self, pl_module: Any, batch: dict[str, Any], tokenizer: Any) -> AnalysisReport:
        """Analyses a single text, without writing or logging anything.

        Args:
            pl_module: The model on its device. Its mode and the random states do not change.
            batch: Batch of one row on the same device.
            tokenizer: Tokenizer that the model was trained with.

        Raises:
            NothingToAnalyseError: If the model records no statistics that this analysis needs.
        """
        findings = Findings()
        with undisturbed(pl_module):
            self._collect(tokenizer, pl_module, batch, findings)
            if not findings:
                name = type(pl_module).__name__
                raise NothingToAnalyseError(f"{name} records nothing about this text")
            return self._text_report(tokenizer, pl_module, findings)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations = state_dict["validations"]

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The step of the evaluated weights, which the trainer knows in training only.
        self._loaded_step = 0 if trainer.state.fn == "fit" else checkpoint["global_step"]

    # ---- hooks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._unable, self._unable_to_sweep, self._loaded_step = False, False, 0
        folder = trainer.log_dir  # broadcast by Lightning, so the same on all ranks
        if not isinstance(folder, str | Path):  # no logger, or the stand-in of fast_dev_run
            folder = trainer.default_root_dir
        self._folder = Path(folder) / self.tag
        if self.output is not None:
            self._folder = Path(self.output).expanduser()
            check_folder(f"{self.tag}.output", self._folder)

    def evaluation_starts(self, trainer: L.Trainer, pl_module: Any) -> None:
        due = self._is_turn(trainer, self.every_n_validations)
        self._findings = Findings() if due else None
        self._sweeps = self._is_turn(trainer, self.sweep_every_n_validations)

    def evaluation_batch_ends(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        if self._findings is None or self._unable:
            return
        if batch_idx < self.num_batches and dataloader_idx == 0:
            try:
                with undisturbed(pl_module):
                    self._collect(tokenizer_of(trainer), pl_module, batch, self._findings)
            except NothingToAnalyseError as error:
                self._unable = True
                self._warn(str(error))

    def evaluation_ends(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            self._validations += 1
        collected, self._findings = self._findings, None
        if collected is None:
            return
        findings = Findings()
        for part in gather(collected):
            findings.append(part)
        if trainer.is_global_zero and findings:
            stage = "test" if trainer.state.fn == "test" else "val"
            report = self._report(trainer, pl_module, findings)
            self._publish(trainer, report, f"{stage}-step={self._step(trainer)}-")

    # ---- schedule

    def _is_turn(self, trainer: L.Trainer, every: int) -> bool:
        """Returns whether this validation is an ``every``-th one during training, or standalone."""
        if trainer.state.fn != "fit":
            return True
        return bool(every) and (self._validations + 1) % every == 0

    def _step(self, trainer: L.Trainer) -> int:
        """Returns the optimiser step of the analysed weights."""
        return self._loaded_step or trainer.global_step

    # ---- output

    def _publish(self, trainer: L.Trainer, report: AnalysisReport, prefix: str) -> None:
        """Writes the files of a report, and logs it; a full disk does not end training."""
        drawn = report.drawn()
        for figure in drawn.values():
            say_step(figure, self._step(trainer))
        try:
            report.write(self._folder, prefix, drawn)
        except OSError as error:
            self._warn(f"{self._folder} cannot be written to: {error}")
        self._log(trainer, report.finite)
        step = self._step(trainer)
        for logger in trainer.loggers:
            for name, figure in drawn.items():
                log_images(logger, f"{self.image_tag}/{name}", as_tiles(figure), step)
            for name, text in report.markdown.items():
                log_text(logger, name, text, step)

    def _log(self, trainer: L.Trainer, scalars: Mapping[str, float]) -> None:
        for logger in trainer.loggers if scalars else ():
            log_details(logger, scalars, self._step(trainer), self.cards)

    def _give_up_sweeps(self, reason: str) -> None:
        self._unable_to_sweep = True
        rank_zero_info(f"{self._name}: {reason}")

    def _warn(self, message: str) -> None:
        rank_zero_warn(f"{self._name}: {message}")

    @property
    def _name(self) -> str:
        return self.tag.replace("_", " ")


# ---- parts of batches


def rows_of(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Returns a batch of the rows from ``start`` up to ``stop``."""
    rows = len(batch["tokens"])

    def part(value: Any) -> Any:
        has_rows = isinstance(value, Tensor | list) and len(value) == rows
        return value[start:stop] if has_rows else value

    return {key: part(value) for key, value in batch.items()}


def first_tokens(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """Returns the first tokens of each row of a batch of windows; counts of whole rows stay."""
    shape = batch["tokens"].shape

    def part(value: Any) -> Any:
        by_token = isinstance(value, Tensor) and value.shape[:2] == shape
        return value[:, :count] if by_token else value

    return {key: part(value) for key, value in batch.items()}


def real_tokens(batch: dict[str, Any]) -> np.ndarray:
    """Returns bool (B, T), true for tokens and false for padding."""
    mask: Tensor = batch.get("mask", ones_like(batch["tokens"]).bool())
    return mask.cpu().numpy()


def as_float64(values: Tensor) -> np.ndarray:
    """Returns a tensor as a float64 array of the same shape."""
    return values.detach().cpu().double().numpy()
