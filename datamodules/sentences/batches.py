"""Batches of sentences, by number.

| source | rows | use |
|---|---|---|
| `StreamSource` | streams, cut again as the curriculum grows | training |
| `DocumentSource` | whole documents, each once, the longest first | evaluation |
| `SentencePromptSource` | prompts, their last sentence open | predict |
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from datamodules.document_order import permutation
from datamodules.loader import Batch
from datamodules.prompts import DealtPrompts
from datamodules.sentences.bucketing import Batches, distribute, number_of_batches
from datamodules.sentences.dealing import Bounds
from datamodules.sentences.grids import empty_batch, stored_batch, with_bytes, written_batch
from datamodules.sentences.index import SentenceIndex
from datamodules.sentences.streams import Curriculum, Streams, cut_documents
from datamodules.sentences.tokenizer import SentenceTokenizer

# Sentences of an evaluation batch, its padding counted: one very long document is scored alone.
_MOST_SENTENCES = 2**16


class StreamSource:
    """Training batches of one rank.

    Batches count on over epochs: batch n is number ``n % len`` of epoch ``n // len``, which decides
    the curriculum's stage, too.

    Args:
        index: Sentences of the train split.
        bounds: What a batch may hold.
        curriculum: How long streams are in each epoch.
        seed: Non-negative.
        rank: This process among `world_size`.
        world_size: Processes that share the streams.

    Raises:
        ValueError: The split has fewer sentences than an epoch has batches.
    """

    def __init__(
        self,
        index: SentenceIndex,
        *,
        bounds: Bounds,
        curriculum: Curriculum,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._index, self._bounds, self._curriculum = index, bounds, curriculum
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._streams: dict[int, Streams] = {}
        self._epochs: dict[int, Batches] = {}
        streams = self._cut(curriculum.at(0))
        self._number = number_of_batches(
            int(streams.lexical.sum()), len(streams), bounds, world_size
        )
        self._epoch(0)  # a split that is too small is told at once

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a loading process needs; it cuts and deals the streams itself."""
        return {**vars(self), "_streams": {}, "_epochs": {}}

    def __len__(self) -> int:
        """Returns the batches of each rank per epoch, the same in all epochs."""
        return self._number // self._world_size

    def _cut(self, max_sentences: int) -> Streams:
        if max_sentences not in self._streams:
            streams = cut_documents(
                self._index, max_sentences=max_sentences, max_lexical=self._bounds.lexical
            )
            self._streams = {max_sentences: streams}
        return self._streams[max_sentences]

    def _epoch(self, epoch: int) -> Batches:
        if epoch not in self._epochs:
            batches = distribute(
                self._cut(self._curriculum.at(epoch)),
                self._index,
                number=self._number,
                bounds=self._bounds,
                seed=self._seed,
                epoch=epoch,
                world_size=self._world_size,
            )
            self._epochs = {epoch: batches}
        return self._epochs[epoch]

    def streams(self, n: int, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns first sentences and numbers of sentences of the streams in batch `n`.

        Args:
            n: Number of the batch.
            rank: Of that rank; None: of all ranks.
        """
        epoch, step = divmod(n, len(self))
        begin, ranks = step * self._world_size, self._world_size
        if rank is not None:
            begin, ranks = begin + rank, 1
        return self._epoch(epoch).streams(begin, begin + ranks)

    def counts(self, n: int) -> dict[str, float]:
        """Returns the targets of batch `n` over all ranks, in all and of each kind."""
        first, sentences = self.streams(n)
        lexical = int(self._index.lexical(first, first + sentences).sum())
        eos, eod = int(sentences.sum()), int(self._index.ends_document(first + sentences).sum())
        counts = {"targets": lexical + eos + eod, "lexical": lexical, "eos": eos, "eod": eod}
        return {name: float(count) for name, count in counts.items()}

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank; see `grids.grid_batch`.

        Also ``sentence_steps``, int: most sentences that a stream of batch n has on any rank.
        ``sequence_id`` is the number of the stream's first sentence.
        """
        first, sentences = self.streams(n, self._rank)
        batch = stored_batch(self._index, first, sentences, first)
        return {**batch, "sentence_steps": int(self.streams(n)[1].max())}


class DocumentSource:
    """Evaluation batches of one rank: whole documents, each on one rank.

    The documents of a batch have similar lengths. The longest come first, so that what does not fit
    into memory shows at once; the other batches come in a drawn order, always the same, so that
    some of them stand for all. A rank for which there is no document left gets a row without
    sentences.

    Args:
        index: Sentences of the split.
        batch_size: Most documents of a batch.
        token_bytes: UTF-8 bytes of each id, (V,) int64.
        rank: This process among `world_size`.
        world_size: Processes that share the documents.
    """

    def __init__(
        self,
        index: SentenceIndex,
        *,
        batch_size: int,
        token_bytes: Tensor,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._index, self._token_bytes = index, token_bytes
        self._rank, self._world_size = rank, world_size
        stops = index.document_ends
        self._first = np.append(0, stops[:-1])
        self._sentences = np.diff(stops, prepend=0)
        self._order = np.argsort(-self._sentences, kind="stable")
        self._begins = self._group(batch_size)
        rest = permutation(max(0, len(self._begins) - 1), seed=0, epoch=0)
        self._turns = np.append(0, 1 + rest)

    def _group(self, batch_size: int) -> list[int]:
        """Returns where in the order each batch of all ranks begins."""
        begins, begin = [], 0
        while begin < len(self._order):
            begins.append(begin)
            longest = int(self._sentences[self._order[begin]])
            begin += self._world_size * max(1, min(batch_size, _MOST_SENTENCES // longest))
        return begins

    def __len__(self) -> int:
        """Returns the batches of each rank."""
        return len(self._begins)

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank; see `grids.grid_batch`.

        Also ``num_bytes`` (B,) int64, UTF-8 bytes of the targets. ``sequence_id`` is the document's
        number in the split, -1 in a row without sentences.
        """
        turn = int(self._turns[n])
        end = self._begins[turn + 1] if turn + 1 < len(self._begins) else len(self._order)
        documents = self._order[self._begins[turn] + self._rank : end : self._world_size]
        if not len(documents):
            return with_bytes(empty_batch(), self._token_bytes)
        rows = self._first[documents], self._sentences[documents], documents
        return with_bytes(stored_batch(self._index, *rows), self._token_bytes)


class SentencePromptSource(DealtPrompts):
    """Batches of prompts as documents whose last sentence is open.

    Batches are those of `grids.grid_batch` with ``num_bytes`` and ``prompt``, the list of texts.
    The EOS of the last sentence is there, as every sentence has one, but not a target.
    ``sequence_id`` is the prompt's number in the file.

    Args:
        prompts: Texts.
        tokenizer: Marks them.
        batch_size: Rows of a batch; see `DealtPrompts`.
        rank: This process among `world_size`.
        world_size: Processes that share the prompts.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        tokenizer: SentenceTokenizer,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(prompts, batch_size=batch_size, rank=rank, world_size=world_size)
        self._tokenizer = tokenizer
        self._sentences = [tokenizer.prompt_sentences(prompt) for prompt in prompts]

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank."""
        numbers = self._numbers(n)
        batch = written_batch(
            [self._sentences[number] for number in numbers],
            numbers,
            bos_id=self._tokenizer.bos_id,
            eos_id=self._tokenizer.eos_id,
        )
        batch = with_bytes(batch, self._tokenizer.token_bytes)
        return {**batch, "prompt": [self._prompts[number] for number in numbers]}
