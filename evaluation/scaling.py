"""``evaluate.py scaling``: curves through the results of runs of several sizes."""

import glob
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from evaluation.figures import label_sizes
from evaluation.output import check_target, format_columns, read_json, write_atomically, write_json
from evaluation.runs import split_name

# ---- fitted curves


Law = Literal["power", "log"]


@dataclass(frozen=True)
class FittedCurve:
    """A fitted line over log x: of log y (``power``), or of y itself (``log``)."""

    law: Law
    slope: float
    """How fast the line falls; alpha of a power law, else in the unit of y per factor e of x."""
    intercept: float
    """Of the line; alpha * log c of a power law."""
    r2: float
    """R^2 of the line; nan where all values are equal."""

    @property
    def constant(self) -> float:
        """The x at which a power law is 1, D_c or N_c, and a line over log x is 0.

        nan or infinite for a curve that is flat or nearly.
        """
        return _exp(self.intercept / self.slope) if self.slope else math.nan

    def value_at(self, x: float) -> float:
        """Returns y at a size."""
        line = self.intercept - self.slope * math.log(x)
        return _exp(line) if self.law == "power" else line

    def size_for(self, value: float) -> float:
        """Returns the x at which the curve has this value; nan where values do not fall with x."""
        if self.slope <= 0:
            return math.nan
        line = math.log(value) if self.law == "power" else value
        return _exp((self.intercept - line) / self.slope)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def fit_curve(x: Sequence[float], values: Sequence[float], law: Law = "power") -> FittedCurve:
    """Returns the least-squares line over log x.

    Args:
        x: sizes, positive, at least two different ones.
        values: one a size; positive for a power law.
        law: what is a line: the logarithms of the values, or the values.
    """
    log_x = [math.log(v) for v in x]
    line = [math.log(v) for v in values] if law == "power" else list(values)
    slope, intercept = statistics.linear_regression(log_x, line)
    mean = statistics.fmean(line)
    total = sum((y - mean) ** 2 for y in line)
    rest = sum((y - intercept - slope * v) ** 2 for v, y in zip(log_x, line, strict=True))
    return FittedCurve(law, -slope, intercept, 1 - rest / total if total else math.nan)


@dataclass(frozen=True)
class Multipliers:
    """How many times its own size a baseline would need for the value of a run (m_D or m_N)."""

    measured: float
    """By the baseline's curve at the run's own value: x_baseline(L(x)) / x."""
    fitted: float
    """By both curves: the run's value is taken from the curve of its group."""


def multipliers(baseline: FittedCurve, own: FittedCurve, x: float, value: float) -> Multipliers:
    """Returns the effective multipliers of a run of size ``x``.

    NOTE(paper): section 3.2 defines them with the achieved loss, but its ranges for parameters
    (1.33 to 1.42) and its example (30M for 21M) are those of two fitted curves; with achieved
    losses Table 2 gives 1.28 to 1.50. Both are reported.
    """
    return Multipliers(baseline.size_for(value) / x, baseline.size_for(own.value_at(x)) / x)


# ---- runs from result files


Axis = Literal["tokens", "parameters"]

AXIS_KEYS: dict[str, str] = {"tokens": "train_tokens", "parameters": "parameters"}
"""Axis -> key of the result files that has the size."""
LOSS_KEY = "nats_per_token"
SAME_FOR_ALL = ("split", "tokens", "counted", "likelihood", "pairs", "names")
"""What results must agree in for their values to be comparable."""

_UNKNOWN = {
    "train_tokens": "score the checkpoint where its training text is prepared (data.cache_dir)",
    "parameters": "score the checkpoint again",
    LOSS_KEY: "give results of evaluate.py perplexity --output",
}


@dataclass(frozen=True)
class ScalingRun:
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


def read_runs(
    words: Sequence[str], axis: Axis, y: str = LOSS_KEY, law: Law = "power"
) -> list[ScalingRun]:
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


def _read_run(path: Path, name: str | None, axis: Axis, y: str, law: Law) -> ScalingRun:
    content = _content(path)
    group = content.get("model") if name is None else name
    if not isinstance(group, str):
        raise ValueError(f"runs ({path}) does not say its model; name its group: NAME={path}")
    x = _number(content, AXIS_KEYS[axis], path, positive=True)
    return ScalingRun(
        group, str(path), x, _number(content, y, path, positive=law == "power"), content
    )


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


