"""Checkpoints: finding, reading without running code, writing and rebuilding models.

A checkpoint is a file of ``torch.save``, such a file with its tensors in parts
(:mod:`lightning_models.shards`), or a model folder: weights as safetensors, the rest as JSON.
"""

import contextlib
import difflib
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch

from lightning_models import shards
from lightning_models.memory import host_memory, weights_size
from lightning_models.recipe import (
    MisfitError,
    complete,
    complete_arguments,
    plain,
    public_path,
    resolve_class,
)

Recipe = dict[str, Any]
"""``{"class_path": "lightning_models.TransformerLM", "init_args": {...plain values...}}``."""


Which = Literal["last", "best"]
"""Of the checkpoints of a run: the furthest, or the best by its own account."""

_LAYOUT: dict[str, type] = {
    "global_step": int,
    "callbacks": Mapping,
    "loops": Mapping,
    "optimizer_states": list,
    "lr_schedulers": list,
}


RESULTS = "results"
"""Folder with the scores of checkpoints, in that of their run."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or rebuilt; the message names the file and the cure."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was written by this project.

    Raises:
        CheckpointError: if the content has no recipe.
    """

    path: Path
    """Where it was read from."""
    content: Mapping[str, Any]
    """Everything Lightning saved; tensors are mapped from the file, not read."""
    which: Which | None = None
    """Which one of its run it was chosen as; None: its file was named."""
    status: tuple[int, ...] | None = None
    """Status of the file when it was read, see ``file_status``."""

    def __post_init__(self) -> None:
        """Checks that the content says how to rebuild the model."""
        recipe = self.content.get("recipe")
        if not isinstance(recipe, Mapping) or not _is_recipe(recipe.get("model")):
            keys = ", ".join(sorted(map(str, self.content))) or "none"
            raise CheckpointError(
                f"{self.path} has no recipe, so it does not say which model it holds. Expected is "
                "a checkpoint of train.py or evaluate.py import, with the keys state_dict and "
                f"recipe (found: {keys})"
            )
        if not isinstance(self.content.get("state_dict"), Mapping):
            raise CheckpointError(f"{self.path} has no weights (key state_dict)")
        if recipe.get("data") is not None and not _is_recipe(recipe["data"]):
            raise CheckpointError(
                f"{self.path}: recipe.data is broken; expected class_path and init_args"
            )
        for key, kind in _LAYOUT.items():
            value = self.content.get(key)
            if value is not None and not isinstance(value, kind):
                raise CheckpointError(
                    f"{self.path}: {key} ({str(value)[:40]!r}) is broken; expected a "
                    f"{kind.__name__}, as train.py writes it. Take another checkpoint"
                )

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return int(self.content.get("global_step", 0))

    @property
    def run_id(self) -> str | None:
        """What all checkpoints of one run, resumed or not, have in common; None in older ones."""
        return self._of_run("id")

    @property
    def run_name(self) -> str | None:
        """What the run was called on the command line; None if nothing."""
        return self._of_run("name")

    @property
    def log_folder(self) -> Path | None:
        """Where the run logs, relative to its root folder if below that; None if not known."""
        folder = self._of_run("log_folder")
        return None if folder is None else Path(folder)

    def _of_run(self, key: str) -> str | None:
        run = self.content.get("run")
        value = run.get(key) if isinstance(run, Mapping) else None
        return value if isinstance(value, str) else None

    @property
    def model_recipe(self) -> Recipe:
        """Class path and init arguments of the model, checked (see ``lightning_models.recipe``).

        Raises:
            CheckpointError: if they name what they must not, or are of another version.
        """
        self.complete("model")
        return dict(self.content["recipe"]["model"])

    @property
    def data_recipe(self) -> Recipe | None:
        """Class path and init arguments of the data; None if trained without a datamodule.

        Raises:
            CheckpointError: see ``model_recipe``.
        """
        return None if self.complete("data") is None else dict(self.content["recipe"]["data"])

    def complete(self, role: Literal["model", "data"]) -> Recipe | None:
        """Returns the recipe of model or data, if there is one, with all defaults.

        Raises:
            CheckpointError: see ``model_recipe``.
        """
        recipe = self.content["recipe"].get(role)
        try:
            return None if recipe is None else complete(recipe, role)
        except ValueError as error:
            raise _refused(self.path, error) from error

    @property
    def data_state(self) -> Mapping[str, Any]:
        """What the datamodule saved (fingerprint, tokenizer); empty if nothing."""
        recipe = self.content["recipe"].get("data")
        name = "" if recipe is None else recipe["class_path"].rpartition(".")[2]
        state = self.content.get(name)
        if not isinstance(state, Mapping):
            return {}
        for part in (state, state.get("corpus")):
            tokenizer = part.get("tokenizer") if isinstance(part, Mapping) else None
            if tokenizer is not None and not isinstance(tokenizer, Mapping):
                raise CheckpointError(
                    f"{self.path}: the tokenizer of {name} is broken; take another checkpoint"
                )
        return state


