"""The dials: their defaults, and what is refused with key, value and a cure."""

import math

import pytest

from lightning_models.latent_thought import LatentThoughtConfig
from tests.latent_thought.cases import SIZES

WRONG = [
    ({"positions": "learned"}, "positions (learned)", "rope"),
    ({"init": "ponderlm"}, "init (ponderlm)", "gpt2"),
    ({"latents": "stacked"}, "latents (stacked)", "layered, shared"),
    ({"latents_per_layer": 0}, "latents_per_layer (0)", "at least 1"),
    ({"latent_positions": "learned"}, "latent_positions (learned)", "index, spread, public"),
    ({"prior": "flow"}, "prior (flow)", "normal, transport"),
    ({"prior_layers": 0}, "prior_layers (0)", "at least 1"),
    ({"encoder_layers": -1}, "encoder_layers (-1)", "at least 1"),
    ({"inference": "mcmc"}, "inference (mcmc)", "variational, langevin, amortised"),
    ({"inner_steps": 2.5}, "inner_steps (2.5)", "whole number"),
    ({"resample_every": 2.5}, "resample_every (2.5)", "whole number"),
    ({"inner_steps": -1}, "inner_steps (-1)", "0 (prior) or above"),
    ({"inner_lr": 0.3}, "inner_lr (0.3)", "two numbers above 0"),
    ({"inner_lr": (0.3,)}, "inner_lr ([0.3])", "two numbers above 0"),
    ({"inner_lr": (0.3, 0.0)}, "inner_lr ([0.3, 0.0])", "two numbers above 0"),
    ({"inner_lr": (0.3, math.nan)}, "inner_lr (nan)", "finite"),
    ({"inner_schedule": "linear"}, "inner_schedule (linear)", "constant, cosine"),
    ({"inner_betas": (0.9,)}, "inner_betas ([0.9])", "two numbers in [0, 1)"),
    ({"inner_betas": (0.9, 1.0)}, "inner_betas ([0.9, 1.0])", "two numbers in [0, 1)"),
    ({"inner_betas": (math.nan, 0.9)}, "inner_betas (nan)", "finite"),
    ({"inner_weight_decay": -0.1}, "inner_weight_decay (-0.1)", "0 or above"),
    ({"inner_weight_decay": math.nan}, "inner_weight_decay (nan)", "finite"),
    ({"init_log_variance": math.inf}, "init_log_variance (inf)", "finite"),
    ({"init_mean_std": -0.1}, "init_mean_std (-0.1)", "0 or above"),
    ({"init_mean_std": math.inf}, "init_mean_std (inf)", "finite"),
    (
        {"latent_positions": "public", "block_size": 5, "latents_per_layer": 3},
        "latent_positions (public)",
        "block_size of at least 6",
    ),
    ({"noise": "none"}, "noise (none)", "fixed, resampled"),
    ({"bound_noise": "outer"}, "bound_noise (outer)", "fresh, inner"),
    ({"slow_gradient": "all"}, "slow_gradient (all)", "final, trajectory"),
    ({"langevin_step_size": 0.0}, "langevin_step_size (0.0)", "above 0"),
    ({"langevin_step_size": math.nan}, "langevin_step_size (nan)", "finite"),
    ({"kl_annealing": 1.5}, "kl_annealing (1.5)", "[0, 1]"),
    ({"kl_annealing": math.nan}, "kl_annealing (nan)", "finite"),
    ({"kl_annealing": 0.5}, "kl_annealing (0.5)", "inference=amortised"),
    ({"resample_every": 0}, "resample_every (0)", "null"),
    ({"window": 0}, "window (0)", "null"),
    (
        {"slow_gradient": "trajectory", "inference": "langevin"},
        "slow_gradient (trajectory)",
        "slow_gradient=final",
    ),
    (
        {"slow_gradient": "trajectory", "inference": "amortised"},
        "slow_gradient (trajectory)",
        "slow_gradient=final",
    ),
]


def config(**changes):
    return LatentThoughtConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(("changes", "value", "cure"), WRONG, ids=str)
def test_what_cannot_work_is_refused_in_one_line(changes, value, cure):
    with pytest.raises(ValueError) as error:
        config(**changes)
    message = str(error.value)
    assert value in message
    assert cure in message
    assert "\n" not in message


def test_the_papers_defaults():
    """Sections 3.1 and 2.4, Appendix A: LTM-Large but for its number of steps."""
    chosen = LatentThoughtConfig(vocab_size=50257, block_size=1024)
    assert (chosen.num_layers, chosen.dim, chosen.num_heads) == (12, 512, 8)
    assert chosen.window == 256
    assert (chosen.norm, chosen.activation, chosen.positions) == ("rms", "swiglu", "rope")
    assert not chosen.bias
    assert chosen.tie_head
    assert chosen.norm_eps == 1e-5
    assert chosen.hidden_dim == 1376, "2/3 of 4 D, rounded up to 32"
    assert (chosen.latents, chosen.num_latents) == ("layered", 24)
    assert (chosen.prior, chosen.inference) == ("normal", "variational")
    assert chosen.inner_steps == 16
    assert chosen.inner_lr == (0.3, 0.34)
    assert chosen.inner_betas == (0.9, 0.95)
    assert chosen.noise == "resampled", "Algorithm 1, line 8"
    assert (chosen.slow_gradient, chosen.bound_noise) == ("final", "fresh")
