"""Tokenisation of contexts and continuations for each type of model, and the tokens to score.

The harness asks for the log-likelihood of a continuation after a context. Tokens are divided
between the two as in its ``hf`` model: both are encoded together, whitespace at the end of the
context goes to the continuation, an empty context is BOS or the end-of-text token, and texts begin
with BOS if the tokenizer adds it. If a token spans the join, the context is encoded separately, and
the continuation is the whole text's tokens after the first n, where n is the context's length.

``LoadedModel.score`` reads whole texts (``documents``): all tokens of the context are kept and the
continuation is encoded separately, so that the scored tokens are exactly its text.

| reader | for models that read | scored tokens |
|---|---|---|
| `WindowReader` | windows of tokens | the continuation's tokens |
| `MarkedReader` | windows over marked sentences | its words, not the markers between sentences |
| `SentenceReader` | sentences (Thought Gestalt) | its words, not the markers |
| `QuestionReader` | questions (the context) and answers | the answer's tokens and its EOS |
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from datamodules import SentenceTokenizer, Tokenizer
from datamodules.sentences.batches import written_batch
from datamodules.text import IGNORE
from lightning_models import LanguageModel
from lightning_models.outputs import Likelihood

Batch = dict[str, Any]


@dataclass(frozen=True)
class Segment:
    """Tokens that the model reads in one row, with a mask of the scored ones.

    Attributes:
        tokens: Token ids; a `SentenceReader` leaves out the markers.
        scored: Whether each token is scored. The first token of a window never is; the last is.
        ends: Token index at which each sentence ends, for a `SentenceReader`; else empty.
    """

    tokens: tuple[int, ...]
    scored: tuple[bool, ...]
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, context: Sequence[int], scored: Sequence[int]) -> "Segment":
        """Returns a segment of context tokens followed by scored tokens."""
        return cls((*context, *scored), (*[False] * len(context), *[True] * len(scored)))

    @property
    def given(self) -> int:
        """Number of tokens before the first scored one."""
        return self.scored.index(True)

    def prefixes(self) -> Iterator["Segment"]:
        """Yields, for each scored token, the segment that ends with it and scores only it."""
        for idx in np.flatnonzero(self.scored).tolist():
            ends = tuple(end for end in self.ends if end <= idx)
            yield Segment(
                self.tokens[: idx + 1],
                (*[False] * idx, True),
                (*ends, idx + 1) if self.ends else (),
            )


def stream_of(tokens: Sequence[int]) -> int:
    """Returns the 62-bit id of the random stream for a context.

    Random draws for a scored text depend on its context only, so they are the same for all answers
    to a question, in any batch and order.
    """
    digest = hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


class Reader(ABC):
    """Converts texts to tokens, and tokens to batches.

    Args:
        tokenizer: The tokenizer that the model was trained with.
        limit: Maximum number of tokens that the model reads at once, or None if unlimited.
        documents: Whether contexts begin documents, after BOS or the end-of-text token as in
            training, and continuations are encoded separately. False for the harness.

    Attributes:
        spanned: Number of requests so far with a token that spans context and continuation.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int | None, *, documents: bool = False) -> None:
        self.tokenizer, self.limit, self.documents = tokenizer, limit, documents
        self.spanned = 0

    @abstractmethod
    def segment(self, context: str, continuation: str) -> Segment:
        """Returns both texts as a segment of any length that scores the continuation."""

    @abstractmethod
    def rows(self, segments: Sequence[Segment]) -> Batch:
        """Returns a batch of segments within the limit, with the scored tokens as targets."""

    def batch(self, segments: Sequence[Segment], *, whole: bool = False) -> Batch:
        """Returns ``rows`` with ``sequence_id`` (B,) and ``context`` (B,), the context's length.

        Args:
            segments: At least one segment.
            whole: Whether texts have no context. If so, a method that infers latents bounds the
                likelihood of the text instead, and each text has separate draws.
        """
        contexts = [
            segment.tokens if whole else segment.tokens[: segment.given] for segment in segments
        ]
        batch = self.rows(segments) | {"sequence_id": torch.tensor(list(map(stream_of, contexts)))}
        return batch if whole else batch | {"context": torch.tensor(list(map(len, contexts)))}

    def shared_batch(self, segments: Sequence[Segment]) -> Batch:
        """Returns a batch of segments in which a shared context is stored once, as ``prefix``.

        ``LanguageModel.score`` documents the keys. Rows begin with the last token of the context.
        """
        contexts = [segment.tokens[: segment.given] for segment in segments]
        index = {prefix: row for row, prefix in enumerate(dict.fromkeys(contexts))}
        rests = [
            Segment(segment.tokens[segment.given - 1 :], segment.scored[segment.given - 1 :])
            for segment in segments
        ]
        prefixes = [torch.tensor(prefix) for prefix in index]
        return self.rows(rests) | {
            "sequence_id": torch.tensor(list(map(stream_of, contexts))),
            "prefix": pad_sequence(prefixes, batch_first=True, padding_value=self.tokenizer.eos_id),
            "prefix_lengths": torch.tensor([len(prefix) for prefix in prefixes]),
            "prefix_row": torch.tensor([index[prefix] for prefix in contexts]),
        }

    def document(self, text: str) -> Segment:
        """Returns a whole text from its start to its end as a segment."""
        return self.segment("", text)

    def segments(self, context: str, continuation: str) -> list[Segment]:
        """Returns segments within the limit that together score each token once.

        A continuation that fits is one segment, with the context truncated on the left. A longer
        one is split into windows with as much preceding text as fits, like the harness' rolling
        windows.
        """
        return windows(self.segment(context, continuation), self.limit)

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt, which is never empty.

        For sentence models, it includes markers, and the last sentence is left open.
        """
        marked = isinstance(self.tokenizer, SentenceTokenizer)
        if marked or self.tokenizer.text_bos_id is not None:
            return self.tokenizer.prompt_ids(text)
        return self.tokenizer.encode(text) or [self.tokenizer.eos_id]

    def rolling_segments(self, text: str) -> list[Segment]:
        """Returns `segments` of a whole text, like the harness."""
        return self.segments("", text)

    def read_tokens(self, segment: Segment) -> int:
        """Returns the number of tokens that the model reads for a segment."""
        return len(segment.tokens) - 1


def windows(segment: Segment, limit: int | None) -> list[Segment]:
    """Splits a segment into windows of at most ``limit`` inputs that score each token once."""
    if not any(segment.scored):
        return []
    size, begin = len(segment.tokens), segment.given
    if limit is None or size - 1 <= limit:
        return [segment]
    parts = []
    while begin < size:
        end = min(begin + limit, size)
        start = max(0, end - limit - 1)
        scored = [idx >= begin and segment.scored[idx] for idx in range(start, end)]
        if any(scored):  # a window of only markers is skipped
            last = len(scored) - scored[::-1].index(True)
            tokens = segment.tokens[start : start + last]
            parts.append(Segment(tokens, tuple(scored[:last])))
        begin = end
    return parts


class WindowReader(Reader):
    """Reader of plain tokens."""

    def segment(self, context: str, continuation: str) -> Segment:
        context_ids, continuation_ids = (self._apart if self.documents else self._together)(
            context, continuation
        )
        if self.documents or not context_ids or self.tokenizer.text_bos_id is not None:
            context_ids = [self.tokenizer.start_id, *context_ids]
        return Segment.of(context_ids, continuation_ids)

    def _apart(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes context and continuation separately."""
        if not context:
            return [], self.tokenizer.encode(continuation)
        return list(self._encoded(context)), self.tokenizer.encode_continuation(continuation)

    def _together(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes both together, and splits the tokens after as many as the context has."""
        stripped = context.rstrip()
        ids = self.tokenizer.encode(stripped + context[len(stripped) :] + continuation)
        context_ids = list(self._encoded(stripped)) if stripped else []
        self.spanned += ids[: len(context_ids)] != context_ids
        if len(context_ids) < len(ids):
            return context_ids, ids[len(context_ids) :]
        return ids[:-1], ids[-1:]  # the continuation is part of the context's last token

    def rolling_segments(self, text: str) -> list[Segment]:
        # The harness' hf model puts BOS before the tokenizer's output, so a BOS that the tokenizer
        # adds is a target.
        segment = self.segment("", text)
        if self.tokenizer.text_bos_id is not None:
            segment = Segment.of([self.tokenizer.text_bos_id], segment.tokens)
        return windows(segment, self.limit)

    def document(self, text: str) -> Segment:
        segment = self.segment("", text)  # the end of the document is its last target
        return Segment((*segment.tokens, self.tokenizer.eos_id), (*segment.scored, True))

    @lru_cache(maxsize=64)  # noqa: B019 (results are used as long as the reader lives)
    def _encoded(self, text: str) -> tuple[int, ...]:
        """Encodes a context, which all answers to a question share."""
        return tuple(self.tokenizer.encode(text))

    def rows(self, segments: Sequence[Segment]) -> Batch:
        # The last token of a segment is a target only: a model that is not causal must not read it.
        rows = [torch.tensor(segment.tokens) for segment in segments]
        scored = [torch.tensor(segment.scored) for segment in segments]
        targets = [row.where(mark, IGNORE)[1:] for row, mark in zip(rows, scored, strict=True)]
        lengths = torch.tensor([len(row) - 1 for row in rows])
        return {
            "tokens": pad_sequence(
                [row[:-1] for row in rows], batch_first=True, padding_value=self.tokenizer.eos_id
            ),
            "targets": pad_sequence(targets, batch_first=True, padding_value=IGNORE),
            "mask": torch.arange(int(lengths.max())) < lengths[:, None],
        }


class MarkedReader(WindowReader):
    """Reader of sentences in a flat stream, between BOS and EOS, which are read but not scored."""

    tokenizer: SentenceTokenizer

    def segment(self, context: str, continuation: str) -> Segment:
        """Returns both texts with markers; the last sentence is left open."""
        unmarked = word_segment(self.tokenizer, context, continuation, apart=self.documents)
        tokens: list[int] = []
        scored: list[bool] = []
        for first, last in _spans(unmarked):
            marks = [self.tokenizer.eos_id, self.tokenizer.bos_id][first == 0 :]
            tokens += [*marks, *unmarked.tokens[first:last]]
            scored += [*[False] * len(marks), *unmarked.scored[first:last]]
        return Segment(tuple(tokens), tuple(scored))


class SentenceReader(Reader):
    """Reader of words in sentences, to which the batch adds markers."""

    tokenizer: SentenceTokenizer

    def segment(self, context: str, continuation: str) -> Segment:
        return word_segment(self.tokenizer, context, continuation, apart=self.documents)

    def rows(self, segments: Sequence[Segment]) -> Batch:
        """Returns a batch with the keys of `datamodules.sentences.batches.grid_batch`."""
        batch = written_batch(
            [[segment.tokens[a:b] for a, b in _spans(segment)] for segment in segments],
            range(len(segments)),
            bos_id=self.tokenizer.bos_id,
            eos_id=self.tokenizer.eos_id,
        )
        # row by row, the slots that predict words are in the order of the segments' words
        scored = torch.tensor([mark for segment in segments for mark in segment.scored])
        kept = torch.zeros_like(batch["mask"]).masked_scatter_(batch["lexical"], scored)
        return batch | {"targets": batch["targets"].where(kept, IGNORE)}

    def shared_batch(self, segments: Sequence[Segment]) -> Batch:
        """Returns ``batch`` with ``owners`` (B, S), see ``ThoughtGestaltLM.score``.

        A sentence without scored words is shared by rows that are equal up to its end.
        """
        first: dict[Any, int] = {}
        owners, max_sentences = [], max(len(segment.ends) for segment in segments)
        for row, segment in enumerate(segments):
            complete_ends = [end for end in segment.ends if end <= segment.given]
            complete = [
                (segment.tokens[:end], segment.ends[:s]) for s, end in enumerate(complete_ends, 1)
            ]
            shared = [first.setdefault(start, row) for start in complete]
            owners.append(shared + [row] * (max_sentences - len(shared)))
        return self.batch(segments) | {"owners": owners}

    def read_tokens(self, segment: Segment) -> int:
        return len(segment.tokens) + 2 * len(segment.ends)  # words, and two markers per sentence


class QuestionReader(Reader):
    """Reader of questions (the context) and their answers."""

    def segment(self, context: str, continuation: str) -> Segment:
        # the EOS after the answer is also scored
        query = self.tokenizer.prompt_ids(context)
        answer = [*self.tokenizer.encode_continuation(continuation), self.tokenizer.eos_id]
        return Segment.of(query, answer)

    def document(self, text: str) -> Segment:
        return self.segment(text, "")

    def rows(self, segments: Sequence[Segment]) -> Batch:
        """Returns a batch as in `datamodules.reasoning.batches`, without steps or ``num_bytes``."""
        queries = [torch.tensor(segment.tokens[: segment.given]) for segment in segments]
        answers = [torch.tensor(segment.tokens[segment.given :]) for segment in segments]
        rows, eos = len(segments), self.tokenizer.eos_id
        return {
            "query": pad_sequence(queries, batch_first=True, padding_value=eos),
            "query_lengths": torch.tensor([len(query) for query in queries]),
            "steps": torch.full((rows, 1, 1), eos),
            "step_lengths": torch.zeros(rows, 1, dtype=torch.int64),
            "step_places": torch.full((rows, 1), -1),
            "targets": pad_sequence(answers, batch_first=True, padding_value=IGNORE),
            "group": torch.zeros(rows, dtype=torch.int64),
        }


def scored_of(per_target: Tensor, targets: Tensor) -> list[Tensor]:
    """Returns the values of the scored tokens of each row, in order.

    Args:
        per_target: Values in the shape of ``targets``.
        targets: Targets of the batch, (B, T) or (B, S, U).
    """
    return [row[wanted != IGNORE] for row, wanted in zip(per_target, targets, strict=True)]


def _spans(segment: Segment) -> list[tuple[int, int]]:
    return list(zip((0, *segment.ends[:-1]), segment.ends, strict=True))


def word_segment(
    tokenizer: SentenceTokenizer, context: str, continuation: str, *, apart: bool = False
) -> Segment:
    """Returns the words of both texts with the ends of their sentences; the continuation is scored.

    The whole text is split into sentences, so a continuation may continue the context's last
    sentence or begin another. It is also tokenised as a whole, and a word that spans the join is
    scored; with ``apart``, the two texts are tokenised separately.
    """
    if apart and context:
        sentences, num_context = tokenizer.continued_sentences(context, continuation)
    else:
        size = len(context.rstrip().encode())
        measured = tokenizer.measured_sentences(context + continuation)
        sentences = [ids.tolist() for ids, _ in measured]
        covered = np.cumsum(np.concatenate([sizes for _, sizes in measured]))
        # if words share the bytes of a character, they belong to the last word
        num_context = int(np.searchsorted(covered, size)) + (size > 0 and size in covered)
    tokens = [token for sentence in sentences for token in sentence]
    ends = np.cumsum([len(sentence) for sentence in sentences]).tolist()
    num_context = min(num_context, len(tokens) - 1)
    scored = tuple(idx >= num_context for idx in range(len(tokens)))
    return Segment(tuple(tokens), scored, tuple(ends))


def label(
    likelihood: Likelihood, causal: bool, *, from_prefixes: bool, has_context: bool
) -> tuple[Likelihood, bool]:
    """Returns the kind of a log-likelihood, and whether it is causal.

    Args:
        likelihood: Kind of the model's likelihood.
        causal: Whether the model is causal.
        from_prefixes: Whether each token was scored given its prefix only, which makes every model
            causal and ``noncausal`` ones exact.
        has_context: Whether there was a context; an ``estimate`` is then inferred from it only.
    """
    if from_prefixes:
        return "exact" if likelihood == "noncausal" else likelihood, True
    return likelihood, causal or (has_context and likelihood == "estimate")


def reader_of(model: LanguageModel, tokenizer: Tokenizer, *, documents: bool = False) -> Reader:
    """Returns the reader for a model's type of rows.

    Models that answer questions only have a reader for ``documents`` (see ``Reader``), in which
    the context is the question.

    Raises:
        ValueError: If the model only answers questions, or its tokenizer does not mark sentences.
    """
    if model.reads == "reasoning" and documents:
        return QuestionReader(tokenizer, None)
    marked = isinstance(tokenizer, SentenceTokenizer)
    if model.reads == "windows":
        cls = MarkedReader if marked else WindowReader
        return cls(tokenizer, model.context_limit, documents=documents)
    if model.reads == "sentences" and marked:
        return SentenceReader(cast(SentenceTokenizer, tokenizer), None, documents=documents)
    name = type(model).__name__
    if model.reads == "sentences":
        raise ValueError(
            f"ckpt: {name} reads sentences, which the tokenizer ({tokenizer.name}) does not mark; "
            "use the tokenizer it was trained with"
        )
    raise ValueError(
        f"ckpt: {name} answers questions ({model.reads} rows) and cannot score other texts; "
        "evaluate it with evaluate.py reason"
    )
