"""Results of several models next to each other: JSON, tables, rows of answers, the figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callbacks.reasoning.thinking import thought_text, told
from evaluation.figures import COLOURS
from evaluation.output import format_columns
from evaluation.reason.models import LATENTS, Contestant
from evaluation.reason.result import ReasonResult, Reply, overlap_table, overlaps
from evaluation.runs import is_number

COLUMNS = {
    "latents": "latents",
    "written_tokens": "written tokens",
    "seconds_per_question": "s/question",
    "speed_up": "speed-up",
    "rounds": "rounds",
    "chunks": "chunks",
    "nontrivial_chunks": "with a thought",
}
"""Numbers that the printed table has where any model has them, and what it calls them."""


@dataclass(frozen=True)
class ReasonReport:
    """Answers of several models to the same questions, and everything needed to repeat it."""

    results: Sequence[ReasonResult]
    """At least one."""
    group_name: str
    """What a group counts, e.g. operations."""
    baseline: str | None
    """Label of the model that speed-ups are over."""
    data: dict[str, Any]
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file."""
        return {
            "results": [result.as_dict(self.group_name) for result in self.results],
            "overlap": [overlap.as_dict() for overlap in overlaps(self.results)],
            "baseline": self.baseline,
            "data": self.data,
            "settings": self.settings,
        }

    # ---- for people

    def as_table(self) -> str:
        """Returns the result for people."""
        parts = [self._models(), self._groups(), self._question_first(), self._overlap()]
        return "\n\n".join([*filter(None, parts), self._notes()])

    def _models(self) -> str:
        numbers = [result.as_dict(self.group_name) for result in self.results]
        shown = [key for key in COLUMNS if any(own.get(key) is not None for own in numbers)]
        rows = [["", "accuracy", *(COLUMNS[key] for key in shown)]]
        for result, own in zip(self.results, numbers, strict=True):
            rows.append([result.label, str(result.accuracy), *(_cell(own, key) for key in shown)])
        return format_columns(rows)

    def _groups(self) -> str:
        """Returns accuracies by group; nothing if there is one group only."""
        columns = [result.by_group() for result in self.results]
        groups = list(columns[0])
        if len(groups) < 2:
            return ""
        rows = [[self.group_name, *(result.label for result in self.results)]]
        rows += [[str(group), *(str(column[group]) for column in columns)] for group in groups]
        return format_columns(rows)

    def _question_first(self) -> str:
        rows = [["question first", "all so", "of those wrong before", "only those so"]]
        for result in self.results:
            found = result.with_question_first()
            if found:
                rows.append([result.label, *map(str, found.values())])
        return format_columns(rows) if len(rows) > 1 else ""

    def _overlap(self) -> str:
        return overlap_table(self.results) if len(self.results) > 1 else ""

    def _notes(self) -> str:
        count, settings = len(self.results[0].replies), self.settings
        notes = [f"{count:,} questions of the {self.data['split']} split, on {settings['device']}"]
        timed = bool(settings["rounds"])
        if timed:
            notes.append(
                f"times are medians of {settings['rounds']} rounds over the first "
                f"{settings['timed_questions']:,} questions, {settings['timing_batch_size']} at a "
                "time, models in turn"
            )
        if timed and self.baseline is not None:
            notes.append(f"speed-ups are over {self.baseline}")
        if len(self.results) > 1:
            notes.append("overlap: share of what the row's model solves that the column's does not")
        notes += [
            f"with chunks of {found['chunk_size']} tokens {found['questions']:,} of "
            f"{found['of']:,} {found['split']} questions have a step moved out of its chunk"
            for found in self.data.get("moved_steps", ())
        ]
        return "\n".join(notes)

    # ---- answers

    def answers(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Returns one row an answer, for a jsonl file: model after model, in the questions' order.

        Args:
            tokenizer: of the data.
        """
        rows = []
        for result in self.results:
            rows += [_answer(tokenizer, result.label, reply, False) for reply in result.replies]
            again = result.question_first or ()
            rows += [_answer(tokenizer, result.label, reply, True) for reply in again]
        return rows


def _answer(tokenizer: Any, label: str, reply: Reply, question_first: bool) -> dict[str, Any]:
    """Returns an answer as plain values; thoughts are None for models that record none."""
    question, thinking = reply.question, reply.thinking
    row: dict[str, Any] = {
        "model": label,
        "number": question.number,
        "group": question.group,
        "question_first": question_first,
        "query": tokenizer.decode(question.query),
        "gold": tokenizer.decode(question.answer).strip(),
        "text": reply.text.strip(),
        "right": reply.right,
        "written": tokenizer.decode(reply.written),
        "thoughts": None,
    }
    if thinking is not None:
        row["thoughts"] = [
            {"token": thought.end, "text": thought_text(tokenizer, thought.tokens)}
            for thought in thinking.thoughts
            if thought.tokens
        ]
        row["query_with_thoughts"] = told(tokenizer, question.query, thinking)
        row["rounds"] = thinking.rounds
    return row


def _cell(numbers: dict[str, Any], key: str) -> str:
    value = numbers.get(key)
    return "-" if value is None else f"{value:.4g}"


# ---- figure: accuracies by length, or against a setting with speed-ups (Fig. 3)


RECURRENCE = "recurrence"
"""Stands for the layers between injection and extraction (Fig. 3 a)."""
LEGEND_COLUMNS = 3
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
    place: dict[str, Any] = {
        "loc": "outside upper center",
        "ncols": min(len(plain), LEGEND_COLUMNS),
    }
    figure.legend(list(named.values()), plain, frameon=False, fontsize=8, **place)
    return figure


def _over_groups(axes: Any, results: Sequence[ReasonResult]) -> Mapping[str, Any]:
    """Draws accuracies by group, with one standard error to both sides."""
    named = {}
    for number, result in enumerate(results):
        groups = result.by_group()
        values, errors, _ = zip(*groups.values(), strict=True)
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
    """Returns header and rows of the table next to the figure, see `reason_figure`."""
    if against is None:
        return ["label", group_name, "accuracy", "standard_error"], [
            [result.label, group, share.value, share.error]
            for result in results
            for group, share in result.by_group().items()
        ]
    key, values = against
    return ["label", key, "accuracy", "standard_error", "speed_up"], [
        [result.label, value, result.accuracy.value, result.accuracy.error, result.speed_up]
        for result, value in zip(results, values, strict=True)
    ]
