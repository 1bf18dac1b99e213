"""Batches of streams of sentences, for models that process a stream sentence by sentence.

Tensors are (B, S, U): streams, sentences, slots. A sentence fills its slots from 0 on with
``BOS w.. EOS``, or ``BOS w.. EOD EOS`` at the end of a document.

| source | rows | use |
|---|---|---|
| `StreamSource` | streams, cut again when the curriculum grows | training |
| `DocumentSource` | whole documents, each once, the longest first | evaluation |
| `SentencePromptSource` | prompts with an open last sentence | predict |
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.base import LanguageDataModule, range_problems
from datamodules.order import permutation
from datamodules.sentences.corpus import SentenceCorpus, SentenceIndex
from datamodules.sentences.streams import (
    Batches,
    Bounds,
    Curriculum,
    Streams,
    cut_documents,
    distribute,
    num_batches_for,
    parts_of_step,
    runs,
    share_step,
)
from datamodules.sentences.tokenizer import MARKERS, SentenceTokenizer
from datamodules.sources import Batch, DealtPrompts, StepBatch
from datamodules.store import Split
from datamodules.text import IGNORE, target_bytes

# ---- sentences as tensors


def grid_batch(
    tokens: Tensor, lengths: Tensor, is_last: Tensor, sequence_id: Tensor, *, is_open: bool = False
) -> Batch:
    """Returns the batch dict of sentences.

    Keys: ``tokens`` (B, S, U) int64, 0 in unused slots; ``lengths`` (B, S) int64, used slots, 0
        after a row's last sentence; ``is_last`` (B, S) bool, whether the sentence ends its
        document; ``targets`` (B, S, U) int64, the token after each slot, -100 from EOS on;
        ``mask`` (B, S, U) bool, used slots; ``lexical`` (B, S, U) bool, whether the target is a
        word; ``sequence_id`` (B,) int64.

    Args:
        tokens: Token ids (B, S, U), arbitrary in unused slots.
        lengths: Used slots (B, S).
        is_last: Whether each sentence ends its document (B, S).
        sequence_id: Id of each row (B,).
        is_open: Whether to exclude the EOS of each row's last sentence from the targets, because
            the sentence may continue.
    """
    slots, used = torch.arange(tokens.shape[-1]), lengths[..., None]
    mask = slots < used  # (B, S, U)
    following = torch.full_like(tokens, IGNORE)
    following[..., :-1] = tokens[..., 1:]
    predicted = slots < used - 1  # the last slot is EOS, which predicts nothing
    if is_open:
        row, last = torch.arange(len(lengths)), (lengths > 0).sum(1) - 1
        predicted[row, last] &= slots < used[row, last] - 2
    return {
        "tokens": tokens.where(mask, 0),
        "lengths": lengths,
        "is_last": is_last,
        "targets": following.where(predicted, IGNORE),
        "mask": mask,
        "lexical": slots < used - 2 - is_last[..., None].long(),
        "sequence_id": sequence_id,
    }


def stored_batch(
    index: SentenceIndex,
    first: np.ndarray,
    sentences: np.ndarray,
    sequence_id: np.ndarray,
    *,
    count_bytes: bool = False,
) -> Batch:
    """Returns a batch of runs of stored sentences; see `grid_batch`.

    Args:
        index: Sentences of the split.
        first: First sentence of each row (B,), int64.
        sentences: Number of sentences of each row (B,), at least 1.
        sequence_id: Id of each row (B,), int64.
        count_bytes: Whether to add ``num_bytes``.
    """
    stop = first + sentences
    offsets = np.arange(sentences.max())
    indices = np.minimum(first[:, None] + offsets, stop[:, None] - 1)  # (B, S), clipped padding
    starts = index.starts(indices)
    lengths = np.where(offsets < sentences[:, None], index.ends[indices] - starts, 0)
    positions = starts[..., None] + np.arange(lengths.max())  # (B, S, U)
    positions = np.minimum(positions, len(index.stream) - 1)
    tokens = index.stream.gather(positions)
    is_last = (offsets == sentences[:, None] - 1) & index.ends_document(stop)[:, None]
    parts = (tokens, lengths, is_last, sequence_id)
    batch = grid_batch(*(torch.from_numpy(part) for part in parts))
    return with_bytes(batch, index.stream.bytes_at(positions, tokens)) if count_bytes else batch


def written_batch(
    rows: Sequence[Sequence[Sequence[int]]], sequence_id: Sequence[int], *, bos_id: int, eos_id: int
) -> Batch:
    """Returns a batch of unfinished documents with an open last sentence; see `grid_batch`.

    Args:
        rows: Words of each sentence of each document.
        sequence_id: Id of each document.
        bos_id: First token of a sentence.
        eos_id: Last token of a sentence.
    """
    max_sentences = max(map(len, rows))
    longest = max(len(sentence) for row in rows for sentence in row)
    tokens = torch.zeros(len(rows), max_sentences, longest + 2, dtype=torch.int64)
    lengths = torch.zeros(len(rows), max_sentences, dtype=torch.int64)
    for r, row in enumerate(rows):
        for s, sentence in enumerate(row):
            lengths[r, s] = len(sentence) + 2
            tokens[r, s, : len(sentence) + 2] = torch.tensor([bos_id, *sentence, eos_id])
    is_last = torch.zeros_like(lengths, dtype=torch.bool)
    return grid_batch(tokens, lengths, is_last, torch.tensor(sequence_id), is_open=True)


def empty_batch() -> Batch:
    """Returns a batch of one row without sentences, for a rank with nothing to score."""
    zeros = torch.zeros(1, 1, dtype=torch.int64)
    return grid_batch(zeros[..., None], zeros, zeros.bool(), torch.tensor([-1]))


def with_bytes(batch: Batch, sizes: np.ndarray) -> Batch:
    """Returns the batch with ``num_bytes`` (B,) int64, UTF-8 bytes of the targets.

    Args:
        batch: Batch of sentences.
        sizes: UTF-8 bytes of each token, (B, S, U) int64.
    """
    following = np.zeros_like(sizes)
    following[..., :-1] = sizes[..., 1:]
    return {**batch, "num_bytes": target_bytes(batch["targets"], following)}


# ---- batches by index


# Maximum number of sentences per evaluation batch, with padding; very long documents are scored
# alone.
_MAX_SENTENCES = 2**16


class StreamSource:
    """Training batches of one rank.

    Batch indices continue over epochs: batch n is batch ``n % len`` of epoch ``n // len``, which
    also determines the curriculum's stage.

    Args:
        index: Sentences of the train split.
        bounds: Limits of a batch.
        curriculum: Maximum length of streams by epoch.
        seed: Non-negative seed.
        step: Limits of a step over all ranks. If given, streams are dealt to steps, and ranks and
            micro-batches share each step, all within `bounds`. By default streams are dealt to each
            rank's batches.
        accumulate: Number of micro-batches per step, with `step`.
        rank: Rank of this process.
        world_size: Number of processes that share the streams.

    Raises:
        ValueError: If the split has fewer sentences than an epoch has batches.
    """

    def __init__(
        self,
        index: SentenceIndex,
        *,
        bounds: Bounds,
        curriculum: Curriculum,
        seed: int,
        step: Bounds | None = None,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._index, self._curriculum, self._seed = index, curriculum, seed
        self._bounds, self._part, self._accumulate = step or bounds, bounds, accumulate
        self._rank, self._world_size = rank, world_size
        self._shares = step is not None
        self._dealt_to = 1 if self._shares else world_size  # dealt batches per step
        self._streams: dict[int, Streams] = {}
        self._epochs: dict[int, Batches] = {}
        self._shared: dict[int, tuple[Streams, np.ndarray]] = {}
        streams = self._cut(curriculum.at(0))
        self._num_batches = num_batches_for(
            int(streams.lexical.sum()), len(streams), self._bounds, self._dealt_to
        )
        self._epoch(0)  # raises early if the split is too small

    def __getstate__(self) -> dict[str, Any]:
        """Omits the cached streams, which data-loading workers cut and deal again."""
        return {**vars(self), "_streams": {}, "_epochs": {}, "_shared": {}}

    def __len__(self) -> int:
        """Returns the number of batches per rank and epoch, equal in all epochs."""
        return self._num_batches // self._dealt_to * self._accumulate

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
                num_batches=self._num_batches,
                bounds=self._bounds,
                seed=self._seed,
                epoch=epoch,
                world_size=self._dealt_to,
            )
            self._epochs = {epoch: batches}
        return self._epochs[epoch]

    def streams(self, n: int, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first sentence and the number of sentences of each stream in batch `n`.

        Args:
            n: Index of the batch.
            rank: Rank whose streams to return, or None for all ranks.
        """
        begin, count = (0, self._world_size) if rank is None else (rank, 1)
        if self._shares:
            streams, part = self._share(n // self._accumulate)
            begin += n % self._accumulate * self._world_size
            chosen = streams[(begin <= part) & (part < begin + count)]
            return chosen.first, chosen.sentences
        epoch, step = divmod(n, len(self))
        begin += step * self._world_size
        return self._epoch(epoch).streams(begin, begin + count)

    def _dealt(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first sentence and sentence count of a step's streams, before sharing."""
        epoch, batch = divmod(step, self._num_batches)
        return self._epoch(epoch).streams(batch, batch + 1)

    def _share(self, step: int) -> tuple[Streams, np.ndarray]:
        """Returns the streams of a step and the part that each stream belongs to.

        With W ranks, micro-batch m has the parts m * W to (m + 1) * W - 1.
        """
        if step not in self._shared:
            first, sentences = self._dealt(step)
            streams = runs(self._index, first, first + sentences)
            parts = self._world_size * self._accumulate
            shared = share_step(streams, self._index, count=parts, bounds=self._part)
            self._shared = {step: shared}
        return self._shared[step]

    def counts(self, n: int) -> dict[str, float]:
        """Returns the numbers of targets of batch `n` over all ranks, in total and by type."""
        first, sentences = self.streams(n)
        lexical = int(self._index.lexical(first, first + sentences).sum())
        eos, eod = int(sentences.sum()), int(self._index.ends_document(first + sentences).sum())
        counts = {"targets": lexical + eos + eod, "lexical": lexical, "eos": eos, "eod": eod}
        return {name: float(count) for name, count in counts.items()}

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank; see `grid_batch`.

        It also has ``sentence_steps``, the maximum number of sentences per stream of batch n on any
        rank. In a shared step, the first micro-batch has the maximum over the step's streams before
        they are cut for devices, and the others have 0. ``sequence_id`` is the index of the
        stream's first sentence. A part without streams is `empty_batch`.
        """
        first, sentences = self.streams(n, self._rank)
        batch = stored_batch(self._index, first, sentences, first) if len(first) else empty_batch()
        step, micro = divmod(n, self._accumulate)
        _, counts = self._dealt(step) if self._shares else self.streams(n)
        return {**batch, "sentence_steps": 0 if micro else int(counts.max())}


class DocumentSource:
    """Evaluation batches of one rank, with whole documents.

    The documents of a batch have similar lengths. The longest come first, so that an out-of-memory
    error occurs immediately. The other batches come in a fixed random order, so that the first few
    are representative. A rank without a remaining document gets a row without sentences.

    Args:
        index: Sentences of the split.
        batch_size: Maximum number of documents per batch.
        rank: Rank of this process.
        world_size: Number of processes that share the documents.
    """

    def __init__(
        self,
        index: SentenceIndex,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._index = index
        self._rank, self._world_size = rank, world_size
        stops = index.document_ends
        self._first = np.append(0, stops[:-1])
        self._sentences = np.diff(stops, prepend=0)
        self._order = np.argsort(-self._sentences, kind="stable")
        self._begins = self._group(batch_size)
        rest = permutation(max(0, len(self._begins) - 1), seed=0, epoch=0)
        self._sequence = np.append(0, 1 + rest)

    def _group(self, batch_size: int) -> list[int]:
        """Returns the start of each batch over all ranks, as an index into the order."""
        begins, begin = [], 0
        while begin < len(self._order):
            begins.append(begin)
            longest = int(self._sentences[self._order[begin]])
            begin += self._world_size * max(1, min(batch_size, _MAX_SENTENCES // longest))
        return begins

    def __len__(self) -> int:
        """Returns the number of batches per rank."""
        return len(self._begins)

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank; see `grid_batch`.

        It also has ``num_bytes`` (B,) int64, UTF-8 bytes of the targets. ``sequence_id`` is the
        document's index in the split, -1 in a row without sentences.
        """
        group = int(self._sequence[n])
        end = self._begins[group + 1] if group + 1 < len(self._begins) else len(self._order)
        documents = self._order[self._begins[group] + self._rank : end : self._world_size]
        if not len(documents):
            return with_bytes(empty_batch(), np.zeros((1, 1, 1), dtype=np.int64))
        rows = self._first[documents], self._sentences[documents], documents
        return stored_batch(self._index, *rows, count_bytes=True)


class SentencePromptSource(DealtPrompts):
    """Batches of prompts, as documents with an open last sentence.

    Batches have the keys of `grid_batch` and ``num_bytes``. The last sentence has an EOS, like
    every sentence, but it is not a target.

    Args:
        prompts: Texts of the prompts.
        tokenizer: Tokenizer that marks the sentences.
        **rows: See `DealtPrompts`.
    """

    def __init__(self, prompts: Sequence[str], tokenizer: SentenceTokenizer, **rows: int) -> None:
        super().__init__(prompts, **rows)
        self._tokenizer = tokenizer
        self._sentences = [tokenizer.measured_sentences(prompt) for prompt in prompts]

    def _built(self, indices: list[int]) -> Batch:
        chosen = [self._sentences[index] for index in indices]
        markers = {"bos_id": self._tokenizer.bos_id, "eos_id": self._tokenizer.eos_id}
        ids = [[sentence.tolist() for sentence, _ in sentences] for sentences in chosen]
        batch = written_batch(ids, indices, **markers)
        sizes = np.zeros(batch["tokens"].shape, dtype=np.int64)
        for row, sentences in zip(sizes, chosen, strict=True):
            for slots, (_, covered) in zip(row, sentences, strict=False):
                slots[1 : 1 + len(covered)] = covered
        return with_bytes(batch, sizes)


# ---- the data module


class Sentences(SentenceCorpus, LanguageDataModule):
    """A corpus in batches of sentences (Thought Gestalt, section 2.1 and App. B.1).

    Training documents are cut into streams of at most S sentences, and streams are dealt to batches
    of at most `batch_tokens` lexical tokens and `batch_size` streams. S grows by `curriculum_step`
    every `curriculum_epochs` epochs. Evaluation scores whole documents.

    With `global_batch_tokens` streams are dealt to steps instead, and devices and micro-batches
    share each step, so that step n has the same sentences on any number of devices and with any
    `batch_tokens`. A stream is cut only if it does not fit into a device's batch. If a step has
    fewer streams than devices, some devices are idle.

    Args:
        batch_tokens: Maximum number of lexical tokens (all but BOS, EOS and EOD) per training batch
            of a device. The paper does not publish its value.
        batch_size: Maximum number of streams per training batch of a device.
        global_batch_tokens: Maximum number of lexical tokens per optimiser step over all devices,
            in as few micro-batches as are guaranteed to fit. With null, each device processes
            trainer.accumulate_grad_batches batches of `batch_tokens` per step.
        max_sentences: Maximum number of sentences per stream in the first epochs (S).
        curriculum_step: Increment of S; 0 keeps S constant.
        curriculum_epochs: Number of epochs between increments. Epochs are passes over the data,
            which are the trainer's epochs unless limit_train_batches shortens them.
        curriculum_limit: Largest S, or null for no limit.
        **kwargs: See `SentenceCorpus` and `LanguageDataModule`. eval_batch_size counts documents;
            global_batch counts streams per step (by default one per max_sentence_tokens).

    Raises:
        ValueError: If arguments are out of range; the message lists all of them.
    """

    rows = "sentences"

    def __init__(
        self,
        *,
        batch_tokens: int = 8192,
        batch_size: int = 64,
        global_batch_tokens: int | None = None,
        max_sentences: int = 30,
        curriculum_step: int = 12,
        curriculum_epochs: int = 5,
        curriculum_limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.batch_tokens = batch_tokens
        self.global_batch_tokens = global_batch_tokens
        self.max_sentences = max_sentences
        self.curriculum_step = curriculum_step
        self.curriculum_epochs = curriculum_epochs
        self.curriculum_limit = curriculum_limit
        super().__init__(batch_size=batch_size, **kwargs)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        problems += range_problems(1, max_sentences=self.max_sentences)
        problems += range_problems(0, curriculum_step=self.curriculum_step)
        problems += range_problems(1, curriculum_epochs=self.curriculum_epochs)
        if self.curriculum_limit is not None and self.curriculum_limit < self.max_sentences:
            problems.append(
                f"curriculum_limit={self.curriculum_limit} must be at least max_sentences="
                f"{self.max_sentences}, or null"
            )
        sizes = {"batch_tokens": self.batch_tokens, "global_batch_tokens": self.global_batch_tokens}
        problems += [
            f"{key}={size} must be at least max_sentence_tokens={self.max_sentence_tokens}, so "
            "that any sentence fits into a batch"
            for key, size in sizes.items()
            if size is not None and size < self.max_sentence_tokens
        ]
        if self.global_batch is not None and self.global_batch_tokens is None:
            problems.append(
                f"global_batch={self.global_batch} counts the streams of a step of "
                "global_batch_tokens lexical tokens: set that too"
            )
        return problems

    @property
    def block_size(self) -> int:
        """Slots per sentence: words, BOS, EOD and EOS."""
        return self.max_sentence_tokens + MARKERS

    def row_tokens(self, split: Split) -> int:
        """Returns the mean number of slots of a split's documents."""
        counts = self.counts(split)
        return -(-counts.tokens // max(1, counts.documents))

    def unit_tokens(self) -> int:
        return 1

    @property
    def _most_at_once(self) -> tuple[int, str]:
        return self.batch_tokens, "lexical tokens"

    def _shared_step(self, devices: int) -> StepBatch | None:
        size, step = self.global_batch_tokens, self._step_bounds
        if size is None or step is None:
            return None
        accumulate = -(-parts_of_step(step, self._bounds) // devices)
        micro = min(self.batch_tokens, size)
        unit = self._most_at_once[1]
        return StepBatch(size=size, micro=micro, accumulate=accumulate, devices=devices, unit=unit)

    @property
    def _bounds(self) -> Bounds:
        """Limits of a device's batch."""
        return Bounds(
            lexical=self.batch_tokens, streams=self.batch_size, sentence=self.max_sentence_tokens
        )

    @property
    def _step_bounds(self) -> Bounds | None:
        """Limits of a step, or None if its size is not set."""
        size, longest = self.global_batch_tokens, self.max_sentence_tokens
        if size is None:
            return None
        streams = size // longest if self.global_batch is None else self.global_batch
        return Bounds(lexical=size, streams=streams, sentence=longest)

    def sentences(self, split: Split) -> SentenceIndex:
        """Returns the index of a split's sentences in the prepared corpus."""
        return SentenceIndex(self.stream(split), self.tokenizer.eos_id)

    def training_source(self) -> StreamSource:
        """Returns the training batches of this rank by index.

        Raises:
            ValueError: If the train split is too small to give each batch a sentence.
        """
        rows = self._training_rows()
        return StreamSource(
            self.sentences("train"),
            bounds=self._bounds,
            step=self._step_bounds,
            curriculum=Curriculum(
                max_sentences=self.max_sentences,
                step=self.curriculum_step,
                epochs=self.curriculum_epochs,
                limit=self.curriculum_limit,
            ),
            seed=self.seed,
            accumulate=rows.get("accumulate", 1),
            **self._ranks(),
        )

    def evaluation_source(self, split: Split) -> DocumentSource:
        """Returns this rank's batches, which score every token of a split once.

        Raises:
            ValueError: If the split is empty.
        """
        index = self.sentences(split)
        self._refuse_empty(split, len(index))
        return DocumentSource(
            index,
            batch_size=self.eval_batch_size,
            **self._ranks(),
        )

    def prompt_source(self, prompts: Sequence[str]) -> SentencePromptSource:
        """Returns batches of prompts with an open last sentence."""
        return SentencePromptSource(
            prompts, self.tokenizer, batch_size=self.eval_batch_size, **self._ranks()
        )

    def order(self) -> dict[str, Any]:
        sizes = ("batch_tokens", "batch_size", "max_sentences")
        growth = ("curriculum_step", "curriculum_epochs", "curriculum_limit")
        return {key: getattr(self, key) for key in (*sizes, *growth, "seed")}
