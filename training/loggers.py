"""Loggers for runs that may be killed and resumed: TensorBoard, CSV, Weights & Biases and MLflow.

Checkpoints, records and files of analyses are in the run's folder for any logger.
"""

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from lightning_models.atomic_files import write_whole
from lightning_models.checkpoint import Checkpoint
from training.errors import UserError

HPARAM_METRICS = ("val/loss", "val/bpb", "train/loss")
"""Logged values to show next to hyperparameters in TensorBoard."""
TRAINER_KEYS = (
    *("max_steps", "max_epochs", "precision", "strategy", "devices", "num_nodes"),
    *("accumulate_grad_batches", "gradient_clip_val"),
)
"""Options of the trainer to log as hyperparameters."""
PROJECT_NAME = "latent-thinking"
"""Project of W&B and experiment of MLflow, unless set by their environment variables."""


@dataclass(frozen=True)
class RunPlace:
    """Location of a run's logs.

    Attributes:
        root: Value of trainer.default_root_dir.
        parent: Name of the folder in ``root`` that holds the run's folder, empty for ``root``.
        version: Name of the run's folder, or None for the next ``version_N``.
        run_id: Id of the run.
        purge_step: First step that is logged again, or None for a new run.
    """

    root: Path
    parent: str
    version: str | None
    run_id: str
    purge_step: int | None = None

    @property
    def group(self) -> Path:
        """Parent of the run's folder."""
        return self.root / self.parent


class _Deduplicating:
    """A logger that skips rows equal to the previous one.

    The row of a step is written before its checkpoint, and the trainer then logs it again.
    """

    _latest = ""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        row = repr((step, sorted((key, _as_text(value)) for key, value in metrics.items())))
        if row != self._latest:
            self._latest = row
            super().log_metrics(metrics, step)  # type: ignore[misc]


def _as_text(value: Any) -> str:
    """Formats a value so that nan equals nan, and a tensor equals its number."""
    try:
        return repr(float(value))
    except (TypeError, ValueError):
        return repr(value)


class EventLog(_Deduplicating, TensorBoardLogger):
    """TensorBoard, with the run's configuration and metrics in the tab HPARAMS."""

    takes_config = True
    """See ``_InRunFolder``."""

    def log_hyperparams(
        self, params: Any, metrics: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        from torch.utils.tensorboard.summary import hparams  # takes a second

        if not isinstance(params, Mapping) or "model" not in params:
            return  # not the configuration but the trainer's values, which have no names
        values = hyperparameters(params)
        super().log_hyperparams(values)
        for summary in hparams(values, dict.fromkeys(HPARAM_METRICS, 0.0)):
            self.experiment._get_file_writer().add_summary(summary)


class MetricsFile(_Deduplicating, CSVLogger):
    """``metrics.csv`` in the run's folder, to which a resumed run appends."""

    def __init__(self, save_dir: Path, name: str, version: str, purge_step: int | None) -> None:
        super().__init__(save_dir, name=name, version=version)
        self.purge_step = purge_step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Writer of the file."""
        if self._experiment is None:
            _keep_rows(Path(self.log_dir, ExperimentWriter.NAME_METRICS_FILE), self.purge_step)
            self._experiment = _Rows(self.log_dir)
        return self._experiment


class _Rows(ExperimentWriter):
    """Appends to a CSV file, which Lightning's writer would delete."""

    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        if path.is_file():
            with path.open(newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])


def _keep_rows(path: Path, end: int | None) -> None:
    """Keeps the complete rows of steps before ``end``; a killed process may cut one off."""
    if not path.is_file():
        return
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        whole = [row for row in reader if (row.get("step") or "").isdigit()]
    kept = io.StringIO()
    writer = csv.DictWriter(kept, fieldnames=list(reader.fieldnames or ()))
    writer.writeheader()
    writer.writerows(row for row in whole if end is None or int(row["step"]) < end)
    write_whole(path, kept.getvalue())


