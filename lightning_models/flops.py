"""Counting floating-point operations: a multiply-add is two."""

from torch import nn

from lightning_models.layers import DecoderConfig, SequenceConfig


def linear_flops(module: nn.Module) -> float:
    """Returns the forward FLOPs per token of ``module``, if linear, and linear layers below."""
    return 2.0 * sum(
        layer.in_features * layer.out_features
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    )


def mean_keys(context: int, window: int | None = None) -> float:
    """Returns the mean number of keys that the queries of a causal row of ``context`` tokens see.

    Args:
        context: Tokens of the row.
        window: Most keys of a query, its own included; None: all before it.
    """
    window = min(window or context, context)
    return (window * (window + 1) / 2 + (context - window) * window) / context


def attention_flops(config: DecoderConfig, context: int) -> float:
    """Returns the forward FLOPs per token of scores and weighted sums in all L layers.

    The mean over the positions of a sequence of ``context`` tokens: a causal query sees half of
    them, a windowed one at most ``window``.
    """
    return config.num_layers * 4.0 * config.dim * mean_keys(context, config.window)


def head_flops(config: DecoderConfig) -> float:
    """Returns the forward FLOPs per token of the output layer."""
    return 2.0 * config.dim * config.padded_vocab_size


TRAINING_FACTOR = 3.0
"""A training step costs a forward pass and a backward pass of twice its FLOPs."""


def training_flops(forward: float, blocks: float, config: SequenceConfig) -> float:
    """Returns the FLOPs of a training step.

    Args:
        forward: Those of its forward pass.
        blocks: The part of blocks, which gradient checkpointing computes once more, or a little
            less: it stops at the last value that the backward pass needs.
        config: Says whether it does.
    """
    again = blocks if config.gradient_checkpointing is True else 0.0
    return TRAINING_FACTOR * forward + again
