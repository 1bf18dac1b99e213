"""Scores of tasks with kinds of likelihood and costs: as JSON, as a table, per example."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lm_eval.utils import make_table

from evaluation.cost import Cost, price
from evaluation.scoring import PERPLEXITY_KEYS
from evaluation.tables import KINDS, TWO
from evaluation.tasks.adapter import LogLikelihood, RequestStats, RollingLogLikelihood, TaskUsage
from lightning_models import LanguageModel
from lightning_models.outputs import Likelihood

_NO_FILTER = "none"

_SHOWN: dict[str, Callable[[Any], str]] = {
    "likelihood": str,
    "flops_per_token": "{:.3g}".format,
    "executed_steps": TWO,
}
"""Further keys of a score in the table, and their formats."""

Score = dict[str, Any]
"""Scores of a task or group under the keys of the JSON file, see ``task_scores``."""


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def task_scores(
    results: Mapping[str, Any], model: LanguageModel, usage: Mapping[str, TaskUsage]
) -> dict[str, Score]:
    """Returns the scores of each group and each task, groups first.

    The keys are ``metrics`` and ``standard_errors`` of the harness, with perplexities named by the
    kind of their likelihood; ``likelihood`` and ``causal``, None for written texts; ``examples``
    that were scored, and ``of_examples``, the number that the task has; ``num_fewshot`` and
    ``version``; numbers of tokens; the entries of ``price``; and, for groups, ``tasks``, their
    members.

    Args:
        results: Results of ``harness.score_tasks``.
        model: The model.
        usage: Time and tokens by task.
    """
    samples, groups = results["samples"], results.get("group_subtasks", {})
    scores = {}
    for name in (*groups, *samples):
        members = [name] if name in samples else _leaves(name, groups)
        facts = facts_of(
            answer
            for member in members
            for example in samples[member]
            for tries in example["resps"]
            for answer in tries
        )
        kinds = kinds_of(facts)
        counts = [results["n-samples"][member] for member in members]
        scores[name] = {
            **_metrics(results["results"].get(name, {}), weakest(kinds)),
            "likelihood": " and ".join(kinds) or None,
            "causal": all(fact.causal for fact in facts) if facts else None,
            "examples": sum(count["effective"] for count in counts),
            "of_examples": sum(count["original"] for count in counts),
            "num_fewshot": results["n-shot"].get(name),
            "version": results["versions"].get(name),
            "scored_tokens": sum(fact.scored for fact in facts),
            "read_tokens": sum(fact.read for fact in facts),
            **_cost(facts, [usage[m] for m in members if m in usage], model),
            **({} if name in samples else {"tasks": members}),
        }
    return scores


def facts_of(answers: Iterable[Any]) -> list[RequestStats]:
    """Returns the statistics of all answers that are log-likelihoods."""
    return [a.facts for a in answers if isinstance(a, LogLikelihood | RollingLogLikelihood)]


def kinds_of(facts: Iterable[RequestStats]) -> list[Likelihood]:
    """Returns the kinds of likelihood of requests with scored tokens, each once."""
    return list(dict.fromkeys(fact.likelihood for fact in facts if fact.scored))


def weakest(kinds: Iterable[Likelihood]) -> Likelihood:
    """Returns the weakest kind, which holds for several of them together."""
    return max(kinds, key=list(KINDS).index, default="exact")


def _leaves(name: str, groups: Mapping[str, Any]) -> list[str]:
    inner = [_leaves(child, groups) if child in groups else [child] for child in groups[name]]
    return [leaf for part in inner for leaf in part]


def _metrics(values: Mapping[str, Any], likelihood: Likelihood) -> dict[str, dict[str, Any]]:
    """Splits the harness' values, named ``metric,filter``, into metrics and standard errors."""
    metrics, errors = {}, {}
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        is_number = isinstance(value, float | int)  # else N/A
        if not (comma and is_number) or metric.endswith("_stderr"):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        label = metric.replace("perplexity", PERPLEXITY_KEYS[likelihood])
        label += "" if filtered == _NO_FILTER else f" ({filtered})"
        metrics[label] = float(value)
        errors[label] = float(error) if isinstance(error, float | int) else None
    return {"metrics": metrics, "standard_errors": errors}


