"""Power laws through losses: known curves, the paper's Table 2, and what is refused."""

import json
import math

import pytest

from evaluation.scaling import fit_curve, fit_scaling, multipliers, read_results

TABLE_2 = {
    "tokens": {
        "x": [12e6, 20e6, 30e6, 50e6],
        "GPT-2": [50.9, 38.1, 30.9, 24.0],
        "TG": [49.5, 37.1, 29.8, 23.2],
    },
    "parameters": {
        "x": [0.34e6, 1.3e6, 5.4e6, 21.3e6],
        "GPT-2": [104.8, 68.7, 42.4, 28.8],
        "TG": [97.7, 59.8, 37.8, 26.8],
    },
}
"""Test perplexities of the paper (arXiv text of Thought Gestalt, App. E.1)."""


@pytest.fixture
def result(tmp_path):
    """Writes a result of evaluate.py perplexity with some keys changed; ... removes one."""

    def write(name, **changes):
        whole = {
            "nats_per_token": 3.0,
            "tokens": 1000,
            "counted": "lexical",
            "likelihood": "exact",
            "model": "TransformerLM",
            "parameters": 1000,
            "train_tokens": 5000,
            "data": {"split": "test"},
        }
        whole.update(changes)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({k: v for k, v in whole.items() if v is not ...}))
        return path

    return write


@pytest.fixture
def table_2(result, tmp_path):
    """Writes the paper's table; returns the words of the command line."""

    def write(axis):
        table, words = TABLE_2[axis], []
        for group in ("GPT-2", "TG"):
            for x, perplexity in zip(table["x"], table[group], strict=True):
                size = {"train_tokens" if axis == "tokens" else "parameters": int(x)}
                name = f"{group}_{int(x)}"
                result(name, nats_per_token=math.log(perplexity), **size)
            words.append(f"{group}={tmp_path}/{group}_*.json")
        return words

    return write


@pytest.mark.parametrize(
    ("axis", "exponents", "measured", "fitted"),
    [
        ("tokens", {"GPT-2": 0.149, "TG": 0.152}, (1.05, 1.08), (1.05, 1.08)),
        ("parameters", {"GPT-2": 0.080, "TG": 0.081}, (1.28, 1.50), (1.33, 1.42)),
    ],
)
def test_the_papers_table_gives_the_papers_numbers(
    table_2, evaluates, tmp_path, axis, exponents, measured, fitted
):
    target = tmp_path / "fit.json"
    options = ("--x", axis, "--baseline", "GPT-2", "--output", target)
    printed = evaluates("scaling", *table_2(axis), *options)
    fits = json.loads(target.read_text())["fits"]
    for group, exponent in exponents.items():
        assert fits[group]["exponent"] == pytest.approx(exponent, abs=8e-4)
        assert fits[group]["r2"] > 0.998
        assert f"{fits[group]['exponent']:.4f}" in printed
    for key, (low, high) in {"multiplier": measured, "multiplier_of_fits": fitted}.items():
        found = [run[key] for run in fits["TG"]["runs"]]
        assert min(found) == pytest.approx(low, abs=0.006)
        assert max(found) == pytest.approx(high, abs=0.006)
        assert all(run[key] is None for run in fits["GPT-2"]["runs"])
    largest = fits["TG"]["runs"][-1]
    if axis == "parameters":  # "matching TG at N = 21M would require 30M"
        assert largest["parameters"] * largest["multiplier_of_fits"] == pytest.approx(
            30e6, rel=0.02
        )


@pytest.mark.parametrize(
    ("law", "slope", "curve", "at_constant"),
    [
        ("power", 0.12, lambda x: (5e9 / x) ** 0.12, 1),
        ("log", 0.263, lambda x: 1.4 - 0.263 * math.log(x / 3e7), 0),
    ],
)
def test_a_law_is_recovered(law, slope, curve, at_constant):
    sizes = [1e3, 7e4, 2e6, 9e6]
    fit = fit_curve(sizes, [curve(x) for x in sizes], law)
    assert fit.slope == pytest.approx(slope, rel=1e-9)
    assert fit.r2 == pytest.approx(1.0)
    assert fit.value_at(3e5) == pytest.approx(curve(3e5))
    assert fit.size_for(fit.value_at(3e5)) == pytest.approx(3e5)
    assert fit.value_at(fit.constant) == pytest.approx(at_constant, abs=1e-9)


