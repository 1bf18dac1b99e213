"""What ``evaluate.py sweep`` measures: likelihood and cost of checkpoints, at settings of dials."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.checkpoint.rebuild import build_outline
from evaluation.perplexity import PerplexityReport
from evaluation.runs.folders import short_names
from evaluation.runs.labels import MODEL, MOST_KEYS, Labels, differing, label_runs
from evaluation.sweep.dials import Typed, check_declared, own_dials
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
    dials: Mapping[str, Any]
    """The dials among them."""
    outline: LanguageModel
    """The model without weights."""

    @property
    def thinking_steps(self) -> int:
        """K; 0 for models without additional steps."""
        return int(getattr(self.outline.config, STEPS, 0))


@dataclass(frozen=True)
class Skipped:
    """A checkpoint at settings of its dials that it cannot take."""

    name: str
    """What tells its checkpoint from the others."""
    dials: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        """Returns the line that is printed."""
        return f"skipped: {self.name} at {shown_dials(self.dials)}: {self.reason}"


@dataclass(frozen=True)
class SweepPoint:
    """What a variant has reached, and what a token costs it."""

    variant: Variant
    label: str
    """Points of one label are a line of the figure."""
    report: PerplexityReport

    def value(self, key: str) -> float:
        """Returns the number of an axis of the figure, see ``sweep_figure.AXES``."""
        if key == STEPS:
            return float(self.variant.thinking_steps)
        return self.report.cost.as_dict()[key]


def shown_dials(dials: Mapping[str, Any], names: Mapping[str, str] | None = None) -> str:
    """Returns dials and their values for people, such as ``kappa 2L, tau 0.1``.

    Args:
        dials: values by field.
        names: what fields are called; None: as they are.
    """
    shown = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in dials.items()}
    return ", ".join(f"{(names or {}).get(key, key)} {value}" for key, value in shown.items())


def find_variants(
    checkpoints: Sequence[Checkpoint], changes: Mapping[str, Any], dials: Mapping[str, Typed]
) -> tuple[list[Variant], list[Skipped]]:
    """Returns each checkpoint at each combination of the dials that its model has.

    Beside them the combinations that a checkpoint cannot take, with the reason.

    Args:
        checkpoints: in their order.
        changes: fields of configs to change where a config has them.
        dials: values by the name of the field.

    Raises:
        ValueError: if no config has a field, a dial is none of any, or no checkpoint takes a value.
    """
    _check_known(checkpoints, changes)
    names = short_names([checkpoint.path.resolve() for checkpoint in checkpoints])
    plain = [build_outline(checkpoint, _fixed(checkpoint, changes)) for checkpoint in checkpoints]
    check_declared(plain, dials)
    variants: list[Variant] = []
    skipped: list[Skipped] = []
    for checkpoint, name, outline in zip(checkpoints, names, plain, strict=True):
        fixed, own = _fixed(checkpoint, changes), own_dials(outline, dials)
        for values in itertools.product(*own.values()):
            turned = dict(zip(own, values, strict=True))
            try:
                variants.append(_variant(checkpoint, name, fixed, turned))
            except ValueError as error:
                skipped.append(Skipped(name, turned, str(error)))
    _check_taken(variants, skipped)
    return variants, skipped


def _variant(
    checkpoint: Checkpoint, name: str, fixed: Mapping[str, Any], turned: Mapping[str, Any]
) -> Variant:
    """Returns a variant.

    Raises:
        ValueError: if its config refuses a value, or the checkpoint's weights have other shapes.
    """
    changes = {**fixed, **turned}
    outline = build_outline(checkpoint, changes)
    saved, own = checkpoint.content["state_dict"], outline.state_dict()
    sizes = {key: tuple(value.shape) for key, value in own.items()}
    learned = {key: tuple(value.shape) for key, value in saved.items()}
    other = [key for key in {**learned, **sizes} if learned.get(key) != sizes.get(key)]
    if other and turned:
        raise ValueError(
            f"{checkpoint.path}: the weights were learned for another size ({other[0]}: "
            f"{learned.get(other[0], 'none')}, {shown_dials(turned)} needs "
            f"{sizes.get(other[0], 'none')}); train a checkpoint with it"
        )
    return Variant(checkpoint, name, changes, turned, outline)


def _check_taken(variants: Sequence[Variant], skipped: Sequence[Skipped]) -> None:
    """Refuses values that nothing takes; those that some take are points left out."""
    for point in skipped:
        for key, value in point.dials.items():
            if not any(variant.dials.get(key) == value for variant in variants):
                raise ValueError(point.reason)


def _check_known(checkpoints: Sequence[Checkpoint], changes: Mapping[str, Any]) -> None:
    for key in changes:
        if not any(key in _config(checkpoint) for checkpoint in checkpoints):
            raise ValueError(f"none of the models has the setting {key}; leave it out")


def _fixed(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes of fields that the checkpoint's config has."""
    return {key: value for key, value in changes.items() if key in _config(checkpoint)}


def _config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    config: Mapping[str, Any] = checkpoint.model_recipe["init_args"].get("config", {})
    return config


def label_variants(variants: Sequence[Variant], keys: str | None, dials: Sequence[str]) -> Labels:
    """Returns a label for each variant, whatever its number of steps and its dials.

    Args:
        variants: what is measured.
        keys: of the configs, separated by commas; None: the class, and what models of one class
            and K differ in.
        dials: fields that make no label: those that are turned.

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
