"""Finds checkpoints: by path, the furthest or the best of a run; and the runs below a folder."""

import contextlib
import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, get_args

from lightning_models.checkpoint.content import Checkpoint, CheckpointError, Which
from lightning_models.checkpoint.formats import is_model_folder, open_checkpoint, verified

AUTO = "auto"
"""Value of ``--ckpt_path`` for the last checkpoint, and a new run where there is none yet."""
RESULTS = "results"
"""Name of the folder with the scores of a run's checkpoints, in the folder of the run."""
RUNS = Path("runs")
"""Where training writes runs by default."""
LOGS = ("events.out.tfevents.*", "metrics.csv")
"""Names of the files that a run logs to."""
WITHIN = "within."
"""Begins the tags of analyses in TensorBoard, which sorts them behind ``train/`` and ``val/``."""

_Source = TypeVar("_Source")


# ---- paths


def place_of(word: str | Path, key: str = "ckpt") -> Path:
    """Returns the path that a command line names as a checkpoint, or where some are.

    Args:
        word: The path; ``~`` is the home folder.
        key: The option that has it, for messages.

    Raises:
        CheckpointError: If it is empty, as a shell variable that is not set: ``Path`` takes that
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


def suggest_path(path: Path) -> str:
    """Returns the question after a missing path, naming paths that resemble it.

    Folders and checkpoints are compared, next to the path and among ``RUNS``.
    """
    near = _near(path) or _near(RUNS / path)
    return f"; did you mean {' or '.join(map(str, near[:3]))}?" if near else ""


def _suggest_import(path: Path) -> str:
    """Returns what to do where a path may be the hub name of a model, as gpt2 or owner/name."""
    if path.suffix == ".ckpt" or len(path.parts) > 2 or path.is_absolute():
        return ""
    if path.parent != Path() and path.parent.exists():
        return ""
    return (
        f"; to load the model of transformers with that name, import it: python evaluate.py import "
        f"--hf {path} --output {path.name}.ckpt"
    )


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


# ---- checkpoints


def read_checkpoint(
    path: str | Path, which: Which = "last", *, verifies: bool = True
) -> Checkpoint:
    """Returns the checkpoint at ``path``, verified; only tensors and plain values are unpickled.

    Args:
        path: A file, a model folder, or a folder of runs, of which the newest is taken.
        which: Whether the furthest whole checkpoint of that run is taken, or the best one.
        verifies: Whether parts that processes have written are read against their digests. Ranks
            above 0 of a run leave that to the first rank, and verify a share when they load.

    Raises:
        CheckpointError: If the file is missing, damaged, wants to run code, or is not ours; if the
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
    if path.suffix in (".yaml", ".yml") and not path.is_dir():
        raise CheckpointError(
            f"{path} is a config, which has no weights; train it (python train.py fit -c {path}), "
            "then name the folder of the run"
        )
    if path.is_dir() and not is_model_folder(path):
        checkpoint = _of_run([path], which, "which=best", verifies)
        runs = started_runs([path])  # names the starts that it has passed over
        if len(runs) > 1:
            warnings.warn(
                f"{path} has {len(runs)} runs, and the newest is taken: {checkpoint.path}; name "
                "the folder of one run to choose",
                stacklevel=2,
            )
        return replace(checkpoint, which=which)
    if not path.exists():
        hint = suggest_path(path) or _suggest_import(path)
        raise CheckpointError(f"there is no checkpoint at {path}{hint}")
    if which == "best":
        raise CheckpointError(
            f"which=best chooses among the checkpoints of a run, and {path} is one "
            f"{'model' if path.is_dir() else 'file'}; give the folder of the run, or leave --which "
            "out"
        )
    return verified(open_checkpoint(path), parts=verifies)


