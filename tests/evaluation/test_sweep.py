"""Several checkpoints side by side: perplexity against the steps and FLOPs they take."""

import json
import re
import shutil

import pandas as pd
import pytest
import torch
from compared_runs import read
from methods import METHODS

from datamodules import LocalText
from evaluation.figures import MARKERS, SWEEP_COSTS, sweep_figure
from evaluation.load import build_outline
from evaluation.sweep import frontier, loss_key, points_frame
from lightning_models import MoRLM, PonderLM, ThinkingStatesLM, ThoughtbubblesLM
from lightning_models.checkpoint import read_checkpoint

COSTS = list(SWEEP_COSTS)
FEW = ("--limit_batches", 1)
TRAIN = ("--split", "train", *FEW)


@pytest.fixture(scope="module")
def runs(checkpoint_path, ponder_path, corpus, train_checkpoint, tmp_path_factory):
    """A folder with the plain transformer, and PonderLM-3 with K = 1 and K = 2."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(checkpoint_path, folder / "plain.ckpt")
    shutil.copy(ponder_path, folder / "two.ckpt")
    train_checkpoint(folder / "one.ckpt", LocalText(**corpus), PonderLM, thinking_steps=1)
    return folder


@pytest.fixture
def sweep_of(evaluates, tmp_path):
    """Runs the command on checkpoints; returns the rows of the CSV file and what was printed."""

    def run(ckpts, *options):
        output = tmp_path / "pareto.svg"
        printed = evaluates("sweep", "--ckpts", *ckpts, "--output", output, *options)
        assert "<svg" in output.read_text()
        return read(output.with_suffix(".csv")), printed

    return run


@pytest.fixture
def sweep(sweep_of, runs):
    """The same on runs."""

    def run(*options, ckpts=("*.ckpt",)):
        return sweep_of([runs / name for name in ckpts], *options)

    return run


def test_the_numbers_are_those_of_perplexity(sweep, reports, runs):
    rows, printed = sweep()
    assert [row["thinking_steps"] for row in rows] == ["1", "0", "2"]
    assert [row["label"] for row in rows] == ["one", "plain", "two"]
    for row in rows:
        alone, _ = reports("perplexity", "--ckpt", row["checkpoint"])
        for key in ("nats_per_token", "perplexity", *COSTS):
            if key in alone:
                assert float(row[key]) == pytest.approx(alone[key], rel=1e-12)
        assert f"{alone['nats_per_token']:.5g}" in printed
    plain = rows[1]
    assert float(plain["executed_steps"]) == 0
    outline = build_outline(read_checkpoint(runs / "plain.ckpt"))
    assert float(plain["generation_flops_per_token"]) == outline.generation_flops(32)
    assert plain["frontier_executed_steps"] == "True"


def test_dials_are_turned_where_there_are_any(sweep):
    rows, printed = sweep("--dial", "alpha=-30,0", "tau=0.01", *FEW)
    assert [(row["thinking_steps"], row["alpha"], row["tau"]) for row in rows] == [
        ("1", "-30.0", "0.01"),
        ("1", "0.0", "0.01"),
        ("0", "", ""),
        ("2", "-30.0", "0.01"),
        ("2", "0.0", "0.01"),
    ]
    assert [float(row["executed_steps"]) for row in rows] == [0, 1, 0, 0, 2]
    assert "alpha" in printed.splitlines()[0]


def test_checkpoints_of_one_label_share_a_line(sweep):
    rows, _ = sweep("--label", "model", *FEW)
    assert [row["label"] for row in rows] == ["PonderLM", "TransformerLM", "PonderLM"]


def test_settings_are_changed_where_there_are_any(sweep):
    rows, _ = sweep("--set.tau", "0.999", *FEW)
    assert [float(row["executed_steps"]) for row in rows] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--against", "steps"], "against (steps) must name some of executed_steps"),
        (["--against", ""], "against () must name some of executed_steps"),
        (["--dial", "alpha=0,x"], "dial (alpha=x) must be values of alpha (float)"),
        (["--dial", "alpha"], "dial (alpha) must be NAME=VALUE,VALUE"),
        (["--dial", "alpha="], "dial (alpha=) must be NAME=VALUE,VALUE"),
        (["--dial", "alpha=1", "alpha=2"], "alpha is given twice"),
        (["--ckpts", "none.ckpt"], "there is no checkpoint at none.ckpt"),
        (["--dial", "dim=8"], "none of the models has the dial dim; they have thinking_steps"),
        (["--measure", "bits"], "measure"),
        (["--set.dimm", "3"], "none of the models has the setting dimm"),
        (["--label", "width"], "label (width) is not a key"),
        (["--limit_batches", "0"], "--limit_batches: "),
        (["--output", "pareto.gif"], "must end in .svg, .png or .pdf"),
    ],
)
def test_wrong_options_end_in_one_line(fails, runs, tmp_path, options, expected):
    output = ["--output", tmp_path / "pareto.svg"]
    assert expected in fails("sweep", "--ckpts", runs, runs / "one.ckpt", *output, *options)


def test_another_vocabulary_or_tokenizer_is_named(fails, checkpoint_path, bpe_run, tmp_path):
    output = ("--output", tmp_path / "a.svg")
    line = fails("sweep", "--ckpts", checkpoint_path, bpe_run, *output)
    assert f"ckpts ({bpe_run}): the data's tokenizer (bytes) has 257 entries" in line
    content = torch.load(bpe_run, weights_only=True)
    edit_alphabet(content)
    other = tmp_path / "other.ckpt"
    torch.save(content, other)
    line = fails("sweep", "--ckpts", bpe_run, other, *output)
    assert f"ckpts ({other}): the data's tokenizer" in line
    assert "the same ids mean different text" in line


def edit_alphabet(content):
    """Exchanges two entries of a checkpoint's tokenizer."""
    state = next(v for k, v in content.items() if "DataModule" in k or "LocalText" in k)
    saved = state["tokenizer"]
    whole = json.loads(saved["json"])
    vocab = whole["model"]["vocab"]
    first, second = [key for key in vocab if key in ("a", "b")]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    saved["json"] = json.dumps(whole)


