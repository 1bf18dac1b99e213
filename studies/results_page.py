"""Report of a study: the comparison of its runs, and a table of its evaluations.

A study with columns generates a marked section of docs/results/NAME.md. The tables of every run and
of their means, the figure, the comparison and the files of the analyses are written to the folder
docs/results/NAME. A run with the declared settings stays in the tables and the report after its
checkpoint is deleted.
"""

import json
import re
import shlex
import shutil
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from callbacks.analysis.report import as_png
from evaluation.cli import main as evaluate
from evaluation.compare_report import short_hash
from evaluation.run_metrics import ScoringOptions, measure
from evaluation.runs import find_compared, read_scalars
from lightning_models.atomic_files import write_whole
from studies.figures import (
    KIND,
    Trained,
    draw_figure,
    draw_scores,
    figure_points,
    name_seeds,
    on_page,
)
from studies.runner import CONFIG, RunFolder, clock
from studies.study import LOGGED, Run, Study, StudyError

BEGIN = "<!-- study: begin (generated; text outside is kept) -->"
END = "<!-- study: end -->"
MARKS = re.compile(r"<!-- study: begin\b.*?<!-- study: end -->", re.DOTALL)
COMPARISON, FIGURE, POINTS = "comparison", "figure.png", "figure.csv"
EVERY_RUN, MEANS = "evaluations.csv", "means.csv"
BITS, NATS = ".bits_per_byte", ".nats_per_token"
COST = {
    "parameters (k)": "`run.parameters` / 1e3",
    "training TFLOPs": "`run.flops` / 1e12",
    "inference kFLOPs/token": "`run.inference_flops_per_token` / 1e3",
}
"""Columns that every study has besides its own, which replace them; fields of `RunMetrics`."""


def trained_runs(study: Study, folder: Path) -> list[tuple[Run, RunFolder]]:
    """Returns all trained runs of a study, including extra ones, in its order."""
    run_dirs = [(run, RunFolder(folder / run.folder)) for run in study.seeded(list(study.runs))]
    return [(run, run_dir) for run, run_dir in run_dirs if run_dir.trained]


def compare(study: Study, trained: Trained, output: Path, introduction: str = "") -> None:
    """Writes the comparison of trained runs to a folder.

    Scores of their evaluations are reused if the comparison would measure the same values.
    """
    argv = ["compare", *(f"{run.title}={run_dir.training}" for run, run_dir in trained)]
    named = {"output": output, "title": study.title, "introduction": introduction}
    for key, value in {**named, **study.compare}.items():
        argv += [f"--{key}", str(value)]
    output.parent.mkdir(parents=True, exist_ok=True)
    code = evaluate(argv)
    if code:  # the error is printed
        raise SystemExit(code)


def write_suite(study: Study, folder: Path, output: Path) -> None:
    """Writes the comparison of trained runs and the config of each to a folder.

    Args:
        study: A study without columns.
        folder: Folder of its runs.
        output: Folder of the report.
    """
    trained = trained_runs(study, folder)
    compare(study, trained, output, study.introduction)
    for run, run_dir in trained:
        write_whole(output / f"{run.folder}.yaml", (run_dir.path / CONFIG).read_bytes())


# ---- studies with columns


def check_report(path: Path) -> None:
    """Checks that the report can be written, before hours of training.

    Raises:
        StudyError: If its folder is missing, or the file exists without the marks.
    """
    if not path.parent.is_dir():
        raise StudyError(f"output ({path}): the folder {path.parent} does not exist; create it")
    if path.is_dir():
        raise StudyError(f"output ({path}) is a folder; name a file in it")
    if path.is_file() and len(MARKS.findall(path.read_text(encoding="utf-8"))) != 1:
        raise StudyError(
            f"output ({path}) must have exactly one section between the marks {BEGIN} and {END}; "
            "add each of them once, or choose another --output"
        )


