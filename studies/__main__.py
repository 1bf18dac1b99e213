"""``python -m studies METHOD``: trains, evaluates and reports what a study declares."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.catalogue import STUDIES, find_study
from studies.commands import ROOT
from studies.exit_codes import run_guarded
from studies.options import add_common_options, configured
from studies.processes import executor
from studies.report import check_report, write_report
from studies.results import collect
from studies.runner import run_study


def main(args: Sequence[str] | None = None) -> int:
    """Runs a study and returns the exit code, see `run_guarded`.

    Args:
        args: the command line; None: that of the process.
    """
    return run_guarded(lambda: _run(args))


def _run(args: Sequence[str] | None) -> None:
    options = parser().parse_args(args)
    declared = find_study(options.method, options.operations)
    study = configured(declared, options)
    runs = study.seeded(options.only)
    folder = Path(options.folder or Path("runs", "studies", study.folder)).resolve()
    whole = (study.steps, study.epochs) == (declared.steps, declared.epochs)
    output = _output(options, folder, whole=whole and not study.typed)
    check_report(output)
    print(f"{len(runs)} runs of {study.length} in {folder}")
    run_study(study, folder, only=options.only, jobs=options.jobs, execute=executor(options.jobs))
    write_report(study, collect(study, folder), output)
    print(f"report: {output}")


def _output(options: argparse.Namespace, folder: Path, *, whole: bool) -> Path:
    """Returns where the report goes; a trial's or variant's does not replace the declared one's."""
    if options.output:
        return Path(options.output)
    if whole:
        return ROOT / "docs" / "results" / f"{options.method}.md"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "report.md"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m studies", description=__doc__)
    parser.add_argument("method", help=f"Which study: {', '.join(STUDIES)}.")
    add_common_options(parser)
    parser.add_argument(
        "--operations",
        type=int,
        metavar="N",
        help="Most operations of training texts, where a study makes them up (declared: 10).",
    )
    parser.add_argument(
        "--output",
        help="The report (default: docs/results/METHOD.md; of a variant: beside the runs).",
    )
    parser.add_argument("--folder", help="Where runs are kept (default: below runs/studies).")
    return parser


if __name__ == "__main__":
    sys.exit(main())