def test_what_one_checkpoint_cannot_take_is_skipped(sweep):
    over_steps = ("--dial", "thinking_steps=1,2", "--against", "thinking_steps")
    rows, printed = sweep(*over_steps, *FEW, ckpts=("one.ckpt", "two.ckpt"))
    assert [row["thinking_steps"] for row in rows] == ["1", "2"]
    lines = [line for line in printed.splitlines() if line.startswith("skipped: ")]
    assert [line.partition(": ")[2].partition(":")[0] for line in lines] == [
        "one at thinking_steps 2",
        "two at thinking_steps 1",
    ]
    assert all("size mismatch for network.router" in line for line in lines)


@pytest.mark.parametrize("dial", ["thinking_steps=3", "tau=2"])
def test_a_value_that_no_checkpoint_takes_leaves_nothing(fails, runs, tmp_path, dial):
    output = ("--output", tmp_path / "a.svg", *FEW)
    assert dial[:3] in fails("sweep", "--ckpts", runs / "one.ckpt", *output, "--dial", dial)
    assert not list(tmp_path.iterdir())


# ---- frontier and figure


def test_points_without_a_loss_are_not_on_the_frontier_and_hide_nothing():
    nan = float("nan")
    points = [(1, 5.0), (2, nan), (3, 9.0), (0, nan), (nan, 1.0)]
    assert frontier(pd.DataFrame(points, columns=["cost", "loss"])) == [0]


def test_the_frontier_is_what_nothing_beats():
    points = [(1, 9.0), (2, 5.0), (2, 6.0), (3, 5.0), (4, 1.0), (0, 9.5), (4, 1.0)]
    found = frontier(pd.DataFrame(points, columns=["cost", "loss"]))
    assert found == [5, 0, 1, 4, 6]
    for number, (cost, loss) in enumerate(points):
        beaten = any(
            c <= cost and other <= loss and (c, other) != (cost, loss) for c, other in points
        )
        assert beaten == (number not in found)


