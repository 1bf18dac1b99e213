"""``evaluate.py scaling``: power laws fitted to the results of runs of several sizes.

A frame of results has a row for each file: ``group`` (its curve), ``file``, ``x`` (size) and ``y``
(the value to fit).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from jsonargparse import ArgumentParser, Namespace

from datamodules.readers import parse_json
from evaluation.arguments import add_file_arguments
from evaluation.figures import scaling_figure, write_picture
from evaluation.output import check_targets, report_result
from evaluation.run_metrics import NATS
from evaluation.runs import is_number, matching, split_name
from evaluation.scoring import bounded_exp
from evaluation.tables import (
    FOUR,
    FOUR_DIGITS,
    THREE,
    WHOLE,
    TableColumn,
    as_aligned,
    show_columns,
    title_of,
)

Law = Literal["power", "log"]
Axis = Literal["tokens", "parameters"]

SIZE_KEYS: dict[str, str] = {"tokens": "train_tokens", "parameters": "parameters"}
"""Key of the size in the result files, by axis."""
FACTS = ("likelihood", "counted", "split", "tokens")
"""Keys of the result files that describe the measurement."""
COLUMNS = ("group", "file", "checkpoint", "x", "y", *FACTS)
MULTIPLIERS = ("multiplier", "multiplier_of_fits")

# ---- fitted curves


@dataclass(frozen=True)
class FittedCurve:
    """A straight line in log x of log y (``power``) or of y (``log``)."""

    law: Law
    slope: float
    """Negative slope of the line: alpha of a power law, else the fall of y per factor e of x."""
    intercept: float
    """Value at log x = 0, for a power law alpha * log c."""
    r2: float
    """R^2 of the line; nan if all values are equal."""

    def as_dict(self) -> dict[str, float]:
        """Returns the curve under the keys of the JSON file.

        The constant of a power law is the x at which y is 1, D_c or N_c in the papers.
        """
        if self.law == "log":
            return {"slope": self.slope, "intercept": self.intercept, "r2": self.r2}
        constant = bounded_exp(self.intercept / self.slope) if self.slope else math.nan
        return {"exponent": self.slope, "constant": constant, "r2": self.r2}

    def value_at(self, x: float) -> float:
        """Returns y at a size."""
        line = self.intercept - self.slope * math.log(x)
        return bounded_exp(line) if self.law == "power" else line

    def size_for(self, value: float) -> float:
        """Returns the x at which the curve has this value; nan if values do not fall with x."""
        if self.slope <= 0:
            return math.nan
        line = math.log(value) if self.law == "power" else value
        return bounded_exp((self.intercept - line) / self.slope)


def fit_curve(x: Iterable[float], values: Iterable[float], law: Law = "power") -> FittedCurve:
    """Fits a least-squares line in log x; values of a power law must be positive."""
    log_x = [math.log(size) for size in x]
    line = [math.log(value) if law == "power" else value for value in values]
    slope, intercept = statistics.linear_regression(log_x, line)
    mean = statistics.fmean(line)
    total = sum((y - mean) ** 2 for y in line)
    rest = sum((y - intercept - slope * v) ** 2 for v, y in zip(log_x, line, strict=True))
    return FittedCurve(law, -slope, intercept, 1 - rest / total if total else math.nan)


def multipliers(
    baseline: FittedCurve, curve: FittedCurve, x: float, value: float
) -> tuple[float, float]:
    """Returns the factors in size by which a baseline reaches a run's value, and its fitted value.

    NOTE(paper): section 3.2 of Thought Gestalt defines m_D and m_N with the achieved loss, but its
    ranges for parameters (1.33 to 1.42) and its example (30M for 21M) follow from two fitted
    curves; with achieved losses Table 2 gives 1.28 to 1.50. Both are reported.
    """
    return baseline.size_for(value) / x, baseline.size_for(curve.value_at(x)) / x


def fit_groups(
    runs: pd.DataFrame, baseline: str | None = None, law: Law = "power"
) -> tuple[dict[str, FittedCurve], pd.DataFrame]:
    """Fits a curve to each group of results; also returns the results with their ``MULTIPLIERS``.

    Raises:
        ValueError: If the baseline, with whose curve the others are compared, is not a group.
    """
    groups = runs.groupby("group", sort=False)
    fits = {str(name): fit_curve(group["x"], group["y"], law) for name, group in groups}
    if baseline is not None and baseline not in fits:
        raise ValueError(f"baseline ({baseline}) is not a group; there are {', '.join(fits)}")
    saved = [
        (None, None)
        if baseline in (None, run.group)
        else multipliers(fits[str(baseline)], fits[run.group], run.x, run.y)
        for run in runs.itertuples()
    ]
    return fits, runs.join(pd.DataFrame(saved, columns=[*MULTIPLIERS], dtype=object))


# ---- results of several sizes


def read_results(
    targets: Sequence[str], axis: Axis, y: str = NATS, law: Law = "power"
) -> pd.DataFrame:
    """Reads the results that the command line names, sorted by size within each group.

    Args:
        targets: ``[NAME=]FILE`` or ``[NAME=]PATTERN``. The name is the group, by default the class
            of the model.
        axis: Size on the x axis.
        y: Key of the values; files of a pattern without it are left out.
        law: Law of the curves; values of a power law must be positive.

    Raises:
        ValueError: If there is no result, a value is missing or out of range, or a group has only
            one size, or several results of the same checkpoint.
    """
    rows = [row for target in targets for row in _read_target(target, SIZE_KEYS[axis], y, law)]
    runs = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
    # a result may be both in the folder of its run and in a file of --output
    runs = runs.drop_duplicates(["group", "checkpoint", "x", "y"])
    groups = [g.sort_values("x", kind="stable") for _, g in runs.groupby("group", sort=False)]
    for group in groups:
        name, file = group[["group", "file"]].iloc[-1]
        if group["x"].nunique() < 2:
            raise ValueError(f"runs ({file}): {name} has only one size; name at least two")
        repeated = group[group["checkpoint"].notna() & group.duplicated(["checkpoint", "x"])]
        if len(repeated):
            raise ValueError(
                f"runs ({repeated['file'].iloc[0]}): {name} has another result of this checkpoint, "
                "on other text or with other settings; name one of them"
            )
    return pd.concat(groups, ignore_index=True)


def _read_target(target: str, size: str, y: str, law: Law) -> list[dict[str, Any]]:
    name, pattern = split_name(target)
    rows = []
    for file in matching(Path(pattern).expanduser()):
        try:
            content = parse_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"runs ({file}) cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"runs ({file}) is not JSON: {error}") from error
        if not isinstance(content, dict) or y not in content:
            continue
        cure = "score it where its training text is prepared"
        _check_number(file, size, content.get(size), above_0=True, cure=cure)
        _check_number(file, y, content[y], above_0=law == "power", cure="set --law log")
        checkpoint = content.get("checkpoint")
        if name is None and not isinstance(content.get("model"), str):
            raise ValueError(f"runs ({file}) does not name its model; name its group: NAME={file}")
        data = content.get("data")
        content = {**content, "split": data.get("split") if isinstance(data, dict) else None}
        facts = {key: str(content[key]) for key in FACTS if content.get(key) is not None}
        rows.append(
            {
                "group": name or content["model"],
                "file": str(file),
                "checkpoint": None if checkpoint is None else str(Path(str(checkpoint)).resolve()),
                "x": content[size],
                "y": content[y],
                **facts,
            }
        )
    if not rows:
        raise ValueError(
            f"runs ({pattern}): there is no result with {y}; name result files of evaluate.py "
            "perplexity or reversal, a pattern such as 'runs/**/*.json', or another --y"
        )
    return rows


def _check_number(file: Path, key: str, value: Any, *, above_0: bool, cure: str) -> None:
    if not is_number(value) or not math.isfinite(value) or (above_0 and value <= 0):
        expected = "a number above 0" if above_0 else "a finite number"
        raise ValueError(
            f"runs ({file}): {key} ({value!r}) must be {expected}; leave this run out, or {cure}"
        )


# ---- command


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "runs",
        type=str,
        nargs="+",
        metavar="[NAME=]FILE",
        help="Results of evaluate.py perplexity or reversal: files of --output, or patterns in "
        "quotes; 'runs/**/*.json' includes the results in the folders of runs. Results with the "
        "same NAME share a curve, or without names results of the same model class.",
    )
    parser.add_argument(
        "--x",
        type=Axis,
        required=True,
        help=f"Size on the x axis ({' or '.join(get_args(Axis))}): lexical tokens of the training "
        "text, or trainable parameters without embeddings.",
    )
    parser.add_argument(
        "--y",
        type=str,
        default=NATS,
        help="Key of the value to fit in the result files, such as reversed_target of reversal; "
        "files of a pattern without it are left out.",
    )
    parser.add_argument(
        "--law",
        type=Law,
        default="power",
        help="power: log y is linear in log x, which needs positive values; log: y is linear.",
    )
    parser.add_argument(
        "--baseline",
        type=str | None,
        default=None,
        help="Group to compare the others with, by the factor in size at which it would reach "
        "their values; undefined if the values of the group do not fall with size.",
    )
    add_file_arguments(parser, output="JSON file to write.", plot="PNG or SVG file to write.")


def run(settings: Namespace) -> None:
    """Fits the curves, prints them, and writes the requested files."""
    target, picture = check_targets(output=settings.output, plot=settings.plot)
    size, y = SIZE_KEYS[settings.x], settings.y
    runs = read_results(settings.runs, settings.x, y, settings.law)
    fits, runs = fit_groups(runs, settings.baseline, settings.law)
    curves = {name: fit.as_dict() for name, fit in fits.items()}
    columns = runs[["file", "x", "y", *MULTIPLIERS]].rename(columns={"x": size, "y": y})
    rows = {
        name: {**curve, "runs": columns[runs["group"] == name].to_dict("records")}
        for name, curve in curves.items()
    }
    result = {"x": size, "y": y, "baseline": settings.baseline, "fits": rows}
    report_result(scaling_table(curves, runs, size, y), result, target)
    if picture is not None:
        write_picture(scaling_figure(runs, fits, size, y), picture)


def scaling_table(
    curves: Mapping[str, Mapping[str, float]], runs: pd.DataFrame, size: str, y: str
) -> str:
    """Formats the curves and the results as tables."""
    fits = pd.DataFrame(curves).T
    slope, constant, r2 = fits
    titles = {
        slope: TableColumn(slope, FOUR),
        constant: TableColumn(constant, FOUR_DIGITS),
        r2: TableColumn("R^2", FOUR),
    }
    columns = {
        "x": TableColumn(title_of(size), WHOLE),
        "y": TableColumn(title_of(y), FOUR),
        **{key: TableColumn(title_of(key), THREE) for key in MULTIPLIERS},
        **{key: TableColumn(key) for key in FACTS},
    }
    tables = show_columns(fits, titles), show_columns(runs.set_index("group"), columns)
    return "\n\n".join(map(as_aligned, tables))