def place_of(word: str | Path, key: str = "ckpt") -> Path:
    """Returns the path that a command line names as a checkpoint, or where some are.

    Args:
        word: the path; ``~`` is the home folder.
        key: the option that has it, for messages.

    Raises:
        CheckpointError: if it is empty, as a shell variable that is not set: ``Path`` takes that
            for the working folder, and the newest checkpoint below it would be read.
    """
    if not str(word).strip():
        raise CheckpointError(
            f"{key} ({str(word)!r}) is empty; name a checkpoint or the folder of a run (is a "
            "shell variable not set?)"
        )
    try:
        return Path(word).expanduser()
    except RuntimeError:  # ~ of a user that there is not
        return Path(word)


RUNS = Path("runs")
"""Where training writes runs by default."""


def suggest_path(path: Path) -> str:
    """Returns the question after a missing path, naming paths that resemble it.

    Folders and checkpoints are compared, next to the path and among ``RUNS``.
    """
    near = _near(path) or _near(RUNS / path)
    return f"; did you mean {' or '.join(map(str, near[:3]))}?" if near else ""


def _near(path: Path) -> list[Path]:
    """Returns a path that exists, else those whose parts are spelt like its parts."""
    if path.exists() or path == path.parent:
        return [path] if path.exists() else []
    found = []
    for folder in [path.parent] if path.parent.is_dir() else _near(path.parent):
        with contextlib.suppress(OSError):
            places = [p for p in sorted(folder.iterdir()) if p.suffix == ".ckpt" or p.is_dir()]
            names = [place.name for place in places if not place.name.startswith(".")]
            found += [folder / name for name in difflib.get_close_matches(path.name, names, n=2)]
    return found


def read_checkpoint(
    path: str | Path, which: Which = "last", *, verifies: bool = True
) -> Checkpoint:
    """Returns the checkpoint at ``path``; only tensors and plain values are ever unpickled.

    Args:
        path: a file, a model folder, or the folder of a run: then the newest run below it.
        which: of a folder's run the furthest whole checkpoint, or the best one.
        verifies: Whether parts that processes have written are read against their digests. Ranks
            above 0 of a run leave that to the first rank, and verify a share when they load.

    Raises:
        CheckpointError: if the file is missing, damaged, wants to run code, or is not ours; if the
            run has kept no best checkpoint, or the best is asked for of a file.
    """
    if which not in get_args(Which):
        raise CheckpointError(f"which ({which}) must be one of {', '.join(get_args(Which))}")
    path = place_of(path)
    if (path / "config.json").is_file() and not is_model_folder(path):
        raise CheckpointError(
            f"{path} is a model of transformers; make a checkpoint of it with evaluate.py import "
            f"--hf {path} --output FILE.ckpt"
        )
    if path.is_dir() and not is_model_folder(path):
        last = newest_checkpoint([path], verifies=verifies)
        started_runs([path])  # names the starts that it has passed over
        found = last if which == "last" else best_checkpoint(last, "which=best", verifies=verifies)
        return replace(found, which=which)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}{suggest_path(path)}")
    if which == "best":
        raise CheckpointError(
            f"which=best chooses among the checkpoints of a run, and {path} is one "
            f"{'model' if path.is_dir() else 'file'}; give the folder of the run, or leave --which "
            "out"
        )
    checkpoint = _open(path)
    _check_sums(path)
    return _with_shards(checkpoint, verifies)


