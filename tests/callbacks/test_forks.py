"""What the analysis of forks finds: real models, references, and numbers by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from methods import METHODS

from callbacks import ForkAnalysis
from callbacks.analysis import forks
from callbacks.analysis.base import Findings
from callbacks.analysis.forks import (
    LINE_TOKENS,
    MEASURES,
    MIN_TOKENS,
    TOKEN_WIDTH,
    WINDOW,
    ForkRecorder,
    fit_parabola,
    fork_report,
    measures_by_layer,
    tokens_figure,
    windows,
    with_rows,
)
from datamodules.tokenizers import BytesTokenizer
from tests.callbacks.written import names, scalars, table

BY_NAME = {method.name: method for method in METHODS}
FILES = {f"{name}.csv" for name in ("scalars", "windows", "tokens", "layers", "streams")}


def build(name="thoughtbubbles", **changes):
    model = BY_NAME[name].build(num_layers=3, dim=16, num_heads=2, **changes)
    with torch.no_grad():  # entropies that differ by more than rounding
        model.network.embedding.weight.mul_(15)
    return model


@pytest.fixture
def analyse(make_data, make_trainer, tmp_path, undrawn):
    """Validates a model with the analysis and returns the names of its files, and its scalars."""

    def run(model=None, **options):
        trainer = make_trainer(ForkAnalysis(**{"num_batches": 1, **options}))
        trainer.validate(model or build(), make_data(), verbose=False)
        folder = tmp_path / "fork_analysis"
        return names(folder), scalars(folder)

    return run


@pytest.fixture
def save_checkpoint(make_trainer, make_data, tmp_path):
    """Writes a checkpoint of a method that has been trained for a step."""

    def save(name, **changes):
        trainer = make_trainer(max_steps=1, limit_val_batches=0)
        trainer.fit(build(name, **changes), make_data())
        trainer.save_checkpoint(tmp_path / "reference.ckpt")
        return str(tmp_path / "reference.ckpt")

    return save


# ---- real models


def test_numbers_of_a_real_model(analyse, tmp_path):
    """At kappa = 2L all fork at the first fork layer and the second has to delete half."""
    files, found = analyse()
    assert files == FILES
    assert found["forks/layer1/per_token"] == found["forks/layer1/created"] == 1
    assert found["forks/layer1/orphans"] == 0
    assert found["forks/layer2/per_token"] == found["forks/per_token"] == 1
    assert found["forks/layer2/created"] + found["forks/layer2/kept"] == pytest.approx(1)
    assert found["forks/layer2/survival"] + found["forks/layer2/deletion"] == pytest.approx(1)
    # scores start at about one half an action
    assert found["forks/layer1/score_forks"] == pytest.approx(0.5, abs=0.1)
    assert 0 < found["forks/entropy/mean"] < math.log(320)  # V, padded
    assert len(table(tmp_path / "fork_analysis", "windows")) == 4 * 32 // 4
    tokens = table(tmp_path / "fork_analysis", "tokens")
    assert len(tokens) == 4 * 32
    assert sum(int(token["streams_layer2"]) for token in tokens) == 2 * len(tokens)
    assert {int(token["streams_layer1"]) for token in tokens} == {2}
    shares = table(tmp_path / "fork_analysis", "streams")
    assert shares[0] == {"layer": "1", "streams": "2", "share": "1"}
    second = [int(line["streams"]) * float(line["share"]) for line in shares[1:]]
    assert sum(second) == pytest.approx(2, rel=1e-5)


def test_attention_is_that_of_the_weights(analyse):
    """Queries and keys of zero attend evenly, but for the scores of the keys."""
    model = build(bias_scale="inv_sqrt_dmodel")
    with torch.no_grad():
        for block in model.network.blocks:
            block.attention.qkv.weight[:32] = 0
            block.attention.qkv.bias[:32] = 0
        for fork in model.network.forks:
            fork.score.weight.zero_()  # all scores are a half
    _, found = analyse(model)
    at_first = found["forks/layer1/attention_self"]
    assert found["forks/layer1/attention_own_forks"] == pytest.approx(at_first)
    # a query at stream n gives each of its n + 1 keys 1 / (n + 1): n = 1, 3, ..., 63
    assert at_first == pytest.approx(np.mean([1 / (n + 1) for n in range(1, 64, 2)]), rel=1e-4)
    others = np.mean([1 / (n + 1) for n in range(3, 64, 2)])
    assert found["forks/layer1/attention_others"] == pytest.approx(others, rel=1e-4)


def test_rows_may_be_scored_one_by_one_and_without_attention(analyse, monkeypatch):
    _, together = analyse()
    monkeypatch.setattr(forks, "MAX_WEIGHTS", 1)
    _, alone = analyse()
    assert alone == pytest.approx(together, rel=1e-4)
    _, found = analyse(attention=False)
    assert found == pytest.approx(
        {k: v for k, v in together.items() if "attention" not in k}, rel=1e-4
    )


@pytest.mark.parametrize("name", ["thoughtbubbles-threshold", "thoughtbubbles-window"])
def test_rows_of_different_widths(analyse, name):
    files, found = analyse(build(name))
    assert files == FILES
    assert found["forks/layer1/per_token"] >= 0


@pytest.mark.parametrize("rows", [0, 2])
def test_only_some_rows_are_written_out(analyse, tmp_path, rows):
    files, _ = analyse(shown_rows=rows)
    assert files == (FILES if rows else FILES - {"tokens.csv"})
    lines = table(tmp_path / "fork_analysis", "tokens") if rows else []
    assert len({line["row"] for line in lines}) == rows


def test_tests_are_analysed(make_data, make_trainer, tmp_path):
    trainer = make_trainer(ForkAnalysis(), limit_test_batches=1)
    trainer.test(build(), make_data(test_fraction=0.2), verbose=False)
    assert (tmp_path / "fork_analysis" / "test-step=0-scalars.csv").is_file()


# ---- a reference


@pytest.mark.parametrize("name", ["gpt2", "thoughtbubbles-residual"])
def test_entropies_of_another_checkpoint(analyse, save_checkpoint, tmp_path, name):
    _, alone = analyse()
    _, found = analyse(reference_ckpt=save_checkpoint(name))
    own = {k: v for k, v in found.items() if "reference" not in k}
    assert own == pytest.approx(alone)
    assert found["forks/reference_entropy/mean"] != found["forks/entropy/mean"]
    assert 0 < found["forks/reference_entropy/mean"] < math.log(320)  # V, padded
    assert "reference_entropy" in table(tmp_path / "fork_analysis", "windows")[0]


def test_a_model_is_its_own_reference(analyse, save_checkpoint):
    path = save_checkpoint("thoughtbubbles")
    model = build()
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    _, found = analyse(model, reference_ckpt=path)
    for name in ("mean", "curvature", "r2"):
        own = found[f"forks/entropy/{name}"]
        assert found[f"forks/reference_entropy/{name}"] == pytest.approx(own, rel=1e-3)


def test_a_reference_is_moved_once_a_batch(analyse, save_checkpoint, monkeypatch):
    """Not once a row, where rows are scored one by one."""
    reference, path, back = BY_NAME["gpt2"].model, save_checkpoint("gpt2"), []
    monkeypatch.setattr(reference, "cpu", lambda self: back.append(self))
    monkeypatch.setattr(forks, "MAX_WEIGHTS", 1)
    _, found = analyse(reference_ckpt=path)
    assert "forks/reference_entropy/mean" in found
    assert len(back) == 1


def test_references_that_cannot_be_used_are_refused(analyse, save_checkpoint):
    with pytest.raises(ValueError, match="there is no checkpoint at nowhere.ckpt"):
        analyse(reference_ckpt="nowhere.ckpt")
    path = save_checkpoint("gpt2", vocab_size=300)
    with pytest.raises(ValueError, match="vocabulary of 300, but the model has 257"):
        analyse(reference_ckpt=path)
    content = torch.load(path, weights_only=True)
    content["recipe"]["model"]["class_path"] = "elsewhere.OtherLM"
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"elsewhere\.OtherLM .*--packages elsewhere"):
        analyse(reference_ckpt=path)


# ---- a fork layer by hand

T = 3  # tokens of a row; also the mark of padding


def streams(tokens, p=None):
    """Streams of these tokens, those of one token next to each other; as networks record them."""
    token = torch.tensor(tokens)
    count = torch.stack([(row[:, None] == row).sum(1) for row in token])
    slot = torch.stack([torch.tril(row[:, None] == row, -1).sum(1) for row in token])
    real = token < T
    log_p = torch.zeros(token.shape) if p is None else torch.tensor(p).log()
    return SimpleNamespace(
        token=token,
        count=count,
        slot=slot,
        log_p=log_p,
        num_tokens=T,
        real=real,
        original=real & (slot == count - 1),
        lengths=real.sum(1),
    )


# One row of three tokens, one of two, and one that only fills up the batch. The fork of token 0
# dies but forks itself first; token 1 forks.
BATCH = {
    "tokens": torch.tensor([[10, 11, 12], [13, 14, 0], [0, 0, 0]]),
    "mask": torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool),
}
DECISION = {
    "ordinal": 0,
    "before": streams([[0, 0, 1, 2], [0, 1, T, T], [T, T, T, T]]),
    "after": streams(
        [[0, 0, 1, 1, 2], [0, 1, T, T, T], [T] * 5],
        [[0.5, 0.8, 0.25, 0.6, 1.0], [0.7, 0.9, 1.0, 1.0, 1.0], [1.0] * 5],
    ),
    "parent": torch.tensor([[0, 1, 2, 2, 3], [0, 1, 3, 3, 3], [3] * 5]),
    "is_fork": torch.tensor([[1, 0, 1, 0, 0], [0] * 5, [0] * 5], dtype=torch.bool),
    "budgets": torch.tensor([6, 4, 3]),
}
ENTROPY = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan], [math.nan] * 3])


def recorded(**changes):
    recorder = ForkRecorder()
    recorder.fork(**{**DECISION, **changes})
    recorder.entropy(entropy=ENTROPY)
    return recorder


def measures(*recorders):
    """The measures of the first fork layer, of one pass or several."""
    lines = pd.DataFrame([line for recorder in recorders for line in recorder.sums])
    return measures_by_layer(lines).iloc[0]


def test_a_fork_layer_by_hand():
    layer = measures(recorded())
    expected = {
        "layer": 1,
        "per_token": 2 / 5,
        "created": 2 / 5,
        "kept": 0.0,
        "deleted": 1 / 5,
        "survival": 0.0,
        "deletion": 1.0,
        "orphans": 1 / 2,
        "score_originals": (0.8 + 0.6 + 1.0 + 0.7 + 0.9) / 5,
        "score_forks": (0.5 + 0.25) / 2,
        "budget_use": (5 + 2) / (6 + 4),
    }
    assert layer.dropna().to_dict() == pytest.approx(expected, rel=1e-6)
    assert list(layer.index) == ["layer", *MEASURES]
    twice = measures(recorded(), recorded())
    assert twice.to_dict() == pytest.approx(layer.to_dict(), nan_ok=True)


def test_a_fork_that_is_kept_is_not_new():
    """The same decision, but token 0's fork lives on instead of forking; and there is no budget."""
    none = torch.zeros(3, 5, dtype=torch.bool)
    layer = measures(recorded(is_fork=none, budgets=None))
    assert (layer["created"], layer["survival"], layer["deletion"]) == (0, 1, 0)
    assert math.isnan(layer["orphans"])
    assert math.isnan(layer["budget_use"])


