"""The table of a sweep: for people, and with all digits for its CSV file."""

from collections.abc import Sequence
from typing import Any

from evaluation.console import format_columns
from evaluation.perplexity.scoring import PERPLEXITY_KEYS
from evaluation.sweep.figure import COSTS, height
from evaluation.sweep.points import STEPS, SweepPoint, frontier

SHORT = {
    "executed_steps": "steps",
    "flops_per_token_6nd": "6 N (1 + steps)",
    "generation_flops_per_token": "FLOPs/generated token",
}
"""What the printed table calls the costs."""


def as_rows(points: Sequence[SweepPoint]) -> list[list[Any]]:
    """Returns a row a point behind a header, with all digits.

    Perplexities stand under the name of their kind, dials under their own; cells of what a point
    has not are empty. ``frontier_...`` says whether no other point has both less cost and less
    perplexity.
    """
    dials, kinds, best = _dials(points), _kinds(points), _frontiers(points)
    header = ["checkpoint", "label", STEPS, *dials, "likelihood", "causal", "nats_per_token"]
    header += [PERPLEXITY_KEYS[kind] for kind in kinds]
    rows: list[list[Any]] = [[*header, *COSTS, *(f"frontier_{key}" for key in COSTS)]]
    for number, point in enumerate(points):
        variant, report = point.variant, point.report
        row: list[Any] = [variant.checkpoint.path, point.label, variant.thinking_steps]
        row += [variant.dials.get(key) for key in dials]
        row += [report.likelihood, report.causal, report.totals.nats_per_token]
        row += [report.totals.perplexity if kind == report.likelihood else None for kind in kinds]
        row += [point.value(key) for key in COSTS]
        rows.append([*row, *(number in best[key] for key in COSTS)])
    return rows


def as_table(points: Sequence[SweepPoint], note: str | None) -> str:
    """Returns likelihoods and costs for people; a star is on the Pareto frontier of its cost.

    Args:
        points: what was measured.
        note: what to tell of the labels.
    """
    dials, kinds, best = _dials(points), _kinds(points), _frontiers(points)
    names = [PERPLEXITY_KEYS[kind].replace("_", " ") for kind in kinds]
    rows = [["", "K", *dials, "nats per token", *names, *(SHORT[key] for key in COSTS)]]
    for number, point in enumerate(points):
        totals, own = point.report.totals, point.report.likelihood
        row = [point.label, str(point.variant.thinking_steps)]
        row += [_cell(point.variant.dials.get(key)) for key in dials]
        row += [f"{totals.nats_per_token:.5g}"]
        row += [_cell(totals.perplexity if kind == own else None) for kind in kinds]
        stars = {key: " *" if number in best[key] else "" for key in COSTS}
        rows.append([*row, *(f"{point.value(key):.4g}{stars[key]}" for key in COSTS)])
    notes = ["*: no other one has both less cost and less perplexity"]
    return "\n".join([format_columns(rows), *notes, *([f"note: {note}"] if note else [])])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _dials(points: Sequence[SweepPoint]) -> list[str]:
    return list(dict.fromkeys(key for point in points for key in point.variant.dials))


def _kinds(points: Sequence[SweepPoint]) -> list[str]:
    return list(dict.fromkeys(point.report.likelihood for point in points))


def _frontiers(points: Sequence[SweepPoint]) -> dict[str, set[int]]:
    """Returns the numbers of the points on the frontier of each cost."""
    return {
        key: set(frontier([(point.value(key), height(point, key)) for point in points]))
        for key in COSTS
    }
