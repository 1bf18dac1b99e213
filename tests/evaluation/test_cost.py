"""What the FLOPs of a pass are spent on, and the curves that compare draws of a real run."""

from pathlib import Path

import pytest
from compared_runs import read
from methods import METHODS

from datamodules import LocalText
from evaluation.cost import compute_frame, count_compute
from evaluation.load import build_model, build_outline
from lightning_models import OptimizerConfig, TransformerConfig, TransformerLM
from lightning_models.checkpoint import read_checkpoint
from training.loggers import EventLog

ROOT = Path(__file__).resolve().parents[2]

ROWS, BLOCK = 4, 32  # of the data of the checkpoints


# ---- what was trained on


def test_curves_of_a_real_run(quiet_trainer, corpus, evaluates, tmp_path):
    data = LocalText(**corpus)
    sizes = {"vocab_size": data.vocab_size, "block_size": BLOCK, "num_layers": 1, "dim": 16}
    model = TransformerLM(TransformerConfig(**sizes, num_heads=2), OptimizerConfig(warmup=0))
    log = EventLog(tmp_path, name="TransformerLM", default_hp_metric=False)
    steps = {"max_steps": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    checks = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(**steps, **checks, logger=log, default_root_dir=tmp_path)
    trainer.fit(model, data)
    trainer.save_checkpoint(f"{log.log_dir}/checkpoints/last.ckpt")
    evaluates("compare", log.log_dir, "--output", tmp_path / "report")
    rows = read(tmp_path / "report" / "curves.csv")
    assert [int(row["steps"]) for row in rows] == [1, 2]
    assert [float(row["tokens"]) for row in rows] == [2 * ROWS * BLOCK, 4 * ROWS * BLOCK]
    assert float(rows[1]["val/bpb"]) == trainer.callback_metrics["val/bpb"].item()
    flops = model.flops_per_token(BLOCK, training=True)
    assert float(rows[1]["training_flops"]) == 4 * ROWS * BLOCK * flops


def test_ranks_and_accumulated_batches_count(edited, evaluates, tmp_path):
    def edit(content):
        content["LocalText"]["order"]["world_size"] = 3
        total = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        total["processed"] = 2 * content["global_step"]

    evaluates("compare", edited(edit), "--output", tmp_path / "report")
    (row,) = read(tmp_path / "report" / "runs.csv")
    assert float(row["training_tokens"]) == 2 * 2 * 3 * ROWS * BLOCK


# ---- shares of FLOPs


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
    frame = compute_frame(
        [count_compute(built(), 32), count_compute(built(LatentLM), 32)], ["a", "b"]
    )
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
    assert "flops_as_published" not in compute_frame([count_compute(built(), 32)], ["plain"])


def test_an_outline_counts_like_the_model(checkpoint_path):
    checkpoint = read_checkpoint(checkpoint_path)
    outline, whole = build_outline(checkpoint), build_model(checkpoint)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    assert count_compute(outline, 32) == count_compute(whole, 32)
    count = count_compute(whole, 8)
    sizes = sum(p.numel() for p in whole.parameters()), whole.flops_per_token(8, training=True)
    assert (count["parameters"], count["flops_training"]) == sizes


EVERY_CLASS = list({method.model: method for method in reversed(METHODS)}.values())[::-1]


@pytest.mark.parametrize("method", EVERY_CLASS, ids=lambda method: method.name)
def test_every_method_is_counted_or_says_that_it_is_not(method):
    model = method.build()
    if method.model.reads == "reasoning":
        with pytest.raises(ValueError, match=method.model.__name__):
            count_compute(model, 40)
        return
    counted = count_compute(model, 40)
    assert counted["flops_training"] == model.flops_per_token(40, training=True)
    assert counted["flops_one_pass"] == sum(counted["parts"].values())


def test_the_shares_of_the_latent_thought_paper(tmp_path, monkeypatch):
    """The script that draws its Fig. 3, and the shares that the page gives."""
    monkeypatch.chdir(tmp_path)
    names = {}
    exec((ROOT / "docs/papers/shares.py").read_text(), names)
    shares = names["shares"].set_index("label")
    assert [f"{100 * share:.1f}" for share in shares["share_output"]] == ["68.6", "52.3", "35.4"]
    assert [f"{flops / 1e9:.2f}" for flops in shares["flops_as_published"]] == [
        "4.08",
        "5.53",
        "32.22",
    ]
    assert (tmp_path / "shares.svg").exists()