def test_least_squares_leaves_residuals_that_no_line_explains():
    sizes, losses = [10.0, 100.0, 1000.0], [4.0, 3.5, 2.5]
    fit = fit_curve(sizes, losses)
    rest = [math.log(y) - math.log(fit.value_at(x)) for x, y in zip(sizes, losses, strict=True)]
    assert sum(rest) == pytest.approx(0, abs=1e-12)
    assert sum(r * math.log(x) for r, x in zip(rest, sizes, strict=True)) == pytest.approx(0)
    mean = sum(map(math.log, losses)) / 3
    total = sum((math.log(y) - mean) ** 2 for y in losses)
    assert fit.r2 == pytest.approx(1 - sum(r * r for r in rest) / total)


def test_a_model_that_needs_half_the_text_has_multiplier_two():
    sizes = [1e6, 4e6, 9e6]
    baseline = fit_curve(sizes, [(8e9 / x) ** 0.1 for x in sizes])
    losses = [(8e9 / (2 * x)) ** 0.1 for x in sizes]
    own = fit_curve(sizes, losses)
    for x, loss in zip(sizes, losses, strict=True):
        found = multipliers(baseline, own, x, loss)
        assert found.measured == pytest.approx(2)
        assert found.fitted == pytest.approx(2)


def test_a_loss_that_does_not_fall_has_no_multipliers(result, evaluates, tmp_path):
    flat = [result(f"flat{x}", model="Flat", train_tokens=x) for x in (10, 100)]
    rising = [
        result(f"r{x}", model="Rising", train_tokens=x, nats_per_token=x**0.1) for x in (10, 100)
    ]
    target = tmp_path / "out" / "fit.json"
    target.parent.mkdir()
    options = ("--x", "tokens", "--baseline", "Flat", "--output", target)
    printed = evaluates("scaling", *flat, *rising, *options)
    assert "note: the loss of Rising does not fall with train_tokens" in printed
    fits = json.loads(target.read_text())["fits"]
    assert fits["Flat"]["constant"] is None
    assert fits["Rising"]["exponent"] == pytest.approx(-0.1)
    assert [run["multiplier"] for run in fits["Rising"]["runs"]] == [None, None]


def fitted(words):
    """The result over tokens."""
    return fit_scaling(read_results(list(map(str, words)), "tokens"), "tokens")[1]


def test_runs_are_grouped_by_class_or_by_name(result):
    plain = [result(f"plain{x}", train_tokens=x) for x in (10, 30, 20)]
    other = result("other", model="ThoughtGestaltLM", train_tokens=40)
    (own,) = fitted(plain)["fits"].values()
    assert [run["train_tokens"] for run in own["runs"]] == [10, 20, 30]
    fits = fitted([f"mine={plain[0]}", f"mine={other}", *plain[1:]])["fits"]
    assert [(name, len(fit["runs"])) for name, fit in fits.items()] == [
        ("mine", 2),
        ("TransformerLM", 2),
    ]


def test_an_equals_sign_in_a_path_names_no_group(result, monkeypatch):
    path, other = result("step=20"), result("other", train_tokens=9)
    monkeypatch.chdir(path.parent)
    assert list(fitted(["step=20.json", other])["fits"]) == ["TransformerLM"]


def test_what_makes_losses_incomparable_is_told(result):
    first = result("first", train_tokens=10, data={"split": "val"}, pairs=7)
    second = result("second", train_tokens=20, counted="all", parameters=2000, pairs=5)
    assert fitted([first, second])["notes"] == [
        "the runs differ in split: test, val",
        "the runs differ in counted: all, lexical",
        "the runs differ in pairs: 5, 7",
        "the runs of TransformerLM differ in parameters: 1000, 2000",
        "the loss of TransformerLM does not fall with train_tokens",
    ]


