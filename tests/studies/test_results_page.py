"""The report: values of the tables, the marked section, and its files."""

import csv
import json
import math
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from quiet import quiet_trainer

from datamodules import LocalText
from lightning_models import OptimizerConfig, TransformerConfig, TransformerLM
from studies import results_page
from studies.figures import draw_figure, draw_scores
from studies.results_page import (
    BEGIN,
    END,
    check_report,
    evaluations_table,
    render_section,
    write_report,
    write_suite,
)
from studies.runner import RunFolder, run_study
from studies.study import Figure, StudyError


@pytest.fixture
def reported(study, commands, tmp_path):
    """Runs the study without executing its commands; returns what writes its report."""
    run_study(study, tmp_path / "runs")

    def write(changed=study, path=tmp_path / "pair.md"):
        write_report(changed, tmp_path / "runs", path)
        return path.read_text()

    return write


def table(text, head):
    """The first table whose header has this cell: a row by its first cell."""
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    start = next(number for number, row in enumerate(cells) if head in row)
    return {row[0]: dict(zip(cells[start], row, strict=True)) for row in cells[start + 1 :]}


def test_values_of_the_table(reported, study):
    rows = table(reported(), "bpb")
    assert rows["plain"]["bpb"] == "2.5 [2, 3]"
    assert rows["copied"]["bpb"] == "2.125 [1.5, 2.75], not causal"
    assert rows["plain"]["minus plain"] == "-"
    assert rows["copied"]["minus plain"] == "-0.375 [-0.5, -0.25], not causal"
    assert rows["plain"]["parameters (k)"] == "0.01"
    assert rows["plain"]["training TFLOPs"] == "3"
    assert rows["plain"]["inference kFLOPs/token"] == "2"
    assert "- protocol: Nothing was searched.\n" in reported()
    assert "0 minutes of wall time; budget: 9 core-minutes\n" in reported(replace(study, budget=9))
    assert rows["plain"]["gap"] == "-"
    assert rows["copied"]["gap"] == "-1e-09"
    assert rows["plain"]["logged M"] == "3"


def test_a_study_can_declare_a_cost_itself(reported, study):
    columns = {"inference kFLOPs/token": "`blockwise.bits_per_byte` * 2", **study.columns}
    rows = table(reported(replace(study, columns=columns)), "bpb")
    assert list(rows["plain"])[-1] == "inference kFLOPs/token"
    assert rows["plain"]["inference kFLOPs/token"] == "5 [4, 6]"


def test_the_page_has_chosen_columns_and_the_means_all(reported, study, tmp_path):
    rows = table(reported(replace(study, page_columns=("bpb",))), "bpb")
    assert list(rows["plain"]) == [
        "run", "bpb", "minus plain", "parameters (k)", "training TFLOPs", "inference kFLOPs/token"
    ]  # fmt: skip
    means = pd.read_csv(tmp_path / "pair" / "means.csv").set_index("run")
    assert set(means) == set(rows["plain"]) - {"run"} | set(study.columns) | {"wall time"}
    assert means.loc["copied", "bpb"] == rows["copied"]["bpb"]
    assert means.loc["copied", "gap"] == "-1e-09"
    assert means.loc["plain", "wall time"] == "0:00:00"


def test_differences_that_cancel_have_the_mean_zero():
    assert results_page._mean(pd.Series([-0.1, 0.1 + 1e-16]), 3) == "0 [-0.1, 0.1]"


def test_extra_runs_are_only_in_the_means(reported, study, tmp_path):
    runs = {**study.runs, "copy": replace(study.runs["copy"], extra=True)}
    assert list(table(reported(replace(study, runs=runs)), "bpb")) == ["plain"]
    assert list(pd.read_csv(tmp_path / "pair" / "means.csv")["run"]) == ["plain", "copied"]
    runs = {**study.runs, "plain": replace(study.runs["plain"], extra=True)}
    rows = table(reported(replace(study, runs=runs)), "bpb")
    assert list(rows) == ["copied"]  # an extra baseline still counts
    assert rows["copied"]["minus plain"] == "-0.375 [-0.5, -0.25], not causal"
    runs = {name: replace(run, extra=True) for name, run in runs.items()}
    assert list(table(reported(replace(study, runs=runs)), "bpb")) == ["plain", "copied"]


def test_page_columns_are_columns(study):
    with pytest.raises(StudyError, match=r"page_columns \(of another study\) must be columns"):
        replace(study, page_columns=("bpb", "of another study"))


