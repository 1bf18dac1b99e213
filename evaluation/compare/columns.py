"""The columns of the table: a number of each run, as a mean over the seeds of a row."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evaluation.compare.measured import ANSWERS, Measured
from evaluation.compare.rows import KINDS, Row
from evaluation.scoring import PERPLEXITY_KEYS

TOKEN = {"all": "token", "lexical": "lexical token", ANSWERS: "answer token"}
"""What nats are per, by what is counted."""
PREFERRED = ("acc", "acc,none", "acc_norm", "acc_norm,none", "accuracy", "exact_match")
"""The metric of a task that the table shows, if it has one of them; the CSV file has all."""
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")

Number = float | int | None


@dataclass(frozen=True)
class Column:
    """A number that runs have."""

    key: str
    """Of the CSV file."""
    title: str
    value: Callable[[Measured], Number]
    """None where a run has no such number."""
    show: Callable[[float], str] = str
    in_table: bool = True
    """Whether the table for people has it."""

    def values(self, row: Row) -> list[float]:
        """Returns the numbers of a row's members that have one."""
        return [v for v in map(self.value, row.members) if v is not None]

    def cell(self, row: Row) -> str:
        """Returns the mean, and between which values the seeds lie; empty without a number."""
        values = self.values(row)
        if not values:
            return ""
        low, high = self.show(min(values)), self.show(max(values))
        mean = self.show(statistics.mean(values))
        return mean if low == high else f"{mean} ({low} to {high})"


def make_columns(rows: Sequence[Row]) -> list[Column]:
    """Returns the columns that some row has a number in; a kind of likelihood has its own."""
    columns = [*_sizes(), *_likelihoods(rows), *_inference(), *_tasks(rows)]
    return [column for column in columns if any(column.values(row) for row in rows)]


def si(value: float) -> str:
    """Returns a number in three digits and a prefix, such as 12.3 G."""
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {PREFIXES[power]}".rstrip()


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _sizes() -> list[Column]:
    return [
        Column("parameters", "parameters", lambda m: m.training.parameters, _whole),
        Column(
            "non_embedding_parameters",
            "outside embeddings",
            lambda m: m.training.non_embedding,
            _whole,
            in_table=False,
        ),
        Column("steps", "optimiser steps", lambda m: m.training.steps, _whole, in_table=False),
        Column("training_tokens", "training tokens", lambda m: m.training.tokens, _whole),
        Column(
            "training_flops_per_token",
            "training FLOPs/token",
            lambda m: m.training.flops_per_token,
            si,
        ),
        Column(
            "training_flops_per_token_published",
            "training FLOPs/token, as its paper counts",
            _published,
            si,
        ),
        Column("training_flops", "training FLOPs", lambda m: m.training.flops, si),
    ]


def _published(one: Measured) -> Number:
    count, training = one.training.published_per_position, one.training
    if count is None or not training.tokens or training.positions is None:
        return None
    return count * training.positions / training.tokens


def _likelihoods(rows: Sequence[Row]) -> list[Column]:
    """Returns columns of which none has two kinds of likelihood, or two kinds of tokens."""
    found = {(row.first.likelihood, row.first.counted) for row in rows}
    columns = []
    for kind in KINDS:
        for counted in TOKEN:
            if (kind, counted) in found:
                columns += _of_kind(kind, counted)
    text_kinds = [kind for kind in KINDS if {(kind, "all"), (kind, "lexical")} & found]
    columns += [_bits(kind, of_answers=False) for kind in text_kinds]
    columns += [_bits(kind, of_answers=True) for kind in KINDS if (kind, ANSWERS) in found]
    return columns


def _of_kind(kind: str, counted: str) -> list[Column]:
    def nats(one: Measured) -> Number:
        own = (one.likelihood, one.counted) == (kind, counted)
        return one.score.content["nats_per_token"] if own else None

    def perplexity(one: Measured) -> Number:
        own = (one.likelihood, one.counted) == (kind, counted)
        return one.score.content[PERPLEXITY_KEYS[kind]] if own else None

    end = "" if counted == "all" else f"_{counted}"
    return [
        Column(
            f"nats_per_token_{kind}{end}",
            f"nats/{TOKEN[counted]} ({KINDS[kind]})",
            nats,
            _fixed(4),
        ),
        Column(
            f"{PERPLEXITY_KEYS[kind]}{end}",
            f"perplexity ({KINDS[kind]})",
            perplexity,
            _fixed(2),
            in_table=False,
        ),
    ]


def _bits(kind: str, *, of_answers: bool) -> Column:
    def bits(one: Measured) -> Number:
        own = one.likelihood == kind and (one.counted == ANSWERS) is of_answers
        return one.score.content["bits_per_byte"] if own else None

    of = " of answers" if of_answers else ""
    end = f"_{ANSWERS}" if of_answers else ""
    return Column(f"bits_per_byte_{kind}{end}", f"bits/byte{of} ({KINDS[kind]})", bits, _fixed(4))


def generating(one: Measured) -> float:
    """Returns the FLOPs per token of text that a run's model writes."""
    return one.score.generation_flops * one.score.markers


def _scoring(one: Measured) -> Number:
    flops = one.score.content.get("flops_per_token")
    return None if flops is None else flops * one.score.markers


def _inference() -> list[Column]:
    return [
        Column("executed_steps", "extra steps/token", _steps, _fixed(2)),
        Column("inference_flops_per_token", "inference FLOPs/token, generating", generating, si),
        Column("scoring_flops_per_token", "inference FLOPs/token, scoring", _scoring, si),
        Column(
            "tokens_per_second",
            "training tokens/s",
            lambda m: m.training.tokens_per_second,
            _whole,
        ),
        Column("val_accuracy", "right answers (val)", lambda m: m.training.accuracy, _fixed(3)),
    ]


def _steps(one: Measured) -> Number:
    return one.score.content.get("executed_steps")


def _tasks(rows: Sequence[Row]) -> list[Column]:
    """Returns a column a task and metric; the table shows one metric of each task."""
    metrics: dict[str, dict[str, None]] = {}
    for one in (member for row in rows for member in row.members):
        for task, result in one.tasks.items():
            metrics.setdefault(task, {}).update(dict.fromkeys(result.metrics))
    columns = []
    for task, names in metrics.items():
        shown = next((name for name in PREFERRED if name in names), next(iter(names), None))
        columns += [_task(task, name, shown=name == shown) for name in names]
    return columns


def _task(task: str, metric: str, *, shown: bool) -> Column:
    def value(one: Measured) -> Number:
        result = one.tasks.get(task)
        return None if result is None else result.metrics.get(metric)

    return Column(f"{task}_{metric}", f"{task} ({metric})", value, _fixed(3), in_table=shown)
