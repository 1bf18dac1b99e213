"""Decoding cache: the open sentence of every row and the vectors of its earlier sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_models.thought_gestalt.config import ThoughtGestaltConfig
from lightning_models.thought_gestalt.memory import MemoryAttention
from lightning_models.thought_gestalt.network import Extend, ThoughtGestaltNetwork
from lightning_models.thought_gestalt.packing import Packing, pack

# ---- working memory


class RowMemory:
    """The latest M sentence vectors of each row, for rows that write and forget independently.

    As in ``SentenceMemory``, each reader has a projection of every sentence, to which positions are
    added when it is read. The oldest sentence of a row comes first.

    Args:
        readers: The layers that read.
        positions: Sinusoidal positions (M, D) of memory slots 1 to M.
        batch: Number of rows.
    """

    def __init__(self, readers: Sequence[MemoryAttention], positions: Tensor, batch: int) -> None:
        self._readers, self._size = readers, len(positions)
        self._position_keys = [reader.project_positions(positions) for reader in readers]
        # Vectors, then keys and values of each reader, (B, M, D) each; the first write allocates
        # them and determines their dtype.
        self._entries: list[Tensor] = []
        self.counts = torch.zeros(batch, dtype=torch.int64, device=positions.device)
        """int64 (B,): number of sentences in memory of each row."""

    def write(self, rows: Tensor, sentences: Tensor) -> None:
        """Appends sentence vectors (R, D), one to each of ``rows`` (R,)."""
        projected = (part for reader in self._readers for part in reader.project(sentences))
        new, shape = [sentences, *projected], (len(self.counts), self._size)
        if not self._entries:
            self._entries = [vectors.new_zeros(*shape, vectors.shape[1]) for vectors in new]
        counts = self.counts[rows]
        full = (counts == self._size)[:, None, None]  # (R, 1, 1), rows that drop their oldest
        slot = counts.clamp(max=self._size - 1)[:, None, None]  # (R, 1, 1), where to write
        for entries, vectors in zip(self._entries, new, strict=True):
            old = torch.where(full, entries[rows].roll(-1, dims=1), entries[rows])  # (R, M, D)
            entries[rows] = old.scatter(1, slot.expand(-1, 1, old.shape[2]), vectors[:, None])
        self.counts[rows] = (counts + 1).clamp(max=self._size)

    def forget(self, rows: Tensor) -> None:
        """Empties the memory of the rows selected by ``rows``, bool (B,)."""
        self.counts = self.counts.masked_fill(rows, 0)

    def read(self, reader: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Returns keys and values (B, M, D) and the mask of written slots, bool (B, M).

        Returns None if no row has written yet.
        """
        if not self._entries:
            return None
        keys, values = self._entries[1 + 2 * reader : 3 + 2 * reader]
        slots = torch.arange(keys.shape[1], device=keys.device)
        positions = self._position_keys[reader].to(keys.dtype)
        return keys + positions, values, slots < self.counts[:, None]

    def latest(self) -> Tensor | None:
        """Returns the latest vector (B, D) of each row, or None if no row has written yet.

        The vectors of rows with an empty memory are undefined.
        """
        if not self._entries:
            return None
        rows = torch.arange(len(self.counts), device=self.counts.device)
        return self._entries[0][rows, self.counts - 1]

    def vectors(self, rows: Tensor) -> Tensor:
        """Returns the vectors (R, W, D) of ``rows`` (R,), where W is their largest count."""
        return self._entries[0][rows, : int(self.counts[rows].max())]

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices)."""
        self.counts = self.counts[rows]
        self._entries = [entries[rows] for entries in self._entries]


# ---- sequence of slots
#
# A sentence tensor of U slots holds BOS, up to U - 3 text tokens, EOD at the end of a document, and
# EOS. The row's next token determines the slots to process, one per step. The row is ready, i.e.
# its state predicts the token after it, after the last of them.
#
# ==============================  ===============================================================
# next token of the row           slots
# ==============================  ===============================================================
# text token, EOD                 the next one (1, 2, ...) for text tokens, U - 2 for EOD
# EOS                             U - 1, then BOS (slot 0) of the next sentence
# text token after U - 3 others   EOS, BOS, then the token: a cut, as in the data
# anything but EOS after EOD      EOS, BOS, then the token
# any, at the start of the text   BOS, then the token
# BOS in an empty sentence        0, or none right after BOS, whose state is the answer
# BOS after a text token          as a text token; trained models do not generate it
# ==============================  ===============================================================
#
# EOD ends the document: after the sentence's EOS the next document begins with an empty memory.


@dataclass(frozen=True)
class Slots:
    """The slot that each row processes next; all tensors are (B,)."""

    tokens: Tensor
    """int64: BOS, EOS or the row's token."""
    positions: Tensor
    """int64: index in the sentence tensor."""
    begins: Tensor
    """Bool: true for the BOS of a sentence."""
    closes: Tensor
    """Bool: true for the EOS of a sentence."""
    forgets: Tensor
    """Bool: true for the EOS of a document's last sentence."""
    repeats: Tensor
    """Bool: true if there is no slot to process and the row's last state is returned again."""
    ready: Tensor
    """Bool: true if this is the last slot of the row's token."""