def test_real_tokens_by_hand():
    tokens = with_rows(recorded().tokens(BATCH))  # none of the row that fills up the batch
    assert tokens["row"].tolist() == [0, 0, 0, 1, 1]
    assert tokens["place"].tolist() == [0, 1, 2, 0, 1]
    assert tokens["id"].tolist() == [10, 11, 12, 13, 14]
    assert tokens["streams_layer1"].tolist() == [2, 2, 1, 1, 1]
    np.testing.assert_allclose(tokens["score_original"], [0.8, 0.6, 1.0, 0.7, 0.9], rtol=1e-6)
    np.testing.assert_allclose(tokens["score_forks"][:3], [0.5, 0.25, np.nan], rtol=1e-6)
    assert tokens["entropy"].tolist() == [1, 2, 3, 4, 5]


def test_attention_by_hand():
    recorder = recorded()
    weights = torch.zeros(3, 2, 5, 5)
    weights[0, :, 1, :2] = torch.tensor([[0.2, 0.8], [0.4, 0.6]])  # original of token 0
    weights[0, :, 3, :4] = torch.tensor([[0.0, 0.2, 0.4, 0.4], [0.2, 0.2, 0.2, 0.4]])  # of token 1
    weights[0, :, 4, 4] = 1.0  # token 2 has no forks, so it is not asked
    weights[0, :, 2, 2] = 1.0  # nor are forks
    recorder.attention(weights=weights)
    layer = measures(recorder)
    assert layer["attention_self"] == pytest.approx((0.7 + 0.4) / 2)
    assert layer["attention_own_forks"] == pytest.approx((0.3 + 0.3) / 2)
    assert layer["attention_others"] == pytest.approx((0.1 + 0.2) / 2)  # token 0 has none before


