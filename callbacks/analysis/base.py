"""What analyses that run after validations have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from callbacks.analysis.files import as_pixels, write_files
from callbacks.checkpointing import check_folder
from callbacks.hooks import EvaluationHooks, gather, undisturbed


class Analysis(EvaluationHooks, ABC):
    """Looks at the first batches of every n-th validation of a training, and of standalone ones.

    And of tests where ``of_tests`` says so. Each analysis says what it has found before the first
    batch (``_begin``), what it looks at in a batch (``_look_at``) and how it reports (``_report``).
    How many validations have passed is in checkpoints.
    """

    of_tests = False
    tag: ClassVar[str]
    """Name of the files' folder; pictures are below it in TensorBoard."""

    def __init__(
        self, every_n_validations: int, num_batches: int, output: str | None = None
    ) -> None:
        """Chooses how often, how much, and where to.

        Args:
            every_n_validations: of the validations within training; 0: never there.
            num_batches: of a validation.
            output: folder of the files; null: the one of that name in the run's log folder.

        Raises:
            ValueError: if a number is too low.
        """
        check_least("num_batches", num_batches, 1)
        check_least("every_n_validations", every_n_validations, 0)
        self.every_n_validations = every_n_validations
        self.num_batches = num_batches
        self.output = output
        self._validations = 0
        self._loaded_step = 0
        self._folder = Path()
        self._findings: Any = None
        self._unable = False

    # ---- what an analysis says

    @abstractmethod
    def _begin(self) -> Any:
        """Returns findings in which there is nothing yet; others can be merged into them."""

    @abstractmethod
    def _look_at(
        self, trainer: L.Trainer, pl_module: Any, batch: dict[str, Any], findings: Any
    ) -> None:
        """Adds what is found in a batch; called on all ranks, with the model in eval mode."""

    @abstractmethod
    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Any) -> None:
        """Reports the findings of all ranks; called on rank 0."""

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Returns how many validations have passed."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Counts on from the checkpoint."""
        self._validations = state_dict["validations"]

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Notes the step that is evaluated; the trainer knows it in training only."""
        self._loaded_step = 0 if trainer.state.fn == "fit" else checkpoint["global_step"]

    # ---- hooks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Finds the folder, the same on all ranks.

        Raises:
            ValueError: if ``output`` cannot be written to.
        """
        self._unable, self._loaded_step = False, 0
        folder = trainer.log_dir  # this broadcasts it
        if not isinstance(folder, str | Path):  # no logger, or the stand-in of fast_dev_run
            folder = trainer.default_root_dir
        self._folder = Path(folder) / self.tag
        if self.output is not None:
            self._folder = Path(self.output).expanduser()
            check_folder(f"{self.tag}.output", self._folder)

    def evaluation_starts(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begins an analysis if this validation's turn has come."""
        due = self._is_turn(trainer, self.every_n_validations)
        self._findings = self._begin() if due else None

    def evaluation_batch_ends(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Analyses the first batches."""
        if self._findings is None or self._unable:
            return
        if batch_idx < self.num_batches and dataloader_idx == 0:
            with undisturbed(pl_module):
                self._look_at(trainer, pl_module, batch, self._findings)

    def evaluation_ends(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Reports what all ranks have found, on rank 0."""
        if trainer.state.fn == "fit":
            self._validations += 1
        own, self._findings = self._findings, None
        if own is None:
            return
        findings = self._merged(own)
        if trainer.is_global_zero:
            self._report(trainer, pl_module, findings)

    def _merged(self, own: Any) -> Any:
        """Returns what all ranks have found, each its own."""
        findings = self._begin()
        for each in gather(own):
            findings.merge(each)
        return findings

    # ---- when

    def _is_turn(self, trainer: L.Trainer, every: int) -> bool:
        """Returns whether the validation in work is every n-th one of a training, or standalone."""
        if trainer.state.fn != "fit":
            return True
        return bool(every) and (self._validations + 1) % every == 0

    def _step(self, trainer: L.Trainer) -> int:
        """Returns the optimiser step of the weights that are looked at."""
        return self._loaded_step or trainer.global_step

    def _log_step(self, trainer: L.Trainer) -> int:
        """Returns the step of the scalars logged with this validation, counted from 0."""
        return max(0, self._step(trainer) - 1)

    # ---- where to

    def _prefix(self, trainer: L.Trainer) -> str:
        """Returns how the names of this validation's, or test's, files begin."""
        stage = "test" if trainer.state.fn == "test" else "val"
        return f"{stage}-step={self._step(trainer)}-"

    def _write(self, prefix: str, texts: Mapping[str, str], drawn: Mapping[str, Any]) -> None:
        """Writes files and pictures; a full disk must not end the training."""
        try:
            write_files(self._folder, prefix, texts, drawn)
        except OSError as error:
            self._warn(f"{self._folder} cannot be written to: {error}")

    def _log(
        self, trainer: L.Trainer, values: Mapping[str, float], drawn: Mapping[str, Any]
    ) -> None:
        """Hands scalars to all loggers, and pictures to those that take any (TensorBoard)."""
        step = self._log_step(trainer)
        for logger in trainer.loggers:
            if values:
                logger.log_metrics(dict(values), step)
            writer: Any = getattr(logger, "experiment", None)
            if hasattr(writer, "add_image"):
                for name, figure in drawn.items():
                    pixels = as_pixels(figure)
                    writer.add_image(f"{self.tag}/{name}", pixels, step, dataformats="HWC")

    def _give_up(self, reason: str) -> None:
        """Leaves this and later batches out, and says so."""
        self._unable = True
        self._warn(reason)

    def _warn(self, message: str) -> None:
        rank_zero_warn(f"{self._name}: {message}")

    @property
    def _name(self) -> str:
        """How messages begin."""
        return self.tag.replace("_", " ")


class SweepingAnalysis(Analysis):
    """An analysis that also scores its batches under other settings, which is expensive.

    It does so (``_sweeps``) at every n-th validation of a training, and at standalone ones.
    """

    def __init__(
        self,
        every_n_validations: int,
        num_batches: int,
        output: str | None,
        sweep_every_n_validations: int,
    ) -> None:
        """Chooses how often, how much, and where to.

        Args:
            every_n_validations: see ``Analysis``.
            num_batches: see ``Analysis``.
            output: see ``Analysis``.
            sweep_every_n_validations: of the validations within training that are analysed; 0:
                never there.

        Raises:
            ValueError: if a number is too low.
        """
        super().__init__(every_n_validations, num_batches, output)
        check_least("sweep_every_n_validations", sweep_every_n_validations, 0)
        self.sweep_every_n_validations = sweep_every_n_validations
        self._fixed = self._sweeps = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Finds the folder.

        Raises:
            ValueError: if ``output`` cannot be written to.
        """
        super().setup(trainer, pl_module, stage)
        self._fixed = False

    def evaluation_starts(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begins an analysis if this validation's turn has come."""
        super().evaluation_starts(trainer, pl_module)
        self._sweeps = self._is_turn(trainer, self.sweep_every_n_validations)

    def _give_up_sweeps(self, reason: str) -> None:
        """Leaves sweeps out from now on (``_fixed``), and says so."""
        self._fixed = True
        rank_zero_info(f"{self._name}: {reason}")


def check_least(name: str, value: float | None, least: int) -> None:
    """Raises ValueError if the argument of that name, where there is one, is below ``least``."""
    if value is not None and value < least:
        raise ValueError(f"{name} ({value}) must be at least {least}")