class OpenSentences:
    """Progress of each row within its open sentence."""

    def __init__(
        self, config: ThoughtGestaltConfig, batch: int, device: torch.device | None = None
    ) -> None:
        self._config = config
        self.used = torch.zeros(batch, dtype=torch.int64, device=device)
        """int64 (B,): number of processed slots of the sentence; at 0, BOS is next."""
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        """Bool (B,): whether the last slot was EOD."""
        self.closed = torch.zeros(batch, dtype=torch.bool, device=device)
        """Bool (B,): whether the row's token is EOS and its slot is processed."""

    def next(self, tokens: Tensor) -> Slots:
        """Returns the next slots to process for the tokens (B,) of the rows."""
        config = self._config
        begins, eod, eos = self.used == 0, tokens == config.eod_id, tokens == config.eos_id
        bos = tokens == config.bos_id
        # BOS and U - 3 text tokens; only EOD or EOS still fits
        full = (self.used == config.block_size - 2) & ~eod
        closes = ~begins & (eos | self.ended | full)
        positions = torch.where(eod, config.block_size - 2, self.used)
        positions = positions.masked_fill(closes, config.block_size - 1).masked_fill(begins, 0)
        return Slots(
            tokens=tokens.masked_fill(closes, config.eos_id).masked_fill(begins, config.bos_id),
            positions=positions,
            begins=begins,
            closes=closes,
            forgets=closes & self.ended,
            repeats=bos & (self.used == 1),
            # BOS is the last slot of EOS and of BOS; EOS always has BOS after it
            ready=torch.where(begins, self.closed | bos, ~closes),
        )

    def advance(self, tokens: Tensor, slots: Slots, moves: Tensor) -> None:
        """Advances the rows in ``moves``, bool (B,), past ``slots`` for their ``tokens`` (B,)."""
        eos, eod = tokens == self._config.eos_id, slots.tokens == self._config.eod_id
        self.used = torch.where(moves, (self.used + 1).masked_fill(slots.closes, 0), self.used)
        self.ended = torch.where(moves, eod, self.ended)
        self.closed = torch.where(moves, slots.closes & eos, self.closed)

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.used, self.ended, self.closed = self.used[rows], self.ended[rows], self.closed[rows]


def split_text(
    ids: Sequence[int], config: ThoughtGestaltConfig
) -> tuple[list[list[int]], list[int]]:
    """Returns the complete sentences of a text's last document and its open sentence.

    They have no boundary tokens, except for an EOD at the end of the open sentence. The text is cut
    in the same places as if it were fed token by token.
    """
    complete: list[list[int]] = []
    sentence: list[int] = []
    for token in ids:
        ended = sentence[-1:] == [config.eod_id]
        full = len(sentence) == config.block_size - 3 and token != config.eod_id
        if token == config.eos_id or ended or full:
            if ended:
                complete = []
            else:
                complete.append(sentence)
            sentence = []
        if token != config.eos_id and (sentence or token != config.bos_id):
            sentence.append(token)
    return complete, sentence


def complete_sentences(
    texts: Sequence[Sequence[Sequence[int]]], config: ThoughtGestaltConfig
) -> tuple[Tensor, Tensor]:
    """Adds BOS and EOS to sentences and pads them as ``packing.pack`` takes them.

    Returns:
        Tokens (B, S, U) and lengths (B, S), int64.
    """
    shape = len(texts), max(map(len, texts), default=0), config.block_size
    tokens = torch.zeros(shape, dtype=torch.int64)
    lengths = torch.zeros(shape[:2], dtype=torch.int64)
    for row, sentences in enumerate(texts):
        for t, sentence in enumerate(sentences):
            marked = [config.bos_id, *sentence, config.eos_id]
            tokens[row, t, : len(marked)] = torch.tensor(marked)
            lengths[row, t] = len(marked)
    return tokens, lengths


