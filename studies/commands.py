"""The command lines of a study: what ``train.py`` and ``evaluate.py`` are asked."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.study import Analysis, CheckpointOf, Evaluation, Run, Study

ROOT = Path(__file__).resolve().parents[1]
LAST = "*/version_*/checkpoints/last.ckpt"
"""The checkpoint to go on from and to evaluate, below the folder of a training."""


def training_settings(study: Study, run: Run) -> dict[str, Any]:
    """Returns the config of a run, as nested plain values."""
    return {
        "seed_everything": run.seed,
        "model": _model(study, run),
        "data": _data(study, run),
        "trainer": {
            **study.trainer,
            "num_sanity_val_steps": 0,
            **_length(study, run),
            **_watch(run),
        },
        "checkpoint": {"save_top_k": 0, **_saving(study, run)},
        "samples": {"every_n_validations": 0},  # their time would count as training
    }


def _model(study: Study, run: Run) -> dict[str, Any]:
    if not run.paced:
        return dict(run.model)
    arguments, passes = run.model["init_args"], study.passes_of(run)
    paced = {key: value(passes) for key, value in run.paced.items()}
    return {
        **run.model,
        "init_args": {**arguments, "config": {**arguments["config"], **paced}},
    }


def _data(study: Study, run: Run) -> dict[str, Any]:
    text = study.source
    corpus = {**text, "init_args": {**text["init_args"], **study.data}}
    if run.data is None:
        return corpus
    return {**run.data, "init_args": {**run.data["init_args"], "corpus": corpus}}


def _watch(run: Run) -> dict[str, Any]:
    return {"callbacks": [dict(callback) for callback in run.callbacks]} if run.callbacks else {}


def _interval(study: Study, run: Run) -> int:
    """Returns the steps between two points of the curves."""
    return max(1, study.steps_of(run) // study.validations)


def _length(study: Study, run: Run) -> dict[str, Any]:
    if study.epochs is not None:
        return {
            "max_epochs": study.epochs,
            "val_check_interval": 1 / math.ceil(study.validations / study.epochs),
            "log_every_n_steps": 10,
        }
    return {
        "max_steps": study.steps_of(run),
        "val_check_interval": _interval(study, run),
        "check_val_every_n_epoch": None,
        "log_every_n_steps": min(10, _interval(study, run)),
    }


def _saving(study: Study, run: Run) -> dict[str, Any]:
    """As often as the curves have points: what a stopped study loses is a small part of a run."""
    if study.epochs is not None:
        return {"train_time_interval": "0:00:30"}
    return {"every_n_train_steps": _interval(study, run)}


def analysis_settings(
    analysis: Analysis, folder: Path, checkpoint_of: Callable[[str], Path | None]
) -> dict[str, Any]:
    """Returns the config of ``train.py validate`` with the callback, which writes below folder.

    Args:
        analysis: the callback and its options.
        folder: where it writes.
        checkpoint_of: the trained checkpoint of another run of the study, if there is one.
    """
    options = dict(analysis.options)
    for key, value in options.items():
        if isinstance(value, CheckpointOf):
            path = checkpoint_of(value.run)
            options[key] = None if path is None else str(path)
    callback = {"class_path": analysis.callback, "init_args": options}
    return {"trainer": {"default_root_dir": str(folder), "callbacks": [callback]}}


def train_command(config: Path, folder: Path, *, resume: bool) -> list[str]:
    """Returns the command that trains below ``folder``, or goes on with what is there."""
    command = [sys.executable, str(ROOT / "train.py"), "fit", "-c", str(config)]
    command += ["--trainer.default_root_dir", str(folder)]
    return command + (["--ckpt_path", "last"] if resume else [])


def evaluate_command(evaluation: Evaluation, checkpoint: Path, output: Path) -> list[str]:
    """Returns the command that measures a checkpoint and writes the JSON file ``output``."""
    options = {"ckpt": checkpoint, "output": output, **evaluation.options}
    return evaluate_words(evaluation.command, (), options)


def evaluate_words(command: str, words: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Returns a command line of ``evaluate.py``.

    Args:
        command: one of its commands.
        words: what stands in front of the options.
        options: without dashes.
    """
    typed = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    return [sys.executable, str(ROOT / "evaluate.py"), command, *words, *typed]


def analyse_command(config: Path, checkpoint: Path) -> list[str]:
    """Returns the command that runs an analysis on a checkpoint."""
    command = [sys.executable, str(ROOT / "train.py"), "validate", "-c", str(config)]
    return [*command, "--ckpt_path", str(checkpoint)]
