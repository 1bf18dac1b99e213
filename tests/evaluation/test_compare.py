"""Runs of all methods in one comparison: rows, checks, report, results of others, bad input."""

import html
import importlib
import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest
import torch
from compared_runs import by_model, dress, grown, place, read
from formats import REASONING

from datamodules import LocalText, Sentences, StateTracking
from evaluation import results
from evaluation.cli import main
from evaluation.load import build_outline
from lightning_models import ThinkingStatesLM, ThoughtbubblesLM, ThoughtGestaltLM
from lightning_models.checkpoint import read_checkpoint

GESTALT = {"num_layers": 4, "sentence_layer": 3, "memory_size": 3}
STATES = {"num_layers": 3, "chunk_size": 4, "max_thought_tokens": 5}
ARC = {"metrics": {"acc": 0.25}, "standard_errors": {"acc": 0.1}, "seconds": 3.0, "examples": 5}
FORKS = {"num_layers": 3, "fork_layers": (1, 2), "kappa": "2L"}


@pytest.fixture(scope="module")
def runs(corpus, checkpoint_path, latent_path, ponder_path, train_checkpoint, tmp_path_factory):
    """A folder with a run of each method, and the plain transformer with two seeds."""
    folder = tmp_path_factory.mktemp("compared")
    one, two = (place(folder, f"plain_{seed}", "TransformerLM") for seed in (1, 2))
    shutil.copy(checkpoint_path, one)
    grown(checkpoint_path, two, 1.5)
    latent, ponder = place(folder, "latent", "LatentThoughtLM"), place(folder, "ponder", "PonderLM")
    shutil.copy(latent_path, latent)
    shutil.copy(ponder_path, ponder)
    bubbles = place(folder, "bubbles", "ThoughtbubblesLM")
    train_checkpoint(bubbles, LocalText(**corpus), ThoughtbubblesLM, **FORKS)
    gestalt = place(folder, "gestalt", "ThoughtGestaltLM")
    train_checkpoint(gestalt, sentences(corpus), ThoughtGestaltLM, **GESTALT)
    states = place(folder, "states", "ThinkingStatesLM")
    questions = StateTracking(**{**REASONING.options, "cache_dir": corpus["cache_dir"]})
    train_checkpoint(states, questions, ThinkingStatesLM, **STATES)
    for path in (one, latent, ponder, bubbles, gestalt):
        dress(path, seed=1)
    dress(two, seed=2, commit="c2", **{"val/bpb": 7.0})
    dress(states, seed=1, **{"val/accuracy": 0.25})
    return folder


