"""Command lines of trainings, parsed by one parser: to build one takes longer than to parse."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from training import LatentCLI
from training.arguments import look

TINY = Path(__file__).parents[1] / "configs" / "transformer" / "tiny.yaml"
ON_CPU = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto")


@cache
def training_parser() -> ArgumentParser:
    """The parser of ``train.py fit``."""
    return LatentCLI([f"-c={TINY}", *ON_CPU], run=False).parser


def parse_training(words: Sequence[str], saved: dict[str, Any] | None = None) -> Namespace:
    """What ``train.py`` makes of the words after the verb; ``saved``: recipes that come first."""
    parser, given = training_parser(), look(words)
    for key in ("model", "data"):
        own = {"class_path": given.own_class(key)}
        parser.set_defaults({key: own if saved is None else saved[key]})
    return parser.parse_args([*words, *ON_CPU])
