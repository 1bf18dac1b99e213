"""``python -m studies NAME``: trains, evaluates and reports a study of ``configs/studies``."""

import argparse
import glob
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveInt

from studies.results_page import check_report, write_report, write_suite
from studies.runner import CommandError, run_study
from studies.study import ROOT, Study, StudyError, load_study, study_names

RESULTS = ROOT / "docs" / "results"
SIGTERM_CODE = 128 + signal.SIGTERM


def main(args: Sequence[str] | None = None) -> int:
    """Runs a study and returns the exit code, see `run_guarded`.

    Args:
        args: The command line. Defaults to ``sys.argv``.
    """
    return run_guarded(lambda: _run(parser().parse_args(args)))


def run_guarded(work: Callable[[], None]) -> int:
    """Runs resumable work and returns the exit code.

    The codes are 0 for success, 1 for a failed command, whose last lines are shown, 2 for bad
    input, and 130 or 143 for a stopped study.
    """
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(SIGTERM_CODE))
    try:
        work()
    except StudyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"error: {error}Start it again to resume.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; start it again to resume", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _run(options: argparse.Namespace) -> None:
    study = configured(options)
    declared = load_study(options.study)
    runs = study.seeded(options.only)
    folder = Path(options.folder or Path("runs", "studies", study.folder)).resolve()
    if study.columns:  # options that only select runs or seeds do not make it a trial
        same = ("steps", "epochs", "operations")
        whole = all(getattr(study, key) == getattr(declared, key) for key in same)
    else:
        whole = study == declared and not options.only
    output = _output(options.output, study, folder, whole=whole)
    if study.columns:
        check_report(output)
    print(f"{len(runs)} runs of {study.length} in {folder}")
    run_study(study, folder, only=options.only, jobs=options.jobs)
    if study.columns:
        write_report(study, folder, output)
    else:
        trial = replace(study, title=f"{study.title}: a trial", introduction="")
        write_suite(study if whole else trial, folder, output)
    print(f"report: {output}")


def configured(options: argparse.Namespace) -> Study:
    """Returns the study that the options describe.

    Raises:
        StudyError: If a pattern matches no files, or a number is out of range.
    """
    keys = ("operations", "steps", "epochs", "seeds", "separator", "text_name")
    typed: dict[str, Any] = {key: getattr(options, key, None) for key in keys}
    files = tuple(str(Path(pattern).expanduser().absolute()) for pattern in options.text)
    for pattern, path in zip(options.text, files, strict=True):
        if not glob.glob(path, recursive=True):
            raise StudyError(f"text ({pattern}): no such file; check path and pattern")
    return load_study(options.study, files=files or None, **typed)


def _output(typed: str | None, study: Study, folder: Path, *, whole: bool) -> Path:
    """Returns the path of the report; a trial's report does not replace the published one."""
    if typed:
        return Path(typed)
    if not whole:
        folder.mkdir(parents=True, exist_ok=True)
    suffix = ".md" if study.columns else ""
    return (RESULTS / study.name if whole else folder / "report").with_suffix(suffix)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies", description=__doc__, allow_abbrev=False
    )
    add_study_arguments(parser)
    add = parser.add_argument
    add("--steps", type=int, help="Optimiser steps of each run, e.g. 5 for a trial.")
    add("--epochs", type=int, help="Passes over the text of each run, instead of steps.")
    add("--seeds", type=_numbers, help="Seeds, separated by commas, e.g. 0,1.")
    add(
        "--output",
        help="Path of the report (default: docs/results/NAME, or next to the runs for a trial).",
    )
    return parser


def add_study_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a study, its text, its runs and their folder."""
    add = parser.add_argument
    add("study", help=f"One of {', '.join(study_names())}, or the YAML file of a study.")
    add("--text", nargs="+", default=[], metavar="GLOB", help="Text files to use instead.")
    add("--text_name", help="Name of the text in the report.")
    add("--separator", help="Regular expression between documents of txt files.")
    add(
        "--operations",
        type=int,
        metavar="N",
        help="Maximum number of operations in generated training texts.",
    )
    add("--only", action="append", default=[], metavar="NAME", help="Name of a run; repeatable.")
    add("--jobs", type=PositiveInt, default=1, help="Concurrent runs, which share the processors.")
    add("--folder", help="Folder of the runs (default: a folder in runs).")


def _numbers(typed: str) -> tuple[int, ...]:
    return tuple(int(part) for part in typed.split(","))


if __name__ == "__main__":
    sys.exit(main())