def _with_shards(checkpoint: Checkpoint, verifies: bool) -> Checkpoint:
    """Returns the checkpoint with all weights, read on demand, also where processes have parts.

    Args:
        checkpoint: As its file has it.
        verifies: Whether the parts are read against their digests.

    Raises:
        CheckpointError: if parts are missing or damaged.
    """
    path, content = checkpoint.path, checkpoint.content
    if shards.KEY not in content:
        return checkpoint
    try:
        parts = shards.Shards(path, content)
        parts.check()
        if verifies:
            parts.verify()
    except shards.BrokenShardsError as error:
        raise CheckpointError(f"{path}: {error}") from error
    weights = shards.TensorsInShards(parts, "state_dict", content["state_dict"])
    return replace(checkpoint, content={**content, "state_dict": weights})


def read_whole(path: str | Path) -> dict[str, Any]:
    """Returns everything in the checkpoint at ``path``, with what processes hold parts of.

    Args:
        path: a file or a model folder.

    Raises:
        CheckpointError: see :func:`read_checkpoint`.
    """
    checkpoint = _open(place_of(path))
    try:
        return shards.whole(checkpoint.path, dict(checkpoint.content))
    except shards.BrokenShardsError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _open(path: Path) -> Checkpoint:
    """Returns the checkpoint, its tensors unread."""
    status, content = file_status(path), read_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    return Checkpoint(path, content, status=status)


