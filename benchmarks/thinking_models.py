"""What the benchmark of Thinking States times: networks, and thoughts that come where it says."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from lightning_models import (
    CoconutConfig,
    CoconutLM,
    CoTConfig,
    CoTLM,
    LanguageModel,
    NoCoTConfig,
    NoCoTLM,
    ThinkingStatesConfig,
    ThinkingStatesLM,
)
from lightning_models.thinking_states.backbone import KNOWN
from lightning_models.thinking_states.network import ThinkingStatesNetwork

METHODS: dict[str, tuple[Any, Any]] = {
    "Thinking States": (ThinkingStatesLM, ThinkingStatesConfig),
    "Coconut": (CoconutLM, CoconutConfig),
    "CoT": (CoTLM, CoTConfig),
    "no CoT": (NoCoTLM, NoCoTConfig),
}
PREFIX, SEPARATOR = (1, 2, 3, 4), (5,)
"""Ids of the answer prefix and of the step separator."""
MARK = 6
"""Token after which the models of `tell_when_to_think` think, at the end of a chunk."""
FIRST = 7
"""The first id that texts are drawn from; those of thoughts are the last ones."""


def build(method: str, options: argparse.Namespace, **config: Any) -> LanguageModel:
    """Returns a model with random weights, on the device.

    Args:
        method: a key of ``METHODS``.
        options: of the command line.
        **config: further fields of its config.
    """
    torch.manual_seed(0)
    kind, settings = METHODS[method]
    sizes: dict[str, Any] = {
        "num_layers": options.layers,
        "dim": options.dim,
        "num_heads": options.heads,
    }
    if options.shape is not None:
        sizes = {"architecture": dict(KNOWN[options.shape])}
    wording = {"answer_prefix": PREFIX, "step_separator": SEPARATOR}
    lengths = {"vocab_size": options.vocab, "block_size": 4 * options.length}
    model: LanguageModel = kind(settings(**sizes, **lengths, **wording, **config))
    model.configure_model()
    return model.to(options.device)


def latents(number: int, each: int = 1) -> dict[str, int]:
    """Returns the fields of a Coconut with ``number`` latents and no step left of the chain."""
    last = number // each
    return {"c_thought": each, "max_latent_stage": last, "first_stage": last + 1}


def random_tokens(options: argparse.Namespace, *shape: int) -> Tensor:
    """Returns text of that shape, int64, on the device; the same each time."""
    generator = torch.Generator().manual_seed(0)
    last = options.vocab - options.thought
    return torch.randint(FIRST, last, shape, generator=generator).to(options.device)


def thought_tokens(options: argparse.Namespace) -> list[int]:
    """Returns the thought that is thought after each ``MARK`` at the end of a chunk."""
    return list(range(options.vocab - options.thought, options.vocab))


@torch.no_grad()
def tell_when_to_think(network: ThinkingStatesNetwork, thought: list[int]) -> None:
    """Sets embedding and T's head so that T writes ``thought`` after ``MARK``, and ends it there.

    Everything is computed as ever, by layers with random weights. Embeddings are made so long that
    what layers add hardly matters: all tokens share a direction that T's head takes for the end of
    a thought; ``MARK`` and the thought's tokens have one of their own, four times as long, that it
    takes for the next token. A state ends with a token without such a direction, so that it wakes
    no thought at the next chunk's end, and silences none.

    Args:
        network: with a head of T's own, and a width above the thought's tokens.
        thought: different ids.
    """
    head: nn.Linear | None = network.thinking.head
    embedding = network.backbone.model.embed_tokens.weight
    width = embedding.shape[1]
    assert head is not None
    assert width > len(thought)
    length = width / 4
    embedding[:, 0] += length
    head.weight.zero_()
    head.weight[network.config.special_id("thought_end"), 0] = 1.0
    for place, (before, token) in enumerate(zip([MARK, *thought], thought, strict=False), start=1):
        embedding[before, place] += 4 * length
        head.weight[token, place] = 1.0
