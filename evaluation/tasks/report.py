"""What ``evaluate.py tasks`` tells: scores, what they are, and what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.cost import Nominal, Thinking, price_steps
from evaluation.output import format_columns, format_table
from evaluation.scoring import PERPLEXITY_KEYS
from evaluation.tasks.adapter import Spent, Work
from lightning_models import LanguageModel
from lightning_models.outputs import Likelihood

_NO_FILTER = "none"

WEAKER: tuple[Likelihood, ...] = ("exact", "lower_bound", "estimate", "noncausal")
"""Kinds of likelihood, each says less than the one before: what several of them together are."""


@dataclass(frozen=True)
class TaskScore:
    """The scores of a task, or of a group of them.

    Attributes:
        name: Of the task.
        metrics: The harness' metrics. Perplexities are named by the kind of their likelihood.
        errors: Their standard errors; None where the harness gives none.
        examples: How many were scored.
        of_examples: How many the task has.
        shots: Examples in front of each question; None where a group has several numbers.
        version: Of the task file.
        spent: What the log-likelihoods took; without requests where texts were written.
        work: What was computed in this process.
        thinking: Steps, and FLOPs of a generated token.
        nominal: What the configuration plans, where texts decide what runs.
        members: Tasks of a group; empty for a task.
    """

    name: str
    metrics: Mapping[str, float]
    errors: Mapping[str, float | None]
    examples: int
    of_examples: int
    shots: int | None
    version: Any
    spent: Spent
    work: Work
    thinking: Thinking
    nominal: Nominal | None = None
    members: tuple[str, ...] = ()

    @property
    def likelihood(self) -> str | None:
        """Kind of the log-likelihoods; None where texts were written."""
        return " and ".join(self.spent.kinds) or None

    @property
    def flops_per_token(self) -> float:
        """Forward FLOPs of a token that was read, or the FLOPs of one that was written."""
        if self.spent.read:
            return self.spent.flops / self.spent.read
        return self.thinking.generation_flops

    def as_dict(self) -> dict[str, Any]:
        """Returns the numbers as plain values under the keys of the JSON file."""
        return {
            "metrics": dict(self.metrics),
            "standard_errors": dict(self.errors),
            "likelihood": self.likelihood,
            "causal": self.spent.causal,
            "examples": self.examples,
            "of_examples": self.of_examples,
            "num_fewshot": self.shots,
            "version": self.version,
            "scored_tokens": self.spent.scored,
            "read_tokens": self.spent.read,
            "flops_per_token": self.flops_per_token,
            **self.thinking.as_dict(),
            **({} if self.nominal is None else self.nominal.as_dict()),
            "seconds": self.work.seconds,
            **({"tasks": list(self.members)} if self.members else {}),
        }


def task_scores(results: Mapping[str, Any], model: LanguageModel, work: Any) -> list[TaskScore]:
    """Returns the scores of each group and each task, groups first.

    Args:
        results: as ``harness.score_tasks`` returned them.
        model: which.
        work: ``Work`` by task.
    """
    samples, groups = results["samples"], results.get("group_subtasks", {})
    leaves = {name: [name] for name in samples}
    found = []
    for name in (*groups, *samples):
        members = leaves[name] if name in leaves else _leaves(name, groups)
        spent = Spent.of(
            outcome
            for member in members
            for example in samples[member]
            for answers in example["resps"]
            for outcome in answers
        )
        found.append(_score(name, results, members, spent, _together(work, members), model))
    return found


def shown(scores: Sequence[TaskScore]) -> list[TaskScore]:
    """Returns the scores of groups that have a mean, and of tasks that are in none of those."""
    inside = {member for score in scores if score.metrics for member in score.members}
    return [score for score in scores if score.metrics and score.name not in inside]


def _leaves(name: str, groups: Mapping[str, Any]) -> list[str]:
    inner = [_leaves(child, groups) if child in groups else [child] for child in groups[name]]
    return [leaf for part in inner for leaf in part]


def _score(
    name: str,
    results: Mapping[str, Any],
    members: list[str],
    spent: Spent,
    work: Work,
    model: LanguageModel,
) -> TaskScore:
    numbers = results["results"].get(name, {})
    counts = [results["n-samples"][member] for member in members]
    kind = max(spent.kinds, key=WEAKER.index, default="exact")
    metrics, errors = {}, {}
    for key, value in numbers.items():
        metric, comma, filtered = key.partition(",")
        number = isinstance(value, float | int)  # N/A where nothing can be said
        if not (comma and number) or metric.endswith("_stderr"):
            continue
        error = numbers.get(f"{metric}_stderr,{filtered}")
        label = metric.replace("perplexity", PERPLEXITY_KEYS[kind])
        label += "" if filtered == _NO_FILTER else f" ({filtered})"
        metrics[label] = float(value)
        errors[label] = float(error) if isinstance(error, float | int) else None
    return TaskScore(
        name=name,
        metrics=metrics,
        errors=errors,
        examples=sum(count["effective"] for count in counts),
        of_examples=sum(count["original"] for count in counts),
        shots=results["n-shot"].get(name),
        version=results["versions"].get(name),
        spent=spent,
        work=work,
        thinking=_thinking(spent, work, model),
        nominal=_nominal(spent, work, model) if model.adaptive else None,
        members=tuple(members) if name not in results["samples"] else (),
    )


def _together(work: Mapping[str, Work], members: list[str]) -> Work:
    parts = [work[member] for member in members if member in work]
    steps = [part.written_steps for part in parts if part.written_steps is not None]
    return Work(
        seconds=sum(part.seconds for part in parts),
        written_tokens=sum(part.written_tokens for part in parts),
        written_steps=sum(steps) if steps else None,
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        prompts=sum(part.prompts for part in parts),
    )


def _thinking(spent: Spent, work: Work, model: LanguageModel) -> Thinking:
    """Returns the price of a token in a context as long as the requests are on average."""
    length = _length(spent, work)
    if spent.requests:
        return price_steps(model, length, spent.mean_steps)
    taken = work.written_steps
    steps = None if taken is None else taken / max(1.0, work.written_tokens)
    return price_steps(model, length, steps)


def _nominal(spent: Spent, work: Work, model: LanguageModel) -> Nominal:
    length = _length(spent, work)
    flops = spent.nominal_flops / spent.read if spent.read else model.flops_per_token(length)
    return Nominal(flops, model.passes_per_token(length) - 1)


def _length(spent: Spent, work: Work) -> int:
    """Returns the tokens of a request, or of a prompt and its continuation, on average."""
    if spent.requests:
        return spent.length
    return max(1, round((work.prompt_tokens + work.written_tokens) / max(1, work.prompts)))


def samples_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns one plain dict an example, those of a task in order.

    Keys: ``task``, ``example`` (its number), ``target``, ``metrics``; of log-likelihoods
    ``log_likelihoods`` in nats, ``greedy`` and ``tokens``, one entry a request; of written texts
    ``texts``.
    """
    rows = []
    for name, examples in results["samples"].items():
        for example in examples:
            answers = [answer[0] for answer in example["resps"]]
            metrics = {key: _plain(example[key]) for key in example["metrics"] if key in example}
            rows.append(
                {
                    "task": name,
                    "example": example["doc_id"],
                    "target": _plain(example["target"]),
                    "metrics": metrics,
                    **_answers(answers),
                }
            )
    return rows


