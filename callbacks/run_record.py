"""The record of a run: its configuration, commit and versions, next to its logs.

The run's id is in the record, in checkpoints and in the loggers.
"""

import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from callbacks.hooks import gather
from callbacks.logging import log_text
from lightning_models.atomic_files import write_whole
from lightning_models.checkpoint import Checkpoint, CheckpointError
from lightning_models.recipe import yaml_values

PACKAGE = "latent-thinking"
_RUN = "# run: "  # prefix of the first line of a record


class SaveRunRecord(SaveConfigCallback):
    """Writes ``config.yaml`` to the log folder when training starts.

    The file reproduces the run (``train.py fit -c config.yaml``); comments at its top have the
    command, the git commit and the versions. An existing file is never overwritten: a resumed run
    writes ``config_<step>.yaml`` next to it.

    The id of the run, which ``last`` keeps, is in these files and in each checkpoint, together with
    the log folder, so that a resumed run finds its logs even if both were moved.

    Args:
        parser: The parser that dumps the configuration.
        config: The parsed configuration of the subcommand.
        step: Number of optimiser steps in the resumed checkpoint.
        run_id: Id of the continued run, or null for a new run.
        run_name: Name of the run in reports, or null.
        recipes: See :func:`as_yaml`.
        kwargs: See Lightning's SaveConfigCallback.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        step: int = 0,
        run_id: str | None = None,
        run_name: str | None = None,
        recipes: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        super().__init__(parser, config, **kwargs)
        self.step = step
        self.recipes = recipes
        self.run_id = run_id
        self.run_name = run_name
        self._log_folder: str | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.already_saved or stage != "fit":
            return
        self.already_saved = True
        self._check_resumed(str(trainer.ckpt_path) if trainer.ckpt_path else None)
        self.run_id = trainer.strategy.broadcast(self.run_id or uuid.uuid4().hex)
        log_dir = trainer.log_dir  # broadcast by Lightning, so the same on all ranks
        if log_dir is not None and trainer.loggers:
            self._log_folder = _portable(Path(log_dir), Path(trainer.default_root_dir))
        if not trainer.is_global_zero or log_dir is None:
            return
        text = f"{_RUN}{self.run_id}\n" + _header()
        text += as_yaml(self.parser, self.config, self.recipes)
        path = free_path(Path(log_dir), self.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        for logger in trainer.loggers:
            block = "\n".join("    " + line for line in text.splitlines())
            log_text(logger, "config", block, self.step)
            if getattr(logger, "takes_config", False):
                logger.log_hyperparams(self.config.as_dict())

    def _check_resumed(self, path: str | None) -> None:
        """Checks that all ranks resume the same run; they then follow rank 0.

        Ranks that restore and ranks that do not would deadlock. Only rank 0 verifies the parts of a
        checkpoint, so it may have fallen back to an older one of the run.
        """
        values = Namespace({key: self.config.get(key) for key in ("model", "data")}).as_dict()
        settings = json.dumps(yaml_values(values), sort_keys=True)
        records = gather((path, self.run_id, settings))
        paths = [record[0] for record in records]
        follow = None not in paths and self.run_id is not None
        if len(set(paths)) == 1 or (follow and len({record[1:] for record in records}) == 1):
            return
        raise CheckpointError(
            f"ckpt_path: the first process resumes from {paths[0]}, another one from "
            f"{next(record for record in paths if record != paths[0])}; give the path itself, in a "
            "folder that all nodes see",
            agreed=True,
        )

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        run = {"id": self.run_id, "name": self.run_name, "log_folder": self._log_folder}
        checkpoint["run"] = run


def as_yaml(parser: LightningArgumentParser, config: Namespace, recipes: Mapping[str, Any]) -> str:
    """Returns the configuration of a verb as YAML.

    Args:
        parser: Parser of the verb.
        config: The parsed values.
        recipes: Values from a checkpoint by key, which bypass the parser.
    """
    parsed = Namespace({key: value for key, value in vars(config).items() if key not in recipes})
    text: str = parser.dump(parsed, skip_unset=False, skip_validation=True, format="yaml")
    text += yaml.safe_dump(yaml_values(recipes), sort_keys=False) if recipes else ""
    return yaml.safe_dump(_escaped(yaml.safe_load(text)), sort_keys=False) if "${" in text else text


def _escaped(value: Any) -> Any:
    """Escapes ``${...}`` in values, which OmegaConf would resolve when it reads the file."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


