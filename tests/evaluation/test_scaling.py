"""Power laws through losses: known curves, the paper's Table 2, and what is refused."""

import json
import math
import os

import pytest

from evaluation.scaling import fit_curve, fit_groups, multipliers, read_results

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
    table_2, reports, axis, exponents, measured, fitted
):
    result, printed = reports("scaling", *table_2(axis), "--x", axis, "--baseline", "GPT-2")
    fits = result["fits"]
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
    ("law", "slope", "curve", "shown"),
    [
        ("power", 0.12, lambda x: (5e9 / x) ** 0.12, {"exponent": 0.12, "constant": 5e9}),
        (
            "log",
            0.263,
            lambda x: 1.4 - 0.263 * math.log(x / 3e7),
            {"slope": 0.263, "intercept": 1.4 + 0.263 * math.log(3e7)},
        ),
    ],
)
def test_a_law_is_recovered(law, slope, curve, shown):
    sizes = [1e3, 7e4, 2e6, 9e6]
    fit = fit_curve(sizes, [curve(x) for x in sizes], law)
    assert fit.slope == pytest.approx(slope, rel=1e-9)
    assert fit.as_dict() == pytest.approx({**shown, "r2": 1})
    assert fit.value_at(3e5) == pytest.approx(curve(3e5))
    assert fit.size_for(fit.value_at(3e5)) == pytest.approx(3e5)


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
        assert multipliers(baseline, own, x, loss) == pytest.approx((2, 2))


def test_a_loss_that_does_not_fall_has_no_multipliers(result, reports):
    flat = [result(f"flat{x}", model="Flat", train_tokens=x) for x in (10, 100)]
    rising = [
        result(f"r{x}", model="Rising", train_tokens=x, nats_per_token=x**0.1) for x in (10, 100)
    ]
    options = ("--x", "tokens", "--baseline", "Flat")
    fits = reports("scaling", *flat, *rising, *options)[0]["fits"]
    assert fits["Flat"]["constant"] is None
    assert fits["Rising"]["exponent"] == pytest.approx(-0.1)
    assert [run["multiplier"] for run in fits["Rising"]["runs"]] == [None, None]


def read(words):
    return read_results(list(map(str, words)), "tokens")


def test_runs_are_grouped_by_class_or_by_name(result):
    plain = [result(f"plain{x}", train_tokens=x) for x in (10, 30, 20)]
    other = result("other", model="ThoughtGestaltLM", train_tokens=40)
    assert list(read(plain)["x"]) == [10, 20, 30]
    fits, runs = fit_groups(read([f"mine={plain[0]}", f"mine={other}", *plain[1:]]))
    assert list(fits) == ["mine", "TransformerLM"]
    assert list(runs["group"]) == ["mine", "mine", "TransformerLM", "TransformerLM"]


def test_an_equals_sign_in_a_path_names_no_group(result, monkeypatch):
    path, other = result("step=20"), result("other", train_tokens=9)
    monkeypatch.chdir(path.parent)
    assert set(read(["step=20.json", other])["group"]) == {"TransformerLM"}


def test_a_pattern_takes_kept_results_once_and_no_others(result, tmp_path):
    first = result("first", checkpoint="a.ckpt")
    (tmp_path / "runs" / "results").mkdir(parents=True)
    kept = {**json.loads(first.read_text()), "checkpoint": os.path.abspath("a.ckpt")}
    (tmp_path / "runs" / "results" / "key.json").write_text(json.dumps(kept))
    result("second", checkpoint="b.ckpt", train_tokens=9)
    result("tasks", checkpoint="a.ckpt", nats_per_token=..., tasks={})
    (tmp_path / "list.json").write_text("[1]")
    assert list(read([tmp_path / "**" / "*.json"])["x"]) == [9, 5000]


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
        (largest,) = (r for r in written["fits"]["TG"]["runs"] if r["train_tokens"] == 50_000_000)
        assert largest[y] == pytest.approx(sign * (9 - 0.263 * math.log(50e6)))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"train_tokens": ...}, [], "second.json): train_tokens (None)"),
        ({"train_tokens": None}, [], "second.json): train_tokens (None)"),
        ({"train_tokens": -5}, [], "second.json): train_tokens (-5)"),
        ({"train_tokens": "many"}, [], "second.json): train_tokens ('many')"),
        ({"train_tokens": True}, [], "second.json): train_tokens (True)"),
        ({"nats_per_token": ...}, [], "second.json): there is no result with nats_per_token"),
        ({"nats_per_token": 0}, [], "second.json): nats_per_token (0)"),
        ({}, ["--y", "margin"], "second.json): there is no result with margin"),
        ({"margin": -1.5}, ["--y", "margin"], "second.json): margin (-1.5)"),
        ({"margin": "x"}, ["--y", "margin", "--law", "log"], "second.json): margin ('x')"),
        ({"model": "Other", "train_tokens": 9}, [], "first.json): TransformerLM has only one size"),
        ({"nats_per_token": 2}, [], "TransformerLM has only one size"),
        ({"train_tokens": 9}, ["--baseline", "GPT"], "baseline (GPT)"),
    ],
)
def test_results_that_cannot_be_fitted_are_named(result, fails, changes, options, named):
    files = result("first", margin=2.0), result("second", **changes)
    assert named in fails("scaling", *files, "--x", "tokens", *options)


def test_two_results_of_a_checkpoint_are_not_on_one_curve(result, fails):
    """Such as those of two splits, or of sets of other texts, in the folder of a run."""
    files = [result("val", checkpoint="a.ckpt"), result("large", train_tokens=9)]
    again = result("test", checkpoint="a.ckpt", nats_per_token=2.0)
    assert "test.json): TransformerLM" in fails("scaling", *files, again, "--x", "tokens")


@pytest.mark.parametrize("word", ["none.json", "TG=none_*.json", ".", "text.json", "list.json"])
def test_files_without_a_result_are_named(fails, tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "list.json").write_text("[1]")
    assert f"runs ({word.rpartition('=')[2]})" in fails("scaling", word, "--x", "tokens")


def test_an_axis_must_be_chosen(result, fails):
    assert "missing: --x" in fails("scaling", result("first"))
    assert "'tokens', 'parameters'" in fails("scaling", result("first"), "--x", "wrong")


def test_results_of_perplexity_are_understood(reports, evaluates, checkpoint_path, tmp_path):
    result, _ = reports("perplexity", "--ckpt", checkpoint_path, "--limit_batches", 1)
    larger = {**result, "train_tokens": 3 * result["train_tokens"]}
    (tmp_path / "large.json").write_text(
        json.dumps({**larger, "nats_per_token": 0.9 * result["nats_per_token"]})
    )
    printed = evaluates(
        "scaling", tmp_path / "reported.json", tmp_path / "large.json", "--x=tokens"
    )
    assert f"{-math.log(0.9) / math.log(3):.4f}" in printed
    assert "TransformerLM" in printed