def find_checkpoint(
    ckpt_path: str, folders: Sequence[Path], verb: str = "fit", *, verifies: bool = True
) -> Checkpoint | None:
    """Returns the checkpoint that ``--ckpt_path`` names, or None if ``auto`` begins a new run.

    Args:
        ckpt_path: A path, or ``last`` for the furthest whole checkpoint of the newest run below
            ``folders``, ``best`` for the best one of that run, or ``auto`` for ``last`` if there is
            a checkpoint file.
        folders: Folders to search, with all their subfolders.
        verb: Verb of the command line; only ``fit`` can begin a run.
        verifies: See :func:`read_checkpoint`.

    Raises:
        CheckpointError: If there is none, or it cannot be read.
    """
    if ckpt_path == AUTO and verb == "fit":
        if not any(path for folder in folders for path in checkpoint_files(folder)):
            return None
        ckpt_path = "last"
    if ckpt_path not in ("last", "best", AUTO):
        return read_checkpoint(place_of(ckpt_path, "ckpt_path"), verifies=verifies)
    which: Which = "best" if ckpt_path == "best" else "last"
    return _of_run(folders, which, "ckpt_path=best", verifies)


def newest_checkpoint(folders: Sequence[Path], *, verifies: bool = True) -> Checkpoint:
    """Returns the furthest whole checkpoint of the newest run below ``folders``.

    The newest run is the one that has written the newest whole file. Its own are the files next to
    that with its id, or without one in older checkpoints, and the one with the highest step is
    taken: copying a run may change the order of its files' times, but not their steps. Damaged
    files are named in a warning and skipped.

    Args:
        folders: Searched with all their subfolders.
        verifies: See :func:`read_checkpoint`.

    Raises:
        CheckpointError: If there is none.
    """

    def read_again(opened: Checkpoint) -> Checkpoint:
        # a run that goes on may have replaced or removed the file since it was opened
        return read_checkpoint(opened.path, verifies=verifies)

    found = {path.resolve(): path for folder in folders for path in checkpoint_files(folder)}
    times = {path: _time(path) for path in found.values()}
    files = sorted(times, key=times.__getitem__, reverse=True)
    damaged: list[CheckpointError] = []
    while files:
        newest = next(_whole(files, open_checkpoint, damaged), None)
        if newest is None:
            break
        files = files[files.index(newest.path) + 1 :]  # those before it are damaged
        others = [path for path in files if path.parent == newest.path.parent]
        beside = _whole(others, open_checkpoint, damaged)
        run = [newest, *(each for each in beside if each.run_id == newest.run_id)]
        run.sort(key=lambda checkpoint: (checkpoint.step, times[checkpoint.path]), reverse=True)
        # only the one that is taken is read from end to end: a folder may hold hundreds
        whole = next(_whole(run, read_again, damaged), None)
        if whole is not None:
            return whole
        paths = [checkpoint.path for checkpoint in run]
        files = [path for path in files if path not in paths]
    places = ", ".join(str(folder) for folder in folders)
    missing = next((folder for folder in folders if not folder.exists()), None)
    hint = "" if missing is None else suggest_path(missing)
    reason = f" ({damaged[0]})" if damaged else ""
    raise CheckpointError(
        f"there is no whole checkpoint below {places}{reason}; give the folder of a run that has "
        "saved one, or the path of a checkpoint, or train one first (python train.py fit -c "
        f"CONFIG){hint}"
    )


def _of_run(folders: Sequence[Path], which: Which, option: str, verifies: bool) -> Checkpoint:
    """Returns the furthest checkpoint of the newest run, or the best one by its account."""
    last = newest_checkpoint(folders, verifies=verifies)
    if which == "last":
        return last
    best = _best_path(last)
    if best is None or not best.is_file():
        raise CheckpointError(
            f"{option}: the run of {last.path} has kept no best checkpoint; it needs a validation "
            "and checkpoint.save_top_k of at least 1. Give a path, or `last`"
        )
    chosen = read_checkpoint(best, verifies=verifies)
    if chosen.run_id != last.run_id:
        raise CheckpointError(
            f"{option}: {best}, which {last.path} names as its best checkpoint, is of another run; "
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
    sources: Iterable[_Source],
    read: Callable[[_Source], Checkpoint],
    damaged: list[CheckpointError],
) -> Iterator[Checkpoint]:
    """Yields the checkpoints that can be read; warns of the others, and notes their errors."""
    for source in sources:
        try:
            yield read(source)
        except CheckpointError as error:
            damaged.append(error)
            warnings.warn(f"skipping a damaged checkpoint: {error}", stacklevel=2)


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # removed by a run that goes on
        return 0


# ---- runs


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