def test_a_page_is_written_again(reported, tmp_path):
    first, comparison = reported(), tmp_path / "pair" / "comparison"
    (comparison / "of_the_last_time.csv").touch()
    assert reported() == first
    assert not (comparison / "of_the_last_time.csv").exists()


def test_every_run_is_in_the_csv_file_with_all_digits(reported, tmp_path):
    reported()
    with (tmp_path / "pair" / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == [
        *("plain-seed0", "copy-seed0", "plain-seed1", "copy-seed1")
    ]
    last = rows[-1]
    assert (last["bpb"], last["gap"], last["logged M"]) == ("2.75", "-1e-09", "3.0")
    assert rows[0]["gap"] == ""


@pytest.mark.parametrize(
    ("content", "key", "value"),
    [
        ({"results": [{"x": 2.0}]}, "a.results.0.x", 2.0),
        ({"x": 2}, "a.x", 2.0),
        ({"x": 3e6}, "`a.x` / 1e6", 3.0),
        ({"x": 3.0, "y": 2.0}, "`a.x` - `a.y`", 1.0),
        ({"x": None}, "a.x", math.nan),
        ({}, "a.x", math.nan),
        ({}, "`a.x` / 1e6", math.nan),
        ({}, "in.x", math.nan),
    ],
)
def test_columns_are_keys_or_expressions(study, commands, tmp_path, content, key, value):
    place = RunFolder(tmp_path)
    place.note("train", {"seconds": 1.0})
    run = replace(study.runs["plain"], evaluations={"a": {}})
    place.output("a").write_text(json.dumps(content))
    results = pd.DataFrame([results_page.read_results(run, place)])
    table = evaluations_table(
        replace(study, columns={"t": key}, paired={}), [(run, place)], results
    )
    assert table["t"][0] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"likelihood": "exact", "causal": True}, ""),
        ({"likelihood": "lower_bound", "causal": True}, ", bound"),
        ({"likelihood": "lower_bound", "causal": False}, ", bound"),
        ({"likelihood": "noncausal", "causal": False}, ", not causal"),
        ({"likelihood": "exact", "causal": False}, ", not causal"),
    ],
)
def test_kinds_of_likelihood_are_marked(study, commands, tmp_path, content, kind):
    run_study(study, tmp_path / "runs", only=["copy"])
    for file in (tmp_path / "runs").rglob("blockwise.json"):
        file.write_text(json.dumps({"bits_per_byte": 2.0, **content}))
    write_report(study, tmp_path / "runs", tmp_path / "pair.md")
    row = table((tmp_path / "pair.md").read_text(), "bpb")["copied"]
    assert row["bpb"] == f"2{kind}"
    assert row["minus plain"] == "-", "without the baseline"


def test_handwritten_text_survives(reported, tmp_path):
    first = reported()
    path = tmp_path / "pair.md"
    path.write_text(
        first.replace(BEGIN, f"Before.\n{BEGIN}").replace("2.5 [2, 3]", "x") + "After.\n"
    )
    second = reported()
    assert second.count(BEGIN) == second.count(END) == 1
    assert "Before.\n" in second
    assert second.endswith("After.\n")
    assert "2.5 [2, 3]" in second


def test_links_lead_to_files_of_the_report(reported, tmp_path):
    text = reported()
    assert "](pair/comparison/runs.csv), [checks](pair/" in text
    comparison = tmp_path / "pair" / "comparison"
    assert {path.name for path in comparison.iterdir()} == {"runs.csv", "checks.csv", "loss.svg"}
    assert "pair/copy-looks/picture.png" in text
    assert (tmp_path / "pair" / "copy-looks" / "quote.png").is_file()
    (tmp_path / "pair" / "copy-looks" / "stale.png").touch()
    (tmp_path / "pair" / "other.png").touch()
    reported()
    assert not (tmp_path / "pair" / "copy-looks" / "stale.png").exists()
    assert (tmp_path / "pair" / "other.png").exists()


def test_the_users_text_is_neither_named_nor_quoted(reported, study, tmp_path):
    own = replace(study, files=("/secret/place/*.txt",), text_name="novels")
    text = reported(own)
    assert "secret" not in text
    assert "--text 'books/*.txt' --text_name novels" in text
    assert not (tmp_path / "pair" / "copy-looks" / "quote.png").exists()
    assert (tmp_path / "pair" / "copy-looks" / "picture.png").exists()


