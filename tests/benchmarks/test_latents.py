"""The literal rival of the latent-thought benchmark computes what we do; the command runs."""

import argparse
import json
import sys

import pytest
import torch

from benchmarks import harness, latents
from benchmarks.harness import in_a_process, random_windows

TINY = {
    "device": "cpu",
    "layers": 2,
    "dim": 16,
    "heads": 2,
    "context": 12,
    "window": 5,
    "latents_per_layer": 2,
    "steps": 3,
    "slow_gradient": "final",
    "batch": 2,
    "bf16": False,
    "compile": False,
}
VOCAB = 40


def step_of(side, **changes):
    """Loss and the gradients of all weights, in float64."""
    options = argparse.Namespace(**TINY | changes)
    model = latents.build_model(options, VOCAB, options.steps).double()
    torch.manual_seed(0)
    for block in model.network.layers:  # which start at 0: latent vectors would not matter
        torch.nn.init.normal_(block.latent_attention.out.weight, std=0.1)
    loss = latents.build_loss(side, model, random_windows(options, VOCAB, options.context))()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.network.named_parameters()}


@pytest.mark.parametrize("slow_gradient", ["final", "trajectory"])
@pytest.mark.parametrize("window", [5, 12])
def test_the_rival_computes_the_same_loss_and_the_same_gradient(window, slow_gradient):
    ours, our_gradients = step_of("ours", window=window, slow_gradient=slow_gradient)
    literal, gradients = step_of("literal", window=window, slow_gradient=slow_gradient)
    assert ours == pytest.approx(literal, abs=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-7, atol=1e-9)


def test_rivals_differ_where_the_public_code_keeps_what_inference_left():
    _, final = step_of("literal")
    _, kept = step_of("literal", slow_gradient="trajectory")
    assert not torch.allclose(final["norm.weight"], kept["norm.weight"])


def run_command(monkeypatch, folder, *arguments):
    """The tables that the command writes at a tiny size."""
    sizes = [f"--{key}={TINY[key]}" for key in ("layers", "dim", "heads", "context", "window")]
    sizes += ["--latents_per_layer=2", "--steps=2", "--batch=2", "--rounds=1"]
    output = folder / "found.json"
    monkeypatch.setattr(sys, "argv", ["latents", *sizes, f"--output={output}", *arguments])
    latents.main()
    return json.loads(output.read_text())["tables"]


def test_speed_has_a_row_for_each_vocabulary_with_both_counts(monkeypatch, tmp_path):
    table = run_command(
        monkeypatch, tmp_path, "--only", "speed", "--peak=1e12", "--vocab", "40", "64"
    )["speed"]
    assert [row["vocabulary"] for row in table] == [40, 64]
    for row in table:
        assert row["as published"] > row["MFLOP/token"] > 0
        assert row["losses apart"] < 1e-3
        assert row["MFU"] > 0


def test_growth_has_a_row_for_each_number_of_inner_steps(monkeypatch, tmp_path):
    table = run_command(monkeypatch, tmp_path, "--only", "growth", "--vocab", "40")["growth"]
    assert [row["T_fast"] for row in table] == list(latents.GROWTH)


def test_memory_is_measured_of_both_sides(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        harness, "in_a_process", lambda module, settings: asked.append(settings) or 1e6
    )
    (row,) = run_command(monkeypatch, tmp_path, "--only", "memory", "--vocab", "40")["memory"]
    assert [settings["side"] for settings in asked] == ["ours", "literal"]
    assert list(row.values()) == [40, 1.0, 1.0, 1.0]


def test_a_process_prints_the_bytes_of_a_step(monkeypatch, capsys):
    settings = json.dumps(TINY | {"vocab": VOCAB, "side": "literal"})
    monkeypatch.setattr(sys, "argv", ["latents", "--memory", settings])
    latents.main()
    assert float(capsys.readouterr().out) >= 0


def test_no_inner_steps_are_refused(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        run_command(monkeypatch, tmp_path, "--steps=0")
    assert stopped.value.code == 2
    assert "--steps (0)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_large_vocabulary_takes_half_of_the_rivals_memory_at_most():
    sizes = {"layers": 3, "dim": 256, "heads": 8, "context": 256, "window": 256, "batch": 4}
    settings = TINY | sizes | {"latents_per_layer": 8, "steps": 2, "vocab": 50304}
    ours, literal = (
        in_a_process("benchmarks.latents", {**settings, "side": side})
        for side in ("ours", "literal")
    )
    assert ours <= 0.5 * literal
