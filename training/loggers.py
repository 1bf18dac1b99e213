"""Loggers: TensorBoard, CSV, Weights & Biases and MLflow, of a run that may be killed and resumed.

Checkpoints, records and files of analyses lie in the run's folder, wherever its values are logged.
"""

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment

from lightning_models.checkpoint import Checkpoint
from training.errors import UserError

PROJECT_NAME = "latent-thinking"
"""Project of W&B and experiment of MLflow, unless their environment variables name another."""


@dataclass(frozen=True)
class RunPlace:
    """Where a run is logged, and as what.

    Attributes:
        root: trainer.default_root_dir.
        parent: name of the folder in ``root`` that holds the run's; empty: ``root`` does.
        version: name of the run's folder; None: the next ``version_N``.
        run_id: the run's id.
        purge_step: first step that is logged again; None: a new run.
    """

    root: Path
    parent: str
    version: str | None
    run_id: str
    purge_step: int | None = None

    @property
    def group(self) -> Path:
        """The folder that holds the run's."""
        return self.root / self.parent


class _Once:
    """A logger that takes the same values of the same step in a row once.

    A checkpoint has the values of its step written before itself; the trainer then hands over the
    same ones again.
    """

    _latest = ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs values, unless they are those of the last call."""
        values = sorted((key, _number(value)) for key, value in metrics.items())
        written = f"{step} {values}"
        if written != self._latest:
            self._latest = written
            super().log_metrics(metrics, step)  # type: ignore[misc]


def _number(value: Any) -> float | int:
    """Returns a scalar as a number; of an image, which object it is."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return id(value)


class EventLog(_Once, TensorBoardLogger):
    """TensorBoard."""


class MetricsFile(_Once, CSVLogger):
    """``metrics.csv`` in the run's folder; a resumed run goes on in it."""

    def __init__(self, save_dir: Path, name: str, version: str, purge_step: int | None) -> None:
        """Takes the folder in three parts, and the first step that is logged again."""
        super().__init__(save_dir, name=name, version=version)
        self.purge_step = purge_step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the file."""
        if self._experiment is None:
            self._experiment = _Rows(self.log_dir, self.purge_step)
        return self._experiment


class _Rows(ExperimentWriter):
    """Rows of a CSV file. Lightning's own deletes the file of a run that is resumed."""

    def __init__(self, log_dir: str, purge_step: int | None) -> None:
        self._purge_step = purge_step
        super().__init__(log_dir)

    def _check_log_dir_exists(self) -> None:
        """Keeps the rows of earlier steps, and drops one that a killed process has left torn."""
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            keys = list(reader.fieldnames or ())
            whole = [row for row in reader if (row.get("step") or "").isdigit()]
        end = float("inf") if self._purge_step is None else self._purge_step
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=keys)
            writer.writeheader()
            writer.writerows(row for row in whole if int(row["step"]) < end)
        temporary.replace(path)
        self.metrics_keys = keys


class _InRunFolder(_Once):
    """A logger whose values lie elsewhere: checkpoints and records still go to the run's folder."""

    folder: Path

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.folder)

    @property
    def name(self) -> str:
        """Nothing, as no folder lies between the run's and its checkpoints."""
        return ""

    @property
    def version(self) -> str:
        """Nothing, as for ``name``."""
        return ""


class WandbRun(_InRunFolder, WandbLogger):
    """Weights & Biases; a resumed run goes on there, too. ``WANDB_MODE=offline`` sends nothing.

    ``WANDB_PROJECT`` and the other environment variables of W&B are followed.
    """

    def __init__(self, folder: Path, name: str, run_id: str) -> None:
        """Takes the run's folder, name and id."""
        self.folder = folder
        project = os.environ.get("WANDB_PROJECT", PROJECT_NAME)
        super().__init__(name=name, save_dir=folder, id=run_id, project=project)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of W&B, whose files lie in the run's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)  # else they go to a temporary one
        return super().experiment


class MLFlowRun(_InRunFolder, MLFlowLogger):
    """MLflow: ``mlflow.db`` in trainer.default_root_dir, or the server of ``MLFLOW_TRACKING_URI``.

    A resumed run goes on there, too: it is found by its id, the tag ``run``.
    """

    def __init__(self, root: Path, folder: Path, name: str, run_id: str) -> None:
        """Takes the folders of all runs and of this one, and its name and id."""
        self.folder = folder
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        root.mkdir(parents=True, exist_ok=True)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT_NAME)
        super().__init__(
            experiment_name=experiment,
            run_name=name,
            tracking_uri=uri or f"sqlite:///{root / 'mlflow.db'}",
            artifact_location=None if uri else (root / "mlartifacts").as_uri(),
            tags={"run": run_id},
        )
        known = self._mlflow_client.get_experiment_by_name(experiment)
        if known is not None:
            found = self._mlflow_client.search_runs([known.experiment_id], f"tags.run = '{run_id}'")
            self._run_id = found[0].info.run_id if found else None
        self._is_new = self._run_id is None

    def log_hyperparams(self, params: Any) -> None:
        """Logs the configuration of a new run; MLflow lets nobody change it afterwards."""
        if self._is_new:
            super().log_hyperparams(params)


# ---- the loggers of a run by name


def build_loggers(names: Sequence[str], place: RunPlace) -> list[Logger]:
    """Returns the loggers of a run, in the order of ``names``.

    Args:
        names: of ``tensorboard``, ``csv``, ``wandb`` and ``mlflow``, at least one.
        place: where the run is logged.

    Raises:
        UserError: if there is none of a name, or its package is not installed.
    """
    events = EventLog(
        save_dir=place.root,
        name=place.parent,
        version=place.version,
        default_hp_metric=False,
        purge_step=place.purge_step,
    )
    folder = Path(events.log_dir)
    shown = folder.relative_to(place.root).as_posix()
    known: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: events,
        "csv": lambda: MetricsFile(place.root, place.parent, folder.name, place.purge_step),
        "wandb": lambda: WandbRun(folder, shown, place.run_id),
        "mlflow": lambda: MLFlowRun(place.root, folder, shown, place.run_id),
    }
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise UserError(f"loggers ({', '.join(wrong)}) must be of {', '.join(known)}")
    loggers = []
    for name in dict.fromkeys(names):
        try:
            loggers.append(known[name]())
        except ModuleNotFoundError as error:
            raise UserError(
                f"loggers ({name}): a package is missing ({' '.join(str(error).split())}); "
                f"pip install -e '.[{name}]'"
            ) from error
    return loggers


def purge_step(saved: Checkpoint) -> int:
    """Returns the first step of the log that a run resumed from ``saved`` writes again.

    Steps count from 0 there: after n optimiser steps the latest is n - 1. Only a checkpoint from
    between two accumulated micro-batches follows a validation that was logged at n, unless that
    was still to be done.
    """
    unfinished = bool(saved.content.get("resume_state", {}).get("unfinished_step"))
    return saved.step + (unfinished and not saved.content.get("pending_validation", False))
