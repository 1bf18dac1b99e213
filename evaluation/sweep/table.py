"""The table of a sweep: for people, and with all digits for its CSV file."""

from collections.abc import Sequence
from typing import Any

from evaluation.console import format_columns
from evaluation.scoring import PERPLEXITY_KEYS
from evaluation.sweep.figure import COSTS, by_kind, height
from evaluation.sweep.points import STEPS, Skipped, SweepPoint, frontier

SHORT = {
    "executed_steps": "steps",
    "flops_per_token_6nd": "6 N (1 + steps)",
    "generation_flops_per_token": "FLOPs/generated token",
    "flops_per_token": "FLOPs/scored token",
}
"""What the printed table calls the costs."""


def as_rows(points: Sequence[SweepPoint]) -> list[list[Any]]:
    """Returns a row a point behind a header, with all digits.

    Losses and perplexities stand under the names of their kind, dials under their own; cells of
    what a point has not are empty. ``frontier_...`` says whether no other point of the same kind of
    likelihood has both less cost and less perplexity; ``seconds`` is the wall time of scoring.
    """
    dials, kinds, best = _dials(points), _kinds(points), _frontiers(points)
    header = ["checkpoint", "label", STEPS, *dials, "likelihood", "causal"]
    header += [loss_key(kind) for kind in kinds] + [PERPLEXITY_KEYS[kind] for kind in kinds]
    header += [*COSTS, *(f"frontier_{key}" for key in COSTS), "seconds"]
    rows: list[list[Any]] = [header]
    for number, point in enumerate(points):
        variant, report = point.variant, point.report
        row: list[Any] = [variant.checkpoint.path, point.label, variant.thinking_steps]
        row += [variant.dials.get(key) for key in dials]
        row += [report.likelihood, report.causal]
        for value in (report.totals.nats_per_token, report.totals.perplexity):
            row += [value if kind == report.likelihood else None for kind in kinds]
        row += [point.value(key) for key in COSTS]
        rows.append([*row, *(number in best[key] for key in COSTS), report.cost.seconds])
    return rows


def as_table(
    points: Sequence[SweepPoint], note: str | None, skipped: Sequence[Skipped] = ()
) -> str:
    """Returns likelihoods and costs for people; a star is on the Pareto frontier of its cost.

    Args:
        points: what was measured.
        note: what to tell of the labels.
        skipped: settings that checkpoints cannot take.
    """
    dials, kinds, best = _dials(points), _kinds(points), _frontiers(points)
    names = [loss_key(kind).replace("_", " ") for kind in kinds]
    names += [PERPLEXITY_KEYS[kind].replace("_", " ") for kind in kinds]
    rows = [["", "K", *dials, *names, *(SHORT[key] for key in COSTS), "seconds"]]
    for number, point in enumerate(points):
        totals, own = point.report.totals, point.report.likelihood
        row = [point.label, str(point.variant.thinking_steps)]
        row += [_cell(point.variant.dials.get(key)) for key in dials]
        for value in (totals.nats_per_token, totals.perplexity):
            row += [_cell(value if kind == own else None) for kind in kinds]
        stars = {key: " *" if number in best[key] else "" for key in COSTS}
        row += [f"{point.value(key):.4g}{stars[key]}" for key in COSTS]
        rows.append([*row, f"{point.report.cost.seconds:.3g}"])
    of_kind = " of its kind of likelihood" if len(kinds) > 1 else ""
    notes = [f"*: no other one{of_kind} has both less cost and less perplexity"]
    notes += [f"note: {note}"] if note else []
    return "\n".join([format_columns(rows), *notes, *map(str, skipped)])


def loss_key(kind: str) -> str:
    """Returns what a loss is called whose likelihood is of that kind."""
    return "nats_per_token" if kind == "exact" else f"nats_per_token_{kind}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _dials(points: Sequence[SweepPoint]) -> list[str]:
    """Returns the dials that are turned; K has a column of its own."""
    turned = dict.fromkeys(key for point in points for key in point.variant.dials)
    return [key for key in turned if key != STEPS]


def _kinds(points: Sequence[SweepPoint]) -> list[str]:
    kinds = dict.fromkeys(point.report.likelihood for point in points)
    return list(kinds)


def _frontiers(points: Sequence[SweepPoint]) -> dict[str, set[int]]:
    """Returns the numbers of the points on the frontier of each cost, within their kind."""
    place = {id(point): number for number, point in enumerate(points)}
    found: dict[str, set[int]] = {key: set() for key in COSTS}
    for key, best in found.items():
        for members in by_kind(points).values():
            costs = [(point.value(key), height(point, key)) for point in members]
            best |= {place[id(members[number])] for number in frontier(costs)}
    return found