def test_runs_that_only_an_option_trains_are_named(reported, study):
    copy = replace(study.runs["copy"], extra=True)
    untrained = replace(copy, name="untrained", title="untrained")
    runs = {**study.runs, "copy": copy, "untrained": untrained}
    text = reported(replace(study, runs=runs))
    assert "- trained only with `--only`: copy\n" in text
    assert "`--only`" not in reported()


def test_an_analysis_without_files_for_the_report_is_left_out(reported, study, tmp_path):
    assert "- copy-looks: " in reported()
    looks = replace(study.runs["copy"].analyses["looks"], files=())
    copy = replace(study.runs["copy"], analyses={"looks": looks})
    text = reported(replace(study, runs={**study.runs, "copy": copy}))
    assert "## Analyses" not in text
    assert not (tmp_path / "pair" / "copy-looks").exists()


def test_missing_runs_are_named(reported, tmp_path):
    shutil.rmtree(tmp_path / "runs" / "copy-seed1")
    text = reported()
    assert "- not run: copy-seed1\n" in text
    assert "copied (seed 0)" in table(text, "bpb")


def test_a_further_seed_of_another_run_asks_for_no_more_runs(reported, study, commands, tmp_path):
    reported()
    further = replace(study, seeds=(5,))
    run_study(further, tmp_path / "runs", only=["copy"])
    text = reported(further)
    assert "- not run" not in text
    assert "--seeds 0,1\n" in text
    assert {"plain (seeds 0, 1)", "copied"} <= set(table(text, "bpb"))


def test_columns_with_one_baseline_have_a_difference_each(reported, study):
    rows = table(reported(replace(study, paired={"bpb": "plain", "logged M": "plain"})), "bpb")
    assert rows["copied"]["bpb, minus plain"] == "-0.375 [-0.5, -0.25], not causal"
    assert rows["copied"]["logged M, minus plain"] == "0"


def test_runs_of_other_lengths_are_named(reported, study):
    longer = replace(study.runs["copy"], length=2.0)
    changed = replace(study, runs={**study.runs, "copy": longer})
    assert "- 64 tokens (2 steps of 32) a run; 2 times that: *copied*\n" in reported(changed)
    third = replace(longer, name="third", title="third, copied")
    changed = replace(changed, runs={**changed.runs, "third": third})
    titles = pd.DataFrame({"title": ["plain", "copied", "third, copied"]})
    assert results_page._other_lengths(changed, titles) == "; 2 times that: all but *plain*"


def test_tokens_of_a_length_in_other_units(study, tmp_path):
    (tmp_path / "comparison").mkdir()
    counts = pd.DataFrame({"training_tokens": [4_286_985, 4_276_224, 4_280_000]})
    counts.to_csv(tmp_path / "comparison" / "runs.csv")
    epochs = replace(study, steps=None, epochs=3)
    assert results_page._tokens(epochs, tmp_path) == ", 4,276,224 to 4,286,985 tokens"
    assert results_page._tokens(study, tmp_path) == ""
    for length, expected in ((1.0, ", 4,276,224 to 4,286,985 tokens"), (2.0, "")):
        rows = replace(study.runs["copy"], data={"batch_size": 4}, length=length)
        changed = replace(study, runs={**study.runs, "copy": rows})
        assert results_page._tokens(changed, tmp_path) == expected
    counts[:1].to_csv(tmp_path / "comparison" / "runs.csv")
    assert results_page._tokens(epochs, tmp_path) == ", 4,286,985 tokens"


def test_a_cost_may_be_unknown(study, commands, tmp_path, monkeypatch):
    """Such as the FLOPs of questions in a run that has logged none."""
    cost = {"run.parameters": 10, "run.flops": None, "run.inference_flops_per_token": None}
    monkeypatch.setattr(results_page, "read_cost", lambda folder, options: cost)
    run_study(study, tmp_path / "runs")
    write_report(study, tmp_path / "runs", tmp_path / "pair.md")
    assert "training TFLOPs" not in (tmp_path / "pair.md").read_text()