def write_report(study: Study, folder: Path, path: Path) -> None:
    """Writes the generated section of the report, and its files to the folder of the same name.

    Args:
        study: A study with columns.
        folder: Folder of its runs, with at least one trained run.
        path: The Markdown file. Its other sections are kept; a new file gets placeholders for them.
    """
    check_report(path)
    files = path.with_suffix("")
    files.mkdir(exist_ok=True)
    trained = trained_runs(study, folder)
    rows = [
        {**read_results(run, run_dir), **read_cost(run_dir, study.compare)}
        for run, run_dir in trained
    ]
    results = pd.DataFrame(rows)
    table = evaluations_table(study, trained, results)
    earlier = earlier_rows(study, files / EVERY_RUN, {run.folder for run, _ in trained})
    if earlier.empty:  # a comparison needs the checkpoints of all runs
        shutil.rmtree(files / COMPARISON, ignore_errors=True)  # from the last report
        compare(study, trained, files / COMPARISON)
    else:
        table = pd.concat([table, earlier], ignore_index=True)
        order = [run.title for run in study.runs.values()]
        position = table["title"].map(order.index)
        table = table.iloc[np.lexsort((position, table["seed"]))]
    write_whole(files / EVERY_RUN, table.to_csv(index=False))
    # the page is about all of its seeds, not only the seeds of this command
    study = replace(study, seeds=page_seeds(study, table))
    _copy_files(study, trained, files)
    if study.figure is not None:
        points = figure_points(study.figure, trained, table, files / POINTS)
        write_whole(files / POINTS, points.to_csv(index=False))
        figure = draw_figure(study, study.figure, points)
    else:
        figure = draw_scores(study, table)
    write_whole(files / FIGURE, as_png(figure))
    write_whole(files / MEANS, means_table(study, table).to_csv(index=False))
    section = render_section(study, table, files)
    for name in ("report.html", "report.md"):  # the page quotes the tables, which are kept
        (files / COMPARISON / name).unlink(missing_ok=True)
    blank = (
        f"# {study.title}\n\n{BEGIN}\n{END}\n\n## Conclusions\n\n"
        "(written by hand; kept when the study is run again)\n"
    )
    old = path.read_text(encoding="utf-8") if path.is_file() else blank
    write_whole(path, MARKS.sub(lambda _: section, old))


def logged(run_dir: RunFolder) -> dict[str, dict[int, float]]:
    """Returns the logged values of a run by tag and step."""
    return {} if run_dir.checkpoint is None else read_scalars(run_dir.checkpoint.parent.parent)


def read_results(run: Run, run_dir: RunFolder) -> dict[str, Any]:
    """Returns all values of a run's result files, and its last logged values.

    Returns:
        Values by ``EVALUATION.KEY``, with dots into nested values and positions in lists.
    """
    files = {name: run_dir.output(name) for name in run.evaluations}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    last = {tag: values[max(values)] for tag, values in logged(run_dir).items() if values}
    return _flat({**results, LOGGED: last})


def page_seeds(study: Study, table: pd.DataFrame) -> tuple[int, ...]:
    """Returns the seeds of the first run with rows: another run may have more of them."""
    for run in study.runs.values():
        seeds = {int(seed) for seed in table["seed"][table["title"] == run.title]}
        if seeds:
            return tuple(sorted(seeds))
    return study.seeds