def _answers(answers: list[Any]) -> dict[str, Any]:
    if all(isinstance(answer, str) for answer in answers):
        return {"texts": answers}
    tokens = {"tokens": [answer.facts.scored for answer in answers]}
    if all(isinstance(answer, float) for answer in answers):
        return {"log_likelihoods": [float(answer) for answer in answers], **tokens}
    return {
        "log_likelihoods": [answer[0] for answer in answers],
        "greedy": [answer[1] for answer in answers],
        **tokens,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | bool | None):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):  # what a task file of yours makes of an answer
        return str(value)


@dataclass(frozen=True)
class TasksReport:
    """Scores of one model on some tasks, and everything needed to repeat them.

    Attributes:
        scores: Of groups and tasks.
        model: Name of the model's class.
        parameters: N, numbers without embeddings and output matrix.
        checkpoint: Its file.
        settings: How it was asked.
        versions: Of the packages that decide the numbers.
    """

    scores: list[TaskScore]
    model: str
    parameters: int
    checkpoint: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values; each number on top, for ``--view results``."""
        top = {
            f"{score.name}_{metric}": value
            for score in shown(self.scores)
            for metric, value in score.metrics.items()
        }
        return {
            **top,
            "model": self.model,
            "parameters": self.parameters,
            "checkpoint": self.checkpoint,
            "tasks": {score.name: score.as_dict() for score in self.scores},
            "settings": dict(self.settings),
            "versions": dict(self.versions),
        }

    def as_table(self) -> str:
        """Returns a row for each metric of each group, and of tasks in none."""
        header = ["task", "metric", "value", "error", "examples", "shots", "likelihood", "causal"]
        header += ["FLOPs/token", "6 N (1 + steps)", "steps", "seconds"]
        rows = [
            [score.name, metric, f"{value:.5g}", _number(score.errors[metric]), *_facts(score)]
            for score in shown(self.scores)
            for metric, value in score.metrics.items()
        ]
        common = {"model": self.model, "checkpoint": self.checkpoint}
        common |= {k: str(self.settings[k]) for k in ("mode", "budget") if k in self.settings}
        return f"{format_columns([header, *rows])}\n\n{format_table(common)}"


def _facts(score: TaskScore) -> list[str]:
    of = "" if score.examples == score.of_examples else f" of {score.of_examples:,}"
    causal = {True: "yes", False: "no", None: "-"}[score.spent.causal]
    return [
        f"{score.examples:,}{of}",
        "-" if score.shots is None else str(score.shots),
        score.likelihood or "-",
        causal,
        f"{score.flops_per_token:.3g}",
        f"{score.thinking.flops_6nd:.3g}",
        f"{score.thinking.executed_steps:.2f}",
        f"{score.work.seconds:.1f}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
