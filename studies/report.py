"""The Markdown file of a study, of which only a marked section is generated."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from studies.curves import draw_curves
from studies.results import Result
from studies.study import Study, StudyError
from studies.tables import seeds_table, summary_table

BEGIN = "<!-- study: begin (generated; what stands outside of the two marks is kept) -->"
END = "<!-- study: end -->"
MARKS = re.compile(r"<!-- study: begin\b.*?<!-- study: end -->", re.DOTALL)
CURVES = "curves.svg"
CURVE_LABELS = {
    "val/bpb": "validation loss (bits per byte)",
    "val/loss": "validation loss (nats per token)",
    "val/accuracy": "validation accuracy",
}


def check_report(path: Path) -> None:
    """Checks that the report can be written, before the hours that lead to it.

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


def write_report(study: Study, results: Sequence[Result], path: Path) -> None:
    """Writes the generated section of the report, and the figures and tables beside it.

    Figures go to a folder with the report's name.

    Args:
        study: what was compared.
        results: of the runs that are trained, at least one.
        path: the file; its other sections stay as they are, a new one gets a place for them.
    """
    check_report(path)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    draw_curves(results, folder / CURVES, CURVE_LABELS[study.curve], study.unit)
    section = render(study, results, _copy_files(results, folder), folder.name)
    old = path.read_text(encoding="utf-8") if path.is_file() else _blank(study)
    partial = path.with_name(f".{path.name}")
    partial.write_text(MARKS.sub(lambda _: section, old), encoding="utf-8")
    partial.replace(path)


def render(study: Study, results: Sequence[Result], links: Sequence[str], folder: str) -> str:
    """Returns the generated section, its marks included.

    Args:
        study: what was compared.
        results: of the runs that are trained.
        links: files of the analyses, relative to the report.
        folder: of the figures, relative to the report.
    """
    seeds = sorted({result.run.seed for result in results})
    parts = [
        BEGIN,
        study.introduction,
        f"```bash\n{_command(study)}\n```",
        _versions(results),
        _setting(study, results),
        f"## Results\n\n{_means(seeds)} {_legend(study)}\n\n{summary_table(study, results)}",
        f"## Validation\n\n{_validation(study)}\n\n"
        f"![Validation against {study.unit} and compute]({folder}/{CURVES})",
        f"## Every run\n\n{_errors(results)}{seeds_table(study, results)}",
        *([_analyses(links)] if links else []),
        END,
    ]
    return "\n\n".join(parts)


def _means(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"One seed ({seeds[0]}): nothing is known about the spread."
    return f"Means over the seeds {_listed(seeds)}, in brackets the smallest and the largest value."


def _errors(results: Sequence[Result]) -> str:
    """Says what stands behind ±, where anything does."""
    contents = [content for result in results for content in result.evaluations.values()]
    sampled = any("standard_error" in content for content in contents)
    return "Behind ± is a standard error over the sampled positions.\n\n" if sampled else ""


def _legend(study: Study) -> str:
    return (
        f"{'bpb: bits per byte, lower is better. ' if study.task is None else ''}"
        "FLOPs count forward passes over whole rows (inference), and forward and backward passes "
        "(training). Wall time is that of the whole training process, start-up and validations "
        "included."
    )


def _blank(study: Study) -> str:
    return (
        f"# {study.title}\n\n{BEGIN}\n{END}\n\n## Conclusions\n\n"
        "(written by hand; kept when the study is run again)\n"
    )


def _command(study: Study) -> str:
    """Returns the command, with the name of the user's text in the place of its paths."""
    words = ["python -m studies", study.method, *([study.typed] if study.typed else [])]
    if study.text.files:
        words += [f"--text '<{study.text.label}>'"]
    if study.epochs is not None:
        words += [f"--epochs {study.epochs}"]
    elif type(study).__dataclass_fields__["steps"].default != study.steps:
        words += [f"--steps {study.steps}"]
    return " ".join([*words, f"--seeds {','.join(map(str, study.seeds))}"])


def _versions(results: Sequence[Result]) -> str:
    """Returns with what the runs were trained; several values where they differ."""
    names = list(dict.fromkeys(name for result in results for name in result.versions))
    seen = {
        name: list(dict.fromkeys(_short(r.versions[name]) for r in results if name in r.versions))
        for name in names
    }
    listed = "; ".join(f"{name} {' and '.join(values)}" for name, values in seen.items())
    return f"Trained with {listed}." if listed else ""


def _short(version: str) -> str:
    """Returns a version with the hash of a commit cut to 12 digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", version)


def _setting(study: Study, results: Sequence[Result]) -> str:
    data = study.data
    windows = f"windows of {data.get('block_size')} tokens"
    reading = study.reading or f"{windows}; the same windows in the same order in every run"
    source = "questions that are made up" if study.task is not None else study.text.label
    tokens = sorted({result.tokens for result in results if result.tokens})
    counted = study.epochs is not None or len(tokens) > 1
    trained = f": {_listed(tokens, ',')} {study.unit} a run" if counted and tokens else " a run"
    lines = [
        f"- text: {source}, tokenizer `{data['tokenizer']}`, {reading}",
        f"- {study.length}{trained}",
        f"- the seed draws the initial weights: {_listed(sorted({r.run.seed for r in results}))}",
    ]
    scored = [c for r in results for c in r.evaluations.values() if "of_positions" not in c]
    if study.task is None and scored and scored[0].get("tokens"):
        lines.append(f"- measured on {scored[0]['tokens']:,} tokens of held-out documents")
    missing = {run.folder for run in study.seeded()} - {result.run.folder for result in results}
    if missing:
        lines.append(f"- not run: {', '.join(sorted(missing))}")
    return "\n".join(lines)


def _validation(study: Study) -> str:
    """Says what the curves are measured on."""
    batches = study.trainer.get("limit_val_batches")
    some = "" if batches is None else f", on at most {batches} batches of the held-out documents"
    if study.task is not None:
        return "A line for each seed."
    return f"Blockwise{some}, a line for each seed."


def _listed(numbers: Sequence[int], form: str = "") -> str:
    return " and ".join(format(number, form) for number in numbers)


def _copy_files(results: Sequence[Result], folder: Path) -> list[str]:
    """Copies the analyses' files beside the report; returns their paths relative to it."""
    links = []
    for result in results:
        for analysis, files in result.files.items():
            target = folder / f"{result.run.name}-{analysis}"
            shutil.rmtree(target, ignore_errors=True)  # of an earlier study, with other names
            target.mkdir()
            for file in files:
                shutil.copyfile(file, target / file.name)
                links.append(f"{folder.name}/{target.name}/{file.name}")
    return links


def _analyses(links: Sequence[str]) -> str:
    """Returns the section with pictures and links to tables, by folder."""
    parts = ["## Analyses"]
    for folder in dict.fromkeys(link.rpartition("/")[0] for link in links):
        inside = [link for link in links if link.rpartition("/")[0] == folder]
        parts.append(f"### {folder.rpartition('/')[2]}")
        pictures = [link for link in inside if link.endswith((".png", ".svg"))]
        parts += [f"![{link.rpartition('/')[2]}]({link})" for link in pictures]
        tables = [link for link in inside if link not in pictures]
        parts += [", ".join(f"[{link.rpartition('/')[2]}]({link})" for link in tables)]
    return "\n\n".join(part for part in parts if part)