def test_attention_before_the_first_fork_layer_does_not_count():
    recorder = ForkRecorder()
    recorder.attention(weights=torch.ones(3, 2, 3, 3))
    assert not recorder.forked
    recorder.fork(**DECISION)
    assert recorder.forked
    assert math.isnan(measures(recorder)["attention_self"])
    assert set(ForkRecorder(attention=False).consumers()) == {"fork", "entropy"}


# ---- entropy


def tokens_of(*rows):
    """Tokens with these forks after the last of two layers, and these entropies."""
    parts = [
        pd.DataFrame({"row": i, "streams_layer1": 1, **columns}).rename_axis("place").reset_index()
        for i, columns in enumerate(rows)
    ]
    table = pd.concat(parts, ignore_index=True)
    table.insert(3, "streams_layer2", table.pop("forks") + 1)
    return table


def test_windows_by_hand():
    first = [1.0, 1.0, 2.0, 2.0, 0.0, 0.0, 4.0, 4.0, 99.0]
    found = windows(
        tokens_of(
            {"forks": [0, 1, 2, 1, 3, 3, 3, 3, 9], "entropy": first, "reference_entropy": 7.0},
            {"forks": [2, 2, 2, 2], "entropy": 5.0, "reference_entropy": [1.0, 2.0, 3.0, 4.0]},
            {"forks": [7, 7], "entropy": 1.0, "reference_entropy": 0.0},  # shorter than a window
        )
    )
    assert WINDOW == 4
    assert found["forks"].tolist() == [1, 3, 2]
    assert found["entropy"].tolist() == [1.5, 2, 5]
    assert found["normalised"].tolist() == [0.5, 1.5, 1]
    assert found["reference_entropy"].tolist() == [7, 7, 2.5]


