"""Parts of a comparison: checks, columns, tasks, numbers for people, figure, folder."""

from dataclasses import MISSING, fields
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from evaluation.compare import curves_frame
from evaluation.compare_report import (
    FILES,
    close,
    equal,
    make_differences,
    report_folder,
    same_parts,
)
from evaluation.figures import compare_figure, label_sizes, on_other_text
from evaluation.output import write_folder
from evaluation.run_metrics import (
    RunMetrics,
    describe_score,
    describe_training,
    tasks_in,
)
from evaluation.tables import show_mean, si
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
    assert show_mean(pd.Series(values, dtype=object), "{:.1f}".format) == expected


# ---- checks


def named(*values):
    return pd.Series(values, [f"r{n}" for n in range(len(values))], dtype=object)


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
    assert equal(named(*values)) == (state, detail)


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
    assert close(named(*values), 0.05)[0] == state


def test_only_the_keys_that_differ_are_named():
    orders = named({"seed": 0, "rows": "a"}, {"seed": 0, "rows": "b"}, {"seed": 0, "tokens": 1234})
    assert same_parts(orders) == ("differs", "rows a (r0) | rows b (r1) | tokens 1,234 (r2)")
    assert same_parts(orders[:1]) == ("matched", "seed 0, rows a")


# ---- results of tasks: of the model as trained, and said where asked otherwise


ASKED = {"mode": "blockwise", "precision": "32", "set": {}}


def result(accuracy, examples=10, settings=ASKED):
    task = {"metrics": {"acc": accuracy}, "examples": examples, "of_examples": 100}
    return {"settings": settings, "tasks": {"piqa_local": task}}


def test_the_file_with_the_most_examples_counts():
    files = [result(0.5, examples=100), result(0.9, examples=5)]
    for order in (files, files[::-1]):
        assert tasks_in(order)["piqa_local"]["metrics"] == {"acc": 0.5}


def test_numbers_of_examples_in_the_prompt_are_kept_apart():
    both = [result(0.5), result(0.75)]
    for shots, each in zip((0, 5), both, strict=True):
        each["tasks"]["piqa_local"]["num_fewshot"] = shots
    found = {name: task["metrics"]["acc"] for name, task in tasks_in(both).items()}
    assert found == {"piqa_local_0shot": 0.5, "piqa_local_5shot": 0.75}


def test_changed_models_are_left_out():
    assert tasks_in([result(0.5, settings={**ASKED, "set": {"inner_steps": 0}})]) == {}


def test_tasks_of_a_group_with_a_mean_are_left_out():
    content = {
        "blimp": {"metrics": {"acc": 0.6}, "tasks": ["island", "agreement"]},
        "island": {"metrics": {"acc": 0.5}},
        "agreement": {"metrics": {"acc": 0.7}},
        "no_mean": {"metrics": {}, "tasks": ["other"]},
        "other": {"metrics": {"acc": 0.1}},
    }
    assert set(tasks_in([{"settings": ASKED, "tasks": content}])) == {"blimp", "other"}


# ---- columns


class Outline(torch.nn.Module):
    """As much of a model as columns read."""

    reads, adaptive_training, published, network = "windows", False, None, None
    config = SimpleNamespace(block_size=32)

    def flops_per_token(self, context, training=False):
        return 6.0 if training else 2.0

    def published_flops_per_token(self, context):
        return self.published


def run(scalars=None, name="run", **model):
    """A run of 10 steps of 128 positions."""
    outline = Outline()
    vars(outline).update(model)
    total = {"fit_loop": {"epoch_loop.batch_progress": {"total": {"processed": 10}}}}
    checkpoint = SimpleNamespace(
        step=10,
        content={"loops": total},
        data_state={},
        data_recipe={"init_args": {"batch_size": 4}},
    )
    known = {"name": name, "outline": outline, "checkpoint": checkpoint}
    return SimpleNamespace(**known, scalars=scalars or {}, model="X")


MARKED = SimpleNamespace(
    tokenizer=SimpleNamespace(special_ids=[0, 1], eos_id=0, text_bos_id=None),
    counts=lambda split: SimpleNamespace(tokens=1280, documents=0),
)
"""Data of which a fifth are markers."""


def trained(**model):
    return describe_training(run(**model), MARKED, 1024)


def test_flops_are_per_token_of_text():
    values = trained(published=12.0)
    assert values["training_tokens"] == 1024
    assert values["training_flops"] == values["flops"] == 1280 * 6
    assert values["training_flops_per_token"] == pytest.approx(7.5)
    assert values["training_flops_per_token_published"] == pytest.approx(15)
    assert values["tokens_per_second"] is None


@pytest.mark.parametrize(
    ("logged", "tokens"),
    [
        ({0: 30.0, 9: 310.0}, 310),
        ({0: 30.0, 9: 310.0, 14: 460.0}, 310),  # the run went on after the checkpoint
        ({0: 30.0, 7: 248.0}, 310),  # 31 per step so far
        ({}, None),
    ],
)
def test_questions_count_as_logged(logged, tokens):
    """Lengths of questions vary, so that the number of rows does not tell the tokens."""
    flops = {0: 10.0, 9: 14.0, 14: 99.0}  # the last one after the checkpoint
    scalars = {"train/tokens": logged, "throughput/flops_per_token": flops}
    values = trained(scalars=scalars, reads="reasoning")
    assert values["training_tokens"] == tokens
    assert values["training_flops"] == (None if tokens is None else 12 * tokens)


