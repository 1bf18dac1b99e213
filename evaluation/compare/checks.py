"""What the runs of a comparison have in common, and what not."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evaluation.compare.measured import Measured
from evaluation.compare.rows import KINDS

State = Literal["matched", "differs", "not known"]

CLOSE_TOKENS, CLOSE_PARAMETERS, CLOSE_FLOPS = 0.01, 0.05, 0.05
"""How far the largest may be above the smallest where runs are called matched."""
MOST_NAMES = 4
NONE = "none"
DEFAULT_PRECISION = "32-true"
"""Of the trainer, where a record says none."""
HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


@dataclass(frozen=True)
class Check:
    """One property that runs may share."""

    what: str
    state: State
    detail: str
    """The value that all share, or the values with the runs that have them."""

    def as_text(self) -> str:
        """Returns the check in one line."""
        return f"{self.state}: {self.what}: {self.detail}"


Fact = Callable[[Measured], Any]


def make_checks(measured: Sequence[Measured]) -> list[Check]:
    """Returns what the runs share or not, what makes numbers incomparable first."""
    return [
        _equal("training text", measured, lambda one: one.text),
        _parts("data order", measured, lambda one: one.order),
        _equal("tokenizer", measured, lambda one: one.tokenizer),
        _close("tokens trained on", measured, lambda one: one.training.tokens, CLOSE_TOKENS),
        _equal("optimiser steps", measured, lambda one: one.training.steps, ","),
        _close("parameters", measured, lambda one: one.training.parameters, CLOSE_PARAMETERS),
        _close("training FLOPs", measured, lambda one: one.training.flops, CLOSE_FLOPS, ".3g"),
        _parts("held-out text that is scored", measured, _held_out),
        _equal("text of the training is still there", measured, _still_there),
        _equal("targets that nats per token count", measured, lambda one: one.counted),
        _equal("kind of likelihood", measured, lambda one: KINDS[one.likelihood]),
        _equal("context when scoring", measured, _context),
        _equal("precision of training", measured, _precision),
        _equal("code version", measured, lambda one: _version(one, "commit")),
        _equal("torch version", measured, lambda one: _version(one, "torch")),
        *_tasks(measured),
    ]


def _tasks(measured: Sequence[Measured]) -> list[Check]:
    """Returns whether the runs that have a task were asked alike."""
    names = dict.fromkeys(name for one in measured for name in one.tasks)
    return [_task(name, [one for one in measured if name in one.tasks]) for name in names]


def _task(name: str, having: Sequence[Measured]) -> Check:
    return _parts(f"task {name}", having, lambda one: one.tasks[name].how)


def _held_out(one: Measured) -> dict[str, Any]:
    content = one.score.content
    return {"text": one.text, "split": content["data"]["split"], "bytes": content["bytes"]}


def _still_there(one: Measured) -> str:
    return "yes" if one.same_text else "no, it has changed since"


def _context(one: Measured) -> str:
    reads = one.run.outline.reads
    if reads == "windows":
        return f"windows of {one.score.context} tokens"
    return "whole documents" if reads == "sentences" else "questions"


def _precision(one: Measured) -> str | None:
    if not one.run.record.settings:
        return None
    return str(one.run.record.get("trainer", "precision") or DEFAULT_PRECISION)


def _version(one: Measured, name: str) -> str | None:
    """Returns a version, the hash of a commit cut to 12 digits; None where it is not known."""
    version = one.run.record.versions.get(name)
    return None if version is None else HASH.sub(r"\1", version)


def _equal(what: str, measured: Sequence[Measured], fact: Fact, form: str = "") -> Check:
    """Returns whether all runs have one value; None is one that is not known."""
    groups: dict[Any, list[str]] = {}
    for one in measured:
        groups.setdefault(fact(one), []).append(one.name)
    known = [value for value in groups if value is not None]
    if len(known) > 1:
        return Check(what, "differs", _listed(groups, form))
    if None in groups:
        return Check(what, "not known", _listed(groups, form) if known else "of any run")
    return Check(what, "matched", _shown(known[0], form))


def _close(
    what: str, measured: Sequence[Measured], fact: Fact, within: float, form: str = ","
) -> Check:
    """Returns whether the values of all runs are nearly the same."""
    exact = _equal(what, measured, fact, form)
    values = [value for value in map(fact, measured) if value is not None]
    if exact.state != "differs" or max(values) > (1 + within) * min(values):
        return exact
    state: State = "not known" if len(values) < len(measured) else "matched"
    return Check(what, state, f"within {within:.0%}: {exact.detail}")


def _parts(what: str, measured: Sequence[Measured], fact: Fact) -> Check:
    """Returns whether all runs have the same values, by key; tells those that differ."""
    every: list[Mapping[str, Any]] = [fact(one) for one in measured]
    keys = list(dict.fromkeys(key for one in every for key in one))
    different = [key for key in keys if len({str(one.get(key)) for one in every}) > 1]
    if not different:
        return Check(what, "matched", _joined(every[0], keys))
    groups: dict[str, list[str]] = {}
    for one, values in zip(measured, every, strict=True):
        groups.setdefault(_joined(values, different), []).append(one.name)
    return Check(what, "differs", _listed(groups))


def _joined(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Returns the values of a run that it has, with their names."""
    own = [f"{key} {_shown(values[key], ',')}" for key in keys if key in values]
    return ", ".join(own) or NONE


def _listed(groups: Mapping[Any, Sequence[str]], form: str = "") -> str:
    return " | ".join(f"{_shown(value, form)} ({_named(names)})" for value, names in groups.items())


def _named(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _shown(value: Any, form: str = "") -> str:
    if value is None:
        return "not known"
    plain = isinstance(value, bool) or not isinstance(value, int | float)
    return str(value) if plain else format(value, form)
