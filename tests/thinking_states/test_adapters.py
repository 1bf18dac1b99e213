"""LoRA on the backbone of CODI: what is learned, and that it is the sum of its matrices."""

import sys

import pytest
import torch

from evaluation.exporting import write_transformers
from lightning_models.flops import TRAINING_FACTOR
from lightning_models.optim import OptimizerConfig, build_optimizer
from lightning_models.thinking_states.backbone import backbone_flops
from tests.thinking_states.cases import FAMILIES, on
from tests.thinking_states.questions import V, build, questions, resumable_trainer

SIZES = {"num_latents": 2, "double": False}
LORA = {"lora_rank": 3, "lora_alpha": 6.0, "lora_dropout": 0.0}


def test_without_peft_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"^lora_rank \(3\) needs peft.*'\.\[lora\]'.*to null$"):
        build("codi", **SIZES, **LORA)


def test_it_does_not_start_from_a_checkpoint():
    with pytest.raises(ValueError, match=r"start_from \(runs/cot\) .* lora_rank \(3\)"):
        build("codi", **SIZES, **LORA, start_from="runs/cot")


def adapted(family=None, **changes):
    """A model whose added matrices are not zero, and a family's shape."""
    pytest.importorskip("peft")
    shape = {} if family is None else on(family)
    for settings in shape.values():
        settings |= {"vocab_size": V}
    model = build("codi", **SIZES, **LORA, **shape, **changes)
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
            if name == "added":
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model, shape


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_the_summed_matrices(family):
    model, shape = adapted(family)
    whole = build("codi", **SIZES, **shape)
    saved, summed = model.network.state_dict(), {}
    for name in whole.network.state_dict():
        stem, _, kind = name.rpartition(".")
        base = f"{stem}.base_layer.{kind}"
        summed[name] = saved[base if base in saved else name].clone()
        if base in saved and kind == "weight":
            down, up = (saved[f"{stem}.lora_{x}.default.weight"] for x in "AB")
            product = 2.0 * up @ down  # alpha / rank = 2
            summed[name] += product.t() if family == "gpt2" else product
    for name in summed:
        if name.endswith(("embed_tokens.weight", "wte.weight")):
            summed[name][V : V + 3] = saved["added"]
    whole.network.load_state_dict(summed)
    batch = questions()
    found, expected = (each.eval().score(batch).log_prob for each in (model, whole))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - build("codi", **SIZES, **shape).eval().score(batch).log_prob).abs().max() > 1e-3


def test_weight_decay_leaves_tokens_that_are_not_read():
    model, _ = adapted()
    decays = OptimizerConfig(lr=0.1, weight_decay=0.5, warmup=0, schedule="constant")
    network, before = model.network, model.network.added.detach().clone()
    optimizer = build_optimizer(network, decays, no_decay=model.no_decay_parameters())
    sum(term.sum for term in model.loss(questions()).terms.values()).backward()
    optimizer.step()
    assert not torch.equal(network.added[0], before[0])
    assert torch.equal(network.pause_latent(), before[2])


def test_only_the_added_matrices_markers_and_projection_are_learned():
    model, _ = adapted(step_weight=1.0, tie_head=False)
    kinds = ("lora_", "projection", "decoder.", "added")
    learns = {name for name, p in model.network.named_parameters() if p.requires_grad}
    assert learns == {
        name for name, _ in model.network.named_parameters() if any(kind in name for kind in kinds)
    }
    output = model.loss(questions())
    sum(term.sum for term in output.terms.values()).backward()
    gradients = {name: p.grad for name, p in model.network.named_parameters()}
    assert {name for name, gradient in gradients.items() if gradient is not None} == learns
    assert all(row.abs().max() > 1e-6 for row in gradients["added"][:2])


def test_a_checkpoint_holds_matrices_and_markers(tmp_path):
    model, _ = adapted()
    trainer, path = resumable_trainer(tmp_path), tmp_path / "model.ckpt"
    trainer.strategy.connect(model)
    trainer.save_checkpoint(path)
    loaded = type(model).load_from_checkpoint(path, weights_only=True)
    batch = questions()
    assert torch.equal(loaded.eval().score(batch).log_prob, model.eval().score(batch).log_prob)


def test_an_export_to_transformers_is_refused(tmp_path):
    model, _ = adapted()
    with pytest.raises(ValueError, match=r"lora_rank.*--format folder"):
        write_transformers(model, tmp_path)


def test_frozen_matrices_cost_no_gradient_of_their_own():
    model, _ = adapted()
    backbone = model.network.backbone
    frozen = sum(
        p.numel()
        for name, p in backbone.named_parameters()
        if p.ndim == 2 and ("base_layer" in name or "embed_tokens" in name)
    )
    forward = backbone_flops(backbone, 20)
    expected = TRAINING_FACTOR * forward - 2 * frozen
    assert backbone_flops(backbone, 20, training=True) == pytest.approx(expected)
