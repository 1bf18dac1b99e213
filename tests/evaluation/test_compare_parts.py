"""Parts of a comparison: numbers for people, checks, record, figure, folder."""

from types import SimpleNamespace

import pandas as pd
import pytest

from evaluation.report import (
    COLUMNS,
    FILES,
    GENERATOR,
    ReportColumn,
    _close,
    _equal,
    _parts,
    check_folder,
    compare_figure,
    curve_of,
    run_values,
    si,
    write_folder,
)
from evaluation.run_metrics import ReportRow, TrainingCost
from evaluation.runs import read_record
from lightning_models import ThoughtbubblesLM
from lightning_models.thoughtbubbles import ThoughtbubblesConfig


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, "0.50"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.6, "1.00 k"),
        (1.5e9, "1.50 G"),
        (3e30, "3000000 Y"),
    ],
)
def test_large_numbers_have_three_digits(value, expected):
    assert si(value) == expected


# ---- checks


def named(*values):
    return [SimpleNamespace(name=f"r{n}", value=value) for n, value in enumerate(values)]


def value_of(one):
    return one.value


@pytest.mark.parametrize(
    ("values", "state", "detail"),
    [
        (("a", "a"), "matched", "a"),
        (("a", "b", "a"), "differs", "a (r0, r2) | b (r1)"),
        (("a", None), "not known", "a (r0) | not known (r1)"),
        ((None, None), "not known", "of any run"),
        (("a", "b", None), "differs", "a (r0) | b (r1) | not known (r2)"),
        (("a", *"bbbbbb"), "differs", "a (r0) | b (r1, r2, r3, r4 and 2 more)"),
    ],
)
def test_values_are_matched_or_told_with_their_runs(values, state, detail):
    check = _equal("it", named(*values), value_of)
    assert (check.state, check.detail) == (state, detail)
    assert check.as_text() == f"{state}: it: {detail}"


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ((100, 100), "matched"),
        ((100, 105), "matched"),
        ((100, 106), "differs"),
        ((100, None), "not known"),
        ((100, 104, None), "not known"),
        ((0, 5), "differs"),
    ],
)
def test_sizes_may_differ_by_five_percent(values, state):
    assert _close("size", named(*values), value_of, 0.05).state == state


def test_only_the_keys_that_differ_are_told():
    orders = named({"seed": 0, "rows": "a"}, {"seed": 0, "rows": "b"}, {"seed": 0, "tokens": 1234})
    check = _parts("order", orders, value_of)
    assert (check.state, check.detail) == (
        "differs",
        "rows a (r0) | rows b (r1) | tokens 1,234 (r2)",
    )
    check = _parts("order", orders[:1], value_of)
    assert (check.state, check.detail) == ("matched", "seed 0, rows a")


# ---- columns


def run(likelihood="exact", loss=1.0, counted="all", name="run", scalars=None, **training):
    """A run as far as columns and figure read it."""
    sizes = {"parameters": 10, "non_embedding": 5, "steps": 10, "tokens": 1000, "positions": 1200}
    sizes |= {"flops_per_position": 6.0, "published_per_position": None}
    sizes |= {"planned": False}
    content = {
        "nats_per_token": loss,
        "bits_per_byte": loss / 2,
        "perplexity": 2.0,
        "ppl_bound": 2.0,
        "flops_per_token": 2.0,
        "causal": True,
    }
    score = SimpleNamespace(
        content=content, likelihood=likelihood, generation_flops=2.0, markers=1.2
    )
    return SimpleNamespace(
        name=name,
        run=SimpleNamespace(scalars=scalars or {}, model="X"),
        training=TrainingCost(**{**sizes, "tokens_per_second": None, "accuracy": None, **training}),
        score=score,
        tasks={},
        likelihood=likelihood,
        counted=counted,
    )


def test_flops_are_per_token_of_text():
    values = run_values(run(published_per_position=12.0))
    assert values["training_flops"] == 1200 * 6
    assert values["training_flops_per_token"] == pytest.approx(7.2)
    assert values["training_flops_per_token_published"] == pytest.approx(14.4)
    assert values["inference_flops_per_token"] == pytest.approx(2.4)
    assert values["tokens_per_second"] is None


def test_planned_training_flops_have_columns_of_their_own():
    """Under causal allocations texts decide what a step of Thoughtbubbles computes."""
    values = run_values(run(planned=True))
    assert values["nominal_training_flops"] == 1200 * 6
    assert values["nominal_training_flops_per_token"] == pytest.approx(7.2)
    assert not {"training_flops", "training_flops_per_token"} & set(values)
    assert not any(key.startswith("nominal") for key in run_values(run()))


@pytest.mark.parametrize(
    ("allocation", "in_evaluation", "planned"),
    [
        ("global_topk", None, False),
        ("global_topk", "threshold", False),
        ("threshold", None, True),
        ("threshold", "global_topk", True),
        ("window_topk", None, True),
    ],
)
def test_training_flops_are_planned_where_texts_decide(allocation, in_evaluation, planned):
    config = ThoughtbubblesConfig(
        vocab_size=50,
        block_size=32,
        num_layers=3,
        num_heads=2,
        dim=16,
        fork_layers=[1, 2],
        allocation=allocation,
        eval_allocation=in_evaluation,
    )
    assert ThoughtbubblesLM(config).adaptive_training is planned


