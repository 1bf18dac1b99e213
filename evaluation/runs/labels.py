"""What runs are called in tables and figures: by what their models differ in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_models.checkpoint import Recipe

MODEL = "model"
"""Stands among the keys of a config for the class of the model."""
MOST_KEYS = 2
"""More keys make no label."""
ABSENT = ""
"""Value of a key that a model's config does not have."""


@dataclass(frozen=True)
class Labels:
    """One label a run; runs that differ in nothing that is named share one."""

    keys: tuple[str, ...]
    """Keys of the config; empty: the labels are names."""
    values: tuple[tuple[Any, ...], ...]
    """Of each run, one value a key; or its name."""
    note: str | None = None
    """What to tell where names had to do."""
    marks: tuple[str, ...] = ()
    """What stands behind the label of each run, such as ``(bound)``; empty: nothing."""

    def texts(self) -> list[str]:
        """Returns the label of each run, such as ``inner_steps 16, num_layers 3``."""
        marks = self.marks or ("",) * len(self.values)
        return [f"{text} {mark}".rstrip() for text, mark in zip(self._texts(), marks, strict=True)]

    def _texts(self) -> list[str]:
        if not self.keys:
            return [str(name) for (name,) in self.values]
        return [
            ", ".join(
                _text(key, value)
                for key, value in zip(self.keys, values, strict=True)
                if value != ABSENT
            )
            or "-"
            for values in self.values
        ]

    def order(self) -> list[int]:
        """Returns the numbers of the runs, those of small values first."""
        ranks = [tuple(map(_rank, values)) for values in self.values]
        return sorted(range(len(ranks)), key=ranks.__getitem__)


def label_runs(recipes: Sequence[Recipe], names: Sequence[str], keys: str | None = None) -> Labels:
    """Returns labels from the one or two keys in which the models' configs differ.

    Args:
        recipes: of the models, with whole configs.
        names: of the runs; their labels where other than one or two keys differ. A single run is
            named by the class of its model.
        keys: separated by commas; None: those that differ.

    Raises:
        ValueError: if no model has such a key.
    """
    configs = [_config(recipe) for recipe in recipes]
    if keys is None and len(configs) == 1:
        keys = MODEL
    chosen = tuple(differing(configs)) if keys is None else _split(keys, configs)
    if keys is None and not 0 < len(chosen) <= MOST_KEYS:
        note = (
            f"the models differ in {', '.join(chosen)}; --label KEY,... chooses" if chosen else None
        )
        return Labels((), tuple((name,) for name in names), note)
    return Labels(
        chosen, tuple(tuple(_plain(c.get(key, ABSENT)) for key in chosen) for c in configs)
    )


def differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the keys that all configs have, but not with one value."""
    shared = [key for key in configs[0] if all(key in config for config in configs)]
    return [key for key in shared if any(config[key] != configs[0][key] for config in configs)]


def _config(recipe: Recipe) -> dict[str, Any]:
    name = recipe["class_path"].rpartition(".")[2]
    return {MODEL: name, **recipe["init_args"].get("config", {})}


def _split(keys: str, configs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    chosen = tuple(key.strip() for key in keys.split(","))
    for key in chosen:
        if not any(key in config for config in configs):
            differ = ", ".join(differing(configs)) or "nothing"
            raise ValueError(
                f"label ({key}) is no key of the models' config; they differ in {differ}"
            )
    return chosen


def _plain(value: Any) -> Any:
    """Returns a value that can be counted; of a list, what it looks like."""
    return str(value) if isinstance(value, list | tuple | dict) else value


def _text(key: str, value: Any) -> str:
    shown = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return shown if key == MODEL else f"{key} {shown}"


def is_number(value: Any) -> bool:
    """Whether a value has a place on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rank(value: Any) -> tuple[bool, float, str]:
    """Orders numbers by size, in front of all else."""
    return (False, float(value), "") if is_number(value) else (True, 0.0, str(value))
