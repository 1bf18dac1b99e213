"""The stack that decodes sentences and writes them to memory, in plain PyTorch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_models.flops import linear_flops
from lightning_models.layers import (
    FeedForward,
    SelfAttention,
    attend,
    initialise,
    make_norm,
    wants,
)
from lightning_models.layers.blocks import join_heads, split_heads
from lightning_models.thought_gestalt.config import ThoughtGestaltConfig
from lightning_models.thought_gestalt.memory import (
    MemoryAttention,
    SentenceMemory,
    slot_positions,
)
from lightning_models.thought_gestalt.packing import Packing, SentenceStep

Result = TypeVar("Result")

BLOCK_VARIANTS = 32
"""Limit on the compiled variants of a block, which differ in memory, number of streams, gradients
and so on. PyTorch's default of 8 is too low; variants beyond the limit would run in eager mode."""

Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""Appends new keys and values (A, H, U, C) to a decoding cache and returns all visible ones, with a
mask broadcastable to (A, H, U, N) or None for causal attention."""


class PackedSelfAttention(SelfAttention):
    """Causal self-attention within each sentence, on packed slots."""

    def forward(  # type: ignore[override]
        self, x: Tensor, packing: Packing, extend: Extend | None = None
    ) -> Tensor:
        """Returns the attention output (P, D) of normed slots (P, D)."""
        grid = packing.to_grid(self.qkv(x))  # (P, 3 D) -> (A, U, 3 D)
        q, k, v = (split_heads(part, self.num_heads) for part in grid.chunk(3, dim=-1))
        dropout, mask = self.dropout if self.training else 0.0, None
        if extend is not None:
            k, v, mask = extend(k, v)
        # (A, H, U, C) each. Empty cells follow a sentence's slots, so causality hides them.
        backend = self.backend if mask is None else "auto"
        heads = attend(q, k, v, causal=mask is None, mask=mask, dropout=dropout, backend=backend)
        return self.out(packing.from_grid(join_heads(heads)))  # (A, H, U, C) -> (A, U, D) -> (P, D)


class GestaltBlock(nn.Module):
    """A pre-norm block of self-attention, memory attention or both, and a feed-forward layer.

    Args:
        config: Configuration of the network.
        layer: Index of the layer, 1-based.
    """

    def __init__(self, config: ThoughtGestaltConfig, layer: int) -> None:
        super().__init__()
        self.dim = config.dim
        self.prefixed = config.memory == "in_context"
        reads = config.reads_memory(layer)
        attends = config.layer_type != "alternate" or not reads
        self.parallel = config.layer_type == "parallel" and reads
        self.attention_norm = make_norm(config) if attends else None
        self.attention = PackedSelfAttention(config) if attends else None
        self.memory_norm = make_norm(config) if reads and not self.parallel else None
        self.memory_attention = MemoryAttention(config, config.gate_init, layer) if reads else None
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        packing: Packing,
        memory: tuple[Tensor, ...] | None,
        extend: Extend | None = None,
    ) -> Tensor:
        """Returns the slots (P, D) after this block.

        Args:
            x: Slots (P, D).
            packing: Packing of the slots.
            memory: Keys and values (A, M, D) of earlier sentences, as ``MemoryAttention`` takes
                them. If None, memory is empty and its attention is skipped.
            extend: Cache of the sentences' earlier slots, when decoding.
        """
        before = x
        if self.attention is not None and self.attention_norm is not None:
            x = x + self.dropout(self.attention(self.attention_norm(x), packing, extend))
        if self.memory_attention is not None and memory is not None:
            norm = self.attention_norm if self.parallel else self.memory_norm
            assert norm is not None
            read = self.memory_attention(norm(before if self.parallel else x), packing, *memory)
            x = x + self.dropout(read)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))

    def flops(self, slots: int, remembered: int) -> dict[str, float]:
        """Returns the forward FLOPs for a sentence, by part, with ``remembered`` vectors in memory.

        The parts are ``feed_forward`` and, if the block has them, ``self_attention`` and
        ``cross_attention`` (to memory). The cost of writing a vector is not included.
        """
        rows = slots + remembered * self.prefixed
        flops = {"feed_forward": rows * linear_flops(self.feed_forward)}
        if self.attention is not None:
            pairs = 2.0 * self.dim * rows * (rows + 1)  # 4 D for each of rows (rows + 1) / 2 pairs
            flops["self_attention"] = rows * linear_flops(self.attention) + pairs
        reader = self.memory_attention
        if reader is not None and remembered:
            projected = slots * (linear_flops(reader.query) + linear_flops(reader.out))
            flops["cross_attention"] = projected + 4.0 * self.dim * slots * remembered
        return flops


class SentenceHead(nn.Module):
    """Maps the state at EOS to the sentence vector with W_sent or an MLP."""

    def __init__(self, config: ThoughtGestaltConfig) -> None:
        super().__init__()
        depth = config.sentence_head_depth
        layers: list[nn.Module] = []
        for _ in range(depth - 1):
            layers += [nn.Linear(config.dim, config.dim), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*layers, nn.Linear(config.dim, config.dim, bias=False))

    def forward(self, x: Tensor, dropout: float) -> Tensor:
        """Returns sentence vectors (A, D) of states at EOS (A, D), to which dropout is applied."""
        return self.layers(F.dropout(x, dropout, self.training))


class ThoughtGestaltNetwork(nn.Module):
    """A single stack that serves as token decoder and sentence encoder."""

    slots: Tensor

    def __init__(self, config: ThoughtGestaltConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.dim)
        self.position = nn.Embedding(config.block_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GestaltBlock(config, i + 1) for i in range(config.num_layers))
        self.sentence_head = SentenceHead(config) if config.memory != "none" else None
        self.norm = make_norm(config)
        self.head = (
            None if config.tie_head else nn.Linear(config.dim, config.padded_vocab_size, False)
        )
        initialise(self, config)
        if self.sentence_head is not None and not config.trains_sentence_head:
            # No loss reaches the head. It keeps its initial weights, and DDP must not wait for its
            # gradients.
            self.sentence_head.requires_grad_(False)
        sizes = config.memory_size, config.dim
        self.register_buffer("slots", slot_positions(*sizes), persistent=False)

    @property
    def output_matrix(self) -> Tensor:
        """The output matrix (V, D)."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, steps: Sequence[SentenceStep], dropouts: Sequence[float] = ()) -> Tensor:
        """Returns the normed states (sum of P, D) of all slots, concatenated over steps."""
        states = list(self.run(steps, dropouts, lambda step, h: h))
        return torch.cat(states) if states else self.slots[:0]

    def run(
        self,
        steps: Sequence[SentenceStep],
        dropouts: Sequence[float],
        consume: Callable[[SentenceStep, Tensor], Result],
        vectors: list[Tensor] | None = None,
    ) -> Iterator[Result]:
        """Processes the sentence steps in order and yields the result of ``consume`` for each.

        Under ``recomputes`` each step and ``consume`` are recomputed in the backward pass. Until
        then only the step's sentence vectors and their projections for memory are kept.

        Args:
            steps: Sentence steps of a batch, in order (see ``packing.pack``).
            dropouts: Fraction in [0, 1] of the full token and sentence dropout for each step. If
                empty, dropout is full.
            consume: Function of a step and its normed states (P, D). Its result keeps its graph.
            vectors: List to which the sentence vectors (A, D) of each step are appended, with their
                graph. With ``memory: detached``, memory holds detached copies of them.
        """
        memory = SentenceMemory(self.readers, self.config.memory_size, self.slots)
        for t, step in enumerate(steps):
            share = dropouts[t] if dropouts else 1.0
            if step.parents is not None:
                memory.select(step.parents)
            if self.recomputes:
                args = consume, step, memory.view(), share
                result, sentences = checkpoint(self._run_step, *args, use_reentrant=False)
            else:
                result, sentences = self._run_step(consume, step, memory, share)
            if sentences is not None:
                memory.write(sentences.detach() if self.config.memory == "detached" else sentences)
                if vectors is not None:
                    vectors.append(sentences)
            yield result

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes each sentence step, under ``checkpoint_sentences``.

        It does not while statistics are recorded or gradients are disabled.
        """
        recorded = any(map(wants, ("memory_attention", "sentences", "attention")))
        return self.config.checkpoint_sentences and torch.is_grad_enabled() and not recorded

    def _run_step(
        self,
        consume: Callable[[SentenceStep, Tensor], Result],
        step: SentenceStep,
        memory: SentenceMemory,
        share: float,
    ) -> tuple[Result, Tensor | None]:
        """Returns the result of ``consume`` for the normed states, and the sentence vectors."""
        rows, config = step.packing.rows, self.config
        x = self._embed(step, memory, share)  # (P, D)
        prefix = self._prefix(memory, rows)  # (A, M_t, D)
        packing = step.packing if prefix is None else step.packing.prefixed(prefix.shape[1])
        num_prefix = 0
        if prefix is not None:
            num_prefix = prefix.shape[0] * prefix.shape[1]
            x = torch.cat((prefix.flatten(0, 1), x))  # (A M_t + P, D), in the order of ``prefixed``
        sentences, reader = None, 0
        for index, block in enumerate(self.blocks):
            read = None
            if config.reads_memory(index + 1):
                read = memory.read(reader, rows)
                reader += 1
            x = block(x, packing, read)
            # the sentence vectors (A, D) come from the states at EOS in the middle of the stack
            if index + 1 == config.sentence_layer and self.sentence_head is not None:
                states = x[num_prefix + step.eos]
                sentences = self.sentence_head(states, share * config.sentence_dropout)
        return consume(step, self.norm(x[num_prefix:])), sentences

    def _embed(self, step: SentenceStep, memory: SentenceMemory, share: float) -> Tensor:
        """Returns token plus position embeddings (P, D), with BOS replaced by the last sentence."""
        embedded = self.embedding(step.tokens)  # (P, D)
        rate = share * self.config.token_dropout
        if self.training and rate > 0:
            # whole tokens of the text are dropped, never BOS, EOD or EOS
            dropped = torch.rand(len(embedded), device=embedded.device) < rate  # (P,)
            embedded = embedded.masked_fill((dropped & step.content)[:, None], 0.0)
        x = embedded + self.position(step.positions)
        if self.config.context_seeding and memory.latest is not None:
            # context seeding: the slots (A,) of BOS receive the vectors of the previous sentences
            x = x.index_copy(0, step.bos, memory.latest[: step.packing.rows].to(x.dtype))
        return self.dropout(x)

    def _prefix(self, memory: SentenceMemory, rows: int) -> Tensor | None:
        """Returns the sentence vectors (A, M_t, D) to prepend to the tokens for ``in_context``."""
        if self.config.memory != "in_context" or not memory.vectors:
            return None
        vectors = torch.stack([vector[:rows] for vector in memory.vectors], dim=1)  # (A, M_t, D)
        return vectors + self.slots[: vectors.shape[1]]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each block with dynamic shapes, since sentences are ragged.

        The loop over steps stays eager. Arguments are passed to ``torch.compile``.
        """
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, BLOCK_VARIANTS)
        for block in self.blocks:
            block.compile(*args, **{"dynamic": True, **kwargs})

    @property
    def layers(self) -> list[GestaltBlock]:
        """The blocks, in order."""
        return [block for block in self.blocks if isinstance(block, GestaltBlock)]

    @property
    def readers(self) -> list[MemoryAttention]:
        """The cross-attention layers to memory, in order."""
        readers = (block.memory_attention for block in self.layers)
        return [reader for reader in readers if reader is not None]
