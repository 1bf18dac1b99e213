"""What the commands of this package have in common on the command line."""

import argparse
import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from studies.study import Study, StudyError, Text


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for text, length, seeds, and runs."""
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="GLOB", help="Your own text; else Python's docs."
    )
    parser.add_argument("--text_name", default="", help="What the report calls it.")
    parser.add_argument("--separator", help="Regular expression between documents of txt files.")
    parser.add_argument("--steps", type=int, help="Optimiser steps of each run.")
    parser.add_argument("--epochs", type=int, help="Passes over the text, where those are counted.")
    parser.add_argument("--seeds", type=_numbers, help="Separated by commas, e.g. 0,1.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="A run to take; repeatable."
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        default=1,
        help="Runs under way at a time; small models fill several processors better that way.",
    )


def configured(study: Study, options: argparse.Namespace) -> Study:
    """Returns the study with what was typed.

    Raises:
        StudyError: if a pattern has no files, or a number is out of its range.
    """
    changes = {key: getattr(options, key) for key in ("steps", "epochs", "seeds")}
    if study.epochs is None and options.epochs is not None:
        raise StudyError(f"epochs ({options.epochs}): this study counts steps; use --steps")
    if study.epochs is not None and options.steps is not None:
        raise StudyError(f"steps ({options.steps}): this study counts epochs; use --epochs")
    text = {"files": _absolute(options.text), "name": options.text_name}
    if options.separator is not None:
        text["separator"] = options.separator
    typed = {key: value for key, value in changes.items() if value is not None}
    return replace(study, text=Text(**text), **typed)


def _absolute(patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns patterns that mean the same from any working folder."""
    for pattern in patterns:
        if not glob.glob(str(Path(pattern).expanduser()), recursive=True):
            raise StudyError(f"text ({pattern}): there is no such file; check path and pattern")
    return tuple(str(Path(pattern).expanduser().absolute()) for pattern in patterns)


def _numbers(typed: str) -> tuple[int, ...]:
    return tuple(int(part) for part in typed.split(","))


def _count(typed: str) -> int:
    number = int(typed)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number