def _cost(facts: Sequence[RequestStats], parts: Sequence[TaskUsage], model: LanguageModel) -> Cost:
    """Returns the cost of a token in a context of the mean length of the requests.

    The length of a request is the number of tokens read for a log-likelihood, or of a prompt and
    its continuation. FLOPs are per token read, or per token written.
    """
    read, tokens = sum(fact.read for fact in facts), 0.0
    if facts:
        length = -(-read // len(facts))
        taken = _sum_of_known(fact.steps for fact in facts)
        tokens += sum(fact.scored for fact in facts)
    else:
        taken = _sum_of_known(part.written_steps for part in parts)
        tokens += sum(part.written_tokens for part in parts)
        prompts = sum(part.prompt_tokens for part in parts)
        length = round((prompts + tokens) / max(1, sum(part.prompts for part in parts)))
    length = max(1, length)
    steps = None if taken is None else taken / max(1, tokens)
    flops, planned = model.generation_flops(length, steps), None
    if read:
        flops = sum(fact.flops for fact in facts) / read
        planned = sum(fact.nominal_flops for fact in facts) / read
    return price(model, length, steps, sum(part.seconds for part in parts), flops, planned)


def shown(scores: Mapping[str, Score]) -> dict[str, Score]:
    """Returns the scores of groups that have a mean, and tasks outside these groups."""
    inside = {
        task for score in scores.values() if score["metrics"] for task in score.get("tasks", ())
    }
    return {n: score for n, score in scores.items() if score["metrics"] and n not in inside}


def headlines(scores: Mapping[str, Score]) -> dict[str, float]:
    """Returns the metrics of ``shown`` by ``task_metric``."""
    pairs = ((name, score["metrics"]) for name, score in shown(scores).items())
    return {f"{name}_{key}": value for name, metrics in pairs for key, value in metrics.items()}


def as_table(results: Mapping[str, Any], scores: Mapping[str, Score]) -> str:
    """Returns the harness' table of the scores of ``shown``, with likelihood and cost."""
    rows = {}
    for name, score in shown(scores).items():
        facts = {f"{key},": show(score[key]) for key, show in _SHOWN.items() if _known(score, key)}
        errors = score["standard_errors"]
        rows[name] = {
            **{f"{key},": value for key, value in score["metrics"].items()},
            **{f"{key}_stderr,": errors[key] for key in errors if _known(errors, key)},
            "examples,": _examples(score),
            **facts,
        }
    return make_table({**results, "results": rows})


def _known(values: Mapping[str, Any], key: str) -> bool:
    return values.get(key) is not None


def _examples(score: Score) -> str:
    whole = score["of_examples"]
    return f"{score['examples']:,}" + ("" if score["examples"] == whole else f" of {whole:,}")


def samples_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a plain dict for each example, in the order of the tasks.

    The keys are ``task``, ``example`` (its index), ``target`` and ``metrics``; for log-likelihoods
    ``log_likelihoods`` in nats, ``greedy`` and ``tokens``, one entry per request; for written texts
    ``texts``, one entry per try, and ``filtered``, the output of the task's filter.
    """
    return [
        {
            "task": name,
            "example": example["doc_id"],
            "target": _plain(example["target"]),
            "metrics": {key: _plain(example[key]) for key in example["metrics"] if key in example},
            **_answers([answer for tries in example["resps"] for answer in tries]),
            **_filtered(example),
        }
        for name, examples in results["samples"].items()
        for example in examples
    ]


def _filtered(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the filter's output for written texts; log-likelihoods pass through unchanged."""
    tries = [answer for several in example["resps"] for answer in several]
    if not all(isinstance(answer, str) for answer in tries):
        return {}
    return {"filtered": _plain(example["filtered_resps"])}


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
    except (TypeError, ValueError):  # any object that the user's task file returns
        return str(value)