def file_status(path: Path) -> tuple[int, ...] | None:
    """Returns inode, size and time of a file, which a replacement changes; None for folders."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_sums(path: Path) -> None:
    """Reads the whole file against its checksums: a hole within tensors shows nowhere else.

    Raises:
        CheckpointError: if they differ.
    """
    if path.is_dir():
        _check_weights(path)
        return
    if not zipfile.is_zipfile(path):  # the older format has none
        return
    with zipfile.ZipFile(path) as file:
        try:
            record = file.testzip()
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise _damaged(path) from error
    if record is not None:
        raise CheckpointError(
            f"{path} is damaged: the checksum of {record} is wrong; copy it again"
        )


def newest_checkpoint(folders: Sequence[Path], *, verifies: bool = True) -> Checkpoint:
    """Returns the furthest whole checkpoint of the newest run below ``folders``.

    The newest run is the one that has written the newest whole file. Its own are the files next to
    that with its id (in older checkpoints: without one), and the one with the highest step is
    taken: copying a run may change the order of its files' times, but not their steps. Damaged
    files are named in a warning and skipped.

    Args:
        folders: Searched with all their subfolders.
        verifies: See :func:`read_checkpoint`.

    Raises:
        CheckpointError: if there is none.
    """
    found = {path.resolve(): path for folder in folders for path in checkpoint_files(folder)}
    files = sorted(found.values(), key=_time, reverse=True)
    damaged: list[CheckpointError] = []
    while files:
        newest = next(iter(_whole(files, _open, damaged)), None)
        if newest is None:
            break
        files = files[files.index(newest.path) + 1 :]  # those before it are damaged
        others = [path for path in files if path.parent == newest.path.parent]
        run = [newest, *(c for c in _whole(others, _open, damaged) if c.run_id == newest.run_id)]
        run.sort(key=lambda checkpoint: (checkpoint.step, _time(checkpoint.path)), reverse=True)
        # the whole content of the one that is taken only: a folder may hold hundreds
        read = partial(read_checkpoint, verifies=verifies)
        paths = [checkpoint.path for checkpoint in run]
        best = next(iter(_whole(paths, read, damaged)), None)
        if best is not None:
            return best
        files = [path for path in files if path not in paths]
    places = ", ".join(str(folder) for folder in folders)
    missing = next((folder for folder in folders if not folder.exists()), None)
    hint = "" if missing is None else suggest_path(missing)
    reason = f" ({damaged[0]})" if damaged else ""
    raise CheckpointError(
        f"there is no whole checkpoint below {places}{reason}; give the folder of the run or the "
        f"path of a checkpoint, or leave it out to start again{hint}"
    )


LOGS = ("events.out.tfevents.*", "metrics.csv")
"""Names of the files that a run logs to."""


def has_log(folder: Path) -> bool:
    """Whether a folder holds what a run has logged."""
    return any(path for name in LOGS for path in folder.glob(name))


def started_runs(paths: Iterable[Path]) -> list[Path]:
    """Returns the runs at or below each path; a path without any stands for itself.

    A run is a folder with logs, or with checkpoints and a config, as one that logs elsewhere. A
    start that failed leaves a folder without a checkpoint: where there are other runs, it is named
    in a warning and left out.
    """
    found = list(dict.fromkeys(run for path in paths for run in _runs_below(path) or [path]))
    found = [path for path in found if path.name != RESULTS or _has_checkpoint(path)] or found
    failed = [path for path in found if path.is_dir() and not _has_checkpoint(path)]
    if not failed or len(failed) == len(found):
        return found
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    warnings.warn(
        f"skipping {', '.join(map(str, failed[:3]))}{more}: no checkpoint is in there, as after a "
        "start that failed; delete it if it is of no use",
        stacklevel=3,
    )
    return [path for path in found if path not in failed]


def _runs_below(path: Path) -> list[Path]:
    path = path.resolve()
    if has_log(path):
        return [path]
    logged = {file.parent for name in LOGS for file in path.rglob(name)}
    saved = {file.parent.parent for file in path.rglob("checkpoints/*.ckpt")}
    runs = sorted(logged | {folder for folder in saved if (folder / "config.yaml").is_file()})
    apart = not any(map(_has_checkpoint, runs)) and _has_checkpoint(path)
    return [] if apart else runs  # apart: checkpoints lie outside the folders of the logs


def _has_checkpoint(folder: Path) -> bool:
    return is_model_folder(folder) or any(checkpoint_files(folder))


def best_checkpoint(last: Checkpoint, asked: str, *, verifies: bool = True) -> Checkpoint:
    """Returns the best checkpoint of a run by the account of its furthest one.

    Args:
        last: the furthest.
        asked: what asks for it, for messages.
        verifies: See :func:`read_checkpoint`.

    Raises:
        CheckpointError: if the run has kept none, or it cannot be read.
    """
    best = _best_path(last)
    if best is None or not best.is_file():
        raise CheckpointError(
            f"{asked}: the run of {last.path} has kept no best checkpoint; it needs a validation "
            "and checkpoint.save_top_k of at least 1. Give a path, or `last`"
        )
    chosen = read_checkpoint(best, verifies=verifies)
    if chosen.run_id != last.run_id:
        raise CheckpointError(
            f"{asked}: {best}, which {last.path} names as its best checkpoint, is of another run; "
            "copy the best one, too, or give a path"
        )
    return chosen


def _best_path(checkpoint: Checkpoint) -> Path | None:
    """Returns the best checkpoint by the account of another one; a moved run keeps it."""
    states = checkpoint.content.get("callbacks")
    for state in states.values() if isinstance(states, Mapping) else ():
        best = state.get("best_model_path") if isinstance(state, Mapping) else None
        if best and isinstance(best, str):
            moved = checkpoint.path.parent / Path(best).name
            return moved if moved.is_file() else Path(best)
    return None


def checkpoint_files(folder: Path) -> Iterable[Path]:
    """Returns the checkpoint files below a folder, in the order of their names."""
    return (path for path in sorted(folder.expanduser().rglob("*.ckpt")) if path.is_file())


def _whole(
    files: Iterable[Path], read: Callable[[Path], Checkpoint], damaged: list[CheckpointError]
) -> Iterable[Checkpoint]:
    """Yields the checkpoints that can be read; warns of the others, and notes their errors."""
    for path in files:
        try:
            yield read(path)
        except CheckpointError as error:
            damaged.append(error)
            warnings.warn(f"skipping a damaged checkpoint: {error}", stacklevel=2)


def _time(path: Path) -> int:
    return path.stat().st_mtime_ns


def read_file(path: Path) -> Any:
    """Reads a checkpoint file or a model folder; nothing in it can run code.

    Tensors of a file are mapped, not read, and its checksums are not compared.

    Raises:
        CheckpointError: If it is missing, damaged, or holds more than tensors and plain values.
    """
    if path.is_dir():
        return _load_folder(path)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}{suggest_path(path)}")
    # Mapping leaves the optimiser's state on disk; the older format cannot be mapped.
    mapped = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles of other programs; refused below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        needed = re.search(r"GLOBAL (\S+)|Unsupported class (\S+)", str(error))
        if needed is None:
            raise _damaged(path) from error
        raise CheckpointError(
            f"{path} is refused: besides tensors and plain values it contains "
            f"{needed[1] or needed[2]}, which could run any code while loading. Load it only in "
            "the program that wrote it, and save plain values from there"
        ) from error
    except Exception as error:  # whatever the bytes of another file make of the unpickler
        raise _damaged(path) from error


def _refused(path: Path, error: ValueError) -> CheckpointError:
    hint = "; was it written by another version?" if isinstance(error, MisfitError) else ""
    return CheckpointError(f"{path} is refused: {error}{hint}")


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is truncated or not a checkpoint; copy it again"
    )


def _is_recipe(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("class_path"), str)
        and isinstance(value.get("init_args"), Mapping)
        and all(isinstance(key, str) for key in value["init_args"])
    )


# ---- model folders: nothing in them is unpickled, nothing of training is kept

RECIPE, WEIGHTS = "recipe.json", "model.safetensors"
_SUM = "sha256"
"""Of the weights' file, next to what a checkpoint holds."""
_OF_TRAINING: dict[str, Any] = {
    "callbacks": {},
    "optimizer_states": [],
    "lr_schedulers": [],
}
"""What Lightning expects in a checkpoint, where there is nothing of it."""
_LEFT_OUT = (
    *_OF_TRAINING,
    "loops",
    "state_dict",
    "hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
    "resume_state",
    "pending_validation",
    shards.KEY,
)