class _InRunFolder(_Deduplicating):
    """A logger with external storage; checkpoints and records are still in the run's folder."""

    folder: Path
    takes_config = True
    """Whether ``SaveRunRecord`` logs the configuration."""

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @property
    def name(self) -> str:
        return ""  # no folder between the run's and its checkpoints

    version = name


class WandbRun(_InRunFolder, WandbLogger):
    """Weights & Biases, which also resumes the run. ``WANDB_MODE=offline`` sends nothing."""

    def __init__(self, folder: Path, name: str, run_id: str) -> None:
        self.folder = folder
        project = os.environ.get("WANDB_PROJECT", PROJECT_NAME)
        super().__init__(name=name, save_dir=folder, id=run_id, project=project)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Run of W&B."""
        self.folder.mkdir(parents=True, exist_ok=True)  # else its files go to a temporary folder
        return super().experiment


class MLFlowRun(_InRunFolder, MLFlowLogger):
    """MLflow: ``mlflow.db`` in trainer.default_root_dir, or the server of ``MLFLOW_TRACKING_URI``.

    A resumed run also continues there; its id is the tag ``run``.
    """

    def __init__(self, root: Path, folder: Path, name: str, run_id: str) -> None:
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
        stored = self._mlflow_client.get_experiment_by_name(experiment)
        query = f"tags.run = '{run_id}'"
        runs = self._mlflow_client.search_runs([stored.experiment_id], query) if stored else []
        self._run_id = runs[0].info.run_id if runs else None
        self._is_new = not runs

    def log_hyperparams(self, params: Any) -> None:
        if self._is_new:  # MLflow does not allow changes afterwards
            super().log_hyperparams(params)


# ---- hyperparameters


def hyperparameters(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Returns the hyperparameters in a configuration by dotted names.

    Args:
        config: The configuration of the verb fit.
    """
    trainer = {key: config.get("trainer", {}).get(key) for key in TRAINER_KEYS}
    sections = {key: config.get(key) for key in ("seed_everything", "model", "data")}
    return dict(_flat({**sections, "trainer": trainer}))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = name if key == "init_args" else f"{name}.{key}".lstrip(".")
            yield from _flat(item, inner.removesuffix(".class_path"))
    elif value is not None:
        yield name, value if isinstance(value, bool | int | float | str) else str(value)


# ---- the loggers of a run by name


def build_loggers(names: Sequence[str], location: RunPlace) -> list[Logger]:
    """Builds the loggers of a run, in the order of ``names``.

    Args:
        names: Some of ``tensorboard``, ``csv``, ``wandb`` and ``mlflow``.
        location: Location of the run's logs.

    Raises:
        UserError: If a name is unknown, or its package is not installed.
    """
    root, parent, purge = location.root, location.parent, location.purge_step
    events = EventLog(root, parent, location.version, default_hp_metric=False, purge_step=purge)
    folder = Path(events.log_dir)
    label = folder.relative_to(root).as_posix()
    makers: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: events,
        "csv": lambda: MetricsFile(root, parent, folder.name, purge),
        "wandb": lambda: WandbRun(folder, label, location.run_id),
        "mlflow": lambda: MLFlowRun(root, folder, label, location.run_id),
    }
    wrong = [name for name in names if name not in makers]
    if wrong or not names:
        raise UserError(f"loggers ({', '.join(wrong)}) must be among {', '.join(makers)}")
    loggers = []
    for name in dict.fromkeys(names):
        try:
            loggers.append(makers[name]())
        except ModuleNotFoundError as error:
            raise UserError(
                f"loggers ({name}): {error}; install it with pip install -e '.[{name}]'"
            ) from error
    return loggers


def purge_step(saved: Checkpoint) -> int:
    """Returns the first step of the log, from 0, that a run resumed from ``saved`` writes again.

    After n optimiser steps the latest logged step is n - 1. Only a checkpoint between two
    accumulated micro-batches follows a validation that was logged at n, unless it is pending.
    """
    unfinished = bool(saved.content.get("resume_state", {}).get("unfinished_step"))
    return saved.step + (unfinished and not saved.content.get("pending_validation", False))