def grouped(runs: Iterable[ScalingRun]) -> dict[str, list[ScalingRun]]:
    """Returns the runs of each group, smallest first; groups in order of appearance.

    Raises:
        ValueError: if a group has fewer than two different sizes.
    """
    groups: dict[str, list[ScalingRun]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    for name, members in groups.items():
        if len({run.x for run in members}) < 2:
            raise ValueError(
                f"runs: {name} has one size only ({members[0].x:,.0f}), and a curve needs at least "
                f"2; add results, or group them otherwise: NAME={members[0].file}"
            )
    return {name: sorted(members, key=lambda run: run.x) for name, members in groups.items()}


def doubts(groups: Mapping[str, Sequence[ScalingRun]], axis: Axis) -> list[str]:
    """Returns what the runs differ in that they should share, a clause each."""
    runs = [run for members in groups.values() for run in members]
    found = [_difference("the runs", key, runs) for key in SAME_FOR_ALL]
    fixed = AXIS_KEYS["parameters" if axis == "tokens" else "tokens"]
    found += [_difference(f"the runs of {name}", fixed, own) for name, own in groups.items()]
    return [clause for clause in found if clause is not None]


def _difference(whose: str, key: str, runs: Sequence[ScalingRun]) -> str | None:
    values = {str(value) for run in runs if (value := _fact(run, key)) is not None}
    return f"{whose} differ in {key}: {', '.join(sorted(values))}" if len(values) > 1 else None


def _fact(run: ScalingRun, key: str) -> Any:
    data = run.content.get("data")
    return data.get(key) if key == "split" and isinstance(data, dict) else run.content.get(key)


# ---- figure


COLOURS = ("#2f6db3", "#d97b29", "#3f9c6b", "#9a5fb0", "#8a8f98", "#b8433f")
MARKERS = "osD^vP"
LABELS = {"tokens": "tokens of the training text D", "parameters": "non-embedding parameters N"}
EXPONENTS = {"tokens": "D", "parameters": "N"}
Y_TICKS = 5


def scaling_figure(
    groups: Mapping[str, Sequence[ScalingRun]],
    fits: Mapping[str, FittedCurve],
    axis: Axis,
    y: str = LOSS_KEY,
) -> Any:
    """Returns values over size where their curves are lines: a point a run, a line a group.

    Args:
        groups: runs of each group, smallest first.
        fits: the curve of each group.
        axis: what x is.
        y: key of the values.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    ax = figure.subplots()
    for number, (name, runs) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        sizes, fit = np.array([run.x for run in runs]), fits[name]
        line = np.geomspace(sizes[0], sizes[-1], 50)
        ax.plot(line, [fit.value_at(x) for x in line], linewidth=1.5, color=colour)
        shown = name.replace("$", r"\$")  # would start a formula
        sign = rf"$\alpha_{EXPONENTS[axis]}$" if fit.law == "power" else "slope"
        label = f"{shown}: {sign} = {fit.slope:.3f}"
        style: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "linestyle": ""}
        ax.plot(sizes, [run.y for run in runs], color=colour, label=label, **style)
    ax.set_xscale("log")
    if all(fit.law == "power" for fit in fits.values()):
        _log_values(ax, [run.y for runs in groups.values() for run in runs])
    label_sizes(ax.xaxis)
    ax.set_xlabel(LABELS[axis])
    ax.set_ylabel("loss (nats per token)" if y == LOSS_KEY else y.replace("_", " "))
    ax.tick_params(which="both", labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    return figure


def _log_values(ax: Any, values: Sequence[float]) -> None:
    """Sets a logarithmic scale of y with readable ticks."""
    from matplotlib.ticker import NullLocator

    ax.set_yscale("log")
    ticks = np.unique(np.geomspace(min(values), max(values), Y_TICKS).round(2))
    ax.set_yticks(ticks, [f"{tick:.2f}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())


# ---- command


DPI = 150


@dataclass(frozen=True)
class ScalingReport:
    """The curve of each group, and what its runs save against a baseline."""

    axis: Axis
    groups: dict[str, list[ScalingRun]]
    """Runs of each group, smallest first."""
    fits: dict[str, FittedCurve]
    """The curve of each group."""
    baseline: str | None
    """The group that the others are compared with; None: no comparison."""
    notes: list[str]
    """What the runs differ in that they should share."""
    y: str = LOSS_KEY
    """Key of the values."""

    def multipliers(self, run: ScalingRun) -> Multipliers | None:
        """Returns the multipliers of a run; None for those of the baseline or without one."""
        if self.baseline in (None, run.group):
            return None
        assert self.baseline is not None
        return multipliers(self.fits[self.baseline], self.fits[run.group], run.x, run.y)

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file."""
        return {
            "x": AXIS_KEYS[self.axis],
            "y": self.y,
            "baseline": self.baseline,
            "fits": {
                name: {
                    **_numbers_of(fit),
                    "runs": [self._run_as_dict(run) for run in self.groups[name]],
                }
                for name, fit in self.fits.items()
            },
            "notes": self.notes,
        }

    def _run_as_dict(self, run: ScalingRun) -> dict[str, Any]:
        found = self.multipliers(run)
        return {
            "file": run.file,
            AXIS_KEYS[self.axis]: run.content[AXIS_KEYS[self.axis]],
            self.y: run.y,
            "multiplier": None if found is None else found.measured,
            "multiplier_of_fits": None if found is None else found.fitted,
        }

    def as_table(self) -> str:
        """Returns the curves, the runs and the notes for people."""
        columns = list(_numbers_of(next(iter(self.fits.values()))))
        curves = [["", "runs", *columns[:2], "R^2"]]
        for name, fit in self.fits.items():
            slope, place, r2 = _numbers_of(fit).values()
            numbers = (f"{slope:.4f}", f"{place:.4g}", f"{r2:.4f}")
            curves.append([name, str(len(self.groups[name])), *numbers])
        members = [run for group in self.groups.values() for run in group]
        header = ["", AXIS_KEYS[self.axis], self.y, "multiplier", "multiplier_of_fits"]
        rows = [[key.replace("_", " ") for key in header], *map(self._row, members)]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([format_columns(curves), "", format_columns(rows), *notes])

    def _row(self, run: ScalingRun) -> list[str]:
        found = self.multipliers(run)
        factors = ("-", "-") if found is None else (f"{found.measured:.3f}", f"{found.fitted:.3f}")
        return [run.group, f"{run.x:,.0f}", f"{run.y:.4f}", *factors]


def _numbers_of(fit: FittedCurve) -> dict[str, float]:
    """Returns what says a curve, under the keys of the JSON file."""
    if fit.law == "power":
        return {"exponent": fit.slope, "constant": fit.constant, "r2": fit.r2}
    return {"slope": fit.slope, "intercept": fit.intercept, "r2": fit.r2}


def fit_scaling(
    runs: Sequence[ScalingRun],
    axis: Axis,
    baseline: str | None = None,
    *,
    y: str = LOSS_KEY,
    law: Law = "power",
) -> ScalingReport:
    """Returns the curves of the groups of runs.

    Args:
        runs: at least two sizes of each group.
        axis: what their ``x`` is.
        baseline: group whose curve the others are measured by; None: none.
        y: key of their values.
        law: of the curves.

    Raises:
        ValueError: if a group is too small, or the baseline is no group.
    """
    groups = grouped(runs)
    if baseline is not None and baseline not in groups:
        raise ValueError(f"baseline ({baseline}) is no group; there are {', '.join(groups)}")
    fits = {
        name: fit_curve([run.x for run in own], [run.y for run in own], law)
        for name, own in groups.items()
    }
    return ScalingReport(axis, groups, fits, baseline, _notes(groups, fits, axis, y), y)


def _notes(
    groups: Mapping[str, Sequence[ScalingRun]], fits: Mapping[str, FittedCurve], axis: Axis, y: str
) -> list[str]:
    what = "the loss" if y == LOSS_KEY else y
    rising = [name for name, fit in fits.items() if fit.slope <= 0]
    return [
        *doubts(groups, axis),
        *(f"{what} of {name} does not fall with {AXIS_KEYS[axis]}" for name in rising),
    ]


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        metavar="[NAME=]FILE",
        help="Results of evaluate.py perplexity or reversal --output: files, or patterns in "
        "quotes. Runs of one NAME share a curve; without a name, those of one model class do.",
    )
    parser.add_argument(
        "--x",
        type=Axis,
        required=True,
        help=f"Size to fit over ({' or '.join(get_args(Axis))}): lexical tokens of the training "
        "text, or trainable parameters without embeddings.",
    )
    parser.add_argument(
        "--y",
        type=str,
        default=LOSS_KEY,
        help="Key of the number to fit in the result files, such as reversed_target of reversal.",
    )
    parser.add_argument(
        "--law",
        type=Law,
        default="power",
        help="power: log y is a line over log x, which needs positive values; log: y is.",
    )
    parser.add_argument(
        "--baseline",
        type=str | None,
        default=None,
        help="Group that the others are compared with: how many times the size it would need for "
        "their values.",
    )
    parser.add_argument("--output", type=str | None, default=None, help="JSON file to write.")
    parser.add_argument("--plot", type=str | None, default=None, help="PNG file to write.")


def run(settings: Namespace) -> None:
    """Fits the curves, prints them and writes the files that are asked for."""
    target = None if settings.output is None else check_target(settings.output)
    picture = None if settings.plot is None else check_target(settings.plot, "plot")
    how = {"y": settings.y, "law": settings.law}
    runs = read_runs(settings.runs, settings.x, **how)
    report = fit_scaling(runs, settings.x, settings.baseline, **how)
    print(report.as_table())
    if target is not None:
        write_json(target, report.as_dict())
    if picture is not None:
        figure = scaling_figure(report.groups, report.fits, settings.x, settings.y)
        write_atomically(picture, lambda path: figure.savefig(path, format="png", dpi=DPI))