def test_cost_is_of_the_last_checkpoint(text_file, tmp_path):
    """A run that has not logged its FLOPs; they are counted for its two steps of 64 tokens."""
    cache = str(tmp_path / "cache")
    data = LocalText(data_files=str(text_file), block_size=32, batch_size=2, cache_dir=cache)
    sizes = {"vocab_size": data.vocab_size, "block_size": 32, "num_layers": 1, "dim": 16}
    model = TransformerLM(TransformerConfig(**sizes, num_heads=2), OptimizerConfig(warmup=0))
    trainer = quiet_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    trainer.fit(model, data)
    folder = tmp_path / "train" / "X" / "version_0"
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    (folder / "config.yaml").write_text(f"# commit: {'0123456789' * 4}-dirty\nseed_everything: 0\n")
    (folder / "metrics.csv").write_text("step,train/loss\n1,2.0\n")
    cost = results_page.read_cost(RunFolder(tmp_path), {"split": "val", "limit_batches": 1})
    assert cost == {
        "run.parameters": sum(parameter.numel() for parameter in model.parameters()),
        "run.flops": 2 * 64 * model.flops_per_token(32, training=True),
        "run.inference_flops_per_token": model.flops_per_token(32),
        "run.commit": "012345678901-dirty",
    }


def test_results_outlive_their_checkpoints(reported, study, commands, tmp_path):
    """Of runs that are declared as they were; the comparison, which takes all, stays as it is."""
    first = reported()
    shutil.rmtree(tmp_path / "runs" / "copy-seed1")
    compared = len(commands.seen)
    second = reported()
    assert len(commands.seen) == compared
    assert table(second, "bpb") == table(first, "bpb")
    assert "copied](" not in second
    assert "- not run" not in second
    rows = pd.read_csv(tmp_path / "pair" / "evaluations.csv")
    assert set(rows["commit"]) == {"9e3b1c2"}
    assert [*rows["run"]] == ["plain-seed0", "copy-seed0", "plain-seed1", "copy-seed1"]
    assert table(reported(replace(study, seeds=(0,))), "bpb") == table(first, "bpb")
    (tmp_path / "pair" / "copy-looks" / "picture.png").write_text("of seed 0")
    last = reported(replace(study, seeds=(1,)))
    assert table(last, "bpb") == table(first, "bpb")
    assert "--seeds 0,1\n" in last
    assert (tmp_path / "pair" / "copy-looks" / "picture.png").read_text() == "of seed 0"
    longer = replace(study.runs["copy"], length=2.0)
    third = reported(replace(study, runs={**study.runs, "copy": longer}))
    assert table(third, "bpb")["copied (seed 0)"]["bpb"] == "1.5, not causal"
    assert "- not run: copy-seed1\n" in third


@pytest.fixture
def drawn(reported, study, tmp_path):
    """Writes the report of a study with a figure; returns the figure and its points."""
    figure = Figure(analysis="looks", table="*x.csv", x="at", y="share", marked=1.5)
    for seed, last in ((0, 0.25), (1, 0.75)):
        folder = tmp_path / "runs" / f"copy-seed{seed}" / "looks" / "of_the_callback"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "val-step=2-x.csv").write_text(f"n,at,share\n4,1,0.5\n4,2,{last}\n")

    def draw(seeds=(0, 1)):
        reported(replace(study, figure=figure, seeds=seeds))
        points = pd.read_csv(tmp_path / "pair" / "figure.csv")
        return draw_figure(study, figure, points).axes[0], points

    return draw


def test_a_figure_has_the_mean_and_range_of_the_seeds_of_each_run(drawn, tmp_path):
    ax, points = drawn()
    line, mark = ax.lines
    assert line.get_label() == "copied"
    assert line.get_xydata().tolist() == [[1, 0.5], [2, 0.5]]
    (band,) = ax.collections
    assert {(1, 0.5), (2, 0.25), (2, 0.75)} == {*map(tuple, band.get_paths()[0].vertices)}
    assert [*mark.get_xdata()] == [1.5, 1.5]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("at", "share")
    assert ax.get_legend().get_title().get_text() == "mean and range over seeds"
    assert points.values.tolist() == [
        *(["copy-seed0", 0, 1, 0.5, 4], ["copy-seed0", 0, 2, 0.25, 4]),
        *(["copy-seed1", 1, 1, 0.5, 4], ["copy-seed1", 1, 2, 0.75, 4]),
    ]
    assert (tmp_path / "pair" / "figure.png").is_file()


def test_a_figure_keeps_the_points_of_runs_whose_checkpoints_are_gone(drawn, tmp_path):
    _, points = drawn()
    shutil.rmtree(tmp_path / "runs" / "copy-seed0")
    assert drawn((1,))[1].equals(points)


