"""``evaluate.py scaling``: curves through the results of runs of several sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace

from evaluation.console import format_columns
from evaluation.output import check_target, write_atomically, write_json
from evaluation.scaling.figure import scaling_figure
from evaluation.scaling.fit import Curve, Law, Multipliers, fit_curve, multipliers
from evaluation.scaling.runs import AXIS_KEYS, LOSS_KEY, Axis, Run, doubts, grouped, read_runs

DPI = 150


@dataclass(frozen=True)
class ScalingReport:
    """The curve of each group, and what its runs save against a baseline."""

    axis: Axis
    groups: dict[str, list[Run]]
    """Runs of each group, smallest first."""
    fits: dict[str, Curve]
    """The curve of each group."""
    baseline: str | None
    """The group that the others are compared with; None: no comparison."""
    notes: list[str]
    """What the runs differ in that they should share."""
    y: str = LOSS_KEY
    """Key of the values."""

    def multipliers(self, run: Run) -> Multipliers | None:
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

    def _run_as_dict(self, run: Run) -> dict[str, Any]:
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

    def _row(self, run: Run) -> list[str]:
        found = self.multipliers(run)
        factors = ("-", "-") if found is None else (f"{found.measured:.3f}", f"{found.fitted:.3f}")
        return [run.group, f"{run.x:,.0f}", f"{run.y:.4f}", *factors]


def _numbers_of(fit: Curve) -> dict[str, float]:
    """Returns what says a curve, under the keys of the JSON file."""
    if fit.law == "power":
        return {"exponent": fit.slope, "constant": fit.constant, "r2": fit.r2}
    return {"slope": fit.slope, "intercept": fit.intercept, "r2": fit.r2}


def fit_scaling(
    runs: Sequence[Run],
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
    groups: Mapping[str, Sequence[Run]], fits: Mapping[str, Curve], axis: Axis, y: str
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
