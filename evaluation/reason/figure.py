"""The picture of accuracies: by length, or against a setting with speed-ups (Fig. 3)."""

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.curves.figure import COLOURS
from evaluation.reason.models import LATENTS, Contestant
from evaluation.reason.result import ReasonResult
from evaluation.runs.labels import is_number

RECURRENCE = "recurrence"
"""Stands for the layers between injection and extraction (Fig. 3 a)."""
COLUMNS = 3
"""Of the legend."""
NAMES = {RECURRENCE: "layers in the recurrence", LATENTS: "latent thoughts"}
"""What axes are called, where not by the key."""


def settings_of(contestants: Sequence[Contestant], key: str) -> list[float | None]:
    """Returns the value of a field of each model's config; None for models without it.

    Args:
        contestants: who was asked.
        key: the field, or ``recurrence``.

    Raises:
        ValueError: if no model has it, or one has no number there.
    """
    values = [_setting(one, key) for one in contestants]
    if all(value is None for value in values):
        raise ValueError(f"against ({key}) is no setting of any model's config")
    return values


def _setting(one: Contestant, key: str) -> float | None:
    with one.ready() as model:
        config: Any = model.config
    if key == RECURRENCE:
        return _recurrence(one) if hasattr(config, "output_layer") else None
    if not hasattr(config, key):
        return None
    value = getattr(config, key)
    if not is_number(value):
        raise ValueError(
            f"against ({key}) is {value!r} in {one.checkpoint.path}; an axis needs numbers"
        )
    return float(value)


def _recurrence(one: Contestant) -> float:
    model: Any = one.model
    first, last = model.config.layers(len(model.network.blocks))
    return float(last - first)


def reason_figure(
    results: Sequence[ReasonResult],
    group_name: str,
    against: tuple[str, Sequence[float | None]] | None = None,
) -> Any:
    """Returns accuracies over groups, a line a model; or over a setting, a line a class of models.

    Over a setting, numbers at the points are speed-ups, and models without it are dotted lines.

    Args:
        results: of the models.
        group_name: what a group counts.
        against: a setting and its value for each model; None: over groups.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes: Any = figure.subplots()
    if against is None:
        label, named = group_name, _over_groups(axes, results)
    else:
        label, named = NAMES.get(against[0], against[0]), _over_settings(axes, results, against[1])
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel("accuracy")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    plain = [text.replace("$", r"\$") for text in named]  # it would start a formula
    place: dict[str, Any] = {"loc": "outside upper center", "ncols": min(len(plain), COLUMNS)}
    figure.legend(list(named.values()), plain, frameon=False, fontsize=8, **place)
    return figure


def _over_groups(axes: Any, results: Sequence[ReasonResult]) -> Mapping[str, Any]:
    """Draws accuracies by group, with one standard error to both sides."""
    named = {}
    for number, result in enumerate(results):
        groups = result.by_group()
        values, errors = zip(*groups.values(), strict=True)
        style: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.2, "capsize": 2}
        colour = COLOURS[number % len(COLOURS)]
        named[result.label] = axes.errorbar([*groups], values, errors, color=colour, **style)
    return named


def _over_settings(
    axes: Any, results: Sequence[ReasonResult], values: Sequence[float | None]
) -> Mapping[str, Any]:
    """Draws a line a class of models, and dotted ones for models without the setting."""
    lines: dict[str, list[tuple[float, ReasonResult]]] = {}
    named: dict[str, Any] = {}
    for result, value in zip(results, values, strict=True):
        if value is not None:
            lines.setdefault(result.model, []).append((value, result))
    for number, (model, members) in enumerate(lines.items()):
        named[model] = _line(axes, members, COLOURS[number % len(COLOURS)])
    for result, value in zip(results, values, strict=True):
        if value is None:
            colour = COLOURS[len(named) % len(COLOURS)]
            style: dict[str, Any] = {"linestyle": ":", "color": colour}
            named[result.label] = axes.axhline(result.accuracy.value, **style)
    return named


def _line(axes: Any, members: Sequence[tuple[float, ReasonResult]], colour: str) -> Any:
    ordered = sorted(members, key=lambda member: member[0])
    x = [value for value, _ in ordered]
    y = [result.accuracy.value for _, result in ordered]
    errors = [result.accuracy.error for _, result in ordered]
    line = axes.errorbar(x, y, errors, color=colour, marker="o", markersize=4, capsize=2)
    for left, low, (_, result) in zip(x, y, ordered, strict=True):
        if result.speed_up is not None:
            offset: dict[str, Any] = {"xytext": (4, 6), "textcoords": "offset points"}
            axes.annotate(f"{result.speed_up:.2f}x", (left, low), fontsize=7, **offset)
    return line


def points_of(
    results: Sequence[ReasonResult],
    group_name: str,
    against: tuple[str, Sequence[float | None]] | None = None,
) -> tuple[list[str], list[list[Any]]]:
    """Returns header and rows of the table beside the figure, see `reason_figure`."""
    if against is None:
        return ["label", group_name, "accuracy", "standard_error"], [
            [result.label, group, *share]
            for result in results
            for group, share in result.by_group().items()
        ]
    key, values = against
    return ["label", key, "accuracy", "standard_error", "speed_up"], [
        [result.label, value, *result.accuracy, result.speed_up]
        for result, value in zip(results, values, strict=True)
    ]