def sentences(corpus):
    plain = {key: value for key, value in corpus.items() if key not in ("batch_size", "block_size")}
    options = {"splitter": "spans:29", "max_sentence_tokens": 29, "max_sentences": 5}
    return Sentences(corpus=LocalText(**plain), batch_size=4, batch_tokens=300, **options)


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    """The folder of a report on all of them."""
    folder = tmp_path_factory.mktemp("report") / "all"
    assert main(["compare", str(runs), "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def compare(evaluates, tmp_path):
    """Compares some runs; returns what was printed, and the rows of the table of runs."""

    def run(*words, output="report"):
        printed = evaluates("compare", *words, "--output", tmp_path / output)
        return printed, read(tmp_path / output / "runs.csv")

    return run


# ---- rows and columns


def test_every_method_is_a_row_and_seeds_share_a_label(report):
    rows = read(report / "runs.csv")
    labels = dict.fromkeys(row["label"] for row in rows)
    assert list(labels)[3:] == ["states", "latent", "bubbles"]  # answers, a bound, not causal
    assert set(labels) == {"plain", "ponder", "gestalt", "states", "latent", "bubbles"}
    plain = [row for row in rows if row["label"] == "plain"]
    assert sorted((row["run"], row["seed"]) for row in plain) == [
        ("plain_1", "1"),
        ("plain_2", "2"),
    ]
    losses = [float(row["bits_per_byte_exact"]) for row in rows if row["label"] in list(labels)[:3]]
    means = [sum(losses[:2]) / 2, *losses[2:]] if rows[0]["label"] == "plain" else losses
    assert len({row["label"] for row in rows[:4]}) == 3
    assert min(means) == means[0]


KIND_COLUMNS = re.compile(r"nats_per_token|bits_per_byte|perplexity|ppl_")


def test_no_column_has_two_kinds_of_likelihood(report):
    rows = read(report / "runs.csv")
    columns = [key for key in rows[0] if KIND_COLUMNS.match(key)]
    for key in columns:
        assert len({row["likelihood"] for row in rows if row[key]}) == 1, key
    for row in rows:
        own = [key for key in columns if row[key]]
        assert own
        assert ("perplexity" in own) == (row["likelihood"] == "exact" and row["counted"] == "all")
    assert {"ppl_bound", "ppl_noncausal", "perplexity_lexical", "perplexity_answers"} <= set(
        columns
    )
    for key in columns:  # tokens of one sort, too, but bits are per byte of the text
        counted = {row["counted"] for row in rows if row[key]}
        assert len(counted - {"lexical"} if "bits" in key else counted) <= 1


def test_numbers_are_those_of_perplexity(report, runs, reports):
    rows = {row["run"]: row for row in read(report / "runs.csv")}
    for name in ("plain_2", "latent", "ponder", "gestalt", "states"):
        alone, _ = reports("perplexity", "--ckpt", runs / name)
        end = {"gestalt": "_lexical", "states": "_answers"}.get(name, "")
        kind = alone["likelihood"]
        assert float(rows[name][f"nats_per_token_{kind}{end}"]) == alone["nats_per_token"]
        bits = f"bits_per_byte_{kind}" + ("_answers" if name == "states" else "")
        assert float(rows[name][bits]) == alone["bits_per_byte"]
        scoring = float(rows[name]["scoring_flops_per_token"])
        assert scoring == pytest.approx(alone["flops_per_token"]) or name == "gestalt"
        if name == "ponder":
            assert float(rows[name]["executed_steps"]) == alone["executed_steps"]


def test_windows_overlap_where_targets_have_a_likelihood_of_their_own(compare, runs, reports):
    printed, rows = compare(runs / "plain_1", runs / "latent", "--stride", "8")
    alone, _ = reports("perplexity", "--ckpt", runs / "plain_1", "--data.eval_stride", "8")
    rows = by_model(rows)
    assert float(rows["TransformerLM"]["nats_per_token_exact"]) == alone["nats_per_token"]
    assert float(rows["TransformerLM"]["scoring_flops_per_token"]) == alone["flops_per_token"]
    contexts = next(line for line in printed.splitlines() if "context when scoring" in line)
    assert "windows of 32 tokens, at least 24 before each target (plain_1)" in contexts
    assert re.search(r"windows of \d+ tokens \(latent\)", contexts)


def test_a_stride_that_no_run_can_have_is_refused(fails, runs):
    message = fails("compare", runs / "latent", "--stride", 8)
    assert "stride (8): no run has windows that can overlap" in message


def test_a_row_has_the_mean_and_the_range_of_its_seeds(report):
    values = [
        float(row["nats_per_token_exact"])
        for row in read(report / "runs.csv")
        if row["run"].startswith("plain")
    ]
    assert values[0] != values[1]
    text = f"{sum(values) / 2:.4f} ({min(values):.4f} to {max(values):.4f})"
    assert text in (report / "report.md").read_text()
    assert text in (report / "report.html").read_text()


def test_training_is_counted_in_tokens_of_the_text(report, corpus):
    rows = by_model(read(report / "runs.csv"))
    assert float(rows["TransformerLM"]["training_tokens"]) == 2 * 4 * 32
    assert float(rows["LatentThoughtLM"]["training_tokens"]) == 2 * 2 * 128
    data = sentences(corpus)
    data.setup()
    batches = [data.training_source().batch(n) for n in range(2)]
    text = sum(int(b["lexical"].sum() + b["is_last"].sum()) for b in batches)
    slots = sum(int(b["lengths"].sum()) for b in batches)
    gestalt = rows["ThoughtGestaltLM"]
    assert float(gestalt["training_tokens"]) == text < slots
    per_token = float(gestalt["training_flops_per_token"])
    assert float(gestalt["training_flops"]) == pytest.approx(per_token * text)
    assert float(gestalt["tokens_per_second"]) == pytest.approx(100 * text / slots)
    assert rows["ThinkingStatesLM"]["training_tokens"] == ""
    assert rows["TransformerLM"]["training_tokens"] == "256"  # whole next to unknown ones
    assert float(rows["ThinkingStatesLM"]["val_accuracy"]) == 1.25  # the latest
    assert float(rows["TransformerLM"]["tokens_per_second"]) == 100


# ---- checks


def checks_in(printed):
    """State and detail of each check."""
    lines = re.findall(r"^- \*\*([a-z ]+)\*\*: ([^:]+): (.*)$", printed, re.M)
    return {what: (state, detail) for state, what, detail in lines}


def test_what_differs_is_said(compare, runs):
    printed, _ = compare(*(runs / name for name in ("plain_1", "latent", "gestalt")))
    checks = checks_in(printed)
    assert {what for what, (state, _) in checks.items() if state == "differs"} == {
        "data order",
        "tokens trained on",
        "parameters",
        "training FLOPs",
        "decoder",
        "targets that nats per token count",
        "kind of likelihood",
        "context when scoring",
    }
    assert checks["tokenizer"] == ("matched", "bytes")
    assert checks["held-out text that is scored"][0] == "matched"  # though cut in two ways
    assert checks["precision of training"] == ("matched", "32-true")
    for part in ("block_size 32", "rows sentences"):
        assert part in checks["data order"][1]
    for part in ("positions learned, residual_depth 2, window null", "positions rope"):
        assert part in checks["decoder"][1]
    assert checks["optimizer"][0] == "matched"
    assert "lr 0.01, betas (0.9, 0.95)" in checks["optimizer"][1]


def test_seeds_match_in_all_but_the_code(compare, runs, tmp_path):
    shutil.copytree(runs / "plain_1", tmp_path / "runs" / "again")
    printed, rows = compare(runs / "plain_1", runs / "plain_2", tmp_path / "runs")
    checks = checks_in(printed)
    assert len({row["label"] for row in rows}) == 1
    assert sorted(row["seed"] for row in rows) == ["1", "1", "2"]
    assert "two of its runs have the same seed (" in printed
    assert checks.pop("code version")[0] == "differs"
    assert {state for state, _ in checks.values()} == {"matched"}
    assert checks["tokens trained on"][1] == "256"


def test_other_text_and_tokenizer_are_said(compare, runs, bpe_run):
    printed, rows = compare(runs / "plain_1", bpe_run)
    checks = checks_in(printed)
    assert checks["held-out text that is scored"][0] == "differs"
    assert checks["tokenizer"][0] == "differs"
    assert "bpe:280 #" in checks["tokenizer"][1]
    assert checks["code version"][0] == "not known"  # a checkpoint without its run
    assert len({row["label"] for row in rows}) == 2


# ---- the report


class Page(HTMLParser):
    """Cells, tags and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.tags, self.addresses, self._inside = [], set(), [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]
        if tag in ("td", "th"):
            self.cells.append("")
            self._inside = True

    def handle_endtag(self, tag):
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self._inside:
            self.cells[-1] += (" " if self.cells[-1] and data.startswith("(") else "") + data


def test_the_page_needs_no_network(report):
    text = (report / "report.html").read_text()
    page = Page(text)
    assert "://" not in text
    assert not {"script", "link", "iframe", "object"} & page.tags
    assert len(page.addresses) == 2
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert "@import" not in text
    assert "url(" not in text


def test_the_same_command_writes_the_same_bytes(report, runs, tmp_path):
    assert main(["compare", str(runs), "--output", str(tmp_path / "again")]) == 0
    first = {path.name: path.read_bytes() for path in report.iterdir()}
    second = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    names = {"report.html", "report.md", "runs.csv", "checks.csv", "curves.csv", "compute.csv"}
    assert set(first) == names | {"loss.svg", "compute.svg"}
    for name in set(first) - {"report.html", "report.md"}:  # which say which scores were kept
        assert first[name] == second[name]
    assert "measured now" in first["report.md"].decode()
    assert "measured now" not in second["report.md"].decode()


def test_curves_are_what_was_logged(report):
    points = [row for row in read(report / "curves.csv") if row["run"] == "plain_2"]
    assert [(int(p["steps"]), float(p["tokens"])) for p in points] == [(1, 128), (2, 256)]
    assert [float(p["val/bpb"]) for p in points] == [7.0, 8.0]
    runs = {row["run"]: row for row in read(report / "runs.csv")}
    flops = float(runs["plain_2"]["training_flops"])
    assert [float(p["training_flops"]) for p in points] == [flops / 2, flops]


def test_questions_alone_have_no_figure(compare, runs, tmp_path):
    printed, (row,) = compare(runs / "states")
    assert not (tmp_path / "report" / "loss.svg").exists()
    assert "loss" not in "".join(path.name for path in (tmp_path / "report").iterdir())
    assert row["counted"] == "answers"
    assert "right answers (val)" in printed


def test_a_run_that_has_diverged_is_the_last_row_and_not_in_the_figure(
    compare, checkpoint_path, tmp_path
):
    whole, diverged = (place(tmp_path / "runs", name, "TransformerLM") for name in ("b", "a"))
    shutil.copy(checkpoint_path, whole)
    grown(checkpoint_path, diverged, math.nan)
    for path in (whole, diverged):
        dress(path, seed=1)
    named = [f"{name}={tmp_path / 'runs' / name}" for name in ("a", "b")]
    _, rows = compare(*named)
    assert [row["label"] for row in rows] == ["b", "a"]
    assert [bool(row["nats_per_token_exact"]) for row in rows] == [True, False]
    assert {row["run"] for row in read(tmp_path / "report" / "curves.csv")} == {rows[0]["run"]}
    compare(named[0], output="alone")
    assert not (tmp_path / "alone" / "loss.svg").exists()


def test_less_than_the_whole_split_is_said(compare, runs, tmp_path):
    printed, _ = compare(runs / "plain_1", "--limit_batches", "1", "--batch_size", "2")
    assert "scored on a part of the split only" in printed
    text = (tmp_path / "report" / "report.md").read_text()
    assert re.search(r"val: 1 of \d+ batches, windows of 32 tokens, 64 targets \(all\)", text)


# ---- results in the folder of a run


@pytest.fixture
def plain(runs, tmp_path):
    """A copy of a run, whose files may be changed."""
    shutil.copytree(runs / "plain_1", tmp_path / "runs" / "plain")
    shutil.rmtree(tmp_path / "runs" / "plain" / "TransformerLM" / "version_0" / "results", True)
    return tmp_path / "runs" / "plain"


def checkpoint_of(run):
    return next(run.rglob("*.ckpt"))


def kept_files(run):
    return sorted(next(run.rglob("version_0")).glob("results/*.json"))


@pytest.fixture
def mark(plain):
    """Changes the loss in the one result that is kept, so that it is seen where it is read."""

    def change(loss=3.25):
        (file,) = kept_files(plain)
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "nats_per_token": loss}))

    return change


def test_the_same_score_is_measured_once(compare, evaluates, reports, plain, mark, tmp_path):
    evaluates("perplexity", "--ckpt", plain)
    mark()
    _, (row,) = compare(plain)
    assert float(row["nats_per_token_exact"]) == 3.25
    again, printed = reports("perplexity", "--ckpt", plain)
    assert again["nats_per_token"] == 3.25
    assert "measured before" in printed
    evaluates("sweep", "--ckpts", plain, "--output", tmp_path / "sweep.svg")
    assert float(read(tmp_path / "sweep.csv")[0]["nats_per_token"]) == 3.25
    assert len(kept_files(plain)) == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--limit_batches", 1),
        ("--split", "test"),
        ("--precision", "bf16"),
        ("--data.eval_stride", 8),
        ("--batch_size", 3),
        ("--set.attention_backend", "math"),
        ("--mode", "autoregressive", "--positions", 9),
    ],
    ids=lambda options: options[0],
)
def test_another_setting_is_measured(evaluates, reports, plain, mark, options):
    evaluates("perplexity", "--ckpt", plain)
    mark()
    assert reports("perplexity", "--ckpt", plain, *options)[0]["nats_per_token"] != 3.25
    assert len(kept_files(plain)) == 2


def test_a_setting_that_an_older_checkpoint_lacks_is_measured(reports, ponder_path, tmp_path):
    content = torch.load(ponder_path, weights_only=True)
    del content["recipe"]["model"]["init_args"]["config"]["alpha"]
    torch.save(content, tmp_path / "older.ckpt")
    losses = []
    for options in ((), ("--set.alpha", "-30")):
        result, _ = reports("perplexity", "--ckpt", tmp_path / "older.ckpt", *options)
        losses.append(result["nats_per_token"])
    assert losses[0] != losses[1]
    assert result["settings"]["set"] == {"alpha": -30}


def test_a_checkpoint_that_is_replaced_meanwhile_keeps_no_result(plain, runs):
    checkpoint = read_checkpoint(checkpoint_of(plain))

    def compute():
        new = plain / "new.ckpt"
        shutil.copy(checkpoint_of(runs / "plain_2"), new)
        new.replace(checkpoint.path)
        return {"nats_per_token": 1.0}

    assert results.cached_result(checkpoint, {}, (), compute) == ({"nats_per_token": 1.0}, None)
    assert kept_files(plain) == []
    assert results.checkpoint_digest(checkpoint) is None


def test_the_code_of_a_package_is_part_of_the_key(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for value in (b"# caf\xe9", b"# tea"):
        (tmp_path / "my_layers.py").write_bytes(b"# -*- coding: latin-1 -*-\n" + value)
        results._package_digest.cache_clear()
        importlib.invalidate_caches()
        digests.append(results.code_digest(["my_layers"]))
    assert digests[0] != digests[1]
    assert None not in digests
    assert results.code_digest(["not_there"]) is None


def test_a_checkpoint_of_another_content_is_measured(evaluates, reports, plain, mark):
    evaluates("perplexity", "--ckpt", plain)
    mark()
    path = checkpoint_of(plain)
    content = torch.load(path, weights_only=True)
    next(iter(content["state_dict"].values())).view(-1)[0] += 1e-3
    torch.save(content, path)
    assert reports("perplexity", "--ckpt", plain)[0]["nats_per_token"] != 3.25


def test_other_code_measures_again(evaluates, reports, plain, mark, monkeypatch):
    evaluates("perplexity", "--ckpt", plain)
    mark()
    monkeypatch.setattr(results, "code_digest", lambda packages: "other")
    assert reports("perplexity", "--ckpt", plain)[0]["nats_per_token"] != 3.25


def test_a_moved_run_keeps_its_results(compare, evaluates, plain, mark, tmp_path):
    evaluates("perplexity", "--ckpt", plain)
    mark()
    moved = plain.rename(tmp_path / "moved")
    renamed = checkpoint_of(moved).rename(checkpoint_of(moved).with_name("other.ckpt"))
    _, (row,) = compare(moved)
    assert float(row["nats_per_token_exact"]) == 3.25
    assert row["checkpoint"] == str(renamed)


def test_a_folder_that_refuses_files_is_said(evaluates, plain):
    folder = next(plain.rglob("version_0"))
    (folder / "results").write_text("in the way")
    assert evaluates("perplexity", "--ckpt", plain)
    assert (folder / "results").read_text() == "in the way"


def test_seeds_of_unnamed_runs_are_a_row_of_their_class(compare, runs, tmp_path):
    for number in (0, 1):
        source = next((runs / f"plain_{number + 1}").rglob("version_0"))
        shutil.copytree(source, tmp_path / "TransformerLM" / f"version_{number}")
    _, rows = compare(tmp_path / "TransformerLM")
    assert [row["label"] for row in rows] == ["TransformerLM"] * 2


def test_scores_of_tasks_make_columns(compare, plain, runs):
    tasks = {"piqa": {"metrics": {"acc": 0.5, "acc_norm": 0.75}}, "arc": {**ARC, "examples": 9}}
    for folder, scores in ((plain, tasks), (runs / "ponder", {"arc": ARC})):
        checkpoint = read_checkpoint(checkpoint_of(folder))
        results.save_result(checkpoint, {"tasks": scores, "settings": {}}, {"command": "tasks"})
    other = kept_files(plain)[0].with_name("other.json")  # about another checkpoint
    shutil.copy(kept_files(runs / "ponder")[-1], other)
    printed, rows = compare(plain, runs / "ponder")
    found = by_model(rows)
    assert float(found["TransformerLM"]["piqa_acc"]) == 0.5
    assert float(found["TransformerLM"]["piqa_acc_norm"]) == 0.75
    assert float(found["TransformerLM"]["arc_acc"]) == float(found["PonderLM"]["arc_acc"]) == 0.25
    assert found["PonderLM"]["piqa_acc"] == ""
    assert not any("seconds" in key or "stderr" in key for key in rows[0])
    state, detail = checks_in(printed)["task arc"]
    assert state == "differs"
    assert all(f"examples {count} (" in detail for count in (5, 9))
    assert "piqa (acc)" in printed
    assert "piqa (acc_norm)" not in printed  # one metric a task for people


# ---- what FLOPs are spent on


def test_shares_of_flops_are_those_of_the_models(report, runs):
    rows = {row["label"]: row for row in read(report / "compute.csv")}
    assert set(rows) == {"plain", "ponder", "gestalt", "latent", "bubbles"}  # not of questions
    for label, row in rows.items():
        path = next((runs / {"plain": "plain_1"}.get(label, label)).rglob("*.ckpt"))
        outline, context = build_outline(read_checkpoint(path)), int(row["context"])
        parts = outline.flops_by_part(context)
        assert float(row["flops_one_pass"]) == sum(parts.values())
        assert float(row["flops_training"]) == outline.flops_per_token(context, training=True)
        assert float(row["share_output"]) == parts["output"] / sum(parts.values())
        shares = [float(value) for key, value in row.items() if key.startswith("share_")]
        assert sum(shares) == pytest.approx(1)
    assert float(rows["latent"]["share_cross_attention"]) > 0


# ---- bad input


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (("--limit_batches", 0), "limit_batches"),
        (("--label", "width"), "label"),
        (("--split", "none"), "split"),
        (("--packages", "[not_there]"), "not_there"),
        (("--stride", 33), "stride"),
        (("--stride", 0), "stride"),
    ],
)
def test_wrong_options_end_in_one_line(fails, runs, tmp_path, monkeypatch, options, option):
    monkeypatch.chdir(tmp_path)
    assert option in fails("compare", runs / "plain_1", "--output", "new", *options)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def broken(corpus, checkpoint_path, tmp_path):
    """A run whose text is gone, and a file that is no checkpoint."""
    content = torch.load(checkpoint_path, weights_only=True)
    arguments = content["recipe"]["data"]["init_args"]
    arguments["data_files"] = str(tmp_path / "gone.jsonl")
    arguments["cache_dir"] = str(tmp_path / "cache")
    torch.save(content, tmp_path / "textless.ckpt")
    (tmp_path / "half.ckpt").write_bytes(b"half")
    return tmp_path / "textless.ckpt", tmp_path / "half.ckpt"


def test_runs_can_be_left_out(compare, fails, broken, runs, tmp_path):
    output = ("--output", tmp_path / "other")
    for path in broken:
        line = fails("compare", runs / "plain_1", path, *output)
        assert path.name in line
        assert "--skip_unreadable" in line
    skip = (*output, "--skip_unreadable")
    assert "none of them can be scored" in fails("compare", broken[0], *skip)
    assert "none of them can be read" in fails("compare", broken[1], *skip)
    assert not (tmp_path / "other").exists()
    printed, (row,) = compare(runs / "plain_1", *broken, "--skip_unreadable")
    assert row["run"].endswith("plain_1")
    assert "## Left out" in printed
    for name in ("report.md", "report.html"):
        text = (tmp_path / "report" / name).read_text()
        assert "Left out" in text
        assert "half.ckpt" in text


def test_a_checkpoint_without_its_run_is_compared(compare, checkpoint_path):
    printed, (row,) = compare(checkpoint_path)
    assert math.isfinite(float(row["bits_per_byte_exact"]))
    assert "tokens_per_second" not in row
    assert checks_in(printed)["code version"][0] == "not known"


# ---- names


def test_rows_and_report_have_the_names_they_are_given(compare, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(runs)
    said = ("--title", "Small <runs>", "--introduction", "Of *two* kinds.")
    printed, rows = compare("plain decoder=plain_*", "ponder", *said)
    assert [row["label"] for row in rows].count("plain decoder") == 2
    assert {row["label"] for row in rows} == {"plain decoder", "ponder"}
    assert "plain decoder" in printed
    text = (tmp_path / "report" / "report.md").read_text()
    difference = r"- ponder minus plain decoder: [+-]\d\.\d{4} bits per byte, (better|worse) \("
    assert re.match(r"# Small &lt;runs&gt;\n\nOf \*two\* kinds\.\n\n" + difference, text)
    assert "| ponder/" in text  # checkpoints below are named from here
    assert str(runs) not in text
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<h1>Small &lt;runs&gt;</h1>\n<p>Of *two* kinds.</p>" in page


def test_names_of_runs_are_neither_html_nor_links_in_markdown(compare, checkpoint_path, tmp_path):
    name = "<img onerror> ![a](b) \\[c](d) `e` & | f"
    folder = tmp_path / "<script>alert(2)<a>"
    folder.mkdir()
    shutil.copy(checkpoint_path, folder / "last.ckpt")
    said = ("--title", "<b>T</b>", "--introduction", "<i>I</i>")
    compare(f"{name}={folder / 'last.ckpt'}", *said)
    text = (tmp_path / "report" / "report.md").read_text()
    assert Page(text).tags == set()
    links = re.findall(r"(?<!\\)(?:\\\\)*\]\(([^)]*)\)", text)
    assert set(links) <= {"loss.svg", "compute.svg"}
    row = next(line for line in text.splitlines() if "onerror" in line)
    cells = re.split(r"(?<!\\)\|", row.strip().strip("|"))
    shown = html.unescape(re.sub(r"\\([\\`|\[\]])", r"\1", cells[0].strip()))
    assert shown == name
    assert "<script>" in html.unescape(text)


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ({"plain_1": "x", "latent": "y"}, ["x", "y"]),
        ({"plain_1": "one", "plain_2": "other"}, ["one", "other"]),
        ({"plain_1": "all", "ponder": "all"}, ["all (plain_1)", "all (ponder)"]),
    ],
)
def test_named_runs_are_rows_of_these_names(compare, runs, named, labels):
    _, rows = compare(*(f"{name}={runs / run}" for run, name in named.items()))
    assert sorted(row["label"] for row in rows) == labels


def test_a_comparison_as_pdf_and_its_samples(compare, runs, evaluates, tmp_path):
    printed, _ = compare(runs / "plain_1", runs / "ponder", "--sample_tokens", 3)
    assert "plain_1 minus ponder: +" in printed  # rows are sorted by loss
    samples = printed.partition("## A sample of each model")[2]
    assert "**plain_1**: " in samples
    assert "**ponder**: " in samples
    assert all(c.isprintable() or c == "\n" for c in samples)  # models of bytes write any
    assert "A sample of each model" in (tmp_path / "report" / "report.html").read_text()
    target = tmp_path / "x.pdf"
    for _ in range(2):
        shown = evaluates("compare", runs / "plain_1", "--sample_tokens", 0, "--output", target)
        assert "A sample of each model" not in shown
        first = target.read_bytes()
    assert first == target.read_bytes()
    assert first.startswith(b"%PDF")
    assert first.count(b"/Type /Page ") == 2
