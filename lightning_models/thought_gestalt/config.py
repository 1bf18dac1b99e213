"""Configuration of Thought Gestalt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_models.layers import DecoderConfig

LayerType = Literal["alternate", "serial", "parallel"]
Memory = Literal["differentiable", "detached", "none", "seeding", "in_context"]


@dataclass(frozen=True, kw_only=True)
class ThoughtGestaltConfig(DecoderConfig):
    """A GPT-2 style decoder that reads a document sentence by sentence.

    ``block_size`` is the number of slots of a sentence tensor: BOS, 64 tokens, EOD and EOS are 67.

    Raises:
        ValueError: If a value is out of range. The message names key, value and cure.
    """

    dials: ClassVar[Mapping[str, str]] = {"memory_size": "M"}

    attention_dropout: float = 0.2
    """Dropout on attention weights, within sentences and over memory (App. B.2)."""
    layer_type: LayerType = "alternate"
    """Layers (Table 1). With alternate, odd layers (1-based) attend within the sentence and even
    ones to memory; every layer does both in turn with serial, and sums both with parallel."""
    sentence_layer: int = 7
    """l_s, layer (1-based) after which the state at EOS becomes the sentence vector."""
    sentence_head_depth: int = 1
    """Number of linear layers of the sentence head W_sent, with GELU and dropout in between."""
    memory: Memory = "differentiable"
    """Memory (Table 1). Gradients flow through it with differentiable and stop at its input with
    detached. none replaces every cross-attention by self-attention, seeding does too, but keeps
    context seeding, and in_context prepends the sentence vectors to the tokens, so that
    self-attention reads both."""
    memory_size: int = 40
    """M, the number of sentence vectors in memory."""
    context_seeding: bool = True
    """Whether the vector of the previous sentence replaces the embedding of BOS."""
    gate_init: float = 1.0
    """Initial value of the scalar gates g_mem on cross-attention."""
    token_dropout: float = 0.15
    """Probability of zeroing the embedding of a content token, after the warm-in."""
    sentence_dropout: float = 0.15
    """Dropout on the state at EOS before the sentence head, after the warm-in."""
    warm_in: tuple[float, float] = (2000, 7000)
    """Sentence steps at which these two dropouts reach half and full rate. Values up to 1 are
    fractions of the run's optimiser steps."""
    eos_weight: float = 0.05
    """Weight of EOS targets in the training loss after the first eos_weight_epochs."""
    eos_weight_epochs: int = 1
    """Number of initial epochs in which EOS targets have weight 1."""
    checkpoint_sentences: bool = False
    """Whether the backward pass recomputes each sentence step, so that memory grows with the number
    of sentences instead of tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "warm_in", tuple(self.warm_in))
        super().__post_init__()
        if not 1 <= self.sentence_layer <= self.num_layers:
            raise ValueError(
                f"sentence_layer ({self.sentence_layer}) must be one of the layers 1 to "
                f"{self.num_layers} (num_layers)"
            )
        for key in ("sentence_head_depth", "memory_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least 1")
        for key in ("token_dropout", "sentence_dropout"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"{key} ({getattr(self, key)}) must be in [0, 1)")
        if len(self.warm_in) != 2 or not 0 <= self.warm_in[0] <= self.warm_in[1]:
            raise ValueError(
                f"warm_in ({list(self.warm_in)}) must be two numbers in ascending order"
            )
        if self.layer_type != "alternate" and self.memory not in ("differentiable", "detached"):
            raise ValueError(
                f"layer_type ({self.layer_type}) has no effect with memory ({self.memory}), which "
                "has no cross-attention; leave it out"
            )
        if self.memory == "seeding" and not self.context_seeding:
            raise ValueError(
                "context_seeding (False) must be true with memory (seeding); without either, use "
                "memory none"
            )
        if self.positions != "learned":
            raise ValueError(
                f"positions ({self.positions}) must be learned: they are indices in the sentence"
            )
        if self.block_size < 4:
            raise ValueError(
                f"block_size ({self.block_size}) must hold BOS, a token, EOD and EOS: at least 4"
            )
        if self.vocab_size < 4:
            raise ValueError(
                f"vocab_size ({self.vocab_size}) must hold a token besides BOS, EOS and EOD: at "
                "least 4"
            )
        if self.eos_weight < 0 or self.eos_weight_epochs < 0:
            raise ValueError(
                f"eos_weight ({self.eos_weight}) and eos_weight_epochs ({self.eos_weight_epochs}) "
                "must not be negative"
            )

    @property
    def bos_id(self) -> int:
        """Id of BOS, the first slot of a sentence."""
        return self.vocab_size - 3

    @property
    def eos_id(self) -> int:
        """Id of EOS, the last slot of a sentence."""
        return self.vocab_size - 2

    @property
    def eod_id(self) -> int:
        """Id of EOD, which precedes the EOS of a document's last sentence."""
        return self.vocab_size - 1

    @property
    def trains_sentence_head(self) -> bool:
        """Whether any loss depends on sentence vectors with a gradient."""
        if self.memory in ("none", "detached"):
            return False
        layers = range(1, self.num_layers + 1)
        read = self.memory == "in_context" or any(map(self.reads_memory, layers))
        return read or self.context_seeding

    def reads_memory(self, layer: int) -> bool:
        """Returns whether layer ``layer`` (1-based) has cross-attention to memory."""
        if self.memory not in ("differentiable", "detached"):
            return False
        return self.layer_type != "alternate" or layer % 2 == 0
