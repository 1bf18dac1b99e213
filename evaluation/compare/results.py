"""Result files of other commands that name a compared checkpoint: its scores, its tasks."""

import glob
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.readers import parse_json
from evaluation.compare.found import Run

ABOVE = 2
"""How many folders above its log folder results of a run may lie: below the root of the run."""


@dataclass(frozen=True)
class ResultFile:
    """What a command wrote about a checkpoint."""

    path: Path
    content: Mapping[str, Any]

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that it is about."""
        return Path(self.content["checkpoint"]).expanduser().resolve()


def named_results(words: Sequence[str], runs: Sequence[Run]) -> list[ResultFile]:
    """Returns the result files that the command line names.

    Args:
        words: files or patterns.
        runs: that are compared.

    Raises:
        ValueError: if a file is missing or no result, or is about none of the runs.
    """
    compared = {run.checkpoint.path.resolve() for run in runs}
    results = []
    for path in (path for word in words for path in _files(word)):
        result = _read(path)
        if isinstance(result, str):
            raise ValueError(f"results ({path}): {result}")
        if result.checkpoint not in compared:
            raise ValueError(
                f"results ({path}) is about {result.content['checkpoint']}, which is not compared; "
                "name that run, too, or leave the file out"
            )
        results.append(result)
    return results


def results_beside(run: Run) -> list[ResultFile]:
    """Returns the results in the folders of a run that are about its checkpoint and not older."""
    path = run.checkpoint.path.resolve()
    folders = [path.parent]
    if run.log is not None:
        log = run.log.resolve()
        folders += [log, *log.parents[:ABOVE]]
    found = (_read(file) for folder in dict.fromkeys(folders) for file in _jsons(folder))
    changed = path.stat().st_mtime
    return [
        result
        for result in found
        if isinstance(result, ResultFile)
        and result.checkpoint == path
        and result.path.stat().st_mtime >= changed
    ]


@dataclass(frozen=True)
class TaskResult:
    """What a model has reached on a task."""

    metrics: Mapping[str, float]
    """Standard errors left out; perplexities are named by the kind of their likelihood."""
    how: Mapping[str, Any]
    """How it was measured: what must be the same for two of them to be compared."""

    @property
    def examples(self) -> int:
        """How many were scored; 0 where the file does not say."""
        return int(self.how.get("examples") or 0)


HOW_TASK = ("examples", "of_examples", "num_fewshot", "version", "likelihood")
HOW_ASKED = ("mode", "budget", "precision", "counted")


def tasks_in(results: Iterable[ResultFile]) -> dict[str, TaskResult]:
    """Returns the result of each task; of several the one with the most examples.

    Of two with as many the later one. What was measured with other settings of the model than it
    was trained with (``--set``) is left out, and so are the tasks that a group consists of where
    the group has a mean.
    """
    found: dict[str, TaskResult] = {}
    for result in results:
        asked = result.content.get("settings", {})
        tasks = result.content.get("tasks")
        if not isinstance(tasks, Mapping) or asked.get("set"):
            continue
        inside = {member for task in tasks.values() for member in _members(task)}
        for name, task in tasks.items():
            one = _task_result(task, asked)
            if one.metrics and name not in inside:
                before = found.get(str(name))
                if before is None or one.examples >= before.examples:
                    found[str(name)] = one
    return found


def _members(task: Any) -> Sequence[str]:
    """Returns the tasks of a group that has numbers of its own."""
    if not isinstance(task, Mapping) or not task.get("metrics"):
        return ()
    members: Sequence[str] = task.get("tasks", ())
    return members


def _task_result(task: Any, asked: Mapping[str, Any]) -> TaskResult:
    content = task if isinstance(task, Mapping) else {}
    metrics = content.get("metrics", content)
    numbers = metrics.items() if isinstance(metrics, Mapping) else ()
    how = {key: content.get(key) for key in HOW_TASK} | {key: asked.get(key) for key in HOW_ASKED}
    return TaskResult(
        {key: value for key, value in numbers if _is_metric(key, value)},
        {key: value for key, value in how.items() if value is not None},
    )


def _is_metric(key: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and "stderr" not in key


def _files(word: str) -> list[Path]:
    path = Path(word).expanduser()
    found = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not found:
        raise ValueError(f"results ({word}): there is no such file")
    return sorted(found)


def _jsons(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.is_file())


def _read(path: Path) -> ResultFile | str:
    """Returns a result, or what is wrong with it."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError as error:
        return f"is not JSON: {error}"
    if not isinstance(content, dict) or not isinstance(content.get("checkpoint"), str):
        return "names no checkpoint; give results of evaluate.py tasks or perplexity --output"
    return ResultFile(path, content)
