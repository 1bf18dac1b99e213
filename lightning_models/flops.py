"""FLOP counts, in which a multiply-add is two operations."""

from torch import nn

from lightning_models.layers import DecoderConfig, SequenceConfig


def linear_flops(module: nn.Module) -> float:
    """Returns the forward FLOPs per token of all linear layers in ``module``, including itself."""
    return 2.0 * sum(
        layer.in_features * layer.out_features
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
    )


def mean_keys(context: float, window: int | None = None) -> float:
    """Returns the mean number of keys that the queries of a causal row of ``context`` tokens see.

    Args:
        context: Number of tokens of the row.
        window: Maximum number of keys of a query, including its own. Defaults to no limit.
    """
    # query i sees min(i, w) keys: w (w + 1) / 2 in the first w queries, then w each
    width = min(window or context, context)
    return (width * (width + 1) / 2 + (context - width) * width) / context


def attention_flops(config: DecoderConfig, context: int) -> float:
    """Returns the forward FLOPs per token of scores and weighted sums in all L layers.

    The mean over the positions of a sequence of ``context`` tokens: a causal query sees half of
    them, a windowed one at most ``window``.
    """
    channels = config.num_heads * config.head_dim
    return config.num_layers * 4.0 * channels * mean_keys(context, config.window)


def head_flops(config: DecoderConfig) -> float:
    """Returns the forward FLOPs per token of the output layer."""
    return 2.0 * config.dim * config.padded_vocab_size


TRAINING_FACTOR = 3.0
"""A training step costs a forward pass and a backward pass of twice its FLOPs."""


def training_flops(forward: float, blocks: float, config: SequenceConfig) -> float:
    """Returns the FLOPs of a training step.

    Args:
        forward: FLOPs of its forward pass.
        blocks: FLOPs of the blocks, which gradient checkpointing recomputes. It stops at the last
            value that the backward pass needs, so this is slightly more than the actual cost.
        config: Configuration with ``gradient_checkpointing``.
    """
    recomputed = blocks if config.gradient_checkpointing is True else 0.0
    return TRAINING_FACTOR * forward + recomputed
