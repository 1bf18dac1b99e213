"""Several checkpoints side by side: perplexity against the steps and FLOPs they take."""

import json
import shutil

import pandas as pd
import pytest
import torch
from compared_runs import read
from methods import METHODS

from datamodules import LocalText
from evaluation.figures import MARKERS, SWEEP_COSTS, sweep_figure
from evaluation.sweep import frontier, loss_key, points_frame
from lightning_models import MoRLM, PonderLM, ThinkingStatesLM, ThoughtbubblesLM

COSTS = list(SWEEP_COSTS)
FEW = ("--limit_batches", 1)


@pytest.fixture(scope="module")
def runs(checkpoint_path, ponder_path, corpus, train_checkpoint, tmp_path_factory):
    """A folder with the plain transformer, and PonderLM-3 with K = 1 and K = 2."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(checkpoint_path, folder / "plain.ckpt")
    shutil.copy(ponder_path, folder / "two.ckpt")
    train_checkpoint(folder / "one.ckpt", LocalText(**corpus), PonderLM, thinking_steps=1)
    return folder


@pytest.fixture
def sweep(evaluates, runs, tmp_path):
    """Runs the command; returns the rows of the CSV file and what was printed."""

    def run(*options, ckpts=("*.ckpt",)):
        output = tmp_path / "pareto.svg"
        words = [runs / name for name in ckpts]
        printed = evaluates("sweep", "--ckpts", *words, "--output", output, *options)
        assert "<svg" in output.read_text()
        return read(output.with_suffix(".csv")), printed

    return run


def test_the_numbers_are_those_of_perplexity(sweep, evaluates, runs, tmp_path):
    rows, printed = sweep()
    assert [row["thinking_steps"] for row in rows] == ["1", "0", "2"]
    assert [row["label"] for row in rows] == ["PonderLM", "TransformerLM", "PonderLM"]
    for row in rows:
        target = tmp_path / "one.json"
        evaluates("perplexity", "--ckpt", row["checkpoint"], "--output", target)
        alone = json.loads(target.read_text())
        for key in ("nats_per_token", "perplexity", *COSTS):
            if key in alone:
                assert float(row[key]) == pytest.approx(alone[key], rel=1e-12)
        assert f"{alone['nats_per_token']:.5g}" in printed
    plain = rows[1]
    assert float(plain["executed_steps"]) == 0
    assert float(plain["generation_flops_per_token"]) == alone_flops(runs / "plain.ckpt")
    assert plain["frontier_executed_steps"] == "True"


def alone_flops(path):
    from evaluation.load import build_outline
    from lightning_models.checkpoint import read_checkpoint

    return build_outline(read_checkpoint(path)).generation_flops(32)


def test_dials_are_turned_where_there_are_any(sweep):
    rows, printed = sweep("--alphas=-30,0", "--taus", "0.01", *FEW)
    assert [(row["thinking_steps"], row["alpha"], row["tau"]) for row in rows] == [
        ("1", "-30.0", "0.01"),
        ("1", "0.0", "0.01"),
        ("0", "", ""),
        ("2", "-30.0", "0.01"),
        ("2", "0.0", "0.01"),
    ]
    assert [float(row["executed_steps"]) for row in rows] == [0, 1, 0, 0, 2]
    assert "alpha" in printed.splitlines()[0]


def test_settings_are_changed_where_there_are_any(sweep):
    rows, _ = sweep("--set.tau", "0.999", *FEW)
    assert [float(row["executed_steps"]) for row in rows] == [0, 0, 0]


def test_loss_over_the_number_of_steps(sweep):
    rows, _ = sweep("--against", "thinking_steps", *FEW, ckpts=("one.ckpt", "two.ckpt"))
    assert [row["thinking_steps"] for row in rows] == ["1", "2"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--against", "steps"], "against (steps) is none of executed_steps"),
        (["--alphas", "0,x"], "alphas (0,x) must be values of alpha (float) separated by commas"),
        (["--dial", "alpha"], "dial (alpha) must be NAME=VALUE,VALUE"),
        (["--dial", "alpha="], "dial () has no values of alpha"),
        (["--dial", "alpha=1", "--alphas", "2"], "alpha is given twice"),
        (["--dial", "dim=8"], "none of the models has the dial dim; they have thinking_steps"),
        (["--thinking_steps", "3"], "learned for another size"),
        (["--measure", "bits"], "measure"),
        (["--set.dimm", "3"], "none of the models has the setting dimm"),
        (["--taus", "2"], "tau (2.0) must be in [0, 1)"),
        (["--label", "width"], "label (width) is no key"),
        (["--limit_batches", "0"], "limit_batches (0) must be at least 1"),
        (["--output", "pareto.pdf"], "must end in .svg or .png"),
    ],
)
def test_wrong_options_end_in_one_line(fails, runs, tmp_path, options, expected):
    output = ["--output", tmp_path / "pareto.svg"]
    assert expected in fails("sweep", "--ckpts", runs, runs / "one.ckpt", *output, *options)


def test_dials_that_no_model_has_are_refused(fails, checkpoint_path, tmp_path):
    line = fails(
        "sweep", "--ckpts", checkpoint_path, "--alphas", "1", "--output", tmp_path / "a.svg"
    )
    assert "none of the models has the dial alpha; they have none" in line


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


def test_no_checkpoint_ends_in_one_line(fails, tmp_path):
    output = ("--output", tmp_path / "a.svg")
    assert "ckpts" in fails("sweep", *output)
    line = fails("sweep", "--ckpts", tmp_path / "none.ckpt", *output)
    assert f"ckpts ({tmp_path / 'none.ckpt'}): there is no such file" in line


def test_what_one_checkpoint_cannot_take_is_skipped(sweep):
    rows, printed = sweep("--thinking_steps", "1,2", *FEW, ckpts=("one.ckpt", "two.ckpt"))
    assert [row["thinking_steps"] for row in rows] == ["1", "2"]
    lines = [line for line in printed.splitlines() if line.startswith("skipped: ")]
    assert len(lines) == 2
    assert lines[0].startswith("skipped: one.ckpt at thinking_steps 2: ")
    assert "learned for another size (network.router" in lines[0]


# ---- frontier and figure


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


def drawn(points, against, measure="perplexity"):
    return sweep_figure(points_frame(points), against, measure)


def test_a_line_a_method_and_the_frontier_of_all():
    panels = drawn(POINTS, [*COSTS, "thinking_steps"]).axes
    ours, fixed, best = panels[0].lines
    assert ours.get_xydata().tolist() == [[1.5, 12.0], [2.5, 10.0]]
    assert fixed.get_xydata().tolist() == [[2.0, 11.5], [3.0, 11.0]]
    assert list(best.get_xdata()) == [1.5, 2.0, 2.5]
    assert [text.get_text() for text in panels[0].texts] == ["K=2", "K=3", "K=2", "K=3"]
    firsts = [list(panel.lines[0].get_xdata()) for panel in panels[1:4]]
    assert firsts == [[9.0, 15.0], [3.0, 5.0], [30.0, 50.0]]
    ours, fixed = panels[4].lines
    assert ours.get_xydata().tolist() == [[2, 1.2], [3, 1.0]]


def test_turned_dials_are_a_line_of_one_number_of_steps():
    turned = [point("ours", 3, 2.0 + a, 10 - a, alpha=a) for a in (0.5, -0.5)]
    lines = lines_of([*turned, point("ours", 2, 1.5, 12.0, alpha=0.0), POINTS[2]])
    assert lines == {"ours, K = 3": 2, "ours, K = 2": 1, "fixed": 1}
    (panel,) = drawn(turned, COSTS[:1]).axes
    assert list(panel.lines[0].get_xdata()) == [1.5, 2.5]
    assert panel.texts[0].get_text() == "alpha -0.5"
    (panel,) = drawn(turned, COSTS[:1], "nats_per_token").axes
    assert list(panel.lines[0].get_ydata()) == [1.05, 0.95]
    assert panel.get_ylabel() == "loss (nats per token)"


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


def test_turned_steps_are_a_line_over_them():
    turned = [point("looped", k, k, 9 - k, thinking_steps=k) for k in (3, 1, 2)]
    assert lines_of(turned) == {"looped": 3}
    (panel,) = drawn(turned, ["thinking_steps"]).axes
    assert list(panel.lines[0].get_xdata()) == [1, 2, 3]


def test_kinds_of_likelihood_share_neither_line_nor_marker_nor_frontier():
    mixed = [*POINTS, point("bound", 0, 2.0, 1.0, "lower_bound"), point("b", 0, 1, 5, "noncausal")]
    figure = drawn(mixed, COSTS[:1])
    (panel,) = figure.axes
    kinds = ["exact", "exact", "lower_bound", "noncausal", "exact", "lower_bound", "noncausal"]
    assert [line.get_marker() for line in panel.lines] == [MARKERS[kind] for kind in kinds]
    best = panel.lines[4:]
    assert [list(line.get_ydata()) for line in best] == [[12, 11.5, 10], [1.0], [5]]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[-2:] == ["Pareto frontier (bound)", "Pareto frontier (noncausal)"]
    same = [point("one", 0, 1, 2, kind) for kind in ("exact", "estimate")]
    assert list(lines_of(same).values()) == [1, 1]


def test_flops_far_apart_have_a_logarithmic_axis():
    for points, scale in ((POINTS, "linear"), ([*POINTS, point("x", 3, 100.0, 9.0)], "log")):
        panels = drawn(points, COSTS).axes
        assert [panel.get_xscale() for panel in panels] == ["linear", *[scale] * 3]


# ---- dials of every method, turned at test time


DIALS = {
    "thoughtbubbles": ["--kappas=1L,1.5L,64"],
    "copy-3": ["--dial", "copies=1,2,3"],
    "latent-thought": ["--inner_steps=0,2,3"],
    "ponderlm": ["--dial", "alpha=-1,0,1", "tau=0"],
    "ponderlm2": ["--dial", "eval_iterations=0,1,null"],
    "ponderlm1": ["--thinking_steps=0,1,2"],
    "looped": ["--thinking_steps=0,1,2"],
    "pause": ["--thinking_steps=1,2,3"],
    "thought-gestalt": ["--dial", "memory_size=1,2,3"],
}


def test_all_methods_with_dials_are_swept_here():
    turned = {method.model for method in METHODS if method.name in DIALS}
    declared = {method.model for method in METHODS if method.build().config.dials}
    own_test = {MoRLM, ThinkingStatesLM}
    assert declared - turned == own_test, (
        "whose steps have learned capacities; whose dial is on or off"
    )


def test_thoughts_are_switched_off(write_method, evaluates, tmp_path):
    path, output = write_method("thinking-states"), tmp_path / "dial.svg"
    words = ("--split", "train", *FEW, "--output", output)
    evaluates("sweep", "--ckpts", path, *words, "--dial", "think=false,true")
    off, on = read(output.with_suffix(".csv"))
    assert float(off["flops_per_token"]) < float(on["flops_per_token"])
    assert off["nats_per_token"] != on["nats_per_token"]


def loss_of(row):
    """The one loss of a row, which stands under the name of its kind."""
    losses = {key: row[key] for key in row if key.startswith("nats_per_token") and row[key]}
    ((key, loss),) = losses.items()
    assert key == loss_key(row["likelihood"])
    return loss


@pytest.mark.parametrize("name", DIALS)
def test_the_dial_of_every_method_changes_what_it_computes(write_method, evaluates, tmp_path, name):
    path, output = write_method(name), tmp_path / "dial.svg"
    words = ("--split", "train", *FEW, "--output", output)
    printed = evaluates("sweep", "--ckpts", path, *words, *DIALS[name])
    rows = read(output.with_suffix(".csv"))
    assert len(rows) == 3
    assert len({loss_of(row) for row in rows}) == 3
    cost = "executed_steps" if name == "ponderlm" else "flops_per_token"
    costs = [float(row[cost]) for row in rows]
    assert costs == sorted(costs)
    assert (costs[0] < costs[-1]) == (name != "ponderlm")
    assert "skipped" not in printed


def test_the_same_command_gives_the_same_files(write_method, evaluates, tmp_path):
    path, pictures, tables = write_method("latent-thought"), [], []
    for number in range(2):
        output = tmp_path / f"{number}.svg"
        words = ("--split", "train", *FEW, "--output", output)
        evaluates("sweep", "--ckpts", path, "--inner_steps", "0,1", *words)
        pictures.append(output.read_bytes())
        tables.append([{**row, "seconds": 0} for row in read(output.with_suffix(".csv"))])
    assert pictures[0] == pictures[1]
    assert tables[0] == tables[1]
    assert not list(tmp_path.glob("*.tmp"))


def test_thresholds_hold_at_the_budget_of_the_training_only(
    corpus, train_checkpoint, fails, evaluates, tmp_path
):
    config = {"fork_layers": (1,), "kappa": "1.5L", "allocation": "threshold"}
    data = LocalText(**corpus)
    path = train_checkpoint(tmp_path / "t.ckpt", data, ThoughtbubblesLM, **config)
    command = ("sweep", "--ckpts", path, *FEW, "--output", tmp_path / "a.svg")
    printed = evaluates(*command, "--kappas", "1.2L,1.5L")
    (line,) = [line for line in printed.splitlines() if line.startswith("skipped: ")]
    assert "at kappa 1.2L: kappa (1.2L): the thresholds were observed at 1.5L" in line
    assert "the thresholds were observed at 1.5L" in fails(*command, "--kappas", "1.2L")


def test_windows_and_sentences_are_two_sweeps(write_method, fails, tmp_path):
    paths = [write_method(name) for name in ("gpt2", "thought-gestalt")]
    line = fails("sweep", "--ckpts", *paths, "--output", tmp_path / "a.svg")
    assert "reads windows and ThoughtGestaltLM (thought-gestalt.ckpt) reads sentences" in line
    assert "make one of each kind" in line


def test_exact_and_bound_are_told_apart_in_the_label(write_method, evaluates, tmp_path):
    paths = [write_method(name) for name in ("gpt2", "latent-thought", "thoughtbubbles")]
    words = ("--split", "train", *FEW, "--output", tmp_path / "a.svg")
    printed = evaluates("sweep", "--ckpts", *paths, *words)
    labels = [line.split("  ")[0] for line in printed.splitlines()[1:4]]
    assert labels == ["TransformerLM", "LatentThoughtLM (bound)", "ThoughtbubblesLM (noncausal)"]
    assert "no other one of its kind of likelihood" in printed


def test_models_of_questions_share_a_sweep(write_method, evaluates, tmp_path):
    paths = [write_method(name) for name in ("thinking-states", "no-cot", "coconut")]
    output = tmp_path / "questions.svg"
    evaluates("sweep", "--ckpts", *paths, "--split", "train", *FEW, "--output", output)
    rows = read(output.with_suffix(".csv"))
    assert [row["label"] for row in rows] == ["ThinkingStatesLM", "NoCoTLM", "CoconutLM"]
    assert {row["likelihood"] for row in rows} == {"exact"}
    costs = {row["label"]: float(row["flops_per_token"]) for row in rows}
    assert costs["NoCoTLM"] < min(costs["ThinkingStatesLM"], costs["CoconutLM"])
