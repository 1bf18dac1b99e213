"""Normalisation layers."""

from torch import nn

from lightning_models.layers.config import DecoderConfig


def make_norm(config: DecoderConfig) -> nn.Module:
    """Returns the norm the config asks for, over the last axis of (..., D)."""
    if config.norm == "rms":
        return nn.RMSNorm(config.dim, eps=config.norm_eps)
    return nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
