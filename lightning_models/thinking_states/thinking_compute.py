"""FLOPs of thinking: those of the backbone, of T and of C."""

from lightning_models.flops import TRAINING_FACTOR
from lightning_models.thinking_states.compute import backbone_flops, head_flops, layer_flops
from lightning_models.thinking_states.network import ThinkingStatesNetwork


def speaking_flops(network: ThinkingStatesNetwork, tokens: float) -> float:
    """Returns the FLOPs of ``tokens`` tokens of thoughts: T's layer and logits, and C's layer.

    T sees the chunk and half of a thought that is as long, C half of one.
    """
    c, backbone = network.config.chunk_size, network.backbone
    attention = layer_flops(backbone, 1.5 * c) + layer_flops(backbone, c / 2)
    return tokens * (attention + head_flops(backbone))


def listening_flops(network: ThinkingStatesNetwork) -> float:
    """Returns the FLOPs of T of a token of a chunk that thinks."""
    return layer_flops(network.backbone, (network.config.chunk_size + 1) / 2)


def reading_flops(network: ThinkingStatesNetwork, context: int, training: bool = False) -> float:
    """Returns the FLOPs per token of a row of ``context`` tokens that is read and thought about.

    Every chunk has a thought that is, with its end, as long as the chunk. The backbone reads once,
    as in training and in sequential reading; speculation reads the query, or what is left of it,
    once for each thought with tokens. A model that does not think at inference only reads.
    """
    if not (training or network.config.think):
        return backbone_flops(network.backbone, context, training)
    thoughts = listening_flops(network) + speaking_flops(network, 1.0)
    factor = TRAINING_FACTOR if training else 1.0
    return backbone_flops(network.backbone, context, training) + factor * thoughts


def answering_flops(network: ThinkingStatesNetwork, context: int, tokens: float | None) -> float:
    """Returns the FLOPs of a token of the answer in a context of ``context`` tokens.

    Args:
        network: its sizes.
        context: tokens.
        tokens: of thoughts, that come with it on average; None: one where answers are thought
            about, else none.
    """
    backbone, thinks = network.backbone, network.config.think_in_decode and network.config.think
    own = backbone.num_layers * layer_flops(backbone, context) + head_flops(backbone)
    if thinks:
        own += listening_flops(network)
    return own + speaking_flops(network, float(thinks) if tokens is None else tokens)
