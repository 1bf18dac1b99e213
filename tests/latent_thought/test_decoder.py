"""p(x | z) against the equations, and against the plain transformer where z has no effect."""

import pytest
import torch

from lightning_models import LatentThoughtConfig, LatentThoughtLM, TransformerLM
from lightning_models.transformer import TransformerConfig
from tests.latent_thought.cases import (
    SIZES,
    build,
    log_probs,
    random_latents,
    reference_of,
    row_of,
    rows_of,
)

SPREAD = {"block_size": 12, "latents_per_layer": 3}
UNEVEN = {"block_size": 26, "latents_per_layer": 5}
"""26 // 10 and 26 // 5 are not 26 / 10 and 26 / 5."""
CASES = {
    "layered-index": {},
    "layered-spread": {"latent_positions": "spread", **SPREAD},
    "layered-public": {"latent_positions": "public", **SPREAD},
    "layered-public-uneven": {"latent_positions": "public", **UNEVEN},
    "shared-index": {"latents": "shared"},
    "shared-spread": {"latents": "shared", "latent_positions": "spread", **SPREAD},
    "shared-public": {"latents": "shared", "latent_positions": "public", **SPREAD},
    "shared-public-uneven": {"latents": "shared", "latent_positions": "public", **UNEVEN},
    "one-latent": {"latents_per_layer": 1},
    "three-layers": {"num_layers": 3},
    "full-attention": {"window": None},
    "window-1": {"window": 1},
    "window-of-all": {"window": 64},
    "one-head": {"num_heads": 1},
    "untied": {"tie_head": False},
    "other-base": {"rope_base": 10.0},
    "default-width": {"ffn_dim": None},
    "math": {"attention_backend": "math"},
    "transport": {"prior": "transport"},
}
EXACT = {"atol": 1e-11, "rtol": 1e-10}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_of_all_next_tokens(case):
    model, batch = build(**CASES[case]), rows_of([5, 2])
    z, slow = random_latents(model, 2), reference_of(model)
    found = log_probs(model, batch["tokens"], z)
    for row in range(2):
        tokens, _ = row_of(batch, row)
        expected = slow.log_probs(tokens, z[row])
        torch.testing.assert_close(found[row, : len(tokens)], expected, **EXACT)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("window", [2, None])
@pytest.mark.parametrize("tied", [True, False])
def test_without_effect_of_z_it_is_the_plain_transformer(window, tied):
    """LLaMA style with the same weights, whatever z is."""
    model = build(window=window, tie_head=tied)
    shape = {
        key: SIZES[key]
        for key in SIZES
        if not key.startswith(("lat", "inner", "noise", "prior", "en"))
    }
    llama = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}
    config = TransformerConfig(**{**shape, **llama, "window": window, "tie_head": tied})
    plain = TransformerLM(config)
    plain.configure_model()
    weights = model.network.state_dict()
    plain.network.load_state_dict({k: v for k, v in weights.items() if ".latent_" not in k})
    with torch.no_grad():
        for block in model.network.layers:
            block.latent_attention.out.weight.zero_()
    tokens = rows_of([8, 8])["tokens"]
    expected = (plain.network(tokens) @ plain.network.output_matrix.t()).log_softmax(dim=-1)
    for seed in range(2):
        found = log_probs(model, tokens, 10 * random_latents(model, 2, seed))
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.usefixtures("exact")
def test_it_starts_without_effect_of_z_and_learns_to_read_it():
    """As the plain transformer; the projection to read with is the first of its layer to learn."""
    model = LatentThoughtLM(LatentThoughtConfig(**SIZES))
    model.configure_model()
    batch = rows_of([8])
    first, second = (log_probs(model, batch["tokens"], random_latents(model, 1, s)) for s in (0, 1))
    assert torch.equal(first, second)
    nll = model.loss(batch).terms["nll"].sum
    read = model.network.layers[0].latent_attention
    slopes = torch.autograd.grad(nll, (read.out.weight, read.key_value.weight))
    assert [bool(slope.any()) for slope in slopes] == [True, False]
