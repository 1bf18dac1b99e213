"""Streams of random sentences, and networks that are not at their initial values."""

import torch
from formats import marked_documents

from lightning_models.thought_gestalt import (
    ThoughtGestaltConfig,
    ThoughtGestaltLM,
    ThoughtGestaltNetwork,
)

SLOTS, VOCAB = 9, 40
BOS, EOS, EOD = 37, 38, 39
SIZES = {
    "vocab_size": VOCAB,
    "block_size": SLOTS,
    "num_layers": 4,
    "dim": 16,
    "num_heads": 2,
    "sentence_layer": 3,
    "memory_size": 3,
}


def streams(shape, seed=0):
    """A batch: lists of numbers of content tokens (1 to SLOTS - 3), one list a stream.

    The last sentence of every other stream ends its document.
    """
    return marked_documents(shape, VOCAB - 3, VOCAB, SLOTS, seed, ends=2)


def build(seed=0, **changes):
    """A float64 network in evaluation mode whose biases and norms are random too."""
    config = ThoughtGestaltConfig(**{**SIZES, **changes})
    torch.manual_seed(seed)
    network = ThoughtGestaltNetwork(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network.double().eval()


VARIANTS = {
    "alternate": {},
    "serial": {"layer_type": "serial"},
    "parallel": {"layer_type": "parallel"},
    "detached": {"memory": "detached"},
    "none": {"memory": "none"},
    "seeding": {"memory": "seeding"},
    "in_context": {"memory": "in_context"},
    "static-bos": {"context_seeding": False},
    "deep-head": {"sentence_head_depth": 2, "sentence_layer": 4},
}


def gestalt(seed=0, **changes):
    model = ThoughtGestaltLM(ThoughtGestaltConfig(**{**SIZES, **changes}))
    model.network = build(seed, **changes)
    return model.eval()
