"""Runs as rows of the table: those that differ in the seed only are one."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.compare.measured import Measured
from evaluation.compare.scoring import SAME_RECIPE
from evaluation.runs.labels import MODEL, MOST_KEYS, differing, label_runs
from lightning_models.checkpoint import Recipe

KINDS = {
    "exact": "exact",
    "lower_bound": "bound",
    "estimate": "estimate",
    "noncausal": "not causal",
}
"""Kinds of likelihoods in the order of the rows, and what columns call them."""
NOT_A_RECIPE = SAME_RECIPE | {
    "seed",
    "compile",
    "eval_batch_size",
    "data_files",  # what the text is, its fingerprint says
    "val_files",
    "test_files",
}
"""Keys in which runs of one recipe may differ."""


@dataclass(frozen=True)
class Row:
    """Runs of one recipe with different seeds."""

    label: str
    members: tuple[Measured, ...]

    @property
    def first(self) -> Measured:
        """Any of them: what is no number is the same for all."""
        return self.members[0]

    @property
    def seeds(self) -> list[str]:
        """Seed of each member, with that of the data order where members differ in it."""
        orders = {member.order.get("seed") for member in self.members}
        return [_seed(member, with_order=len(orders) > 1) for member in self.members]

    @property
    def loss(self) -> float:
        """What rows of a kind are ordered by: mean bits per byte, else nats per token."""
        contents = [member.score.content for member in self.members]
        key = "bits_per_byte" if all(c.get("bits_per_byte") for c in contents) else "nats_per_token"
        return statistics.fmean(content[key] or 0.0 for content in contents)


def make_rows(measured: Sequence[Measured], keys: str | None = None) -> list[Row]:
    """Returns the rows, ordered by kind of likelihood and by loss within each.

    Args:
        measured: runs in any order, at least one.
        keys: of the models' config that name the rows, separated by commas; None: what the command
            line names them, else the class of the model, and what rows of one class differ in.

    Raises:
        ValueError: if no model has such a key.
    """
    groups: dict[tuple[str | None, str], list[Measured]] = {}
    for one in measured:
        groups.setdefault((one.run.row, recipe_of(one)), []).append(one)
    members = [tuple(sorted(group, key=lambda one: one.name)) for group in groups.values()]
    labels = _labels([group[0] for group in members], keys)
    rows = [Row(label, group) for label, group in zip(labels, members, strict=True)]
    order = list(KINDS)
    return sorted(
        rows,
        key=lambda row: (
            order.index(row.first.likelihood),
            row.first.counted == "answers",
            row.loss,
            row.label,
        ),
    )


def recipe_of(one: Measured) -> str:
    """Returns what runs of different seeds have in common, as text."""
    run = one.run
    order = {key: value for key, value in one.order.items() if key != "seed"}
    parts = {
        "model": _bare(run.checkpoint.model_recipe),
        "data": _bare(run.checkpoint.data_recipe),
        "fingerprint": run.checkpoint.data_state.get("fingerprint"),
        "order": order,
        "steps": run.checkpoint.step,
        "precision": run.record.get("trainer", "precision"),
    }
    return json.dumps(parts, sort_keys=True, default=str)


def same_seeds(rows: Sequence[Row]) -> list[str]:
    """Returns a sentence for each row of which two runs have the same known seed."""
    found = []
    for row in rows:
        known = [seed for seed in row.seeds if not seed.startswith("?")]
        if len(set(known)) < len(known):
            found.append(
                f"{row.label}: two of its runs have the same seed ({', '.join(row.seeds)}), so "
                "their spread says nothing about seeds."
            )
    return found


def _seed(member: Measured, *, with_order: bool) -> str:
    seed = member.run.record.get("seed_everything")
    text = "?" if seed is None or isinstance(seed, bool) else str(seed)
    return f"{text} (data {member.order.get('seed', '?')})" if with_order else text


def _bare(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _bare(v) for key, v in value.items() if key not in NOT_A_RECIPE}
    return [_bare(v) for v in value] if isinstance(value, list | tuple) else value


def _labels(firsts: Sequence[Measured], keys: str | None) -> list[str]:
    recipes = [one.run.outline.recipe() for one in firsts]
    names = [one.name for one in firsts]
    if keys is not None:
        chosen = label_runs(recipes, names, keys).texts()
        return _unique(chosen, names)
    texts = [one.run.row or "" for one in firsts]
    unnamed = [number for number, text in enumerate(texts) if not text]
    for kind in dict.fromkeys(firsts[number].run.model for number in unnamed):
        numbers = [number for number in unnamed if firsts[number].run.model == kind]
        found = _of_one_class([recipes[n] for n in numbers], [names[n] for n in numbers])
        for number, text in zip(numbers, found, strict=True):
            texts[number] = text
    return _unique(texts, names)


def _of_one_class(recipes: Sequence[Recipe], names: Sequence[str]) -> list[str]:
    """Returns what tells models of one class apart: the class, one or two keys, or the names."""
    kind = recipes[0]["class_path"].rpartition(".")[2]
    if len(recipes) == 1:
        return [kind]
    keys = differing([recipe["init_args"].get("config", {}) for recipe in recipes])
    if not 0 < len(keys) <= MOST_KEYS:
        return [f"{kind} ({name})" for name in names]
    return _unique(label_runs(recipes, names, ",".join([MODEL, *keys])).texts(), names)


def _unique(texts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the texts, with the name of a run behind those that are not unique."""
    return [
        text if texts.count(text) == 1 else f"{text} ({name})"
        for text, name in zip(texts, names, strict=True)
    ]
