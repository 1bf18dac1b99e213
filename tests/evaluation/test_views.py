"""Views of compare: curves from nothing but run folders, what FLOPs are spent on, result files."""

import dataclasses
import json
import shutil

import pytest
import torch
from compared_runs import dress, place, read
from methods import METHODS

from datamodules import LocalText
from evaluation.load import build_model, build_outline
from evaluation.views import compute_frame, count_compute
from lightning_models import (
    LatentThoughtConfig,
    OptimizerConfig,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.checkpoint import read_checkpoint
from training.loggers import EventLog

CURVES = ("compare", "--view", "curves")
COMPUTE = ("compare", "--view", "compute")
RESULTS = ("compare", "--view", "results")


# ---- curves


ROWS, TOKENS = 4, 32  # of the checkpoints' data: batch_size, block_size
LOSSES = {9: 4.5, 19: 4.0, 29: 3.75}


def flops(**changes):
    """Training FLOPs per token of the checkpoint's model."""
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 2, "vocab_size": 257, "block_size": TOKENS}
    model = TransformerLM(TransformerConfig(**{**sizes, **changes}))
    model.configure_model()
    return model.flops_per_token(TOKENS, training=True)


@pytest.fixture
def make_run(checkpoint_path, tmp_path):
    """Writes a run folder as train.py does, of a changed config, with curves of val/loss."""

    def make(name, losses=LOSSES, edit=lambda content: None, **config):
        logger = EventLog(tmp_path / "runs" / name, name="TransformerLM", default_hp_metric=False)
        for step, loss in losses.items():
            logger.log_metrics({"val/loss": loss, "val/ppl": 2**loss, "epoch": 0.0}, step)
        logger.finalize("success")
        content = torch.load(checkpoint_path, weights_only=True)
        content["recipe"]["model"]["init_args"]["config"].update(config)
        edit(content)
        path = tmp_path / "runs" / name / "TransformerLM" / "version_0" / "checkpoints"
        path.mkdir(parents=True)
        torch.save(content, path / "last.ckpt")
        return path.parent

    return make


@pytest.fixture
def draw(evaluates, tmp_path):
    """Draws the runs; returns what is printed, and the rows of the CSV file."""

    def run(*options, output="figure.svg"):
        printed = evaluates(*CURVES, tmp_path / "runs", "--output", tmp_path / output, *options)
        return printed, read((tmp_path / output).with_suffix(".csv"))

    return run


def test_the_points_are_what_was_logged(make_run, draw, tmp_path):
    make_run("deep", {9: 4.25, 19: 3.5}, num_layers=6)
    make_run("flat", LOSSES)
    printed, rows = draw()
    assert [row["label"] for row in rows] == 2 * ["num_layers 6"] + 3 * ["num_layers 2"]
    assert [row["run"] for row in rows] == 2 * ["deep"] + 3 * ["flat"]
    assert [int(row["steps"]) for row in rows] == [10, 20, 10, 20, 30]
    assert [float(row["val/loss"]) for row in rows] == [4.25, 3.5, *LOSSES.values()]
    assert [float(row["tokens"]) for row in rows] == [
        steps * ROWS * TOKENS for steps in (10, 20, 10, 20, 30)
    ]
    assert float(rows[1]["flops"]) == 20 * ROWS * TOKENS * flops(num_layers=6)
    assert float(rows[4]["flops"]) == 30 * ROWS * TOKENS * flops()
    _, first, second, *_ = printed.splitlines()  # in the order of their layers
    assert first.split()[:6] == ["num_layers", "2", "flat", "3", "3,840", f"{flops():.4g}"]
    assert second.split()[-1] == "3.5"
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_other_scalars_labels_and_formats(make_run, draw, tmp_path):
    make_run("a", dropout=0.1, num_layers=3, ffn_dim=8)
    make_run("b", dropout=0.2, num_layers=4, ffn_dim=9)
    printed, rows = draw("--scalar", "val/ppl", "--label", "dropout", output="figure.png")
    assert [float(row["val/ppl"]) for row in rows[:3]] == pytest.approx(
        [2**loss for loss in LOSSES.values()], rel=1e-6
    )
    assert rows[0]["label"] == "dropout 0.1"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    printed, rows = draw()
    assert rows[0]["label"] == "a"
    assert "note: the models differ in num_layers, ffn_dim, dropout" in printed


def test_ranks_and_accumulated_batches_count(make_run, draw):
    def edit(content):
        content["LocalText"]["order"]["world_size"] = 3
        total = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        total["processed"] = 2 * content["global_step"]

    make_run("run", {0: 1.0}, edit)
    _, (row,) = draw()
    assert float(row["tokens"]) == 2 * 3 * ROWS * TOKENS


