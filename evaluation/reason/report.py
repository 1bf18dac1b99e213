"""Answers of several models as one table, and what is read off it: JSON, tables, the figure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any

import pandas as pd

from callbacks.answers import Reply
from callbacks.thinking import query_with_thoughts, thought_text
from evaluation.cost import Cost
from evaluation.figures import COLOURS
from evaluation.output import format_columns
from evaluation.reason.asking import Timing
from evaluation.reason.contestants import LATENTS, Contestant
from evaluation.runs import is_number
from evaluation.scoring import Share, share_of
from lightning_models.outputs import Likelihood

COLUMNS = {
    "latents": "latents",
    "written_tokens": "written tokens",
    "seconds_per_question": "s/question",
    "speed_up": "speed-up",
    "rounds": "rounds",
    "chunks": "chunks",
    "nontrivial_chunks": "with a thought",
    "executed_steps": "executed steps",
    "flops_per_token": "FLOPs/token",
    "likelihood": "likelihood",
}
"""Values that the printed table has where any model has them, and what it calls them."""
MEANS = ("rounds", "chunks", "nontrivial_chunks", "thought_tokens")
"""Numbers of an answer that results have the means of."""


def answer_row(
    tokenizer: Any, label: str, reply: Reply, question_first: bool = False
) -> dict[str, Any]:
    """Returns an answer as plain values, a line of the answers file.

    Args:
        tokenizer: of the data.
        label: of the model.
        reply: what it answers; its ``thoughts`` are None if it records none.
        question_first: whether it was asked with the question first.
    """
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


# ---- numbers of one model


@dataclass(frozen=True)
class ReasonResult:
    """Answers of one model."""

    label: str
    checkpoint: str
    model: str
    """Name of its class."""
    rows: Sequence[dict[str, Any]]
    """Its answers, see ``answer_row``, at least one, in the questions' order."""
    question_first: Sequence[dict[str, Any]] | None = None
    """The same with the question first; None: not asked so."""
    timing: Timing | None = None
    speed_up: float | None = None
    """Over the baseline; None where it was not timed, or there is none."""
    latents: int | None = None
    cost: Cost | None = None
    likelihood: Likelihood | None = None
    """Kind of the likelihood that chose the answers; None where they are written."""
    causal: bool = True
    """Whether no token's likelihood depends on later ones."""
    candidates: int | None = None
    """Answers to choose from; None where they are written."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it was trained on, and what was changed."""

    @cached_property
    def answers(self) -> pd.DataFrame:
        """The answers as a table."""
        return pd.DataFrame(self.rows)

    @property
    def accuracy(self) -> Share:
        """Of all questions."""
        return _share(self.answers["right"])

    def by_group(self) -> dict[int, Share]:
        """Returns the accuracy of each group, groups ascending."""
        return {int(g): _share(right) for g, right in self.answers.groupby("group")["right"]}

    def thinking(self) -> dict[str, float]:
        """Returns means over the questions of what is thought while they are read.

        ``rounds``: passes of the backbone; ``chunks``: all; ``nontrivial_chunks``: with a thought;
        ``thought_tokens``. Empty for models that record nothing.
        """
        known = [name for name in MEANS if name in self.answers]
        return {name: statistics.fmean(self.answers[name]) for name in known}

    def with_question_first(self) -> dict[str, Share]:
        """Returns the shares of right answers with the question first (Fig. 5), by name.

        ``accuracy``: of all questions; ``recovered``: of those answered wrongly before;
        ``intervention``: of all, had only those been asked again (Sec. 4.5). Empty where it was not
        asked so.
        """
        if self.question_first is None:
            return {}
        before, now = self.answers["right"], pd.DataFrame(self.question_first)["right"]
        return {
            "accuracy": _share(now),
            "recovered": _share(now[~before]),
            "intervention": _share(before | now),
        }

    def as_dict(self, group_name: str) -> dict[str, Any]:
        """Returns the numbers under the keys of the JSON file.

        Args:
            group_name: what a group counts.
        """
        return {
            "label": self.label,
            "model": self.model,
            **({} if self.latents is None else {"latents": self.latents}),
            **self.accuracy.as_dict(),
            "written_tokens": statistics.fmean(self.answers["written_tokens"]),
            **self._speed(),
            **self._choice(),
            **({} if self.cost is None else self.cost.as_dict()),
            **self.thinking(),
            **{
                f"question_first_{name}{ending}": value
                for name, share in self.with_question_first().items()
                for ending, value in (("", share.value), ("_standard_error", share.error))
            },
            "by_group": [
                {group_name: group, **share.as_dict()} for group, share in self.by_group().items()
            ],
            "checkpoint": self.checkpoint,
            "settings": self.settings,
        }

    def _speed(self) -> dict[str, Any]:
        """Returns seconds per question and the speed-up; empty where it was not timed."""
        if self.timing is None:
            return {}
        per_question = [seconds / self.timing.questions for seconds in self.timing.rounds]
        return {
            "seconds_per_question": self.timing.seconds,
            "speed_up": self.speed_up,
            "seconds_per_question_by_round": per_question,
        }

    def _choice(self) -> dict[str, Any]:
        """Returns among how many answers was chosen, by what; empty where they are written."""
        if self.candidates is None:
            return {}
        return {
            "candidates": self.candidates,
            "likelihood": self.likelihood,
            "causal": self.causal,
        }