def point(label, most, steps, perplexity, likelihood="exact", name=None, **dials):
    """The line of a point as far as lines, frontier and figure read it."""
    costs = dict(zip(COSTS, (steps, 6 * steps, 2 * steps, 20 * steps), strict=True))
    note = ", ".join(f"{key} {value}" for key, value in dials.items()) or f"K={most}"
    facts = {"label": label, "name": name or label, "thinking_steps": most, "dials": dials}
    score = {"perplexity": perplexity, "nats_per_token": perplexity / 10, "likelihood": likelihood}
    return {**facts, **score, **costs, "note": note}


POINTS = [
    point("ours", 3, 2.5, 10.0),
    point("ours", 2, 1.5, 12.0),
    point("fixed", 3, 3.0, 11.0),
    point("fixed", 2, 2.0, 11.5),
]


def lines_of(points):
    """Number of points of each line, by its name."""
    return points_frame(points)["line"].value_counts(sort=False).to_dict()


def test_the_frontier_of_a_cost_is_marked():
    points = points_frame(POINTS)
    assert list(points["frontier_executed_steps"]) == [True, True, False, True]
    assert lines_of(POINTS) == {"ours": 2, "fixed": 2}
    panels = sweep_figure(points, [*COSTS, "thinking_steps"]).axes
    best = panels[0].lines[2]
    assert list(best.get_xdata()) == [1.5, 2.0, 2.5]
    assert panels[4].lines[0].get_xydata().tolist() == [[2, 1.2], [3, 1.0]]  # nats over K


def test_turned_dials_are_a_line_of_one_number_of_steps():
    turned = [point("ours", 3, 2.0 + a, 10 - a, alpha=a) for a in (0.5, -0.5)]
    lines = lines_of([*turned, point("ours", 2, 1.5, 12.0, alpha=0.0), POINTS[2]])
    assert lines == {"ours, K = 3": 2, "ours, K = 2": 1, "fixed": 1}
    (panel,) = sweep_figure(points_frame(turned), COSTS[:1], "nats_per_token").axes
    assert panel.lines[0].get_xydata().tolist() == [[1.5, 1.05], [2.5, 0.95]]
    assert panel.texts[0].get_text() == "alpha -0.5"


def test_a_line_is_one_checkpoint_along_the_last_dial():
    names, taus = ("first", "second"), (0.1, 0.2)
    turned = [
        point("ours", 3, 2.0, 10, name=name, tau=tau, alpha=alpha)
        for name in names
        for tau in taus
        for alpha in (-1.0, 1.0)
    ]
    lines = {f"ours, K = 3, tau {tau} ({name})": 2 for name in names for tau in taus}
    assert lines_of(turned) == lines
    looped = [point("looped", k, k, 9 - k, thinking_steps=k) for k in (3, 1, 2)]
    assert lines_of(looped) == {"looped": 3}


def test_kinds_of_likelihood_share_neither_line_nor_marker_nor_frontier():
    mixed = [*POINTS, point("bound", 0, 2.0, 1.0, "lower_bound"), point("b", 0, 1, 5, "noncausal")]
    points = points_frame(mixed)
    assert list(points["frontier_executed_steps"]) == [True, True, False, True, True, True]
    (panel,) = sweep_figure(points, COSTS[:1]).axes
    kinds = ["exact", "exact", "lower_bound", "noncausal", "exact", "lower_bound", "noncausal"]
    assert [line.get_marker() for line in panel.lines] == [MARKERS[kind] for kind in kinds]
    same = [point("one", 0, 1, 2, kind) for kind in ("exact", "estimate")]
    assert list(lines_of(same).values()) == [1, 1]


# ---- dials of every method, turned at test time


DIALS = {
    "thoughtbubbles": ["--dial", "kappa=1L,1.5L,64"],
    "copy-3": ["--dial", "copies=1,2,3"],
    "latent-thought": ["--dial", "inner_steps=0,2,3"],
    "ponderlm": ["--dial", "alpha=-1,0,1", "tau=0"],
    "ponderlm2": ["--dial", "eval_iterations=0,1,null"],
    "ponderlm1": ["--dial", "thinking_steps=0,1,2"],
    "looped": ["--dial", "thinking_steps=0,1,2"],
    "huginn": ["--dial", "thinking_steps=0,1,3"],
    "pause": ["--dial", "thinking_steps=1,2,3"],
    "thought-gestalt": ["--dial", "memory_size=1,2,3"],
}


