"""What ``evaluate.py sweep`` measures: likelihood and cost of checkpoints, at settings of dials."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.checkpoint.rebuild import build_outline
from evaluation.perplexity.report import PerplexityReport
from evaluation.perplexity.thinking import Thinking
from evaluation.runs.folders import short_names
from evaluation.runs.labels import MODEL, MOST_KEYS, Labels, differing, label_runs
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Recipe

STEPS = "thinking_steps"
"""Field of a model's config: K, the additional steps that a token may take at most."""


@dataclass(frozen=True)
class Variant:
    """A checkpoint at settings of its dials."""

    checkpoint: Checkpoint
    name: str
    """What tells its checkpoint from the others."""
    changes: Mapping[str, Any]
    """Fields of its config that are not as in training."""
    dials: Mapping[str, float]
    """The dials among them."""
    outline: LanguageModel
    """The model without weights."""

    @property
    def thinking_steps(self) -> int:
        """K; 0 for models without additional steps."""
        return int(getattr(self.outline.config, STEPS, 0))


@dataclass(frozen=True)
class SweepPoint:
    """What a variant has reached, and what a token costs it."""

    variant: Variant
    label: str
    """Points of one label are a line of the figure."""
    report: PerplexityReport
    thinking: Thinking

    def value(self, key: str) -> float:
        """Returns the number of an axis of the figure, see ``sweep_figure.AXES``."""
        if key == STEPS:
            return float(self.variant.thinking_steps)
        return self.thinking.as_dict()[key]


def find_variants(
    checkpoints: Sequence[Checkpoint],
    changes: Mapping[str, Any],
    dials: Mapping[str, Sequence[float]],
) -> list[Variant]:
    """Returns each checkpoint at each combination of the dials that its model has.

    Args:
        checkpoints: in their order.
        changes: fields of configs to change where a config has them.
        dials: values by the name of the field; no values: as trained.

    Raises:
        ValueError: if no config has a field, or refuses a value.
    """
    _check_known(checkpoints, [*changes, *(key for key, values in dials.items() if values)])
    names = short_names([checkpoint.path.resolve() for checkpoint in checkpoints])
    return [
        variant
        for checkpoint, name in zip(checkpoints, names, strict=True)
        for variant in _variants(checkpoint, name, changes, dials)
    ]


def _variants(
    checkpoint: Checkpoint,
    name: str,
    changes: Mapping[str, Any],
    dials: Mapping[str, Sequence[float]],
) -> list[Variant]:
    known = _config(checkpoint)
    fixed = {key: value for key, value in changes.items() if key in known}
    own = {key: values for key, values in dials.items() if values and key in known}
    found = []
    for values in itertools.product(*own.values()):
        set_to = dict(zip(own, values, strict=True))
        outline = build_outline(checkpoint, {**fixed, **set_to})
        found.append(Variant(checkpoint, name, {**fixed, **set_to}, set_to, outline))
    return found


def _check_known(checkpoints: Sequence[Checkpoint], keys: Sequence[str]) -> None:
    for key in keys:
        if not any(key in _config(checkpoint) for checkpoint in checkpoints):
            raise ValueError(f"none of the models has the setting {key}; leave it out")


def _config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    config: Mapping[str, Any] = checkpoint.model_recipe["init_args"].get("config", {})
    return config


def label_variants(variants: Sequence[Variant], keys: str | None, dials: Sequence[str]) -> Labels:
    """Returns a label for each variant, whatever its number of steps and its dials.

    Args:
        variants: what is measured.
        keys: of the configs, separated by commas; None: the class, and what models of one class
            and K differ in.
        dials: fields that make no label.

    Raises:
        ValueError: if no model has such a key.
    """
    recipes = [variant.outline.recipe() for variant in variants]
    if keys is not None:
        return label_runs(recipes, [variant.name for variant in variants], keys)
    more = _differences(recipes, dials)
    if len(more) >= MOST_KEYS:
        note = f"models of one class differ in {', '.join(more)}; --label KEY,... chooses"
        return Labels((), tuple((variant.name,) for variant in variants), note)
    return label_runs(recipes, [variant.name for variant in variants], ",".join([MODEL, *more]))


def _differences(recipes: Sequence[Recipe], dials: Sequence[str]) -> list[str]:
    """Returns the keys in which configs of one class and K differ, dials left out."""
    groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for recipe in recipes:
        config = recipe["init_args"]["config"]
        groups.setdefault((recipe["class_path"], config.get(STEPS)), []).append(config)
    found = dict.fromkeys(key for group in groups.values() for key in differing(group))
    return [key for key in found if key not in dials]


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the numbers of the points (cost, loss) that no other one beats, cheapest first.

    A point beats another if it is nowhere worse and somewhere better.
    """
    order = sorted(range(len(points)), key=points.__getitem__)
    best: list[int] = []
    for number in order:
        if (
            not best
            or points[number][1] < points[best[-1]][1]
            or points[number] == points[best[-1]]
        ):
            best.append(number)
    return best
