"""Several checkpoints side by side: perplexity against the steps and FLOPs they take."""

import csv
import json
import shutil
from typing import ClassVar

import pytest
import torch

from datamodules import LocalText
from evaluation.cost import Cost, Thinking
from evaluation.sweep import MARKERS, SweepPoint, SweepVariant, frontier, lines_of, sweep_figure
from lightning_models import PonderLM

COSTS = [
    "executed_steps",
    "flops_per_token_6nd",
    "generation_flops_per_token",
    "flops_per_token",
]
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
        with output.with_suffix(".csv").open(newline="") as file:
            return list(csv.DictReader(file)), printed

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


# ---- frontier and figure


def test_the_frontier_is_what_nothing_beats():
    points = [(1, 9.0), (2, 5.0), (2, 6.0), (3, 5.0), (4, 1.0), (0, 9.5), (4, 1.0)]
    assert frontier(points) == [5, 0, 1, 4, 6]
    for number, (cost, loss) in enumerate(points):
        beaten = any(
            c <= cost and other <= loss and (c, other) != (cost, loss) for c, other in points
        )
        assert beaten == (number not in frontier(points))


class Report:
    """As much of a report as the figure reads."""

    def __init__(self, perplexity, steps, likelihood):
        self.totals, self.likelihood = self, likelihood
        self.perplexity, self.nats_per_token = perplexity, perplexity / 10
        self.cost = Cost(20 * steps, Thinking(steps, 2 * steps, 6 * steps), 1.0)


def point(label, most, steps, perplexity, likelihood="exact", name=None, **dials):
    class Outline:
        class config:
            thinking_steps = most
            dials: ClassVar = {"alpha": r"$\alpha$"}

    variant = SweepVariant(None, name or label, {}, dials, Outline)
    return SweepPoint(variant, label, Report(perplexity, steps, likelihood))


POINTS = [
    point("ours", 3, 2.5, 10.0),
    point("ours", 2, 1.5, 12.0),
    point("fixed", 3, 3.0, 11.0),
    point("fixed", 2, 2.0, 11.5),
]


def test_a_line_a_method_and_the_frontier_behind_them():
    panels = sweep_figure(POINTS, [*COSTS, "thinking_steps"]).axes
    assert len(panels) == 5
    ours, fixed, best = panels[0].lines
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([1.5, 2.5], [12.0, 10.0])
    assert (list(fixed.get_xdata()), list(fixed.get_ydata())) == ([2.0, 3.0], [11.5, 11.0])
    assert list(best.get_xdata()) == [1.5, 2.0, 2.5]
    assert [text.get_text() for text in panels[0].texts] == ["K=2", "K=3", "K=2", "K=3"]
    assert list(panels[1].lines[0].get_xdata()) == [9.0, 15.0]
    assert list(panels[2].lines[0].get_xdata()) == [3.0, 5.0]
    assert list(panels[3].lines[0].get_xdata()) == [30.0, 50.0]
    ours, fixed = panels[4].lines
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([2, 3], [1.2, 1.0])


def test_turned_dials_are_a_line_of_one_number_of_steps():
    turned = [point("ours", 3, 2.0 + a, 10 - a, alpha=a) for a in (0.5, -0.5)]
    lines = lines_of([*turned, point("ours", 2, 1.5, 12.0, alpha=0.0), POINTS[2]])
    assert list(lines) == ["ours, K = 3", "ours, K = 2", "fixed"]
    (panel,) = sweep_figure(turned, COSTS[:1]).axes
    assert list(panel.lines[0].get_xdata()) == [1.5, 2.5]
    assert panel.texts[0].get_text() == r"$\alpha$ -0.5"
    (panel,) = sweep_figure(turned, COSTS[:1], "loss").axes
    assert list(panel.lines[0].get_ydata()) == [1.05, 0.95]
    assert panel.get_ylabel() == "loss (nats per token)"


def test_a_line_is_one_checkpoint_along_the_last_dial():
    turned = [
        point("ours", 3, 2.0, 10, name=name, tau=tau, alpha=alpha)
        for name in ("first", "second")
        for tau in (0.1, 0.2)
        for alpha in (-1.0, 1.0)
    ]
    lines = lines_of(turned)
    assert list(lines) == [
        f"ours, K = 3, tau {tau} ({name})" for name in ("first", "second") for tau in (0.1, 0.2)
    ]
    assert {len(members) for members in lines.values()} == {2}


def test_turned_steps_are_a_line_over_them():
    turned = [point("looped", k, k, 9 - k, thinking_steps=k) for k in (3, 1, 2)]
    assert list(lines_of(turned)) == ["looped"]
    (panel,) = sweep_figure(turned, ["thinking_steps"]).axes
    assert list(panel.lines[0].get_xdata()) == [1, 2, 3]


def test_kinds_of_likelihood_share_neither_line_nor_marker_nor_frontier():
    mixed = [*POINTS, point("bound", 0, 2.0, 1.0, "lower_bound"), point("b", 0, 1, 5, "noncausal")]
    figure = sweep_figure(mixed, COSTS[:1])
    (panel,) = figure.axes
    markers = [line.get_marker() for line in panel.lines]
    kinds = ["exact", "exact", "lower_bound", "noncausal", "exact", "lower_bound", "noncausal"]
    assert markers == [MARKERS[kind] for kind in kinds]
    assert len(set(MARKERS.values())) == 4
    best = panel.lines[4:]
    assert [list(line.get_ydata()) for line in best] == [[12, 11.5, 10], [1.0], [5]]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[-2:] == ["Pareto frontier (bound)", "Pareto frontier (noncausal)"]
    same = [point("one", 0, 1, 2, kind) for kind in ("exact", "estimate")]
    assert [len(members) for members in lines_of(same).values()] == [1, 1]


def test_flops_far_apart_have_a_logarithmic_axis():
    near, far = POINTS, [*POINTS, point("much", 3, 100.0, 9.0)]
    for points, scale in ((near, "linear"), (far, "log")):
        panels = sweep_figure(points, COSTS).axes
        assert [panel.get_xscale() for panel in panels] == ["linear", *[scale] * 3]


def test_what_one_checkpoint_cannot_take_is_skipped(sweep):
    rows, printed = sweep("--thinking_steps", "1,2", *FEW, ckpts=("one.ckpt", "two.ckpt"))
    assert [row["thinking_steps"] for row in rows] == ["1", "2"]
    lines = [line for line in printed.splitlines() if line.startswith("skipped: ")]
    assert len(lines) == 2
    assert lines[0].startswith("skipped: one.ckpt at thinking_steps 2: ")
    assert "learned for another size (network.router" in lines[0]