def test_a_bound_has_a_column_of_its_own():
    keys = ("nats_per_token", "bits_per_byte")
    exact, bound = (
        {key: v for key, v in run_values(one).items() if key.startswith(keys)}
        for one in (run(), run("lower_bound"))
    )
    assert exact == {"nats_per_token_exact": 1.0, "bits_per_byte_exact": 0.5}
    assert bound == {"nats_per_token_lower_bound": 1.0, "bits_per_byte_lower_bound": 0.5}
    assert COLUMNS["nats_per_token_lower_bound"].title == "nats/token (bound)"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0], "1.5 (1.0 to 2.0)"),
        ([1.0, 1.01], "1.0"),
        ([None, 2.0], "2.0"),
        ([None], ""),
    ],
)
def test_a_cell_has_the_range_where_there_is_one(values, expected):
    column = ReportColumn("x", "{:.1f}".format, "part")
    assert column.cell(pd.Series(values, dtype=object)) == expected


# ---- figure


LOG = {"val/bpb": {4: 3.0, 9: 2.0, 14: 1.0}}


def test_curves_end_with_the_checkpoint():
    assert curve_of(run(scalars=LOG), "bits_per_byte") == [
        (5, 500, 3600, 3.0),
        (10, 1000, 7200, 2.0),
    ]
    assert curve_of(run(scalars=LOG, tokens=None), "bits_per_byte") == []


def test_a_line_a_run_and_a_point_a_row():
    seeds = ReportRow("plain", (run(loss=2.0, scalars=LOG), run(loss=3.0, scalars=LOG)))
    bound = ReportRow("latent", (run("lower_bound", loss=4.0, scalars=LOG),))
    figure = compare_figure([seeds, bound])
    tokens, flops, inference = figure.axes
    curves = [line for line in tokens.lines if len(line.get_xdata()) == 2]
    assert [line.get_linestyle() for line in curves] == ["-", "-", "--"]
    assert len({line.get_color() for line in curves}) == 2
    assert curves[0].get_linewidth() < curves[2].get_linewidth()
    points = [line for line in inference.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in points] == [[1.25], [2.0]]
    assert [line.get_xdata()[0] for line in points] == pytest.approx([2.4, 2.4])
    assert points[1].get_markerfacecolor() == "white"
    assert [axes.get_xscale() for axes in figure.axes] == 3 * ["log"]
    assert tokens.get_ylabel() == "loss (bits per byte)"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "latent (bound)"]
    assert list(flops.lines[0].get_xdata()) == [3600, 7200]


def test_a_run_with_one_validation_is_seen():
    log = {"val/bpb": {9: 2.0}}
    figure = compare_figure([ReportRow("one", (run(loss=5.0, scalars=log),))])
    points = [line for line in figure.axes[0].lines if list(line.get_ydata()) == [2.0]]
    (score,) = (line for line in figure.axes[0].lines if line.get_marker() == "o")
    assert all(line.get_markersize() > score.get_markersize() for line in points)
    assert points[0].get_zorder() > score.get_zorder()


# ---- record


def test_a_resumed_run_has_the_settings_of_its_start_and_all_versions(tmp_path):
    (tmp_path / "config.yaml").write_text("# run: x\n# commit: a\n# torch: 2\nseed_everything: 3\n")
    (tmp_path / "config_40.yaml").write_text("# commit: b\n# torch: 2\nseed_everything: 4\n")
    record = read_record(tmp_path)
    assert record.versions == {"commit": "a and b", "torch": "2"}
    assert record.get("seed_everything") == 3
    assert record.get("seed_everything", "deeper") is None


@pytest.mark.parametrize("text", [None, "a: [", "- 1", "a: !!python/object:os.x {}"])
def test_what_is_no_record_says_nothing(tmp_path, text):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert read_record(tmp_path).settings == {}
    assert read_record(None).versions == {}


# ---- folder


def writes(text, *names):
    def write(folder):
        for name in (*names, "report.html"):
            (folder / name).write_text(f'<meta content="{GENERATOR}">{text}')

    return write


def test_a_new_folder_appears_whole(tmp_path):
    folder = check_folder(str(tmp_path / "deep" / "report"))

    def fails_halfway(place):
        writes("x")(place)
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError):
        write_folder(folder, fails_halfway)
    assert list((tmp_path / "deep").iterdir()) == []
    write_folder(folder, writes("first", "loss.svg"))
    assert {path.name for path in folder.iterdir()} == {"loss.svg", "report.html"}


def test_an_earlier_report_is_replaced_and_other_files_stay(tmp_path):
    folder = tmp_path / "report"
    write_folder(folder, writes("first", "loss.svg", "report.md"))
    (folder / "notes.txt").write_text("mine")
    assert check_folder(str(folder)) == folder
    write_folder(folder, writes("second", "report.md"))
    assert {path.name for path in folder.iterdir()} == {"report.md", "report.html", "notes.txt"}
    assert "second" in (folder / "report.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert "notes.txt" not in FILES


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "report.html").write_text("<html>another one")
    with pytest.raises(ValueError, match="has other files, and no report of an earlier comparison"):
        check_folder(str(tmp_path))
    with pytest.raises(ValueError, match="is a file; name a folder"):
        check_folder(str(tmp_path / "report.html"))
    (tmp_path / "empty").mkdir()
    assert check_folder(str(tmp_path / "empty")) == tmp_path / "empty"