def test_the_probe_over_data_is_fitted(result, evaluates, tmp_path):
    """Fig. 5 of Thought Gestalt: the target's NLL, and margins, which are negative."""
    target, picture = tmp_path / "fit.json", tmp_path / "fit.png"
    words = []
    for group, slope in (("GPT-2", 0.127), ("TG", 0.263)):
        for size in (12_000_000, 20_000_000, 50_000_000):
            nll = 9 - slope * math.log(size)
            values = {"reversed_target": nll, "reversed_margin": slope * math.log(size) - 9}
            result(f"{group}_{size}", train_tokens=size, nats_per_token=..., pairs=7, **values)
        words.append(f"{group}={tmp_path}/{group}_*.json")
    files = ("--output", target, "--plot", picture)
    for y, sign in (("reversed_target", 1), ("reversed_margin", -1)):
        how = ("--x", "tokens", "--y", y, "--law", "log", "--baseline", "GPT-2")
        printed = evaluates("scaling", *words, *how, *files)
        written = json.loads(target.read_text())
        assert written["y"] == y
        slopes = {name: fit["slope"] for name, fit in written["fits"].items()}
        assert slopes == pytest.approx({"GPT-2": sign * 0.127, "TG": sign * 0.263})
        assert f"{sign * 0.263:.4f}" in printed
        assert y.replace("_", " ") in printed
        assert (f"note: {y} of TG does not fall" in printed) == (sign < 0)
        (largest,) = (r for r in written["fits"]["TG"]["runs"] if r["train_tokens"] == 50_000_000)
        assert largest[y] == pytest.approx(sign * (9 - 0.263 * math.log(50e6)))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({"train_tokens": ...}, [], "does not know its train_tokens; score the checkpoint where"),
        ({"train_tokens": None}, [], "does not know its train_tokens; score the checkpoint where"),
        ({"nats_per_token": ...}, [], "does not know its nats_per_token; give results of"),
        ({"nats_per_token": 0}, [], "nats_per_token (0) must be a number above 0"),
        ({}, ["--y", "margin"], "does not know its margin; give results that have it, or another"),
        ({"margin": -1.5}, ["--y", "margin"], "margin (-1.5) must be a number above 0"),
        (
            {"margin": "x"},
            ["--y", "margin", "--law", "log"],
            "margin ('x') must be a finite number",
        ),
        ({"train_tokens": -5}, [], "train_tokens (-5) must be a number above 0"),
        ({"train_tokens": "many"}, [], "train_tokens ('many') must be a number above 0"),
        ({"train_tokens": True}, [], "train_tokens (True) must be a number above 0"),
        ({"model": ...}, [], "does not say its model; name its group: NAME="),
        ({"model": "Other"}, [], "TransformerLM has one size only (5,000)"),
        ({}, [], "TransformerLM has one size only (5,000)"),
        ({"train_tokens": 9}, ["--baseline", "GPT"], "baseline (GPT) is no group; there are Tr"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(result, fails, changes, options, expected):
    files = result("first", margin=2.0), result("second", **changes)
    assert expected in fails("scaling", *files, "--x", "tokens", *options)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("none.json", "there is no such file"),
        ("TG=none_*.json", "there is no such file"),
        (".", "is a folder; name its result files"),
        ("text.json", "is not JSON"),
        ("list.json", "holds no result"),
    ],
)
def test_files_without_a_result_are_named(fails, tmp_path, monkeypatch, word, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "list.json").write_text("[1]")
    line = fails("scaling", word, "--x", "tokens")
    assert expected in line
    assert word.rpartition("=")[2] in line


def test_an_axis_must_be_chosen(result, fails):
    assert "the option --x is missing" in fails("scaling", result("first"))
    assert "one of tokens, parameters" in fails("scaling", result("first"), "--x", "wrong")


def test_results_of_perplexity_are_understood(evaluates, checkpoint_path, tmp_path):
    path = tmp_path / "small.json"
    evaluates("perplexity", "--ckpt", checkpoint_path, "--limit_batches", "1", "--output", path)
    result = json.loads(path.read_text())
    larger = {**result, "train_tokens": 3 * result["train_tokens"]}
    (tmp_path / "large.json").write_text(
        json.dumps({**larger, "nats_per_token": 0.9 * result["nats_per_token"]})
    )
    printed = evaluates("scaling", tmp_path / "small.json", tmp_path / "large.json", "--x=tokens")
    assert f"{-math.log(0.9) / math.log(3):.4f}" in printed
    assert "TransformerLM" in printed
    assert "note" not in printed
