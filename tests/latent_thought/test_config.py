"""The defaults are the paper's."""

from lightning_models.latent_thought import LatentThoughtConfig


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