# ---- lookup of a run


def log_folder_of(saved: Checkpoint, root: Path) -> Path | None:
    """Returns the log folder of the run that wrote a checkpoint, or None if it is not found.

    The folder named in the checkpoint (relative to ``root`` unless absolute) comes first, then the
    folder of the default layout, ``<log folder>/checkpoints``. Its record must have the same id.
    Checkpoints without an id, of older versions, are assumed to have the default layout.

    Args:
        saved: The checkpoint.
        root: Value of trainer.default_root_dir.
    """
    folder = saved.path.resolve().parent
    default = [folder.parent] if folder.name == "checkpoints" else []
    if saved.run_id is None:
        return next(iter(default), None)
    recorded = [] if saved.log_folder is None else [(root / saved.log_folder).resolve()]
    return next((path for path in recorded + default if any(_records(path, saved.run_id))), None)


def loggers_of(saved: Checkpoint, root: Path) -> Any:
    """Returns the option ``loggers`` of the latest record of a run, or None if unknown.

    Args:
        saved: A checkpoint of the run.
        root: Value of trainer.default_root_dir.
    """
    folder = None if saved.run_id is None else log_folder_of(saved, root)
    if folder is None or saved.run_id is None:
        return None
    latest = max(_records(folder, saved.run_id), key=lambda path: path.stat().st_mtime_ns)
    return read_settings(latest).get("loggers")


def read_settings(record: Path) -> dict[str, Any]:
    """Returns the configuration in a record, empty if it cannot be read."""
    try:
        content = yaml.safe_load(record.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _records(folder: Path, run_id: str) -> Iterator[Path]:
    """Yields the records in ``folder`` of the run with this id."""
    for path in folder.glob("config*.yaml"):
        with path.open(encoding="utf-8", errors="replace") as file:
            if file.readline().rstrip("\n") == _RUN + run_id:
                yield path


def _portable(folder: Path, root: Path) -> str:
    """Returns ``folder`` relative to ``root`` if inside it, else absolute."""
    folder, root = folder.resolve(), root.resolve()
    return (folder.relative_to(root) if folder.is_relative_to(root) else folder).as_posix()


def free_path(folder: Path, step: int) -> Path:
    """Returns the first free path of config.yaml, config_<step>.yaml, config_<step>_2.yaml, ..."""
    path = folder / "config.yaml"
    attempt = 1
    while path.exists():
        path = folder / (f"config_{step}.yaml" if attempt == 1 else f"config_{step}_{attempt}.yaml")
        attempt += 1
    return path


def versions() -> dict[str, str]:
    """Returns the versions of the code and its main dependencies, by name."""
    try:
        package = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        package = "not installed"
    return {
        PACKAGE: package,
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
    }


def git_commit() -> str:
    """Returns the commit of the code, or ``unknown``.

    It ends with ``-dirty`` if tracked files outside docs differ; a study writes its results to docs
    between two of its runs.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None or commit.returncode != 0:
        return "unknown"
    changed = _git("diff", "--quiet", "HEAD", "--", ":/", ":(exclude,top)docs")
    dirty = changed is None or changed.returncode != 0
    return commit.stdout.strip() + ("-dirty" if dirty else "")


def _git(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Runs a git command in this folder; returns None if git is missing or too slow."""
    argv = ["git", "-C", str(Path(__file__).parent), *command]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _header() -> str:
    lines = [f"command: {shlex.join(sys.argv)}"]
    lines += [f"{name}: {version}" for name, version in versions().items()]
    return "".join(f"# {line}\n" for line in lines)
