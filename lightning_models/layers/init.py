"""Initial weights."""

import math

from torch import nn

from lightning_models.layers.config import DecoderConfig


class OutputProjection(nn.Linear):
    """A linear layer that writes into the residual stream, and therefore starts smaller."""


def initialise(module: nn.Module, config: DecoderConfig) -> None:
    """Initialises all linear layers and embeddings below ``module`` in place.

    ``gpt2`` draws N(0, init_std); ``ponderlm`` draws a normal of variance 2 / (5 D) cut at three
    standard deviations. Projections into the residual stream are divided by sqrt(2 L). Biases
    start at zero.
    """
    ponder = config.init == "ponderlm"
    std = math.sqrt(2 / (5 * config.dim)) if ponder else config.init_std
    for layer in module.modules():
        if not isinstance(layer, nn.Linear | nn.Embedding):
            continue
        scale = 1 / math.sqrt(2 * config.num_layers) if isinstance(layer, OutputProjection) else 1.0
        if ponder:
            cut = 3 * std * scale
            nn.init.trunc_normal_(layer.weight, std=std * scale, a=-cut, b=cut)
        else:
            nn.init.normal_(layer.weight, std=std * scale)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


def embedding_scale(config: DecoderConfig) -> float:
    """Returns the factor on token embeddings that gives them unit variance under ``ponderlm``.

    sqrt(2.5 D) is the inverse of that initialisation's standard deviation, so that embeddings
    match the RMS-normed states which the pondering models feed back; 1 for ``gpt2``.
    """
    return math.sqrt(2.5 * config.dim) if config.init == "ponderlm" else 1.0
