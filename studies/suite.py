"""``python -m studies.suite NAME``: trains what a suite lists, and compares it.

A suite is a file of ``configs/suites``: models of several methods that read the same text in the
same order. Its report is that of ``evaluate.py compare`` on its runs, beside it the config of each.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from studies.commands import ROOT, evaluate_words
from studies.exit_codes import run_guarded
from studies.options import add_common_options, configured
from studies.processes import execute, executor
from studies.runner import CONFIG, RunFolder, run_study
from studies.study import Evaluation, Run, Study, StudyError

SUITES = ROOT / "configs" / "suites"
FIRST = "first"
"""Value of a run's ``seeds``: it is trained with the first seed alone."""
OF_SUITE = frozenset(
    ("title", "introduction", "corpus", "data", "trainer", "epochs", "steps", "seeds")
)
OF_RUN = frozenset(field.name for field in fields(Run)) - {"name", "seed", "repeated"} | {"seeds"}


def main(args: Sequence[str] | None = None) -> int:
    """Runs a suite and returns the exit code, see `run_guarded`.

    Args:
        args: the command line; None: that of the process.
    """
    return run_guarded(lambda: _run(args))


def _run(args: Sequence[str] | None) -> None:
    options = parser().parse_args(args)
    declared = load_suite(find_suite(options.suite))
    suite = configured(_opened(declared, options), options)
    runs = suite.seeded(options.only)
    folder = Path(options.folder or Path("runs", "suites", suite.folder)).resolve()
    whole = suite == declared and not options.only
    output = _output(options, folder, suite, whole=whole)
    print(f"{len(runs)} runs of {suite.length} in {folder}")
    run_study(suite, folder, only=options.only, jobs=options.jobs, execute=executor(options.jobs))
    places = [RunFolder(folder / run.folder) for run in runs]
    words = [f"{run.title}={place.training}" for run, place in zip(runs, places, strict=True)]
    compare(suite if whole else _trial(suite), words, output, folder / "compare.log")
    for place in places:
        shutil.copyfile(place.path / CONFIG, output / f"{place.path.name}.yaml")
    print(f"report: {output}")


def _opened(suite: Study, options: argparse.Namespace) -> Study:
    """Returns the suite without what was typed otherwise: its corpus, and its length in epochs."""
    if options.text:
        suite = replace(suite, corpus=None)
    return suite if options.steps is None else replace(suite, epochs=None)


def _trial(suite: Study) -> Study:
    """Returns the suite as what it is not: the whole."""
    return replace(suite, title=f"{suite.title}: a trial", introduction="")


def _output(options: argparse.Namespace, folder: Path, suite: Study, *, whole: bool) -> Path:
    """Returns the folder of the report; a trial's does not replace that of the whole suite."""
    if options.output:
        return Path(options.output)
    return ROOT / "docs" / "results" / suite.method if whole else folder / "report"


def compare(suite: Study, words: Sequence[str], output: Path, log: Path) -> None:
    """Writes the comparison of trained runs.

    Args:
        suite: what names the report.
        words: its runs, as ``evaluate.py compare`` takes them.
        output: folder of the report.
        log: file for the output of the command.

    Raises:
        CommandError: if it fails.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    options = {"output": output, "title": suite.title, "introduction": suite.introduction}
    execute(evaluate_words("compare", words, options), log)


def find_suite(name: str) -> Path:
    """Returns the file of a suite by its name, or the file itself.

    Raises:
        StudyError: if there is none.
    """
    for path in (SUITES / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in SUITES.glob("*.yaml")))
    raise StudyError(f"there is no suite {name!r}; there are {known}, or name a file")


def load_suite(path: Path) -> Study:
    """Returns what the file declares.

    Keys beside those of a suite hold what runs have in common, for YAML's anchors.

    Raises:
        StudyError: if it is no suite; the message names the key.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping) or not isinstance(content.get("runs"), Mapping):
        raise StudyError(f"{path} is no suite: it must have runs, each with a model")
    evaluations = tuple(Evaluation(**each) for each in content.get("evaluations", ()))
    runs = tuple(_run_of(path, name, own, evaluations) for name, own in content["runs"].items())
    if not runs:
        raise StudyError(f"{path}: runs is empty")
    own = {key: value for key, value in content.items() if key in OF_SUITE}
    own["seeds"] = tuple(own.get("seeds", (0,)))
    try:
        return Study(
            method=f"suite_{path.stem}", runs=runs, baseline=runs[0].name, columns=(), **own
        )
    except TypeError as error:  # a key that has no default is missing
        raise StudyError(f"{path}: {str(error).partition(' ')[2]}") from error


def _run_of(path: Path, name: str, own: Any, evaluations: tuple[Evaluation, ...]) -> Run:
    if not isinstance(own, Mapping) or "model" not in own:
        raise StudyError(f"{path}: runs.{name} must have a model: class_path and init_args")
    unknown = sorted(set(own) - OF_RUN)
    if unknown:
        raise StudyError(
            f"{path}: runs.{name} has no key {', '.join(unknown)}; there are "
            f"{', '.join(sorted(OF_RUN))}"
        )
    rest = {key: value for key, value in own.items() if key not in ("seeds", "title")}
    repeated = own.get("seeds", "all") != FIRST
    title = own.get("title", name)
    if "=" in title or "/" in title:
        raise StudyError(f"{path}: runs.{name}: title ({title}) must not contain = or /")
    return Run(name=name, title=title, repeated=repeated, evaluations=evaluations, **rest)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m studies.suite", description=__doc__)
    known = ", ".join(sorted(path.stem for path in SUITES.glob("*.yaml")))
    parser.add_argument("suite", help=f"Which suite: {known}, or a file of this form.")
    add_common_options(parser)
    parser.add_argument("--output", help="Folder of the report (default: docs/results/suite_NAME).")
    parser.add_argument("--folder", help="Where runs are kept (default: below runs/suites).")
    return parser


if __name__ == "__main__":
    sys.exit(main())
