"""Markdown tables over runs and seeds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from studies.console import clock
from studies.results import Result
from studies.study import Column, Study

NONE = "-"


def summary_table(study: Study, results: Sequence[Result]) -> str:
    """Returns a line for each run: the mean over its seeds, and between which values they lie."""
    heads = ["run", "parameters", "FLOPs/token, training", "FLOPs/token, inference"]
    heads += [column.title for column in study.columns]
    heads += ["wall time", "wall time / baseline"]
    lines = []
    for group in _by_name(study, results):
        first = group[0]
        cells = [first.run.title, f"{first.parameters:,}", _flops(first.training_flops)]
        cells.append(_flops(inference_flops(first)))
        cells += [_spread(column, group) for column in study.columns]
        times = [result.seconds for result in group]
        lines.append([*cells, clock(statistics.mean(times)), _relative(study, group, results)])
    return _markdown(heads, lines)


def seeds_table(study: Study, results: Sequence[Result]) -> str:
    """Returns a line for each run and seed, with standard errors where positions were sampled."""
    heads = ["run", "seed", *(column.title for column in study.columns)]
    heads += ["tokens/s", "wall time", "times resumed"]
    lines = [
        [
            result.run.title,
            str(result.run.seed),
            *(_single(column, result) for column in study.columns),
            NONE if result.speed is None else f"{result.speed:,.0f}",
            clock(result.seconds),
            str(result.sittings - 1),
        ]
        for group in _by_name(study, results)
        for result in group
    ]
    return _markdown(heads, lines)


def inference_flops(result: Result) -> float | None:
    """Returns the FLOPs per token that the first evaluation has counted."""
    found = (content.get("flops_per_token") for content in result.evaluations.values())
    return next((float(value) for value in found if value is not None), None)


def value_of(column: Column, result: Result) -> float | None:
    """Returns a column's number in its unit; None where it was not measured."""
    value: Any = result.evaluations.get(column.evaluation)
    for key in column.key.split("."):
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value) / column.unit


def error_of(column: Column, result: Result) -> float | None:
    """Returns the standard error of a number of bits per byte; None where nothing was sampled."""
    content = result.evaluations.get(column.evaluation, {})
    error, nats = content.get("standard_error"), content.get("nats_per_token")
    value = value_of(column, result)
    if column.key != "bits_per_byte" or error is None or not nats or value is None:
        return None
    return float(error) * value / float(nats)


def _single(column: Column, result: Result) -> str:
    value, error = value_of(column, result), error_of(column, result)
    if value is None:
        return NONE
    text = _number(value, column)
    return text if error is None else f"{text} ± {_number(error, column)}"


def _spread(column: Column, group: Sequence[Result]) -> str:
    values = [v for v in (value_of(column, result) for result in group) if v is not None]
    if not values:
        return NONE
    text = _number(statistics.mean(values), column)
    if len(values) > 1:
        text += f" ({_number(min(values), column)} to {_number(max(values), column)})"
    return text + _label(column, group)


def _number(value: float, column: Column) -> str:
    return f"{value:z.{column.digits}f}"  # z: no -0.0000


def _label(column: Column, group: Sequence[Result]) -> str:
    """Says what a likelihood is where it is not an exact, causal one."""
    content = next(
        r.evaluations[column.evaluation] for r in group if column.evaluation in r.evaluations
    )
    if column.key != "bits_per_byte":
        return ""
    kind = str(content.get("likelihood", "exact")).replace("_", " ")
    if not content.get("causal", True):
        return ", not causal"
    return "" if kind == "exact" else f", {kind}"


def _relative(study: Study, group: Sequence[Result], results: Sequence[Result]) -> str:
    base = [result.seconds for result in results if result.run.name == study.baseline]
    if not base:
        return NONE
    times = [result.seconds for result in group]
    return f"{statistics.mean(times) / statistics.mean(base):.2f}"


def _by_name(study: Study, results: Sequence[Result]) -> list[list[Result]]:
    groups = [[r for r in results if r.run.name == run.name] for run in study.runs]
    return [group for group in groups if group]


def _flops(value: float | None) -> str:
    return NONE if value is None else f"{value / 1e6:.2f} M"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
