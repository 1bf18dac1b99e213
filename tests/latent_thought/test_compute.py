"""FLOPs: their parts, torch's own counter, and the numbers of Table 1."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_models import LatentThoughtLM
from lightning_models.flops import TRAINING_FACTOR, head_flops
from lightning_models.latent_thought import LatentThoughtConfig
from lightning_models.latent_thought.network import before_latents
from lightning_models.latent_thought.reading import Reading
from lightning_models.layers import recording
from lightning_models.runtime import gradients_on
from tests.latent_thought.cases import build, random_latents, rows_of

KINDS = {
    "layered": {},
    "shared": {"latents": "shared"},
    "full-attention": {"window": None},
    "untied": {"tie_head": False},
    "transport": {"prior": "transport", "prior_layers": 2},
    "three-layers": {"num_layers": 3, "latents_per_layer": 1},
}
T = 8

PUBLISHED = {
    "small": (3, 8, 16, 4.07e9, 38e6),
    "medium": (6, 4, 16, 5.52e9, 51e6),
    "large": (12, 2, 64, 32.2e9, 76e6),
}
"""Layers, latents per layer, steps, trFLOPs/tok and parameters (Table 1)."""


def uncounted(config, rows):
    """FLOPs that the math kernel spends on keys which a query does not see."""
    window = min(config.window or T, T)
    seen = sum(min(place + 1, window) for place in range(T))
    return config.num_layers * 4 * config.dim * rows * (T * T - seen)


def inference_flops(model):
    """FLOPs per token of finding q."""
    once = sum(model.flops_by_part(T).values())
    return model.flops_per_token(T) - once


def counted(function):
    """What torch counts of a call, with every attention on the math kernel."""
    with FlopCounterMode(display=False) as counter, recording(attention=lambda **_: None):
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_pass_add_up_to_what_torch_counts(kind):
    model, tokens = build(**KINDS[kind]), rows_of([T, T])["tokens"]
    network, z = model.network, random_latents(model, 2)

    def decode():
        with torch.no_grad():
            return network(network.begin(tokens), z) @ network.output_matrix.t()

    found = counted(decode) - uncounted(model.config, 2)
    parts = model.flops_by_part(T)
    assert sum(parts.values()) * 2 * T == pytest.approx(found, rel=1e-12)
    assert parts["output"] == head_flops(model.config)
    assert all(value > 0 for value in parts.values())
    assert ("prior" in parts) == (kind == "transport")


def test_what_does_not_depend_on_z():
    model, tokens = build(), rows_of([T, T])["tokens"]

    def begin():
        with torch.no_grad():
            return model.network.begin(tokens)

    found = counted(begin) - uncounted(model.config, 2) / model.config.num_layers
    assert before_latents(model.network, T) * 2 * T == pytest.approx(found, rel=1e-12)


def test_an_inner_step_computes_no_gradient_of_weights():
    """Twice a pass without its first part, but for attention, whose backward is twice its forward.

    At usual sizes attention is a small part of that; here it is left out on both sides.
    """
    model, batch = build(inner_steps=1), rows_of([T, T])
    reading = Reading(model.network, batch["tokens"], batch["targets"], batch["mask"])

    def step():
        with gradients_on():
            z = random_latents(model, 2).requires_grad_() + 0  # a leaf, the counter cannot do
            reading.gradients(reading.likelihood(z).total, (z,))

    config, found = model.config, counted(step)
    products = 4 * config.dim * 2 * T  # scores and weighted sums of one key a token
    tokens, latents = T * (config.num_layers - 1), config.latents_per_layer
    attention = 3 * products * (tokens + latents * (config.num_layers - 1))
    attention += 3 * products * latents - products * latents / 2  # of the first: no query gradient
    mine = inference_flops(model) * 2 * T
    own = config.window * (config.window + 1) / 2 + (T - config.window) * config.window
    mine -= 2 * products * (own / T * (config.num_layers - 1) + latents * config.num_layers)
    assert mine == pytest.approx(found - attention, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_scoring(kind):
    """Scoring: inference and one pass; training: inference, and a pass forwards and backwards."""
    model = build(inner_steps=5, **KINDS[kind])
    once = sum(model.flops_by_part(T).values())
    fast = 5 * 2 * (once - before_latents(model.network, T))
    assert model.flops_per_token(T) == pytest.approx(once + fast)
    assert model.flops_per_token(T, training=True) == pytest.approx(TRAINING_FACTOR * once + fast)
    assert model.flops_per_token(T, training=True) < model.published_flops_per_token(T)


def test_the_trajectory_costs_what_the_paper_counts():
    """(T_fast + 1) passes forwards and backwards, weights included; the paper has no window."""
    model = build(slow_gradient="trajectory", inner_steps=4)
    config, whole = model.config, sum(model.flops_by_part(T).values())
    assert model.flops_per_token(T, training=True) == pytest.approx(5 * 3 * whole)
    unseen = uncounted(config, 2) / (2 * T)
    assert model.published_flops_per_token(T) == pytest.approx(5 * 3 * (whole + unseen))
    assert model.flops_per_token(T) == build(inner_steps=4).flops_per_token(T), "scores learn not"


def test_an_encoder_is_a_full_pass_over_tokens_and_queries():
    model, batch = build(inference="amortised", encoder_layers=2), rows_of([T, T])
    network = model.network

    def encode():
        with torch.no_grad():
            network.encoder(network.embedding(batch["tokens"]), batch["mask"])

    found = counted(encode)
    mine = inference_flops(model) * 2 * T
    out = 2 * 2 * model.config.dim**2 * 2 * model.config.num_latents  # of the queries alone
    assert mine == pytest.approx(found - out, rel=1e-12)
    once = sum(model.flops_by_part(T).values())
    assert model.flops_per_token(T, training=True) == pytest.approx(3 * (once + mine / (2 * T)))


# ---- Table 1


def published(name, **changes):
    """A model of Table 1, shapes without numbers."""
    layers, each, steps, _, _ = PUBLISHED[name]
    config = LatentThoughtConfig(
        **{
            "vocab_size": 50257,
            "block_size": 1024,
            "num_layers": layers,
            "latents_per_layer": each,
            "inner_steps": steps,
            **changes,
        }
    )
    model = LatentThoughtLM(config)
    with torch.device("meta"):
        model.configure_model()
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_published_sizes(name):
    """Table 1's sizes, to the million."""
    count = sum(p.numel() for p in published(name).network.parameters())
    assert count == pytest.approx(PUBLISHED[name][4], abs=1.0e6)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_count_is_that_of_table_1(name):
    """Within 0.3 %: every query counts all tokens (the N H of section 2.4)."""
    found = published(name).published_flops_per_token(1024)
    assert found == pytest.approx(PUBLISHED[name][3], rel=0.003)