def test_a_figure_names_the_seeds_of_a_run_with_fewer_and_omits_extra_runs(drawn, study, tmp_path):
    _, points = drawn()
    more = points[points["seed"] == 0].assign(run="plain-seed0")
    figure = Figure(analysis="looks", table="*x.csv", x="at", y="share")
    points = pd.concat([more, points])
    labels = [line.get_label() for line in draw_figure(study, figure, points).axes[0].lines]
    assert labels == ["plain (seed 0)", "copied"]
    extra = replace(study, runs={**study.runs, "copy": replace(study.runs["copy"], extra=True)})
    labels = [line.get_label() for line in draw_figure(extra, figure, points).axes[0].lines]
    assert labels == ["plain"]


def test_an_analysis_without_rows_adds_no_points(drawn, tmp_path):
    for path in (tmp_path / "runs" / "copy-seed1" / "looks").rglob("*x.csv"):
        path.write_text("n,at,share\n")
    drawn()
    assert set(drawn()[1]["run"]) == {"copy-seed0"}  # with earlier points, too


def test_a_figure_without_points_has_its_mark_alone(drawn, tmp_path):
    for seed in (0, 1):
        shutil.rmtree(tmp_path / "runs" / f"copy-seed{seed}" / "looks", ignore_errors=True)
    ax, points = drawn()
    assert [[*line.get_xdata()] for line in ax.lines] == [[1.5, 1.5]]
    assert points.empty


def test_compare_takes_titles_and_options(reported, study, commands):
    reported(replace(study, compare={"split": "test"}))
    command = commands.seen[-1]
    assert command[2] == "compare"
    named = [word.partition("=") for word in command[3:7]]
    assert [(title, place.split("/")[-2]) for title, _, place in named] == [
        *(("plain", "plain-seed0"), ("copied", "copy-seed0")),
        *(("plain", "plain-seed1"), ("copied", "copy-seed1")),
    ]
    assert command[-2:] == ["--split", "test"]


def test_a_suite_has_the_config_of_each_run(reported, study, tmp_path):
    output = tmp_path / "docs" / "suite"
    write_suite(study, tmp_path / "runs", output)
    assert {path.name for path in output.glob("*.yaml")} == {
        *(f"{name}-seed{seed}.yaml" for name in ("plain", "copy") for seed in (0, 1))
    }


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_file_without_the_marks_is_left_alone(text, tmp_path):
    path = tmp_path / "own.md"
    path.write_text(text)
    with pytest.raises(StudyError, match=r"own\.md"):
        check_report(path)
    assert path.read_text() == text


def test_a_report_needs_a_folder(tmp_path):
    for path in (tmp_path / "missing" / "a.md", tmp_path):
        with pytest.raises(StudyError, match="output"):
            check_report(path)


def test_without_a_declared_figure_the_page_shows_the_scores_of_each_run_and_seed(
    reported, study, tmp_path
):
    section = reported()
    assert "![scores by run](pair/figure.png)" in section
    assert (tmp_path / "pair" / "figure.png").is_file()
    rows = pd.read_csv(tmp_path / "pair" / "evaluations.csv")
    figure = draw_scores(replace(study, page_columns=("bpb",)), rows)
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["plain", "copied"]
    exact, marked = (sorted(map(tuple, line.get_xydata().tolist())) for line in ax.lines)
    of = rows.set_index("run")["bpb"]
    assert exact == sorted((of[f"plain-seed{seed}"], 0) for seed in (0, 1))
    assert marked == sorted((of[f"copy-seed{seed}"], 1) for seed in (0, 1))
    assert [text.get_text() for text in ax.get_legend().texts] == ["not causal"]
    extra = replace(study, runs={**study.runs, "copy": replace(study.runs["copy"], extra=True)})
    (ax,) = draw_scores(replace(extra, page_columns=("bpb",)), rows).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["plain"]


@pytest.mark.parametrize(("compared", "title"), [(4, "comparison"), (3, "comparison of 3 runs")])
def test_a_comparison_of_other_runs_than_the_table_says_how_many(
    reported, study, tmp_path, compared, title
):
    reported()
    files = tmp_path / "pair"
    rows = pd.read_csv(files / "evaluations.csv")
    assert len(rows) == 4
    (files / "comparison").mkdir(exist_ok=True)
    rows.head(compared)[["run"]].to_csv(files / "comparison" / "runs.csv")
    assert f"[{title}](pair/comparison/runs.csv)" in render_section(study, rows, files)