def test_planned_training_flops_have_columns_of_their_own():
    """Under causal allocations texts decide what a step of Thoughtbubbles computes."""
    values = trained(adaptive_training=True)
    assert values["nominal_training_flops"] == values["flops"] == 1280 * 6
    assert values["nominal_training_flops_per_token"] == pytest.approx(7.5)
    assert values["training_flops"] is values["training_flops_per_token"] is None
    assert trained()["nominal_training_flops"] is None


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


def scored(likelihood="exact", loss=1.0):
    keys = {"nats_per_token": loss, "bits_per_byte": loss / 2, "perplexity": 2.0, "ppl_bound": 2.0}
    counted = {"counted": "all", "causal": True, "likelihood": likelihood}
    flops = {"flops_per_token": 2.0, "generation_flops_per_token": 2.0}
    return describe_score(run(), {**keys, **counted, **flops}, 32, 1.25)


def metrics(**changes):
    """Metrics of a run of which little is known."""
    unknown = dict.fromkeys(field.name for field in fields(RunMetrics) if field.default is MISSING)
    return RunMetrics(**{**unknown, "tasks": {}, **trained(), **scored(), **changes})


@pytest.mark.parametrize(
    ("likelihood", "counted", "columns"),
    [
        ("exact", "all", {"nats_per_token_exact": 1.0, "bits_per_byte_exact": 0.5}),
        (
            "lower_bound",
            "all",
            {"nats_per_token_lower_bound": 1.0, "bits_per_byte_lower_bound": 0.5},
        ),
        ("exact", "lexical", {"nats_per_token_exact_lexical": 1.0, "bits_per_byte_exact": 0.5}),
        (
            "exact",
            "answers",
            {"nats_per_token_exact_answers": 1.0, "bits_per_byte_exact_answers": 0.5},
        ),
    ],
)
def test_kinds_and_targets_have_columns_of_their_own(likelihood, counted, columns):
    keys = ("nats_per_token_", "bits_per_byte_")
    found = metrics(likelihood=likelihood, counted=counted).columns()
    assert {key: v for key, v in found.items() if key.startswith(keys)} == columns


# ---- figure


LOG = {"val/bpb": {4: 3.0, 9: 2.0, 14: 1.0}}


def frame(*rows, scalars=LOG):
    """The table of runs and their curves, from (label, likelihood, loss)."""
    lines = [
        {"run": f"r{n}", "label": label, **trained(), **scored(kind, loss)}
        for n, (label, kind, loss) in enumerate(rows)
    ]
    runs = pd.DataFrame(lines, dtype=object)
    return runs, curves_frame(runs, [run(scalars, name) for name in runs["run"]])


def test_curves_end_with_the_checkpoint():
    _, curves = frame(("one", "exact", 1.0))
    assert curves.to_numpy().tolist() == [
        ["r0", "one", 5, 512.0, 3840.0, 3.0],
        ["r0", "one", 10, 1024.0, 7680.0, 2.0],
    ]
    runs, _ = frame(("one", "exact", 1.0))
    assert curves_frame(runs.assign(training_tokens=None), [run(LOG, "r0")]).empty


# ---- folder


def writes(text, *names):
    def write(folder):
        for name in (*names, "report.html"):
            (folder / name).write_text(text)

    return write


def test_a_new_folder_appears_whole(tmp_path):
    folder = report_folder(str(tmp_path / "deep" / "report"))

    def fails_halfway(place):
        writes("x")(place)
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError):
        write_folder(folder, fails_halfway, FILES)
    assert list((tmp_path / "deep").iterdir()) == []
    write_folder(folder, writes("first", "loss.svg"), FILES)
    assert {path.name for path in folder.iterdir()} == {"loss.svg", "report.html"}


def test_an_earlier_report_is_replaced_and_other_files_stay(tmp_path):
    folder = tmp_path / "report"
    write_folder(folder, writes("first", "loss.svg", "report.md"), FILES)
    (folder / "notes.txt").write_text("mine")
    assert report_folder(str(folder)) == folder
    write_folder(folder, writes("second", "report.md"), FILES)
    assert {path.name for path in folder.iterdir()} == {"report.md", "report.html", "notes.txt"}
    assert "second" in (folder / "report.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert "notes.txt" not in FILES


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "figure.png"):
        with pytest.raises(ValueError, match="output"):
            report_folder(str(path))
    (tmp_path / "empty").mkdir()
    assert report_folder(str(tmp_path / "empty")) == tmp_path / "empty"


# ---- differences and the figure of losses


