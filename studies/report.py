"""Report of a study: that of ``evaluate.py compare``, and a table of its evaluations.

Of a study with columns a marked section of docs/results/NAME.md is generated; the table of every
run, the comparison and the files of the analyses are written to the folder docs/results/NAME.
"""

import csv
import json
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluation.runs import read_scalars
from studies.runner import CONFIG, RunFolder, clock, evaluate_command, execute
from studies.study import LOGGED, Column, Run, Study, StudyError

BEGIN = "<!-- study: begin (generated; what stands outside of the two marks is kept) -->"
END = "<!-- study: end -->"
MARKS = re.compile(r"<!-- study: begin\b.*?<!-- study: end -->", re.DOTALL)
RELATIVE = re.compile(r"\]\((?![#/]|\w+:)")
"""Beginning of a relative link of Markdown."""
COMPARISON, EVERY_RUN = "comparison", "evaluations.csv"
NONE = "-"

Results = Mapping[str, Any]
"""Contents of a run's JSON files by evaluation, and its last logged values as ``LOGGED``."""
Trained = Sequence[tuple[Run, RunFolder]]


def trained_runs(study: Study, folder: Path) -> list[tuple[Run, RunFolder]]:
    """Returns all runs of a study that are trained, extra ones too, in its order."""
    places = [(run, RunFolder(folder / run.folder)) for run in study.seeded(study.names)]
    return [(run, place) for run, place in places if place.trained]


def compare(study: Study, trained: Trained, output: Path, log: Path) -> None:
    """Writes the report of ``evaluate.py compare`` on trained runs.

    Perplexities of their evaluations are taken over where compare would measure the same.

    Args:
        study: its title and introduction head the report, ``compare`` has further options.
        trained: the runs.
        output: folder of the report.
        log: file for the output of the command.

    Raises:
        CommandError: if it fails.
    """
    words = [f"{run.title}={place.training}" for run, place in trained]
    files = [
        str(place.output(name))
        for run, place in trained
        for name, options in run.evaluations.items()
        if "command" not in options
    ]
    words += ["--results", *files] if files else []
    options = {"output": output, "title": study.title, "introduction": study.introduction}
    output.parent.mkdir(parents=True, exist_ok=True)
    execute(evaluate_command("compare", words, {**options, **study.compare}), log)


def write_suite(study: Study, folder: Path, output: Path) -> None:
    """Writes the comparison of trained runs and the config of each to a folder.

    Args:
        study: without columns.
        folder: of its runs.
        output: folder of the report.
    """
    trained = trained_runs(study, folder)
    compare(study, trained, output, folder / "compare.log")
    for run, place in trained:
        shutil.copyfile(place.path / CONFIG, output / f"{run.folder}.yaml")


# ---- studies with columns


def check_report(path: Path) -> None:
    """Checks that the report can be written, before the hours of training.

    Raises:
        StudyError: if its folder is missing, or a file is there without the marks.
    """
    if not path.parent.is_dir():
        raise StudyError(f"output ({path}): the folder {path.parent} does not exist; create it")
    if path.is_dir():
        raise StudyError(f"output ({path}) is a folder; name a file in it")
    if path.is_file() and len(MARKS.findall(path.read_text(encoding="utf-8"))) != 1:
        raise StudyError(
            f"output ({path}) has no section between the marks {BEGIN} and {END}, or several; put "
            "both in once, or choose another --output"
        )


def write_report(study: Study, folder: Path, path: Path) -> None:
    """Writes the generated section of the report, and its files to a folder of its name.

    Args:
        study: with columns.
        folder: of its runs, at least one of which is trained.
        path: the file; its other sections stay as they are, a new one gets a place for them.
    """
    check_report(path)
    files = path.with_suffix("")
    files.mkdir(exist_ok=True)
    trained = trained_runs(study, folder)
    results = [read_results(run, place) for run, place in trained]
    plain = replace(study, introduction="")  # which is in the section
    shutil.rmtree(files / COMPARISON, ignore_errors=True)  # of the last time, without its report
    compare(plain, trained, files / COMPARISON, folder / "compare.log")
    _write_csv(study, trained, results, files / EVERY_RUN)
    _copy_files(study, trained, files)
    section = render_section(study, trained, results, files)
    for name in ("report.md", "report.html"):  # which the section has
        (files / COMPARISON / name).unlink(missing_ok=True)
    blank = (
        f"# {study.title}\n\n{BEGIN}\n{END}\n\n## Conclusions\n\n"
        "(written by hand; kept when the study is run again)\n"
    )
    old = path.read_text(encoding="utf-8") if path.is_file() else blank
    partial = path.with_name(f".{path.name}")
    partial.write_text(MARKS.sub(lambda _: section, old), encoding="utf-8")
    partial.replace(path)


def read_results(run: Run, place: RunFolder) -> dict[str, Any]:
    """Returns what was measured on a trained run, see ``Results``."""
    scalars = read_scalars(place.last_checkpoint().parent.parent)
    files = {name: place.output(name) for name in run.evaluations}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    last = {tag: values[max(values)] for tag, values in scalars.items() if values}
    return {**results, LOGGED: last}


def value_of(column: Column, results: Results) -> float | None:
    """Returns a column's number in its unit; None where it was not measured."""
    value: Any = results.get(column.evaluation)
    for key in column.key.split("."):
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value) / column.unit