def _share(flags: pd.Series) -> Share:
    return share_of(flags.tolist())


def overlaps(results: Sequence[ReasonResult]) -> pd.DataFrame:
    """Returns which questions one model solves and another does not (Sec. 4.5), a row a pair.

    Columns: ``solves`` and ``fails``, labels; ``questions``, how many; ``share_of_solved``, their
    share of what the one solves, the paper's 12 %, nan if it solves nothing;
    ``share_of_questions``. The models have answered the same questions.
    """
    right = {result.label: result.answers["right"].to_numpy() for result in results}
    rows = []
    for one, other in permutations(right, 2):
        count = int((right[one] & ~right[other]).sum())
        solved = int(right[one].sum())
        share = count / solved if solved else float("nan")
        rows.append((one, other, count, share, count / len(right[one])))
    columns = ["solves", "fails", "questions", "share_of_solved", "share_of_questions"]
    return pd.DataFrame(rows, columns=columns)


# ---- all models


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
            "overlap": overlaps(self.results).to_dict("records"),
            "baseline": self.baseline,
            "data": self.data,
            "settings": self.settings,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Returns all answers, model after model, in the questions' order."""
        return [row for one in self.results for row in (*one.rows, *(one.question_first or ()))]

    def as_table(self) -> str:
        """Returns the result for people."""
        tables = [self._models(), self._groups(), self._question_first(), self._overlap()]
        texts = [format_columns(rows) for rows in tables if len(rows) > 1]
        return "\n\n".join([*texts, "\n".join(self._notes())])

    def _models(self) -> list[list[str]]:
        numbers = [result.as_dict(self.group_name) for result in self.results]
        shown = [key for key in COLUMNS if any(own.get(key) is not None for own in numbers)]
        rows = [["", "accuracy", *(COLUMNS[key] for key in shown)]]
        for result, own in zip(self.results, numbers, strict=True):
            cells = (_cell(own.get(key)) for key in shown)
            rows.append([result.label, str(result.accuracy), *cells])
        return rows

    def _groups(self) -> list[list[str]]:
        """Returns accuracies by group; nothing if there is one group only."""
        columns = [result.by_group() for result in self.results]
        if len(columns[0]) < 2:
            return []
        rows = [[self.group_name, *(result.label for result in self.results)]]
        return rows + [[str(g), *(str(column[g]) for column in columns)] for g in columns[0]]

    def _question_first(self) -> list[list[str]]:
        shares = [(result.label, result.with_question_first()) for result in self.results]
        rows = [[label, *map(str, found.values())] for label, found in shares if found]
        return [["question first", "all so", "of those wrong before", "only those so"], *rows]

    def _overlap(self) -> list[list[str]]:
        """Returns the share of what a row's model solves that a column's does not."""
        if len(self.results) < 2:
            return []
        labels = [result.label for result in self.results]
        cells = {
            (pair.solves, pair.fails): f"{pair.share_of_solved:.4f} ({pair.questions:,})"
            for pair in overlaps(self.results).dropna().itertuples()
        }
        rows = [[one, *(cells.get((one, other), "-") for other in labels)] for one in labels]
        return [["solved by, not by", *labels], *rows]

    def _notes(self) -> Iterator[str]:
        count, settings = len(self.results[0].answers), self.settings
        yield f"{count:,} questions of the {self.data['split']} split, on {settings['device']}"
        candidates = self.results[0].candidates
        if candidates is not None:
            yield (
                f"the likeliest of {candidates} possible answers is taken; by chance "
                f"{1 / candidates:.4f} are right"
            )
        if settings["rounds"]:
            yield (
                f"times are medians of {settings['rounds']} rounds over the first "
                f"{settings['timed_questions']:,} questions, {settings['timing_batch_size']} at a "
                "time, models in turn"
            )
            if self.baseline is not None:
                yield f"speed-ups are over {self.baseline}"
        if len(self.results) > 1:
            yield "overlap: share of what the row's model solves that the column's does not"
        for moved in self.data.get("moved_steps", ()):
            yield (
                f"with chunks of {moved['chunk_size']} tokens {moved['questions']:,} of "
                f"{moved['of']:,} {moved['split']} questions have a step moved out of its chunk"
            )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