def is_model_folder(path: Path) -> bool:
    """Whether ``write_model_folder`` has written the folder at ``path``."""
    return (path / RECIPE).is_file()


def write_model_folder(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes weights, recipes and what else of a checkpoint is plain, but nothing of training.

    Args:
        folder: an empty one.
        content: of the checkpoint, its weights whole.

    Raises:
        CheckpointError: if its recipe or its data's state has values that JSON has not.
    """
    from safetensors.torch import save_file

    checkpoint = Checkpoint(folder, content)
    kept = {key: value for key, value in content.items() if key not in _LEFT_OUT}
    strange = [key for key, value in kept.items() if not _is_json(value)]
    if "recipe" in strange or any(kept[key] is checkpoint.data_state for key in strange):
        raise CheckpointError(f"{', '.join(strange)}: not plain enough for {RECIPE}")
    weights = {key: tensor.contiguous() for key, tensor in content["state_dict"].items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    plain_values = {key: value for key, value in kept.items() if key not in strange}
    plain_values[_SUM] = shards.digest(folder / WEIGHTS)
    text = json.dumps(plain_values, indent=2, allow_nan=False)
    (folder / RECIPE).write_text(f"{text}\n", encoding="utf-8")


def _load_folder(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        content = json.loads((path / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / RECIPE} cannot be read ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path / RECIPE} holds a {type(content).__name__}, not an object")
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}; copy that file, too")
    try:
        weights = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _damaged(path / WEIGHTS) from error
    recipe = content.get("recipe")
    model = recipe.get("model") if isinstance(recipe, dict) else None
    arguments = model.get("init_args") if isinstance(model, dict) else None
    kept = {key: value for key, value in content.items() if key not in _LEFT_OUT}
    return {**_OF_TRAINING, **kept, "hyper_parameters": arguments, "state_dict": weights}


def _check_weights(path: Path) -> None:
    """Raises a CheckpointError if the weights are not those that the recipe was written with."""
    expected = json.loads((path / RECIPE).read_text(encoding="utf-8")).get(_SUM)
    if expected is not None and expected != shards.digest(path / WEIGHTS):
        raise CheckpointError(
            f"{path / WEIGHTS} is damaged, or not the file that {RECIPE} was written with (another "
            f"{_SUM}); copy both again"
        )


def _is_json(value: Any) -> bool:
    """Whether JSON holds a value as it is, but for tuples, which become lists."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


# ---- models in checkpoints


class RestoresItself:
    """Mixed into ``LanguageModel``: checkpoints hold enough to rebuild model and data."""

    config: Any
    optimizer_config: Any
    compile_network: bool
    _trainer: Any

    def recipe(self) -> dict[str, Any]:
        """Returns the public class path and plain init arguments that rebuild this model."""
        arguments = {
            "config": plain(self.config),
            "optimizer": plain(self.optimizer_config),
            "compile": self.compile_network,
        }
        return {"class_path": public_path(type(self)), "init_args": arguments}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds plain init arguments and the recipes of model and data, enough to rebuild both."""
        model = self.recipe()
        checkpoint["hyper_parameters"] = model["init_args"]
        recipe = getattr(getattr(self._trainer, "datamodule", None), "recipe", None)
        # a data module of another project has none
        checkpoint["recipe"] = {"model": model, "data": None if recipe is None else recipe()}

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns the model of a checkpoint file, rebuilt from its recipe.

        Args:
            checkpoint_path: the file.
            map_location: device of the model; None: the CPU.
            hparams_file: not read: a recipe is complete.
            strict: whether weights must be those of the model, none missing and none more.
            weights_only: None and true: only tensors and plain values are unpickled; false: as
                Lightning loads it, running any code that the file brings along.
            **kwargs: init arguments that replace the saved ones.

        Raises:
            CheckpointError: if the file is missing, damaged, or wants to run code.
        """
        if weights_only is False:
            load: Any = super().load_from_checkpoint  # type: ignore[misc]  # Lightning's
            loaded: Self = load(
                checkpoint_path, map_location, strict=strict, weights_only=False, **kwargs
            )
            return loaded
        checkpoint = read_checkpoint(checkpoint_path)
        arguments = checkpoint.content["recipe"]["model"]["init_args"]
        try:
            complete_arguments(arguments, cls, "model.init_args")
        except ValueError as error:
            raise _refused(checkpoint.path, error) from error
        build: Any = cls
        model = build(**{**arguments, **kwargs})
        weights_size(model, host_memory())
        model.configure_model()
        model.on_load_checkpoint(checkpoint.content)
        model.load_state_dict(checkpoint.content["state_dict"], strict=strict is not False)
        restored: Self = model.to("cpu" if map_location is None else map_location)
        return restored

    @staticmethod
    def from_checkpoint(path: str | Path) -> "RestoresItself":
        """Returns a checkpoint's model, whatever its method: on the CPU, in eval mode, uncompiled.

        The global random state stays as it is.

        Raises:
            CheckpointError: if the file is missing, damaged, or of an unknown method.
        """
        checkpoint = read_checkpoint(path)
        kind = resolve_class(checkpoint.model_recipe["class_path"], RestoresItself)
        with torch.random.fork_rng(devices=[]):
            model: Any = kind.load_from_checkpoint(
                checkpoint.path, map_location="cpu", compile=False
            )
        restored: RestoresItself = model.eval()
        return restored