def read_cost(run_dir: RunFolder, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns size, cost and code version of a run, as in its comparison, under ``run.FIELD``.

    Args:
        run_dir: Folder of a trained run.
        options: Options of the comparison.
    """
    (run,), _ = find_compared([f"run={run_dir.checkpoint}"], skip=False)
    known = {field.name for field in fields(ScoringOptions)}
    scoring = {key: value for key, value in options.items() if key in known}
    metrics = measure(run, ScoringOptions(**scoring))
    names = ("parameters", "flops", "inference_flops_per_token")
    cost = {f"run.{name}": getattr(metrics, name) for name in names}
    return {**cost, "run.commit": short_hash(metrics.commit)}


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    flat: dict[str, Any] = {}
    for key, value in items:
        nested = isinstance(value, dict | list)
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def evaluations_table(study: Study, trained: Trained, results: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per run: the study's columns with all digits, seconds and code version.

    Columns with bits per byte or nats per token are followed by the kind of the likelihood, empty
    for an exact one.
    """
    runs = [(run.folder, run.title, run.seed) for run, _ in trained]
    results = results.where(results.notna(), np.nan).infer_objects()  # no None in sums
    table = pd.DataFrame(runs, columns=["run", "title", "seed"])
    for title, key in _columns(study).items():
        table[title] = _numbers(results, key)
        if key.endswith((BITS, NATS)):
            table[KIND + title] = [_kind(key, line) for line in results.to_dict("records")]
    seconds = [run_dir.record["train"]["seconds"] for _, run_dir in trained]
    digests = [study.settings_digest(run) for run, _ in trained]
    return table.assign(seconds=seconds, settings=digests, commit=results.get("run.commit"))


def _columns(study: Study) -> dict[str, str]:
    """Returns the study's columns and the columns of costs, which it may declare itself."""
    values = {title: key for title, key in study.columns.items() if title not in COST}
    return {**values, **COST, **study.columns}


def earlier_rows(study: Study, path: Path, trained: Collection[str]) -> pd.DataFrame:
    """Returns the rows of an earlier table for unchanged runs that are not trained here.

    Args:
        study: The declared runs and columns.
        path: Path of the table, which may not exist.
        trained: Folders of the runs that are trained here.
    """
    if not path.is_file():
        return pd.DataFrame()
    table = pd.read_csv(path, dtype={"settings": str}, keep_default_na=True)
    if "settings" not in table or not set(study.columns) <= set(table):
        return pd.DataFrame()
    table = table.assign(**{name: np.nan for name in COST if name not in table})
    seeds = {int(seed) for seed in table["seed"]}  # including seeds that --seeds now omits
    runs = [replace(run, seed=seed) for run in study.runs.values() for seed in seeds]
    digests = {run.folder: study.settings_digest(run) for run in runs}
    declared = table["settings"] == table["run"].map(digests)
    titles = table["run"].map({run.folder: run.title for run in runs})
    return table.assign(title=titles)[declared & ~table["run"].isin(list(trained))]


def _numbers(results: pd.DataFrame, key: str) -> Any:
    """Returns the numbers of a column, nan if they were not measured."""
    if key in results:
        return results[key].astype(float)
    try:
        return results.eval(key) if "`" in key else float("nan")
    except pd.errors.UndefinedVariableError:  # measured on none of the runs
        return float("nan")


def means_table(study: Study, table: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per run: means over its seeds, with the smallest and largest values."""
    rows = []
    names = [name for name in _columns(study) if table[name].notna().any()]
    by_seed = table.set_index("seed")
    for title, group in by_seed.groupby("title", sort=False):
        cells = {}
        for name in names:
            kind = _kind_of(name, group)
            cells[name] = _mean(group[name], 3 if name in COST else 4, kind)
            if name in study.paired:
                baseline = study.runs[study.paired[name]].title
                other = by_seed[by_seed["title"] == baseline]
                gaps = _mean(group[name] - other[name], 3, kind or _kind_of(name, other))
                cells[_difference(study, name)] = "-" if title == baseline else gaps
        if set(group.index) != set(by_seed.index):
            title = f"{title} ({name_seeds(group.index)})"
        rows.append({"run": title, **cells, "wall time": clock(group["seconds"].mean())})
    return pd.DataFrame(rows)


def _difference(study: Study, name: str) -> str:
    """Returns the title of a paired column's differences."""
    baseline = study.runs[study.paired[name]].title
    return f"minus {baseline}" if len(study.paired) == 1 else f"{name}, minus {baseline}"


def page_table(study: Study, table: pd.DataFrame) -> str:
    """Returns the page's table in Markdown: the study's page columns, differences and cost.

    Args:
        study: The declared runs and columns.
        table: One row per run and seed; rows that are not `on_page` are only in `means_table`.
    """
    titles = table["title"].drop_duplicates()  # in the order of the means
    means = means_table(study, table)[titles.isin(on_page(study, table)["title"]).to_numpy()]
    chosen = {"run", *(study.page_columns or study.columns), *COST}
    chosen |= {_difference(study, name) for name in study.paired if name in chosen}
    shown = means[[name for name in means if name in chosen]]
    return shown.to_markdown(index=False, disable_numparse=True)


def _mean(values: pd.Series, digits: int, kind: str = "") -> str:
    """Returns mean and kind, with the range in brackets unless it rounds to the mean."""
    values = values.dropna()
    if values.empty:
        return "-"
    mean = values.mean()
    if abs(mean) < 1e-12 * values.abs().max():  # rounding of values that cancel
        mean = 0.0
    low, mean, high = (
        f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
        for value in (values.min(), mean, values.max())
    )
    return (mean if low == high else f"{mean} [{low}, {high}]") + kind


def _kind_of(name: str, group: pd.DataFrame) -> str:
    """Returns ", KIND" for the likelihood of a column, shared by a run's seeds, or ""."""
    kinds = group[KIND + name][group[name].notna()].dropna() if KIND + name in group else []
    return next((f", {name}" for name in kinds if name), "")


def _kind(key: str, values: Mapping[str, Any]) -> str:
    """Returns the kind of a run's likelihood, or "" if it is exact and causal."""
    name = key.removesuffix(BITS).removesuffix(NATS)
    likelihood = values.get(f"{name}.likelihood")
    if isinstance(likelihood, str) and likelihood != "exact":
        return {"lower_bound": "bound", "noncausal": "not causal"}.get(likelihood, likelihood)
    return "not causal" if values.get(f"{name}.causal") is False else ""


def render_section(study: Study, table: pd.DataFrame, files: Path) -> str:
    """Returns the generated section, including its marks.

    Args:
        study: The declared runs and columns.
        table: One row per run and seed, see `evaluations_table`.
        files: Folder of the report's files, including the comparison.
    """
    missing = {run.folder for run in study.seeded()} - set(table["run"])
    not_run = f"\n- not run: {', '.join(sorted(missing))}" if missing else ""
    titles = set(table["title"])
    extra = [run.name for run in study.runs.values() if run.extra and run.title in titles]
    only = f"\n- trained only with `--only`: {', '.join(extra)}" if extra else ""
    count, minutes = len(table), table["seconds"].sum() / 60
    cost = f"{count} run{'s' if count > 1 else ''}, {minutes:,.0f} minutes of wall time"
    if study.budget is not None:
        cost += f"; budget: {study.budget:,} core-minutes"
    shown = on_page(study, table)
    seeds = name_seeds(shown["seed"])
    notes = [
        f"Means over {seeds} [smallest, largest]."
        if shown["seed"].nunique() > 1
        else f"{seeds.capitalize()}."
    ]
    columns = study.page_columns or tuple(study.columns)
    if any(study.columns[name].endswith(BITS) for name in columns):
        notes.append("bpb: bits per byte.")
    if study.paired and shown.groupby("title")["seed"].agg(frozenset).nunique() > 1:
        notes.append("*Minus*: over common seeds.")
    protocol = f"\n- protocol: {study.protocol}" if study.protocol else ""
    linked = {
        "all means": MEANS,
        "every run": EVERY_RUN,
        "points of the figure": POINTS,
        _compared(table, files): f"{COMPARISON}/runs.csv",
        "checks": f"{COMPARISON}/checks.csv",
        "loss curves": f"{COMPARISON}/loss.svg",
    }
    links = [
        f"[{title}]({files.name}/{path})"
        for title, path in linked.items()
        if (files / path).is_file()
    ]
    body = f"{page_table(study, table)}\n\nFiles: {', '.join(links)}."
    head = [f"```bash\n{_command(study)}\n```"]
    drawn = "scores by run"
    if study.figure is not None:
        drawn = study.figure.y_label or study.figure.y
    head.append(f"![{drawn}]({files.name}/{FIGURE})")
    head.append(study.introduction)
    lead = "\n\n".join(head)
    return f"""{BEGIN}

{lead}

- text: {study.source_name}
- {study.length}{_tokens(study, files)} a run{_other_lengths(study, table)}
- {cost}{protocol}{only}{not_run}

## Evaluations

{" ".join(notes)}

{body}
{_analyses(study, files)}
{END}"""


def _compared(table: pd.DataFrame, files: Path) -> str:
    """Returns ``comparison``, with its number of runs if the table has another."""
    path = files / COMPARISON / "runs.csv"
    count = len(pd.read_csv(path)) if path.is_file() else 0
    return "comparison" if count == len(table) else f"comparison of {count} runs"


def _tokens(study: Study, files: Path) -> str:
    """Returns the tokens of a run of the comparison, if known and not the unit of the length.

    Padded questions and runs of several lengths have no such number.
    """
    path = files / COMPARISON / "runs.csv"
    table = pd.read_csv(path) if path.is_file() else pd.DataFrame()
    known = "training_tokens" in table and table["training_tokens"].notna().all()
    one_length = all(run.length == 1 for run in study.runs.values())
    if study.unit != "tokens" or "tokens" in study.length or not (known and one_length):
        return ""
    counts = [table["training_tokens"].min(), table["training_tokens"].max()]
    numbers = dict.fromkeys(f"{count:,.0f}" for count in counts)
    return f", {' to '.join(numbers)} tokens"


def _other_lengths(study: Study, table: pd.DataFrame) -> str:
    """Returns the runs whose length differs from the study's, or the exceptions, by factor."""
    lengths = {run.title: run.length for run in study.runs.values()}
    lengths = {title: lengths[title] for title in table["title"].unique()}
    parts = []
    for factor in dict.fromkeys(value for value in lengths.values() if value != 1):
        same = [title for title, length in lengths.items() if length == factor]
        rest = [title for title in lengths if title not in same]
        names, prefix = (rest, "all but ") if len(same) > len(rest) > 0 else (same, "")
        parts.append(f"; {factor:g} times that: {prefix}*{'*, *'.join(names)}*")
    return "".join(parts)


def _command(study: Study) -> str:
    """Returns the command, with a placeholder for the paths of the user's text."""
    parts = ["python -m studies", study.name]
    parts += [] if study.operations is None else [f"--operations {study.operations}"]
    parts += ["--text 'books/*.txt'"] if study.files else []
    named = study.files and study.text_name
    parts += [f"--text_name {shlex.quote(study.text_name)}"] if named else []
    length = f"--steps {study.steps}" if study.epochs is None else f"--epochs {study.epochs}"
    return " ".join([*parts, length, f"--seeds {','.join(map(str, study.seeds))}"])


def _copy_files(study: Study, trained: Trained, files: Path) -> None:
    for run, run_dir in trained:
        if run.seed != study.seeds[0]:  # analyses on the page are of the first seed
            continue
        for name, analysis in run.analyses.items():
            source, target = run_dir.path / name, files / f"{run.name}-{name}"
            shutil.rmtree(target, ignore_errors=True)  # from an earlier report
            quoting = analysis.quoting if study.files else ()
            hidden = {path for pattern in quoting for path in source.rglob(pattern)}
            chosen = {path for pattern in analysis.files for path in source.rglob(pattern)}
            for path in sorted(chosen - hidden):
                target.mkdir(exist_ok=True)
                write_whole(target / path.name, path.read_bytes())


def _analyses(study: Study, files: Path) -> str:
    """Returns a list of the analyses with a link to each figure, or to a table without one."""
    lines = []
    for name in (f"{run.name}-{name}" for run in study.runs.values() for name in run.analyses):
        if not (files / name).is_dir():
            continue
        # stems are val-step=N-SUBJECT; figures come last and replace the tables next to them
        paths = sorted((files / name).iterdir(), key=lambda path: (path.suffix != ".csv", path))
        links = {path.stem.rpartition("-")[2]: f"{files.name}/{name}/{path.name}" for path in paths}
        subjects = ", ".join(f"[{subject}]({links[subject]})" for subject in sorted(links))
        lines.append(f"- {name}: {subjects}")
    return "\n".join(["\n## Analyses\n", *lines, ""]) if lines else ""