def test_all_methods_with_dials_are_swept_here():
    turned = {method.model for method in METHODS if method.name in DIALS}
    declared = {method.model for method in METHODS if method.build().config.dials}
    own_test = {MoRLM, ThinkingStatesLM}
    assert declared - turned == own_test, (
        "whose steps have learned capacities; whose dial is on or off"
    )


def test_thoughts_are_switched_off(write_method, sweep_of):
    (off, on), _ = sweep_of([write_method("thinking-states")], *TRAIN, "--dial", "think=false,true")
    assert float(off["flops_per_token"]) < float(on["flops_per_token"])
    assert off["nats_per_token"] != on["nats_per_token"]


@pytest.mark.parametrize("name", DIALS)
def test_the_dial_of_every_method_changes_what_it_computes(write_method, sweep_of, name):
    rows, printed = sweep_of([write_method(name)], *TRAIN, *DIALS[name])
    assert len({row[loss_key(row["likelihood"])] for row in rows}) == len(rows) == 3
    for row in rows:  # one loss, under the name of its kind
        assert len([key for key in row if key.startswith("nats_per_token") and row[key]]) == 1
    cost = "executed_steps" if name == "ponderlm" else "flops_per_token"
    costs = [float(row[cost]) for row in rows]
    assert costs == sorted(costs)
    assert (costs[0] < costs[-1]) == (name != "ponderlm")
    assert "skipped" not in printed
    if "thinking_steps=0" in DIALS[name][1]:  # the table shows that none were taken
        assert re.search(r"^\S+ +0 +\d\.", printed, re.MULTILINE)


def test_thresholds_hold_at_the_budget_of_the_training_only(
    corpus, train_checkpoint, fails, evaluates, tmp_path
):
    config = {"fork_layers": (1,), "kappa": "1.5L", "allocation": "threshold"}
    data = LocalText(**corpus)
    path = train_checkpoint(tmp_path / "t.ckpt", data, ThoughtbubblesLM, **config)
    command = ("sweep", "--ckpts", path, *FEW, "--output", tmp_path / "a.svg")
    printed = evaluates(*command, "--dial", "kappa=1.2L,1.5L")
    (line,) = [line for line in printed.splitlines() if line.startswith("skipped: ")]
    assert "at kappa 1.2L: kappa (1.2L): the thresholds were observed at 1.5L" in line
    assert "the thresholds were observed at 1.5L" in fails(*command, "--dial", "kappa=1.2L")


def test_windows_and_sentences_are_two_sweeps(write_method, fails, tmp_path):
    paths = [write_method(name) for name in ("gpt2", "thought-gestalt")]
    line = fails("sweep", "--ckpts", *paths, "--output", tmp_path / "a.svg")
    assert f"ckpts ({paths[1]}): data (LocalText)" in line
    assert "all checkpoints read the same data" in line


def test_likelihoods_that_are_not_exact_are_marked(write_method, sweep_of):
    paths = [write_method(name) for name in ("gpt2", "latent-thought", "thoughtbubbles")]
    rows, printed = sweep_of(paths, *TRAIN)
    labels = [row["label"] for row in rows]
    assert labels == ["gpt2", "latent-thought (bound)", "thoughtbubbles (noncausal)"]
    assert "no other point of its kind of likelihood" in printed


def test_models_of_questions_share_a_sweep(write_method, sweep_of):
    paths = [write_method(name) for name in ("thinking-states", "no-cot", "coconut")]
    rows, _ = sweep_of(paths, *TRAIN)
    assert {row["likelihood"] for row in rows} == {"exact"}
    costs = {row["label"]: float(row["flops_per_token"]) for row in rows}
    assert list(costs) == ["thinking-states", "no-cot", "coconut"]
    assert costs["no-cot"] < min(costs["thinking-states"], costs["coconut"])
