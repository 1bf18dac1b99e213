"""What the FLOPs of models are spent on."""

import csv
import re
import shutil

import pytest
from methods import BLOCK, METHODS

from evaluation.load import build_model, build_outline
from evaluation.views import compute_figure, compute_frame, count_compute, part_names
from lightning_models import (
    LanguageModel,
    ThoughtbubblesLM,
    ThoughtGestaltLM,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.checkpoint import read_checkpoint
from lightning_models.flops import attention_flops, head_flops

VIEW = ("compare", "--view", "compute")
SIZES = {"vocab_size": 257, "block_size": 32, "num_layers": 2, "dim": 32, "num_heads": 2}
ONE_PASS = [method for method in METHODS if issubclass(method.model, TransformerLM)]


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


@pytest.mark.parametrize("method", ONE_PASS, ids=lambda method: method.name)
def test_the_parts_of_plain_decoders_add_up(method):
    model = method.build()
    count = count_compute(model, BLOCK)
    assert count.one_pass == pytest.approx(model.flops_per_token(BLOCK), rel=1e-12)
    assert sum(map(count.share, count.parts)) == pytest.approx(1, rel=1e-12)
    assert min(count.parts.values()) > 0


def test_the_parts_are_the_matrices_they_are_named_for():
    model = built(activation="swiglu", bias=False, ffn_dim=64)
    parts = model.flops_by_part(16)
    config = model.config
    assert parts["output"] == head_flops(config) == 2 * 32 * 320
    assert parts["self_attention"] == 2 * 2 * 4 * 32**2 + attention_flops(config, 16)
    assert parts["feed_forward"] == 2 * 2 * 3 * 32 * 64
    assert set(parts) == {"output", "self_attention", "feed_forward"}


def test_a_count_has_the_models_own_totals():
    model = built()
    count = count_compute(model)
    assert count.context == 32
    assert count.parameters == sum(p.numel() for p in model.parameters())
    assert (count.forward, count.training) == (
        model.flops_per_token(32),
        model.flops_per_token(32, training=True),
    )
    assert count_compute(model, 8).forward < count.forward


def test_parts_of_a_methods_own_follow_the_common_ones():
    counts = [count_compute(built()), count_compute(built(LatentLM))]
    assert part_names(counts) == [
        "output",
        "self_attention",
        "cross_attention",
        "feed_forward",
        "encoder",
    ]
    plain, latent = counts
    assert plain.share("cross_attention") == 0
    assert latent.one_pass == plain.one_pass + 1024
    assert latent.forward == 13 * latent.one_pass
    assert latent.training == 15 * latent.one_pass
    assert sum(map(latent.share, part_names(counts))) == pytest.approx(1)


class SilentLM(TransformerLM):
    """Says nothing of its parts."""

    flops_by_part = LanguageModel.flops_by_part

    def flops_per_token(self, context, training=False):
        return 1.0


def test_a_model_without_parts_is_named():
    with pytest.raises(ValueError, match="SilentLM does not count its FLOPs by part"):
        count_compute(built(SilentLM))


FORKING = [method for method in METHODS if method.model is ThoughtbubblesLM]
GESTALTS = [method for method in METHODS if method.model is ThoughtGestaltLM]


@pytest.mark.parametrize("method", [*FORKING, *GESTALTS], ids=lambda method: method.name)
@pytest.mark.parametrize("context", [5, BLOCK, 200])
def test_the_parts_of_one_scoring_pass_add_up(method, context):
    model = method.build()
    count = count_compute(model, context)
    assert count.one_pass == pytest.approx(count.forward, rel=1e-12)
    assert min(count.parts.values()) > 0


def test_forks_are_a_part_of_their_own(forking_runs, evaluates):
    printed = evaluates(*VIEW, forking_runs, "--context", "32")
    parts = ["output", "self attention", "feed forward", "forking"]
    assert re.split("  +", printed.splitlines()[1].rstrip())[-4:] == parts


@pytest.fixture
def forking_runs(write_method):
    return write_method("thoughtbubbles")


def test_sentences_are_counted_at_a_context_that_is_given(write_method, evaluates, tmp_path):
    path, output = write_method("thought-gestalt"), tmp_path / "gestalt.svg"
    evaluates(*VIEW, path, "--context", "320", "--output", output)
    (row,) = read_table(tmp_path / "gestalt.csv")
    assert float(row["flops_one_pass"]) == pytest.approx(float(row["flops_forward"]))
    assert float(row["share_cross_attention"]) > 0
    assert float(row["share_sentence_head"]) > 0


def test_a_model_of_documents_needs_a_context():
    (method,) = [method for method in METHODS if method.name == "thought-gestalt"]
    with pytest.raises(ValueError, match=r"context: ThoughtGestaltLM .* give --context N"):
        count_compute(method.build())


def test_an_outline_counts_like_the_model(checkpoint_path):
    checkpoint = read_checkpoint(checkpoint_path)
    outline, whole = build_outline(checkpoint), build_model(checkpoint)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    assert count_compute(outline) == count_compute(whole)


def read_table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_and_the_figure(checkpoint_path, edited, evaluates, tmp_path):
    def deepen(content):
        content["recipe"]["model"]["init_args"]["config"]["num_layers"] = 6

    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copy(edited(deepen), runs / "deep.ckpt")
    shutil.copy(checkpoint_path, runs / "flat.ckpt")
    output = tmp_path / "shares.svg"
    printed = evaluates(*VIEW, runs / "*.ckpt", "--output", output)
    deep, flat = read_table(tmp_path / "shares.csv")
    assert (deep["label"], flat["label"]) == ("num_layers 6", "num_layers 2")
    for row, layers in ((deep, 6), (flat, 2)):
        expected = count_compute(built(num_layers=layers))
        assert float(row["flops_training"]) == expected.training
        assert float(row["flops_forward"]) == float(row["flops_one_pass"]) == expected.forward
        assert float(row["flops_output"]) == expected.parts["output"]
        assert float(row["share_feed_forward"]) == expected.share("feed_forward")
        assert int(row["parameters"]) == expected.parameters
    lines = printed.splitlines()
    assert lines[2].startswith("num_layers 6")
    assert f"{expected.training:.4g}" in lines[3]
    assert f"{100 * expected.share('output'):.1f} %" in lines[3]
    assert "<svg" in output.read_text()


def test_a_papers_own_count_stands_beside_ours():
    counts = [count_compute(built()), count_compute(built(LatentLM))]
    assert [count.published for count in counts] == [None, 7.0 * 32]
    frame = compute_frame(counts, ["plain", "latent"])
    assert list(frame["flops_as_published"]) == [None, 224.0]
    assert list(frame["flops_training"]) == [count.training for count in counts]
    assert "flops_as_published" not in compute_frame(counts[:1], ["plain"])


def test_sizes_can_be_changed_as_no_weights_are_read(checkpoint_path, evaluates, tmp_path):
    output = tmp_path / "big.png"
    options = ("--set.num_layers", "12", "--set.dim", "512", "--context", "1024")
    printed = evaluates(*VIEW, checkpoint_path, *options, "--output", output)
    (row,) = read_table(tmp_path / "big.csv")
    expected = count_compute(build_outline(read_checkpoint(checkpoint_path), {"dim": 512}), 1024)
    assert float(row["flops_output"]) == expected.parts["output"]
    assert float(row["flops_feed_forward"]) == 6 * expected.parts["feed_forward"]
    assert "TransformerLM" in printed
    assert output.read_bytes().startswith(b"\x89PNG")


def test_the_bars_are_the_shares():
    counts = [count_compute(built()), count_compute(built(LatentLM))]
    parts = part_names(counts)
    (axes,) = compute_figure(counts, ["plain", "latent"], parts).axes
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    expected = [[count.share(part) for count in counts] for part in parts]
    assert [pytest.approx(row) for row in expected] == widths
    starts = [[bar.get_x() for bar in bars] for bars in axes.containers]
    assert starts[0] == [0, 0]
    assert starts[-1][1] + widths[-1][1] == pytest.approx(1)
    label = axes.get_yticklabels()[1].get_text()
    assert label.startswith("latent\n")
    assert label.endswith(" training FLOPs/token")  # the paper's trFLOPs/tok are another count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--context", "0"], "context (0) must be at least 1"),
        (["--output", "shares.pdf"], "must end in .svg or .png"),
        (["--label", "width"], "label (width) is no key"),
        (["--set.dimm", "3"], "has no option config.dimm"),
        (["--set.num_heads", "5"], "num_heads (5) must divide dim"),
    ],
)
def test_wrong_options_end_in_one_line(checkpoint_path, fails, options, expected):
    assert expected in fails(*VIEW, checkpoint_path, *options)


def test_a_missing_checkpoint_ends_in_one_line(fails, tmp_path):
    assert "there is no such file or folder" in fails(*VIEW, tmp_path / "none.ckpt")
    line = fails(*VIEW, tmp_path)
    assert f"runs ({tmp_path}): there is no whole checkpoint below this folder" in line
    assert "name the folder of a run or a checkpoint file" in line


EVERY_CLASS = list({method.model: method for method in reversed(METHODS)}.values())[::-1]


@pytest.mark.parametrize("method", EVERY_CLASS, ids=lambda method: method.name)
def test_every_method_is_counted_or_says_that_it_is_not(method, write_method, evaluates, fails):
    path = write_method(method.name)
    command = (*VIEW, path, "--context", 40)
    if method.model.reads == "reasoning":
        line = fails(*command)
        assert f"{method.model.__name__} does not count its FLOPs by part" in line
        return
    printed = evaluates(*command)
    assert printed == evaluates(*command)
    model = build_model(read_checkpoint(path))
    assert f"{model.flops_per_token(40, training=True):.4g}" in printed
