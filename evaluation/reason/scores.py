"""Answers of several models: their metrics, the printed table, the figure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from callbacks.answer_accuracy import Reply
from callbacks.recorded_thoughts import query_with_thoughts, thought_text
from evaluation.figures import COLOURS, add_legend, make_panels
from evaluation.reason.contestants import CONTROL, LATENTS, Contestant
from evaluation.runs import is_number
from evaluation.scoring import Share, share_of
from evaluation.tables import TableColumn, as_aligned, show_columns

COLUMNS = {
    key: TableColumn(title, lambda value: value if isinstance(value, str) else f"{value:.4g}")
    for key, title in {
        "accuracy": "accuracy",
        "latents": "latents",
        CONTROL: "replaced by",
        "written_tokens": "written tokens",
        "seconds_per_question": "s/question",
        "speed_up": "speed-up",
        "rounds": "rounds",
        "chunks": "chunks",
        "nontrivial_chunks": "with a thought",
        "executed_steps": "executed steps",
        "flops_per_token": "FLOPs/token",
        "likelihood": "likelihood",
    }.items()
}
"""Columns of the printed table; columns without values are left out."""
MEANS = ("written_tokens", "rounds", "chunks", "nontrivial_chunks", "thought_tokens")
"""Counts of an answer whose means are in the results."""


def answer_row(tokenizer: Any, label: str, reply: Reply) -> dict[str, Any]:
    """Returns an answer as plain values, a line of the answers file.

    ``thoughts`` is None for a reply without recorded thoughts.
    """
    question, thinking = reply.question, reply.thinking
    row: dict[str, Any] = {
        "model": label,
        "number": question.sequence_id,
        "group": question.group,
        "query": tokenizer.decode(question.query),
        "gold": tokenizer.decode_continuation(question.answer).strip(),
        "text": reply.text.strip(),
        "right": reply.right,
        "written": tokenizer.decode_continuation(reply.written),
        "written_tokens": len(reply.written),
        "thoughts": None,
    }
    if thinking is not None:
        row["thoughts"] = [
            {"token": thought.end, "text": thought_text(tokenizer, thought.tokens)}
            for thought in thinking.thoughts
            if thought.tokens
        ]
        row |= {
            "query_with_thoughts": query_with_thoughts(tokenizer, question.query, thinking),
            "rounds": thinking.rounds,
            "chunks": len(thinking.thoughts),
            "nontrivial_chunks": thinking.nontrivial,
            "thought_tokens": thinking.length,
        }
    return row


# ---- metrics of one model


def measure_answers(rows: Sequence[Mapping[str, Any]], group_name: str) -> dict[str, Any]:
    """Computes the metrics of a model's answers under the keys of the JSON file.

    They are ``accuracy``, with ``standard_error`` and ``questions``, also under ``by_group``, and
    means over the questions of ``written_tokens`` and, if recorded, of ``rounds`` (passes of the
    backbone while the question is read), ``chunks``, ``nontrivial_chunks`` (with a thought) and
    ``thought_tokens``.

    Args:
        rows: Results of ``answer_row``, at least one, in the order of the questions.
        group_name: Name of the property that groups questions.
    """
    answers = pd.DataFrame(rows)
    return {
        **share_of(answers["right"]).as_dict(),
        **{key: statistics.fmean(answers[key]) for key in MEANS if key in answers},
        "by_group": [
            {group_name: int(group), **share_of(flags).as_dict()}
            for group, flags in answers.groupby("group")["right"]
        ],
    }


# ---- tables of all models


def reason_table(content: Mapping[str, Any]) -> str:
    """Formats the content of the JSON file as tables with notes."""
    results = content["results"]
    groups = {
        result["label"]: {next(iter(g.values())): _accuracy(g) for g in result["by_group"]}
        for result in results
    }
    tables = [_models(results)]
    if len(results[0]["by_group"]) > 1:
        name = next(iter(results[0]["by_group"][0]))
        tables.append(pd.DataFrame(groups).rename(index=str).rename_axis(name))
    return "\n\n".join([*map(as_aligned, tables), "\n".join(_notes(content))])


def _accuracy(result: Mapping[str, Any]) -> str:
    return str(Share(*(result[key] for key in ("accuracy", "standard_error", "questions"))))


def _models(results: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(results, dtype=object, index=[result["label"] for result in results])
    frame["accuracy"] = [_accuracy(result) for result in results]
    return show_columns(frame.dropna(axis=1, how="all"), COLUMNS)


def _notes(content: Mapping[str, Any]) -> Iterator[str]:
    results, settings, data = content["results"], content["settings"], content["data"]
    count, candidates = results[0]["questions"], results[0].get("candidates")
    yield f"{count:,} questions of the {data['split']} split, on {settings['device']}"
    if data.get("left_out"):
        yield f"{data['left_out']:,} more are longer than block_size, and left out"
    if candidates is not None:
        yield (
            f"the most likely of {candidates} possible answers is taken; the accuracy by chance is "
            f"{1 / candidates:.4f}"
        )
    if settings["rounds"]:
        yield (
            f"times are medians of {settings['rounds']} rounds over the first "
            f"{settings['timed_questions']:,} questions, {settings['timing_batch_size']} at a "
            "time, models in turn"
        )
        if content["baseline"] is not None:
            yield f"speed-ups are over {content['baseline']}"


# ---- figure: accuracies by length, or against a setting with speed-ups (Fig. 3)


RECURRENCE = "recurrence"
"""Pseudo-field: number of layers between injection and extraction (Fig. 3 a)."""
LEGEND_COLUMNS = 3
NAMES = {RECURRENCE: "layers in the recurrence", LATENTS: "latent thoughts"}
"""Titles of axes; other axes are titled by their key."""

Against = tuple[str, Sequence[float | None]]
"""A field of configs, and its value for each model, None for models without it."""


def settings_of(contestants: Sequence[Contestant], key: str) -> Against:
    """Returns a field of the models' configs, or ``recurrence``, with its value for each model.

    Raises:
        ValueError: If no model has the field, or a value is not a number.
    """
    values = [_setting(contestant, key) for contestant in contestants]
    if all(value is None for value in values):
        raise ValueError(f"against ({key}) is not a field of any model's config")
    return key, values


def _setting(contestant: Contestant, key: str) -> float | None:
    model: Any
    with contestant.ready() as model:
        config = model.config
    if key == RECURRENCE:
        if not hasattr(config, "output_layer"):
            return None
        first, last = config.layers(len(model.network.blocks))
        return float(last - first)
    if not hasattr(config, key):
        return None
    value = getattr(config, key)
    if not is_number(value):
        raise ValueError(
            f"against ({key}) is {value!r} in {contestant.checkpoint.path}, but an axis needs "
            "numbers"
        )
    return float(value)


def points_of(results: Sequence[Mapping[str, Any]], against: Against | None = None) -> pd.DataFrame:
    """Returns the points of the figure: ``label``, the x value, and the y values.

    There is one row per model and group with ``accuracy`` and ``standard_error``, or, against a
    setting, one row per model that also has ``speed_up``.
    """
    if against is None:
        rows = [
            {"label": result["label"], **group}
            for result in results
            for group in result["by_group"]
        ]
        return pd.DataFrame(rows, dtype=object).drop(columns="questions")
    points = pd.DataFrame(results, dtype=object).reindex(
        columns=["label", "accuracy", "standard_error", "speed_up"]
    )
    points.insert(1, against[0], pd.Series(against[1], dtype=object))
    return points


def reason_figure(results: Sequence[Mapping[str, Any]], against: Against | None = None) -> Any:
    """Draws accuracy against groups, a line per model, or a setting, a line per model class.

    Error bars are one standard error. Against a setting, points are annotated with speed-ups, and
    models without the setting are dotted lines.

    Args:
        results: Results of ``measure_answers``.
        against: The setting and its value for each model.
    """
    from matplotlib.ticker import MaxNLocator

    points = points_of(results, against)
    figure, (axes,) = make_panels((7.2, 4.8))
    points["line"] = points["label"]
    if against is not None:
        names = ([result["model"], result.get(CONTROL)] for result in results)
        points["line"] = [", ".join(filter(None, name)) for name in names]
    x = points.columns[1]
    flat = points[points[x].isna()]
    handles: dict[str, Any] = {}
    for line, members in points.dropna(subset=[x]).groupby("line", sort=False):
        handles[str(line)] = _line(
            axes, members.sort_values(x), COLOURS[len(handles) % len(COLOURS)]
        )
    for label, value in zip(flat["label"], flat["accuracy"], strict=True):
        colour = COLOURS[len(handles) % len(COLOURS)]
        handles[label] = axes.axhline(value, linestyle=":", color=colour)
    axes.set_xlabel(NAMES.get(x, x))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel("accuracy")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    add_legend(figure, handles, LEGEND_COLUMNS)
    return figure


def _line(axes: Any, points: pd.DataFrame, colour: str) -> Any:
    x = points.columns[1]
    style: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.2, "capsize": 2}
    line = axes.errorbar(
        points[x].astype(float),
        points["accuracy"].astype(float),
        points["standard_error"].astype(float),
        color=colour,
        **style,
    )
    if "speed_up" in points:
        for point in points.dropna(subset=["speed_up"]).to_dict("records"):
            offset: dict[str, Any] = {"xytext": (4, 6), "textcoords": "offset points"}
            text = f"{point['speed_up']:.2f}x"
            axes.annotate(text, (point[x], point["accuracy"]), fontsize=7, **offset)
    return line
