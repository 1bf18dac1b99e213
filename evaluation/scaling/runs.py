"""Runs of a scaling fit, read from result files of ``evaluate.py``."""

import glob
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evaluation.output import read_json
from evaluation.runs.folders import split_name
from evaluation.scaling.fit import Law

Axis = Literal["tokens", "parameters"]

AXIS_KEYS: dict[str, str] = {"tokens": "train_tokens", "parameters": "parameters"}
"""Axis -> key of the result files that has the size."""
LOSS_KEY = "nats_per_token"
SAME_FOR_ALL = ("split", "tokens", "counted", "likelihood", "pairs", "names")
"""What results must agree in for their values to be comparable."""

_UNKNOWN = {
    "train_tokens": "score the checkpoint where its training text is prepared (data.cache_dir)",
    "parameters": "score the checkpoint anew",
    LOSS_KEY: "give results of evaluate.py perplexity --output",
}


@dataclass(frozen=True)
class Run:
    """One result: a model of some size and what was measured of it."""

    group: str
    """Runs of one group share a curve."""
    file: str
    x: float
    """Training tokens or parameters."""
    y: float
    """The value that is fitted; by default nats per token."""
    content: Mapping[str, Any]
    """The whole result."""


def read_runs(words: Sequence[str], axis: Axis, y: str = LOSS_KEY, law: Law = "power") -> list[Run]:
    """Returns the runs that the command line names, in its order.

    Args:
        words: ``[NAME=]FILE`` or ``[NAME=]PATTERN``, a pattern as in ``'runs/tg_*/test.json'``. The
            name is the group; without it that is the class of the model.
        axis: what the values are fitted over.
        y: key of the values.
        law: of the curve; values of a power law are positive.

    Raises:
        ValueError: if a file is missing or is no result, or a number in it is missing, or not
            positive and must be.
    """
    runs = []
    for word in words:
        name, pattern = split_name(word)
        runs += [_read_run(path, name, axis, y, law) for path in _files(pattern)]
    return runs


def _files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise ValueError(f"runs ({pattern}) is a folder; name its result files, as '{path}/*.json'")
    found = [path] if path.is_file() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not found:
        raise ValueError(
            f"runs ({pattern}): there is no such file; give results of evaluate.py perplexity "
            "--output"
        )
    return sorted(found)


def _read_run(path: Path, name: str | None, axis: Axis, y: str, law: Law) -> Run:
    content = _content(path)
    group = content.get("model") if name is None else name
    if not isinstance(group, str):
        raise ValueError(f"runs ({path}) does not say its model; name its group: NAME={path}")
    x = _number(content, AXIS_KEYS[axis], path, positive=True)
    return Run(group, str(path), x, _number(content, y, path, positive=law == "power"), content)


def _content(path: Path) -> dict[str, Any]:
    content = read_json(path, "runs")
    if not isinstance(content, dict):
        raise ValueError(f"runs ({path}) holds no result; {_UNKNOWN[LOSS_KEY]}")
    return content


def _number(content: Mapping[str, Any], key: str, path: Path, *, positive: bool) -> float:
    """Returns a number of a result.

    Raises:
        ValueError: if it is missing, null, not finite, or not positive and must be.
    """
    value = content.get(key)
    if value is None:
        cure = _UNKNOWN.get(key, "give results that have it, or another --y")
        raise ValueError(f"runs ({path}) does not know its {key}; {cure}")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (positive and value <= 0):
        wanted = "a number above 0, as its logarithm is fitted" if positive else "a finite number"
        cure = "leave this run out" if key in _UNKNOWN else "leave this run out, or set --law log"
        raise ValueError(f"runs ({path}): {key} ({value!r}) must be {wanted}; {cure}")
    return float(value)


def grouped(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Returns the runs of each group, smallest first; groups in order of appearance.

    Raises:
        ValueError: if a group has fewer than two different sizes.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    for name, members in groups.items():
        if len({run.x for run in members}) < 2:
            raise ValueError(
                f"runs: {name} has one size only ({members[0].x:,.0f}), and a curve needs at least "
                f"2; add results, or group them otherwise: NAME={members[0].file}"
            )
    return {name: sorted(members, key=lambda run: run.x) for name, members in groups.items()}


def doubts(groups: Mapping[str, Sequence[Run]], axis: Axis) -> list[str]:
    """Returns what the runs differ in that they should share, a clause each."""
    runs = [run for members in groups.values() for run in members]
    found = [_difference("the runs", key, runs) for key in SAME_FOR_ALL]
    fixed = AXIS_KEYS["parameters" if axis == "tokens" else "tokens"]
    found += [_difference(f"the runs of {name}", fixed, own) for name, own in groups.items()]
    return [clause for clause in found if clause is not None]


def _difference(whose: str, key: str, runs: Sequence[Run]) -> str | None:
    values = {str(value) for run in runs if (value := _fact(run, key)) is not None}
    return f"{whose} differ in {key}: {', '.join(sorted(values))}" if len(values) > 1 else None


def _fact(run: Run, key: str) -> Any:
    data = run.content.get("data")
    return data.get(key) if key == "split" and isinstance(data, dict) else run.content.get(key)
