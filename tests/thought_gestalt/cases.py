"""Streams of random sentences, and networks that are not at their initial values."""

import torch

from lightning_models.thought_gestalt import ThoughtGestaltConfig, ThoughtGestaltNetwork

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
    generator = torch.Generator().manual_seed(seed)
    most = max(map(len, shape))
    tokens = torch.zeros(len(shape), most, SLOTS, dtype=torch.int64)
    lengths = torch.zeros(len(shape), most, dtype=torch.int64)
    is_last = torch.zeros(len(shape), most, dtype=torch.bool)
    for row, sentences in enumerate(shape):
        is_last[row, len(sentences) - 1] = row % 2 == 0
        for t, count in enumerate(sentences):
            words = torch.randint(0, 37, (count,), generator=generator).tolist()
            slots = [BOS, *words, *([EOD] if is_last[row, t] else []), EOS]
            tokens[row, t, : len(slots)] = torch.tensor(slots)
            lengths[row, t] = len(slots)
    return {"tokens": tokens, "lengths": lengths, "is_last": is_last}


def build(seed=0, **changes):
    """A float64 network in evaluation mode whose biases and norms are random too."""
    config = ThoughtGestaltConfig(**{**SIZES, **changes})
    torch.manual_seed(seed)
    network = ThoughtGestaltNetwork(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network.double().eval()