def test_a_real_run(quiet_trainer, corpus, evaluates, tmp_path):
    data = LocalText(**corpus)
    sizes = {"vocab_size": data.vocab_size, "block_size": TOKENS, "num_layers": 1, "dim": 16}
    model = TransformerLM(TransformerConfig(**sizes, num_heads=2), OptimizerConfig(warmup=0))
    log = EventLog(tmp_path, name="TransformerLM", default_hp_metric=False)
    steps = {"max_steps": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    checks = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(**steps, **checks, logger=log, default_root_dir=tmp_path)
    trainer.fit(model, data)
    trainer.save_checkpoint(f"{log.log_dir}/checkpoints/last.ckpt")
    evaluates(*CURVES, log.log_dir, "--output", tmp_path / "figure.svg")
    rows = read(tmp_path / "figure.csv")
    assert [int(row["steps"]) for row in rows] == [1, 2]
    assert [float(row["tokens"]) for row in rows] == [2 * ROWS * TOKENS, 4 * ROWS * TOKENS]
    assert float(rows[1]["val/loss"]) == trainer.callback_metrics["val/loss"].item()
    assert float(rows[1]["flops"]) == 4 * ROWS * TOKENS * flops(num_layers=1, dim=16)


def test_of_questions_nothing_is_drawn(write_method, fails, tmp_path):
    path = place(tmp_path / "runs", "states", "ThinkingStatesLM")
    shutil.copy(write_method("thinking-states"), path)
    dress(path, seed=1)
    line = fails(*CURVES, tmp_path / "runs", "--output", tmp_path / "figure.svg")
    assert f"runs ({path.parents[1]}): its training tokens or FLOPs are not known" in line


def test_rows_that_are_named_keep_their_names(make_run, evaluates, tmp_path):
    folders = [make_run(name) for name in ("one", "two")]
    words = [f"{name}={folder}" for name, folder in zip("ab", folders, strict=True)]
    evaluates(*CURVES, *words, "--output", tmp_path / "figure.svg")
    assert {row["label"] for row in read(tmp_path / "figure.csv")} == {"a", "b"}


LATENT = {"inner_steps": 2, "positions": "rope", "norm": "rms", "activation": "swiglu"}


@pytest.mark.parametrize(
    ("scalar", "mark"),
    [("val/loss", " (bound)"), ("val/ppl", " (bound)"), ("train/loss", " (estimate)"), ("x/y", "")],
)
def test_bounds_are_marked(make_run, draw, scalar, mark):
    def to_latent(content):
        recipe = content["recipe"]["model"]
        recipe["class_path"] = "lightning_models.LatentThoughtLM"
        config = recipe["init_args"]["config"]
        known = {field.name for field in dataclasses.fields(LatentThoughtConfig)}
        for key in config.keys() - known:
            del config[key]

    paths = [make_run("exact"), make_run("latent", edit=to_latent, **LATENT)]
    for path in paths:
        log = EventLog(path.parents[1], name="TransformerLM", version="version_0")
        log.log_metrics({"train/loss": 5.0, "x/y": 1.0}, 3)
        log.finalize("success")
    printed, rows = draw("--scalar", scalar, "--label", "model")
    assert {row["label"] for row in rows} == {"TransformerLM", f"LatentThoughtLM{mark}"}
    assert f"LatentThoughtLM{mark}  " in printed
    _, rows = draw("--scalar", scalar)  # the runs' names
    (label,) = {row["label"] for row in rows if row["label"].startswith("latent")}
    assert label.endswith(mark)


# ---- compute


SIZES = {"vocab_size": 257, "block_size": 32, "num_layers": 2, "dim": 32, "num_heads": 2}


class LatentLM(TransformerLM):
    """A decoder that reads latents in every layer, in several passes forth and back."""

    def published_flops_per_token(self, context):
        return 7.0 * context

    def flops_by_part(self, context):
        latents = {"cross_attention": 1000.0, "encoder": 24.0}
        return super().flops_by_part(context) | latents

    def flops_per_token(self, context, training=False):
        one_pass = sum(self.flops_by_part(context).values())
        return one_pass * (3 * 4 + (3 if training else 1))


def built(kind=TransformerLM, **changes):
    model = kind(TransformerConfig(**{**SIZES, **changes}))
    model.configure_model()
    return model


def test_parts_of_a_methods_own_follow_the_common_ones():
    frame = compute_frame([count_compute(built()), count_compute(built(LatentLM))], ["a", "b"])
    shares = [key.removeprefix("share_") for key in frame if key.startswith("share_")]
    common = ["output", "self_attention", "cross_attention", "feed_forward"]
    assert shares == [*common, "encoder"]
    plain, latent = frame.to_dict("records")
    assert plain["share_cross_attention"] == 0
    assert latent["flops_one_pass"] == plain["flops_one_pass"] + 1024
    assert latent["flops_forward"] == 13 * latent["flops_one_pass"]
    assert latent["flops_training"] == 15 * latent["flops_one_pass"]
    assert sum(latent[f"share_{part}"] for part in shares) == pytest.approx(1)
    assert list(frame["flops_as_published"]) == [None, 224.0]
    assert "flops_as_published" not in compute_frame([count_compute(built())], ["plain"])


def test_a_model_of_documents_needs_a_context():
    (method,) = [method for method in METHODS if method.name == "thought-gestalt"]
    with pytest.raises(ValueError, match=r"context: ThoughtGestaltLM .* give --context N"):
        count_compute(method.build())


def test_an_outline_counts_like_the_model(checkpoint_path):
    checkpoint = read_checkpoint(checkpoint_path)
    outline, whole = build_outline(checkpoint), build_model(checkpoint)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    assert count_compute(outline) == count_compute(whole)
    count = count_compute(whole, 8)
    sizes = sum(p.numel() for p in whole.parameters()), whole.flops_per_token(8, training=True)
    assert (count["parameters"], count["flops_training"]) == sizes


def test_the_table_and_the_figure(checkpoint_path, edited, evaluates, tmp_path):
    def deepen(content):
        content["recipe"]["model"]["init_args"]["config"]["num_layers"] = 6

    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(edited(deepen), runs / "deep.ckpt")
    shutil.copy(checkpoint_path, runs / "flat.ckpt")
    output = tmp_path / "shares.svg"
    printed = evaluates(*COMPUTE, runs / "*.ckpt", "--output", output)
    deep, flat = read(tmp_path / "shares.csv")
    assert (deep["label"], flat["label"]) == ("num_layers 6", "num_layers 2")
    for row, layers in ((deep, 6), (flat, 2)):
        expected = count_compute(built(num_layers=layers))
        parts, whole = expected.pop("parts"), expected["flops_one_pass"]
        for key, value in expected.items():
            assert value is None or float(row[key]) == value
        assert float(row["flops_output"]) == parts["output"]
        assert float(row["share_feed_forward"]) == parts["feed_forward"] / whole
    lines = printed.splitlines()
    assert lines[2].startswith("num_layers 6")
    assert f"{expected['flops_training']:.4g}" in lines[3]
    assert f"{100 * parts['output'] / whole:.1f} %" in lines[3]
    assert "<svg" in output.read_text()


def test_sizes_can_be_changed_as_no_weights_are_read(checkpoint_path, evaluates, tmp_path):
    output = tmp_path / "big.png"
    options = ("--set.num_layers", "12", "--set.dim", "512", "--context", "1024")
    printed = evaluates(*COMPUTE, checkpoint_path, *options, "--output", output)
    (row,) = read(tmp_path / "big.csv")
    expected = count_compute(build_outline(read_checkpoint(checkpoint_path), {"dim": 512}), 1024)
    assert float(row["flops_output"]) == expected["parts"]["output"]
    assert float(row["flops_feed_forward"]) == 6 * expected["parts"]["feed_forward"]
    assert "TransformerLM" in printed
    assert output.read_bytes().startswith(b"\x89PNG")


EVERY_CLASS = list({method.model: method for method in reversed(METHODS)}.values())[::-1]


@pytest.mark.parametrize("method", EVERY_CLASS, ids=lambda method: method.name)
def test_every_method_is_counted_or_says_that_it_is_not(method, write_method, evaluates, fails):
    path = write_method(method.name)
    command = (*COMPUTE, path, "--context", 40)
    if method.model.reads == "reasoning":
        line = fails(*command)
        assert f"{method.model.__name__} does not count its FLOPs by part" in line
        return
    printed = evaluates(*command)
    assert printed == evaluates(*command)
    model = build_model(read_checkpoint(path))
    assert f"{model.flops_per_token(40, training=True):.4g}" in printed


# ---- results


RESULT = {
    "mode": "blockwise",
    "nats_per_token": 3.5,
    "perplexity": 33.1154,
    "causal": True,
    "flops_per_token": 1.5e6,
    "checkpoint": "runs/x.ckpt",
    "data": {"split": "val"},
}


@pytest.fixture
def files(tmp_path):
    for name, changes in {
        "plain": {},
        "forking": {"perplexity": None, "ppl_noncausal": 30.0, "causal": False},
    }.items():
        (tmp_path / name).mkdir()
        result = {key: v for key, v in {**RESULT, **changes}.items() if v is not None}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    return [str(tmp_path / name / "result.json") for name in ("plain", "forking")]


def test_one_row_a_file_and_a_column_for_every_number(files, evaluates, tmp_path):
    target = tmp_path / "table.csv"
    header, plain, forking = evaluates(*RESULTS, *files, "--output", target).splitlines()
    assert "checkpoint" not in header
    assert plain.split() == ["plain", "blockwise", "3.5", "33.115", "yes", "1.5e+06", "-"]
    assert forking.split() == ["forking", "blockwise", "3.5", "-", "no", "1.5e+06", "30"]
    assert header.index("perplexity") == plain.index("33.115") == forking.index("- ")
    rows = read(target)
    assert [row["result"] for row in rows] == ["plain", "forking"]
    assert [row["perplexity"] for row in rows] == ["33.1154", ""]
    assert rows[1]["ppl_noncausal"] == "30.0"


@pytest.mark.parametrize("content", [None, "no json", "[1]"])
def test_a_file_without_a_result_is_one_clear_line(tmp_path, fails, content):
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    line = fails(*RESULTS, path)
    assert line.startswith("error: runs")
    assert str(path) in line