def compared(*losses, kinds=("exact", "exact"), seeds=2):
    """Two rows of seeds with these losses."""
    held = {"text": "t", "split": "val", "bytes": 9}
    rows = [
        {"run": f"{label}{seed}", "label": label, "bits_per_byte": loss + 0.1 * seed}
        | {"seed": str(seed)}
        | {"likelihood": kind, "counted": "all", "scored": held, "training_tokens": 20.0}
        | {"flops": 40.0, "inference_flops_per_token": 5.0, "nats_per_token": loss}
        for label, loss, kind in zip("ab", losses, kinds, strict=True)
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows)


def test_differences_have_their_sign_and_one_kind():
    (worse,) = make_differences(compared(1.0, 1.5))
    pairs = "; paired by seed, +0.5000 to +0.5000 over 2 seeds"
    assert worse == "b minus a: +0.5000 bits per byte, worse (lower is better)" + pairs
    (better,) = make_differences(compared(1.0, 0.75))
    assert better.startswith("b minus a: -0.2500 bits per byte, better")
    (bound,) = make_differences(compared(1.0, 0.5, kinds=("exact", "lower_bound")))
    assert bound == "b minus a: not comparable, the likelihoods differ in kind (exact, bound)"
    elsewhere = compared(1.0, 0.5)
    elsewhere["scored"] = [
        {"text": label, "split": "val", "bytes": 9} for label in elsewhere["label"]
    ]
    assert make_differences(elsewhere) == ["b minus a: not comparable, scored on different text"]


def test_differences_pair_runs_of_the_same_known_seed():
    runs = compared(1.0, 1.5, seeds=3)  # the third of b has another seed
    runs["bits_per_byte"] += [0, 0, 0, 0.25, -1.0, 9.0]
    runs["seed"] = ["0", "1", "2", "1", "0", "?0"]
    # b0 - a1 = 1.75 - 1.1, b1 - a0 = 0.6 - 1.0
    (said,) = make_differences(runs)
    assert said.endswith("; paired by seed, -0.4000 to +0.6500 over 2 seeds")
    runs["seed"] = ["0", "1", "2", "1", "1", "?0"]  # which of the two would pair?
    assert "paired" not in make_differences(runs)[0]


def logged(runs, above=0.0):
    """Two validations of each run, the last of which is that much above the score."""
    return pd.DataFrame(
        [
            {"run": run.run, "label": run.label, "steps": step, "tokens": 10.0 * step}
            | {
                "training_flops": 20.0 * step,
                "val/bpb": run.bits_per_byte + (1.0, above)[step - 1],
            }
            for run in runs.itertuples()
            for step in (1, 2)
        ],
        dtype=object,
    )


def test_seeds_are_a_mean_with_a_band_and_one_seed_has_no_bar():
    runs = compared(1.0, 1.5)
    panel = compare_figure(runs, logged(runs), "bits_per_byte").axes[0]
    lines = [line for line in panel.lines if len(line.get_xdata()) == 2]
    assert [list(line.get_ydata()) for line in lines] == [
        pytest.approx([2.05, 1.05]),
        pytest.approx([2.55, 1.55]),
    ]
    bands = [each for each in panel.collections if each.get_alpha() == 0.2]
    assert [sorted({*band.get_paths()[0].vertices[:, 1].round(2)}) for band in bands] == [
        [1.0, 1.1, 2.0, 2.1],
        [1.5, 1.6, 2.5, 2.6],
    ]
    assert len(panel.containers) == 2
    alone = compared(1.0, 1.5, seeds=1)
    assert not compare_figure(alone, logged(alone), "bits_per_byte").axes[0].containers


def test_points_of_other_text_stand_apart():
    runs = compared(1.0, 1.5)
    same = compare_figure(runs, logged(runs), "bits_per_byte").axes
    assert [panel.get_title() for panel in same] == ["", "", ""]
    apart = compare_figure(runs, logged(runs, above=0.05), "bits_per_byte").axes
    assert [panel.get_title() for panel in apart] == [
        "validations, on other text",
        "validations, on other text",
        "scores of the table",
    ]
    assert [len(panel.containers) for panel in apart] == [0, 0, 2]


@pytest.mark.parametrize(
    ("tokens", "above", "apart"),
    [
        (21.0, -0.05, True),  # the last validation is at 95 % of the run
        (40.0, -0.05, True),  # the score is higher, which training does not explain
        (40.0, 0.05, False),  # lower after half of the run
    ],
)
def test_training_after_the_last_validation_explains_a_lower_score(tokens, above, apart):
    runs = compared(1.0, 1.5)
    curves = logged(runs, above=above)
    assert on_other_text(runs.assign(training_tokens=tokens), curves, "bits_per_byte") == apart


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (2.2e11, 3.4e11, [2.4e11, 2.8e11, 3.2e11]),
        (1e5, 1e7, [1e5, 1e6, 1e7]),
        (1.5e5, 6e5, [2e5, 5e5]),
    ],
)
def test_size_axes_have_a_few_round_labels(low, high, ticks):
    axes = Figure().subplots()
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    label_sizes(axes.xaxis)
    shown = [tick for tick in axes.xaxis.get_major_locator()() if low <= tick <= high]
    assert shown == pytest.approx(ticks)