def test_without_forks_nothing_is_divided_by_zero():
    found = windows(tokens_of({"forks": [0] * 4, "entropy": [1.0] * 4}))
    assert found["normalised"].tolist() == [0]
    assert len(windows(tokens_of({"forks": [1, 1], "entropy": [1.0, 1.0]}))) == 0


def test_the_parabola_is_found_again():
    x = np.linspace(0, 4, 9)
    found = fit_parabola(x, -2 * (x - 1.5) ** 2 + 3)
    expected = {"curvature": -2, "slope": 6, "constant": -1.5, "r2": 1, "vertex": 1.5}
    assert found == pytest.approx(expected)
    # the best parabola through these is constant: it explains nothing
    level = fit_parabola(np.array([0.0, 0, 1, 1, 2, 2]), np.array([-1.0, 1, -1, 1, -1, 1]))
    assert level["r2"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("x", "y"), [([1, 1, 2, 2], [1, 2, 3, 4]), ([1, 2, 3], [5, 5, 5]), ([], [])]
)
def test_no_parabola_where_there_is_none(x, y):
    assert fit_parabola(np.array(x, dtype=float), np.array(y, dtype=float)) == {}


# ---- the report


def test_rows_of_padding_alone_are_reported():
    findings, padding = Findings(), {**BATCH, "mask": torch.zeros(3, 3, dtype=torch.bool)}
    findings.add("layers", recorded().sums)
    findings.add("tokens", recorded().tokens(padding))
    report = fork_report(findings, BytesTokenizer(), 1)
    assert report.finite["forks/per_token"] == 2 / 5
    assert set(report.files()) == {"scalars.csv", "layers.csv"}
    assert report.drawn()


@pytest.mark.parametrize(("tokens", "columns"), [(3, MIN_TOKENS), (13, 13), (60, LINE_TOKENS)])
def test_the_map_of_tokens_is_as_wide_as_the_text(tokens, columns):
    row = pd.DataFrame({"text": ["a"] * tokens, "streams_layer1": [1] * tokens})
    figure = tokens_figure({"tokens": row})
    widest = pd.DataFrame({"text": ["a"] * 48, "streams_layer1": [1] * 48})
    widest = tokens_figure({"tokens": widest})
    share = (columns - LINE_TOKENS) * TOKEN_WIDTH
    assert figure.get_size_inches()[0] == pytest.approx(widest.get_size_inches()[0] + share)
    assert all(axes.get_xlim() == (-0.5, columns - 0.5) for axes in figure.axes)
