"""Command lines of new trainings, parsed by one parser: building one takes longer than parsing."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from training import LatentCLI
from training.arguments import look

TINY = Path(__file__).parents[1] / "configs" / "transformer" / "tiny.yaml"
ON_CPU = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto")


@cache
def training_parser() -> ArgumentParser:
    """The parser of ``train.py fit``."""
    return LatentCLI([f"-c={TINY}", *ON_CPU], run=False).parser


def parse_training(words: Sequence[str]) -> Namespace:
    """What ``train.py fit`` makes of the words after the verb, without a checkpoint."""
    parser, given = training_parser(), look(words)
    for key in ("model", "data"):
        parser.set_defaults({key: {"class_path": given.own_class(key)}})
    return parser.parse_args([*words, *ON_CPU])