# ---- cache


class LayerSlots:
    """Keys and values of the open sentences in one layer, (B, H, capacity, C) each."""

    def __init__(self, batch: int, capacity: int) -> None:
        self._batch, self._capacity = batch, capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def append(self, k: Tensor, v: Tensor, filled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Writes k, v (B, H, 1, C) after the ``filled`` (B,) entries of each row.

        Returns all keys and values, and the mask (B, 1, 1, capacity) of those visible to the new
        slots.
        """
        buffers = self._allocated(k, v)
        index = filled[:, None, None, None].expand_as(k)  # (B, H, 1, C)
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer.scatter_(2, index, new)
        entries = torch.arange(self._capacity, device=k.device)
        return *buffers, (entries <= filled[:, None])[:, None, None]

    def begin(self, k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, None]:
        """Writes the first entries k, v (R, H, T, C) of ``rows`` (R,), which see only these."""
        for buffer, new in zip(self._allocated(k, v), (k, v), strict=True):
            buffer[rows, :, : new.shape[2]] = new
        return k, v, None

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices)."""
        self._batch = len(rows)
        if self._buffers is not None:
            keys, values = self._buffers
            self._buffers = keys[rows], values[rows]

    def _allocated(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._buffers is None:
            shape = self._batch, k.shape[1], self._capacity, k.shape[3]
            self._buffers = k.new_zeros(shape), v.new_zeros(shape)
        return self._buffers


class GestaltCache:
    """Decoding cache of texts whose rows advance independently, sentence by sentence.

    A step processes one slot of every row. The memory of a row does not grow with its text: it
    holds the slots of the open sentence and M sentence vectors with their projections.
    """

    def __init__(self, network: ThoughtGestaltNetwork, batch: int) -> None:
        config, device = network.config, network.slots.device
        self._sentences = OpenSentences(config, batch, device)
        self._memory = RowMemory(network.readers, network.slots, batch)
        self._prefixed = config.memory == "in_context"
        capacity = config.block_size + (config.memory_size if self._prefixed else 0)
        self._layers = [LayerSlots(batch, capacity) for _ in network.blocks]
        self._filled = torch.zeros(batch, dtype=torch.int64, device=device)
        self._states: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def prefill(
        cls, network: ThoughtGestaltNetwork, prompts: Tensor, lengths: Tensor, max_new_tokens: int
    ) -> "GestaltCache":
        """Returns the cache after all but the last token of each right-padded prompt (B, P).

        Complete sentences are processed by the packed network, the open one slot by slot. Only the
        last document of a prompt is read, since earlier ones leave no trace in memory.

        Args:
            network: The network in eval mode.
            prompts: int64 (B, P), with or without boundary tokens.
            lengths: int64 (B,), number of tokens of each prompt.
            max_new_tokens: Ignored, since the size of the cache does not depend on it.
        """
        rows = zip(prompts.tolist(), lengths.tolist(), strict=True)
        texts = [split_text(ids[: length - 1], network.config) for ids, length in rows]
        cache = cls(network, len(prompts))
        if network.sentence_head is not None:
            cache._read_complete(network, [complete for complete, _ in texts])
        cache._read_open(network, [sentence for _, sentence in texts])
        return cache

    @torch.no_grad()
    def step(self, network: ThoughtGestaltNetwork, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Processes the next slot of each row for its token in ``tokens`` (B,).

        Returns:
            Normed states (B, D) and the mask of ready rows, bool (B,), whose states predict the
            token after ``tokens``.
        """
        return self._step(network, tokens, torch.ones_like(tokens, dtype=torch.bool))

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self._sentences.select(rows)
        self._memory.select(rows)
        for layer in self._layers:
            layer.select(rows)
        self._filled = self._filled[rows]
        if self._states is not None:
            self._states = self._states[rows]

    def _read_complete(
        self, network: ThoughtGestaltNetwork, texts: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        """Writes the vectors of complete sentences to memory."""
        tokens, lengths = complete_sentences(texts, network.config)
        device, last = network.slots.device, torch.zeros_like(lengths, dtype=torch.bool)
        steps, order = pack(
            tokens.to(device), lengths.to(device), last.to(device), network.config.block_size
        )
        vectors: list[Tensor] = []
        for _ in network.run(steps, (), lambda step, states: None, vectors):
            pass
        counts = torch.tensor([len(sentences) for sentences in texts])[order.cpu()]
        for t, sentences in enumerate(vectors):
            # only the last M sentences of a row are still in memory at the end
            kept = (counts[: len(sentences)] - t <= network.config.memory_size).nonzero()[:, 0]
            kept = kept.to(device)
            self._memory.write(order[kept], sentences[kept])

    def _read_open(self, network: ThoughtGestaltNetwork, texts: Sequence[Sequence[int]]) -> None:
        """Processes the slots of open sentences."""
        # The first token appears twice, since BOS is processed as a slot of that token.
        queues = [[*sentence[:1], *sentence] for sentence in texts]
        lengths = torch.tensor([len(queue) for queue in queues])
        tokens = torch.zeros(len(queues), int(lengths.max()), dtype=torch.int64)
        for row, queue in enumerate(queues):
            tokens[row, : len(queue)] = torch.tensor(queue)
        tokens, lengths = tokens.to(network.slots.device), lengths.to(network.slots.device)
        for index, column in enumerate(tokens.unbind(dim=1)):
            self._step(network, column, index < lengths)

    def _step(
        self, network: ThoughtGestaltNetwork, tokens: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Performs :meth:`step` for the rows in ``active``, bool (B,), and keeps the others."""
        slots = self._sentences.next(tokens)
        moves = active & ~slots.repeats
        if self._prefixed:
            self._begin(network, slots.begins & moves)
        packing = _unpadded(len(tokens), 1, tokens.device)
        extends = [partial(layer.append, filled=self._filled) for layer in self._layers]
        x, sentences = self._stack(network, self._embed(network, slots), packing, extends)
        self._close(network, sentences, slots, moves)
        states = network.norm(x)
        if self._states is not None:
            states = torch.where(moves[:, None], states, self._states)  # others keep their state
        self._states = states
        filled = (self._filled + 1).masked_fill(slots.closes, 0)
        self._filled = torch.where(moves, filled, self._filled)
        self._sentences.advance(tokens, slots, moves)
        return states, slots.ready

    def _embed(self, network: ThoughtGestaltNetwork, slots: Slots) -> Tensor:
        """Returns the input of the first block (B, D)."""
        x = network.embedding(slots.tokens) + network.position(slots.positions)
        latest = self._memory.latest() if network.config.context_seeding else None
        if latest is None:
            return x
        seeded = slots.begins & (self._memory.counts > 0)
        return torch.where(seeded[:, None], latest.to(x.dtype), x)

    def _begin(self, network: ThoughtGestaltNetwork, begins: Tensor) -> None:
        """Processes the prefix of sentence vectors of the rows in ``begins``, bool (B,)."""
        rows = (begins & (self._memory.counts > 0)).nonzero()[:, 0]
        if not len(rows):
            return
        vectors = self._memory.vectors(rows)
        width = vectors.shape[1]
        extends = [partial(layer.begin, rows=rows) for layer in self._layers]
        x = (vectors + network.slots[:width]).flatten(0, 1)  # (R, W, D) -> (R W, D)
        self._stack(network, x, _unpadded(len(rows), width, x.device), extends)
        # rows with fewer than W vectors overwrite the rest
        self._filled[rows] = self._memory.counts[rows]

    def _close(
        self, network: ThoughtGestaltNetwork, sentences: Tensor, slots: Slots, moves: Tensor
    ) -> None:
        """Writes closed sentences to memory, and empties it at the end of a document."""
        rows = (slots.closes & moves).nonzero()[:, 0]
        if len(rows) and network.sentence_head is not None:
            self._memory.write(rows, network.sentence_head(sentences[rows], 0.0))
        self._memory.forget(slots.forgets & moves)

    def _stack(
        self,
        network: ThoughtGestaltNetwork,
        x: Tensor,
        packing: Packing,
        extends: Sequence[Extend],
    ) -> tuple[Tensor, Tensor]:
        """Returns the slots (P, D) after the last block and after the sentence layer."""
        sentences, reader = x, 0
        for index, (block, extend) in enumerate(zip(network.layers, extends, strict=True)):
            memory = None
            if block.memory_attention is not None:
                memory = self._memory.read(reader)
                reader += 1
            x = block(x, packing, memory, extend)
            if index + 1 == network.config.sentence_layer:
                sentences = x
        return x, sentences


def _unpadded(rows: int, width: int, device: torch.device) -> Packing:
    """Returns the packing of a grid (rows, width) without empty cells."""
    return Packing(torch.arange(rows * width, device=device), rows, width)
