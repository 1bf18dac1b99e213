"""Dials: fields of configs that decide how much a trained model computes, and values for them.

Which fields those are a config says itself (``SequenceConfig.dials``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_models import LanguageModel

OPTIONS = {
    "kappa": "kappas",
    "inner_steps": "inner_steps",
    "thinking_steps": "thinking_steps",
    "alpha": "alphas",
    "tau": "taus",
}
"""Dials that have an option of their own, and its name; all others are turned by ``--dial``."""


@dataclass(frozen=True)
class Typed:
    """Values of a dial as they were typed."""

    option: str
    """The option and its text, for messages."""
    texts: tuple[str, ...]
    """At least one."""


def add_dial_arguments(parser: ArgumentParser) -> None:
    """Declares the options that turn dials."""
    for field, option in OPTIONS.items():
        parser.add_argument(
            f"--{option}",
            type=str,
            default="",
            help=f"Values of {field} at which every model that has this dial is scored, separated "
            f"by commas, e.g. --{option}=1,2 (the sign = lets the first be negative).",
        )
    parser.add_argument(
        "--dial",
        type=str,
        nargs="+",
        default=[],
        help="The same for any dial that a config declares: NAME=VALUE,VALUE ..., such as "
        "kappa=64,128,256 or memory_size=1,5,40.",
    )


def typed_dials(settings: Namespace) -> dict[str, Typed]:
    """Returns what the command line says of dials, by the name of the field.

    Raises:
        ValueError: if ``--dial`` is not NAME=VALUES, there are no values, or a dial is given twice.
    """
    words = [(key, option, settings[option]) for key, option in OPTIONS.items() if settings[option]]
    for word in settings.dial:
        name, sign, values = word.partition("=")
        if not (name and sign):
            raise ValueError(f"dial ({word}) must be NAME=VALUE,VALUE, e.g. kappa=64,128,256")
        words.append((name, "dial", values))
    found: dict[str, Typed] = {}
    for name, option, values in words:
        texts = tuple(part.strip() for part in values.strip("[]").split(",") if part.strip())
        if not texts:
            raise ValueError(
                f"{option} ({values}) has no values of {name}; separate them by commas"
            )
        if name in found:
            raise ValueError(f"{option}: {name} is given twice; put its values into one list")
        found[name] = Typed(f"{option} ({values})", tuple(dict.fromkeys(texts)))
    return found


def own_dials(model: LanguageModel, dials: Mapping[str, Typed]) -> dict[str, list[Any]]:
    """Returns the values of those dials that a model has, of the types of its fields.

    Raises:
        ValueError: if a value is of another type.
    """
    declared, hints = model.config.dials, get_type_hints(type(model.config))
    return {
        name: [_read(text, hints[name], name, typed.option) for text in typed.texts]
        for name, typed in dials.items()
        if name in declared
    }


def _read(text: str, hint: Any, name: str, option: str) -> Any:
    """Returns the value of a field from how it was typed."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=hint)
    try:
        return parser.parse_args([f"--{name}={text}"])[name]
    except ArgumentError as error:
        kind = getattr(hint, "__name__", str(hint))
        raise ValueError(
            f"{option} must be values of {name} ({kind}) separated by commas; {text} is none"
        ) from error


def check_declared(models: Sequence[LanguageModel], dials: Mapping[str, Typed]) -> None:
    """Checks that every dial is one of some model.

    Raises:
        ValueError: if one is not; it names those there are.
    """
    there = dict.fromkeys(name for model in models for name in model.config.dials)
    for name in dials:
        if name not in there:
            raise ValueError(
                f"none of the models has the dial {name}; they have {', '.join(there) or 'none'}"
            )
