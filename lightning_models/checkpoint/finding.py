"""Finds checkpoints, by path or as the last or best one of a run, and the runs in a folder."""

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
"""Value of ``--ckpt_path`` for the last checkpoint, or a new run if there is none yet."""
RESULTS = "results"
"""Name of the subfolder of a run with the scores of its checkpoints."""
RUNS = Path("runs")
"""Default folder of training runs."""
LOGS = ("events.out.tfevents.*", "metrics.csv")
"""Names of the files that a run logs to."""
WITHIN = "within."
"""Prefix of the TensorBoard tags of analyses, which sorts them after ``train/`` and ``val/``."""

_Source = TypeVar("_Source")


# ---- paths


def parse_path(text: str | Path, key: str = "ckpt") -> Path:
    """Returns the path of a checkpoint or a folder of them, as given on the command line.

    Args:
        text: The path, in which ``~`` is the home folder.
        key: Name of the option, for messages.

    Raises:
        CheckpointError: If the path is empty, as from a shell variable that is not set. ``Path``
            would take it for the working folder, and the newest checkpoint below that would be
            read.
    """
    if not str(text).strip():
        raise CheckpointError(
            f"{key} ({str(text)!r}) is empty; name a checkpoint or the folder of a run (is a "
            "shell variable not set?)"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~ of an unknown user
        return Path(text)


def suggest_path(path: Path) -> str:
    """Returns "; did you mean X?" for a missing path, or "" if nothing resembles it.

    Folders and checkpoints next to the path and in ``RUNS`` are compared.
    """
    matches = _near(path) or _near(RUNS / path)
    return f"; did you mean {' or '.join(map(str, matches[:3]))}?" if matches else ""


def _suggest_import(path: Path) -> str:
    """Suggests an import if a missing path may be a hub name, such as gpt2 or owner/name."""
    named_file = path.suffix in (".ckpt", ".yaml", ".yml")
    if named_file or len(path.parts) > 2 or path.is_absolute():
        return ""
    if path.parent != Path() and path.parent.exists():
        return ""
    return (
        f"; to load the model of transformers with that name, import it: python evaluate.py import "
        f"--hf {path} --output {path.name}.ckpt"
    )


def _near(path: Path) -> list[Path]:
    """Returns an existing path itself, or else paths with similarly spelt parts."""
    if path.exists() or path == path.parent:
        return [path] if path.exists() else []
    matches = []
    for folder in [path.parent] if path.parent.is_dir() else _near(path.parent):
        with contextlib.suppress(OSError):
            paths = [p for p in sorted(folder.iterdir()) if p.suffix == ".ckpt" or p.is_dir()]
            names = [p.name for p in paths if not p.name.startswith(".")]
            matches += [folder / name for name in difflib.get_close_matches(path.name, names, n=2)]
    return matches


# ---- checkpoints


def read_checkpoint(
    path: str | Path, which: Which = "last", *, verifies: bool = True
) -> Checkpoint:
    """Reads and verifies the checkpoint at ``path``; only tensors and plain values are unpickled.

    Args:
        path: A file, a model folder, or a folder of runs, of which the newest is used.
        which: The checkpoint of a run to read: the last undamaged one or the best.
        verifies: Whether shards are compared with their digests. In distributed runs rank 0 does
            so, and every rank verifies a share when it loads.

    Raises:
        CheckpointError: If the file is missing, damaged, would run code, or is of another program;
            the run has kept no best checkpoint; or ``best`` is given with a file.
    """
    if which not in get_args(Which):
        raise CheckpointError(f"which ({which}) must be one of {', '.join(get_args(Which))}")
    path = parse_path(path)
    if (path / "config.json").is_file() and not is_model_folder(path):
        raise CheckpointError(
            f"{path} is a model of transformers; make a checkpoint of it with evaluate.py import "
            f"--hf {path} --output FILE.ckpt"
        )
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise CheckpointError(
            f"{path} is a config, which has no weights; train it (python train.py fit -c {path}), "
            "then name the folder of the run"
        )
    if path.is_dir() and not is_model_folder(path):
        checkpoint = _of_run([path], which, "which=best", verifies)
        runs = started_runs([path])  # warns of the starts that were skipped
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
    """Returns the checkpoint named by ``--ckpt_path``, or None if ``auto`` begins a new run.

    Args:
        ckpt_path: A path, or ``last`` for the last undamaged checkpoint of the newest run below
            ``folders``, ``best`` for the best one of that run, or ``auto`` for ``last`` if there is
            a checkpoint file.
        folders: Folders to search, with all their subfolders.
        verb: Verb of the command line; only ``fit`` can begin a run.
        verifies: See :func:`read_checkpoint`.

    Raises:
        CheckpointError: If there is no checkpoint, or it cannot be read.
    """
    if ckpt_path == AUTO and verb == "fit":
        if not any(path for folder in folders for path in checkpoint_files(folder)):
            return None
        ckpt_path = "last"
    if ckpt_path not in ("last", "best", AUTO):
        return read_checkpoint(parse_path(ckpt_path, "ckpt_path"), verifies=verifies)
    which: Which = "best" if ckpt_path == "best" else "last"
    return _of_run(folders, which, "ckpt_path=best", verifies)


def newest_checkpoint(folders: Sequence[Path], *, verifies: bool = True) -> Checkpoint:
    """Returns the last undamaged checkpoint of the newest run under ``folders``.

    The newest run is the one with the newest undamaged file. Files in the same folder belong to it
    if they have its id, or none in older checkpoints. The one with the highest step is used,
    because copying a run may change the order of times, but not of steps. Damaged files are skipped
    with a warning.

    Args:
        folders: Folders to search, with all their subfolders.
        verifies: See :func:`read_checkpoint`.

    Raises:
        CheckpointError: If there is no such checkpoint.
    """

    def read_again(opened: Checkpoint) -> Checkpoint:
        # a live run may have replaced or removed the file since it was opened
        return read_checkpoint(opened.path, verifies=verifies)

    paths = {path.resolve(): path for folder in folders for path in checkpoint_files(folder)}
    times = {path: _time(path) for path in paths.values()}
    files = sorted(times, key=times.__getitem__, reverse=True)
    damaged: list[CheckpointError] = []
    while files:
        newest = next(_whole(files, open_checkpoint, damaged), None)
        if newest is None:
            break
        files = files[files.index(newest.path) + 1 :]  # those before it are damaged
        others = [path for path in files if path.parent == newest.path.parent]
        siblings = _whole(others, open_checkpoint, damaged)
        run = [newest, *(sibling for sibling in siblings if sibling.run_id == newest.run_id)]
        run.sort(key=lambda checkpoint: (checkpoint.step, times[checkpoint.path]), reverse=True)
        # only the chosen one is read from end to end: a folder may hold hundreds
        whole = next(_whole(run, read_again, damaged), None)
        if whole is not None:
            return whole
        tried = [checkpoint.path for checkpoint in run]
        files = [path for path in files if path not in tried]
    searched = ", ".join(str(folder) for folder in folders)
    missing = next((folder for folder in folders if not folder.exists()), None)
    hint = "" if missing is None else suggest_path(missing)
    reason = f" ({damaged[0]})" if damaged else ""
    raise CheckpointError(
        f"there is no complete checkpoint under {searched}{reason}; give the folder of a run "
        "that has saved one, or the path of a checkpoint, or train one first "
        f"(python train.py fit -c CONFIG){hint}"
    )


def _of_run(folders: Sequence[Path], which: Which, option: str, verifies: bool) -> Checkpoint:
    """Returns the last checkpoint of the newest run, or the best one by its record."""
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
            "copy the best one as well, or give a path"
        )
    return chosen


