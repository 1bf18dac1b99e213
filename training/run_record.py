"""The record of a run beside its logs: the whole configuration, the code and the versions."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from training.errors import PROJECT

PACKAGE = "latent-thinking"


class RunRecord(SaveConfigCallback):
    """Writes ``config.yaml`` to the log folder when training starts.

    The file reproduces the run (``train.py fit -c config.yaml``); comments on top name the command,
    the git commit and the versions. A file that exists is never overwritten and never in the way: a
    resumed run writes ``config_<step>.yaml`` beside it.
    """

    def __init__(
        self, parser: LightningArgumentParser, config: Namespace, step: int = 0, **kwargs: Any
    ) -> None:
        """Takes the configuration.

        Args:
            parser: what dumps it.
            config: the parsed configuration of the subcommand.
            step: optimiser steps of the checkpoint that is resumed.
            kwargs: see Lightning's SaveConfigCallback.
        """
        super().__init__(parser, config, **kwargs)
        self.step = step

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Writes the record, once, on rank 0, when training."""
        if self.already_saved or stage != "fit":
            return
        self.already_saved = True
        log_dir = trainer.log_dir  # the same on all ranks: this broadcasts it
        if not trainer.is_global_zero or log_dir is None:
            return
        text = _header() + self.parser.dump(self.config, skip_unset=False, format="yaml")
        path = free_path(Path(log_dir), self.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                block = "\n".join("    " + line for line in text.splitlines())
                logger.experiment.add_text("config", block, self.step)


def free_path(folder: Path, step: int) -> Path:
    """Returns ``config.yaml``, or else ``config_<step>.yaml``, ``config_<step>_2.yaml``, ..."""
    path = folder / "config.yaml"
    count = 1
    while path.exists():
        path = folder / (f"config_{step}.yaml" if count == 1 else f"config_{step}_{count}.yaml")
        count += 1
    return path


def versions() -> dict[str, str]:
    """Returns the versions that results depend on, by name."""
    try:
        own = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {
        PACKAGE: own,
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
    }


def git_commit() -> str:
    """Returns the commit of the code, with ``-dirty`` behind it if files differ; or ``unknown``."""
    command = [
        "git",
        "-C",
        str(PROJECT),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _header() -> str:
    lines = [f"command: {shlex.join(sys.argv)}"]
    lines += [f"{name}: {version}" for name, version in versions().items()]
    return "".join(f"# {line}\n" for line in lines)