# ---- figure: accuracies by length, or against a setting with speed-ups (Fig. 3)


RECURRENCE = "recurrence"
"""Stands for the layers between injection and extraction (Fig. 3 a)."""
LEGEND_COLUMNS = 3
NAMES = {RECURRENCE: "layers in the recurrence", LATENTS: "latent thoughts"}
"""What axes are called, where not by the key."""

Against = tuple[str, Sequence[float | None]]
"""A setting, and its value for each model; None for models without it."""


def settings_of(contestants: Sequence[Contestant], key: str) -> Against:
    """Returns a field of the models' configs with its value for each; None for models without it.

    Args:
        contestants: who was asked.
        key: the field, or ``recurrence``.

    Raises:
        ValueError: if no model has it, or one has no number there.
    """
    values = [_setting(one, key) for one in contestants]
    if all(value is None for value in values):
        raise ValueError(f"against ({key}) is no setting of any model's config")
    return key, values


def _setting(one: Contestant, key: str) -> float | None:
    model: Any
    with one.ready() as model:
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
            f"against ({key}) is {value!r} in {one.checkpoint.path}; an axis needs numbers"
        )
    return float(value)


def points_of(
    results: Sequence[ReasonResult], group_name: str, against: Against | None = None
) -> pd.DataFrame:
    """Returns the points of the figure: ``label``, what they are over, and their values.

    Columns: over groups ``accuracy`` and ``standard_error``, a row a model and group; over a
    setting also ``speed_up``, a row a model.
    """
    rows: list[Sequence[Any]]
    if against is None:
        columns = ["label", group_name, "accuracy", "standard_error"]
        rows = [
            (result.label, group, share.value, share.error)
            for result in results
            for group, share in result.by_group().items()
        ]
    else:
        columns = ["label", against[0], "accuracy", "standard_error", "speed_up"]
        rows = [
            (result.label, value, result.accuracy.value, result.accuracy.error, result.speed_up)
            for result, value in zip(results, against[1], strict=True)
        ]
    return pd.DataFrame(rows, columns=columns, dtype=object)


def reason_figure(
    results: Sequence[ReasonResult], group_name: str, against: Against | None = None
) -> Any:
    """Returns accuracies over groups, a line a model; or over a setting, a line a class of models.

    Lines have one standard error to both sides. Over a setting, numbers at the points are
    speed-ups, and models without it are dotted lines.

    Args:
        results: of the models.
        group_name: what a group counts.
        against: a setting and its value for each model; None: over groups.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    points = points_of(results, group_name, against)
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes: Any = figure.subplots()
    points["line"] = points["label"]
    if against is not None:
        points["line"] = [result.model for result in results]
    x = points.columns[1]
    flat = points[points[x].isna()]
    named: dict[str, Any] = {}
    for line, members in points.dropna(subset=[x]).groupby("line", sort=False):
        named[str(line)] = _line(axes, members.sort_values(x), COLOURS[len(named) % len(COLOURS)])
    for label, value in zip(flat["label"], flat["accuracy"], strict=True):
        colour = COLOURS[len(named) % len(COLOURS)]
        named[label] = axes.axhline(value, linestyle=":", color=colour)
    axes.set_xlabel(NAMES.get(x, x))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel("accuracy")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    _legend(figure, named)
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
            place: dict[str, Any] = {"xytext": (4, 6), "textcoords": "offset points"}
            text = f"{point['speed_up']:.2f}x"
            axes.annotate(text, (point[x], point["accuracy"]), fontsize=7, **place)
    return line


def _legend(figure: Any, named: Mapping[str, Any]) -> None:
    plain = [label.replace("$", r"\$") for label in named]  # a dollar would begin a formula
    columns = min(len(plain), LEGEND_COLUMNS)
    place = {"loc": "outside upper center", "ncols": columns}
    figure.legend(list(named.values()), plain, frameon=False, fontsize=8, **place)