def _best_path(checkpoint: Checkpoint) -> Path | None:
    """Returns the path recorded as the best in a checkpoint, preferably in the same folder."""
    states = checkpoint.content.get("callbacks")
    for state in states.values() if isinstance(states, Mapping) else ():
        best = state.get("best_model_path") if isinstance(state, Mapping) else None
        if best and isinstance(best, str):
            moved = checkpoint.path.parent / Path(best).name  # after the run was moved
            return moved if moved.is_file() else Path(best)
    return None


def checkpoint_files(folder: Path) -> Iterable[Path]:
    """Returns the checkpoint files under a folder, sorted by path."""
    return (path for path in sorted(folder.expanduser().rglob("*.ckpt")) if path.is_file())


def _whole(
    sources: Iterable[_Source],
    read: Callable[[_Source], Checkpoint],
    damaged: list[CheckpointError],
) -> Iterator[Checkpoint]:
    """Yields readable checkpoints; warns of the others, and appends their errors to ``damaged``."""
    for source in sources:
        try:
            yield read(source)
        except CheckpointError as error:
            damaged.append(error)
            warnings.warn(f"skipping a damaged checkpoint: {error}", stacklevel=2)


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # removed by a live run
        return 0


# ---- runs


def has_log(folder: Path) -> bool:
    """Whether a folder holds the log files of a run."""
    return any(path for name in LOGS for path in folder.glob(name))


def started_runs(paths: Iterable[Path]) -> list[Path]:
    """Returns the runs at or under each path, or the path itself if there are none.

    A run is a folder with logs or, if it logs elsewhere, with checkpoints and a config. A failed
    start leaves a folder without a checkpoint, which is skipped with a warning if there are other
    runs.
    """
    runs = list(dict.fromkeys(run for path in paths for run in _runs_below(path) or [path]))
    runs = [path for path in runs if path.name != RESULTS or _has_checkpoint(path)] or runs
    failed = [path for path in runs if path.is_dir() and not _has_checkpoint(path)]
    if not failed or len(failed) == len(runs):
        return runs
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    warnings.warn(
        f"skipping {', '.join(map(str, failed[:3]))}{more}: no checkpoint is in there, as after a "
        "start that failed; delete it if it is of no use",
        stacklevel=3,
    )
    return [path for path in runs if path not in failed]


def _runs_below(path: Path) -> list[Path]:
    path = path.resolve()
    if has_log(path):
        return [path]
    logged = {file.parent for name in LOGS for file in path.rglob(name)}
    saved = {file.parent.parent for file in path.rglob("checkpoints/*.ckpt")}
    runs = sorted(logged | {folder for folder in saved if (folder / "config.yaml").is_file()})
    # checkpoints outside the folders of the logs: the whole path is one run
    separate = not any(map(_has_checkpoint, runs)) and _has_checkpoint(path)
    return [] if separate else runs


def _has_checkpoint(folder: Path) -> bool:
    return is_model_folder(folder) or any(checkpoint_files(folder))