def summary_table(study: Study, trained: Trained, results: Sequence[Results]) -> str:
    """Returns a row for each run: means over its seeds, with the smallest and largest value."""
    rows = [["run", *(column.title for column in study.columns), "wall time"]]
    rows.append(["---"] * len(rows[0]))
    for name in study.names:
        places = [place for run, place in trained if run.name == name]
        own = [found for (run, _), found in zip(trained, results, strict=True) if run.name == name]
        if places:
            title = next(run.title for run in study.runs if run.name == name)
            seconds = statistics.mean(place.record["train"]["seconds"] for place in places)
            rows.append([title, *(_mean(column, own) for column in study.columns), clock(seconds)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _mean(column: Column, group: Sequence[Results]) -> str:
    values = [value for each in group if (value := value_of(column, each)) is not None]
    if not values:
        return NONE
    shown = [statistics.mean(values), min(values), max(values)]
    mean, low, high = (f"{value:z.{column.digits}f}" for value in shown)  # z: no -0.0000
    return mean + (f" ({low} to {high})" if len(values) > 1 else "") + _kind(column, group)


def _kind(column: Column, group: Sequence[Results]) -> str:
    """Returns the kind of a likelihood that is not an exact, causal one."""
    if column.key != "bits_per_byte":
        return ""
    content = next(each[column.evaluation] for each in group if column.evaluation in each)
    if not content.get("causal", True):
        return ", not causal"
    kind = str(content.get("likelihood", "exact")).replace("_", " ")
    return "" if kind == "exact" else f", {kind}"


def render_section(study: Study, trained: Trained, results: Sequence[Results], files: Path) -> str:
    """Returns the generated section, its marks included.

    Args:
        study: what was compared.
        trained: its trained runs.
        results: of each.
        files: folder of the report's files, the comparison among them.
    """
    missing = {run.folder for run in study.seeded()} - {run.folder for run, _ in trained}
    seeds = " and ".join(str(seed) for seed in sorted({run.seed for run, _ in trained}))
    bits = any(column.key == "bits_per_byte" for column in study.columns)
    bpb = "bpb: bits per byte, lower is better. " if bits else ""
    report = (files / COMPARISON / "report.md").read_text(encoding="utf-8")
    body = report.partition("\n")[2].replace("\n## ", "\n### ").strip()  # without its heading
    body = RELATIVE.sub(f"]({files.name}/{COMPARISON}/", body)
    parts = [
        BEGIN,
        study.introduction,
        f"```bash\n{_command(study)}\n```",
        f"- text: {study.source_name}\n- {study.length} a run"
        + (f"\n- not run: {', '.join(sorted(missing))}" if missing else ""),
        f"## Evaluations\n\nSeeds {seeds}: means, in brackets the smallest and the largest value. "
        f"{bpb}Wall time is that of the whole training process, start-up and validations included. "
        f"[Every run]({files.name}/{EVERY_RUN}).",
        summary_table(study, trained, results),
        f"## Comparison\n\n{body}",
        *_analyses(trained, files),
        END,
    ]
    return "\n\n".join(parts)


def _command(study: Study) -> str:
    """Returns the command, with the name of the user's text in the place of its paths."""
    words = ["python -m studies", study.name, *([study.options] if study.options else [])]
    words += [f"--text '<{study.source_name}>'"] if study.files else []
    length = f"--steps {study.steps}" if study.epochs is None else f"--epochs {study.epochs}"
    return " ".join([*words, length, f"--seeds {','.join(map(str, study.seeds))}"])


def _write_csv(study: Study, trained: Trained, results: Sequence[Results], path: Path) -> None:
    """Writes a line for each run, with all digits."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        titles = [column.title for column in study.columns]
        writer.writerow(["run", "title", "seed", *titles, "seconds", "times resumed"])
        for (run, place), found in zip(trained, results, strict=True):
            train = place.record["train"]
            values = [value_of(column, found) for column in study.columns]
            row = [run.folder, run.title, run.seed, *values]
            writer.writerow([*row, train["seconds"], train["sittings"] - 1])


def _copy_files(study: Study, trained: Trained, files: Path) -> None:
    for run, place in trained:
        for name, analysis in run.analyses.items():
            source, target = place.path / name, files / f"{run.name}-{name}"
            shutil.rmtree(target, ignore_errors=True)  # of an earlier study, with other names
            target.mkdir()
            quoting = analysis.quoting if study.files else ()
            hidden = {path for pattern in quoting for path in source.rglob(pattern)}
            chosen = {path for pattern in analysis.files for path in source.rglob(pattern)}
            for path in sorted(chosen - hidden):
                shutil.copyfile(path, target / path.name)


def _analyses(trained: Trained, files: Path) -> list[str]:
    """Returns paragraphs with the pictures of each analysis and links to its tables."""
    names = [f"{run.name}-{name}" for run, _ in trained for name in run.analyses]
    parts = ["## Analyses"] if names else []
    for name in names:
        inside = sorted(path.name for path in (files / name).iterdir())
        pictures = [file for file in inside if file.endswith((".png", ".svg"))]
        links = {file: f"[{file}]({files.name}/{name}/{file})" for file in inside}
        parts.append(f"### {name}")
        parts += [f"!{links.pop(file)}" for file in pictures]
        parts += [", ".join(links.values())] if links else []
    return parts
