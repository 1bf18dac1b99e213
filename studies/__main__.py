"""``python -m studies METHOD``: trains, evaluates and reports what a study declares."""

import argparse
import glob
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from studies.catalogue import STUDIES, find_study
from studies.commands import ROOT
from studies.processes import CommandError, Execute, execute
from studies.report import check_report, write_report
from studies.results import collect
from studies.runner import run_study
from studies.study import Study, StudyError, Text

SIGTERM_CODE = 128 + signal.SIGTERM


def main(args: Sequence[str] | None = None) -> int:
    """Runs a study and returns the exit code.

    0: done; 1: a command failed, told with its last lines; 2: bad input, told in one line; 130 or
    143: stopped. Started again it goes on where it stood, but for bad input.

    Args:
        args: the command line; None: that of the process.
    """
    try:
        _run(args)
    except StudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"error: {error}Start the study again to go on from here.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; start the study again to go on from here", file=sys.stderr)
        return 130
    return 0


def _run(args: Sequence[str] | None) -> None:
    options = parser().parse_args(args)
    declared = find_study(options.method)
    study = configured(declared, options)
    runs = study.seeded(options.only)
    folder = Path(options.folder or Path("runs", "studies", study.folder)).resolve()
    whole = (study.steps, study.epochs) == (declared.steps, declared.epochs)
    output = _output(options, folder, whole=whole)
    check_report(output)
    print(f"{len(runs)} runs of {study.length} in {folder}")
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        run_study(
            study, folder, only=options.only, jobs=options.jobs, execute=_executor(options.jobs)
        )
    finally:
        signal.signal(signal.SIGTERM, previous)
    write_report(study, collect(study, folder), output)
    print(f"report: {output}")


def _output(options: argparse.Namespace, folder: Path, *, whole: bool) -> Path:
    """Returns where the report goes; a trial's does not replace that of the whole study."""
    if options.output:
        return Path(options.output)
    if whole:
        return ROOT / "docs" / "results" / f"{options.method}.md"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "report.md"


def _executor(jobs: int) -> Execute:
    """Returns what runs a command; several at a time share the processors."""
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    return partial(execute, threads=threads)


def _stop(*_: Any) -> None:
    sys.exit(SIGTERM_CODE)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m studies", description=__doc__)
    parser.add_argument("method", help=f"Which study: {', '.join(STUDIES)}.")
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
    parser.add_argument(
        "--output",
        help="The report (default: docs/results/METHOD.md; with --steps: beside the runs).",
    )
    parser.add_argument("--folder", help="Where runs are kept (default: below runs/studies).")
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
