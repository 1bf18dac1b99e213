"""``--help``: the options that people need first, then all others by group, in about 80 lines.

``--help_all`` describes every option, as jsonargparse does.
"""

import argparse
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning.pytorch.cli import LightningArgumentParser

from lightning_models.recipe import ExactOptions
from training.errors import class_options

FULL_FLAG = "--help_all"
WIDTH = 100
COLUMN = 34  # where descriptions begin


class First(NamedTuple):
    """One of the options that people need first.

    Attributes:
        option: as it is typed.
        value: what stands for its value.
        text: what it is.
        evaluates: whether the verbs that do not train need it, too.
    """

    option: str
    value: str
    text: str
    evaluates: bool = True


FIRST = (
    First("--config", "FILE", "-c: a run, or a part of one; later files and typed options win"),
    First("--data", "CLASS", "text or questions: {data}"),
    First("--model", "CLASS", "{model}"),
    First("--name", "NAME", "the run's folder in runs/, and its row in reports", False),
    First("--trainer.max_steps", "N", "optimiser steps", False),
    First("--model.optimizer.lr", "LR", "peak learning rate", False),
    First("--data.batch_size", "N", "rows of a micro-batch on one device"),
    First("--seed_everything", "SEED", "of weights, order of data and all draws"),
    First("--trainer.precision", "P", "32-true (default), bf16-mixed, bf16-true, 16-mixed"),
    First("--trainer.devices", "N", "GPUs, or processes on a CPU; auto: all (default)"),
    First("--ckpt_path", "last|best|FILE", "{checkpoint}"),
)
CHECKPOINT = {
    True: "resume: the newest run's last or best checkpoint, or a file",
    False: "what to evaluate: the newest run's last or best checkpoint, or a file",
}
TITLES = {
    "": "The run",
    "model": "The model",
    "data": "The data",
    "trainer": "Lightning's trainer",
}
"""Titles of the groups that come first; those of others are the first lines of docstrings."""
UNTYPED = (
    "init_args.args",
    "init_args.kwargs",
    "init_args.config.vocab_size",  # the data decide
    "init_args.config.block_size",
)
"""Arguments of model and data that nobody types."""
VERBS = {
    "fit": "Trains a model",
    "validate": "Scores the validation split with a checkpoint",
    "test": "Scores the test split with a checkpoint",
    "predict": "Continues prompts (--data.predict_file) with a checkpoint",
    "list": "Shows the configs: parameters, tokens, estimated time",
    "plan": "Predicts a run's tokens, FLOPs, hours and memory, without training",
}
USAGE = """usage: python train.py {verb} -c CONFIG.yaml [--OPTION VALUE ...]

{title}; `python train.py list` shows the configs there are.
"""
END = """\
more:
  python train.py {verb} --help_all                  every option with its type and default
  python train.py {verb} --model.help CLASS          arguments of one class (--data.help CLASS, ...)
  python train.py {verb} -c FILE --print_config=comments   a config with every key explained"""


class TrainingParser(ExactOptions, LightningArgumentParser):
    """A parser whose help fits on two screens, unless all of it is asked for."""

    short: Callable[["TrainingParser"], str] | None = None
    """Returns the short help of this parser; None: jsonargparse's own."""

    def format_help(self, formatter: argparse.HelpFormatter | None = None) -> str:
        """Returns the text of ``--help``."""
        return super().format_help(formatter) if self.short is None else self.short(self)


def short_help(parser: TrainingParser, verb: str, classes: Mapping[str, type]) -> str:
    """Returns the first options with a description, and the names of all others by group.

    Args:
        parser: of the verb.
        verb: ``fit``, ``plan``, ``validate``, ``test`` or ``predict``.
        classes: of ``model`` and ``data``, whose arguments are listed.
    """
    trains = verb in ("fit", "plan")
    words = {"checkpoint": CHECKPOINT[trains], "model": "", "data": ""}
    for key, package in (("model", "lightning_models"), ("data", "datamodules")):
        words[key] = f"{', '.join(public_classes(package))} (default {classes[key].__name__})"
    parts = [USAGE.format(verb=verb, title=VERBS[verb]), "first options:"]
    parts += [
        _described(f"{first.option} {first.value}", first.text.format(**words))
        for first in FIRST
        if trains or first.evaluates
    ]
    parts.append("\nall options by group (GROUP.NAME is typed --GROUP.NAME):")
    parts += [_listed(*group) for group in _groups(parser, classes)]
    return "\n".join([*parts, "", END.format(verb=verb), ""])


def verbs_help(parser: TrainingParser) -> str:
    """Returns the verbs of ``train.py``."""
    lines = [f"  {verb:<9} {text}" for verb, text in VERBS.items()]
    return "\n".join(
        ["usage: python train.py VERB ...", "", *lines, "", "python train.py VERB --help", ""]
    )


def public_classes(package: str) -> list[str]:
    """Returns the names of the models, or of the data modules, that a package exports."""
    module = importlib.import_module(package)
    base = getattr(module, {"lightning_models": "LanguageModel"}.get(package, "LanguageDataModule"))
    found: list[Any] = [getattr(module, name) for name in module.__all__]
    return sorted(
        kind.__name__
        for kind in found
        if inspect.isclass(kind) and issubclass(kind, base) and not inspect.isabstract(kind)
    )


def _groups(
    parser: argparse.ArgumentParser, classes: Mapping[str, type]
) -> Iterator[tuple[str, str, list[str]]]:
    """Yields prefix, title and names of each group of options."""
    names: dict[str, list[str]] = {key: [] for key in TITLES}
    titles = dict(TITLES)
    keys = {a.dest.partition(".")[0] for a in parser._actions if "." in a.dest}
    for group in parser._action_groups:
        for action in group._group_actions:
            key, dot, rest = action.dest.partition(".")
            option = max(action.option_strings, key=len, default="").strip("-+")
            if option.endswith("help") or not option:
                continue
            if dot and key not in classes:
                names.setdefault(key, []).append(rest)
                titles.setdefault(key, (group.title or key).rstrip(":").replace("``", ""))
            elif key not in {*classes, *keys}:
                names[""].append(option)
    for option in class_options(classes):
        key, _, rest = option.lstrip("-").partition(".")
        if rest not in UNTYPED:
            names[key].append(rest.removeprefix("init_args."))
    for key, members in names.items():
        title = titles[key]
        if key in classes:
            title = f"{title} ({classes[key].__name__}; others: --{key}.help CLASS)"
        yield key, title, list(dict.fromkeys(members))


def _listed(key: str, title: str, names: list[str]) -> str:
    """Returns a group: its title, and its names in lines."""
    text = ", ".join(names)
    head = f"{key}: " if key else ""
    lines = textwrap.wrap(text, WIDTH - 4, break_on_hyphens=False)
    return "\n".join([f"  {head}{title}", *(f"    {line}" for line in lines)])


def _described(option: str, text: str) -> str:
    """Returns an option and what it is, in two columns."""
    lines = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False)
    rest = "".join(f"\n{' ' * COLUMN}{line}" for line in lines[1:])
    return f"  {option:<{COLUMN - 3}} {lines[0]}{rest}"
