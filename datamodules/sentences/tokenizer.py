"""A tokenizer that marks the beginnings and ends of sentences, and the end of text."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from datamodules import long_texts
from datamodules.sentences.splitters import SpanSplitter, Splitter, parse_splitter, tidy
from datamodules.tokenizer_base import Tokenizer
from datamodules.tokenizers import tokenizer_from_state

MARKERS = 3  # BOS, EOS and EOD, after the ids of the inner tokenizer
# Over-long sentences are cut after tokens that end in one of these. Hyphens and apostrophes are
# excluded because they occur inside words.
_PUNCTUATION = (*",;:.!?\u2026\u2013\u2014\u2015)]}>\u201d\u00bb\u203a", "--", " -", '"')
_PUNCTUATION += tuple("\u3001\u3002\uff0c\uff1a\uff1b\uff01\uff1f\u300d\u300f\u3011\uff09")


class SentenceTokenizer(Tokenizer):
    """An inner tokenizer, with BOS, EOS and EOD after its V0 ids.

    A marked document is ``BOS w.. EOS`` for each sentence, ``BOS w.. EOD EOS`` for the last. The
    inner tokenizer tokenises the whole document once; sentences are cut at token boundaries, and a
    token that crosses the end of a sentence belongs to the earlier one. The sentences thus decode
    to the same text as the whole document. Sentences of more than `max_sentence_tokens` words
    (tokens of the inner tokenizer) are cut after the last punctuation within that length, or else
    at that length.

    The store ends each document with `eos_id`, so `encode` omits the last EOS.

    Args:
        inner: Tokenizer of the text within sentences.
        splitter: Splits documents into sentences.
        max_sentence_tokens: Maximum number of words per sentence.

    Attributes:
        bos_id: First token of a sentence, V0.
        eos_id: Last token of a sentence, V0 + 1.
        eod_id: Token before the EOS of a document's last sentence, V0 + 2.

    Raises:
        ValueError: If `max_sentence_tokens` is below 1, or below the N of ``spans:N``.
    """

    def __init__(
        self, inner: Tokenizer, splitter: Splitter | SpanSplitter, *, max_sentence_tokens: int = 64
    ) -> None:
        check_length(splitter, max_sentence_tokens)
        self.inner, self.splitter = inner, splitter
        self.max_sentence_tokens = max_sentence_tokens
        self.name = f"{inner.name} with sentences ({splitter.name})"
        self.bos_id, self.eos_id, self.eod_id = range(inner.vocab_size, inner.vocab_size + MARKERS)
        self.vocab_size = inner.vocab_size + MARKERS
        self.stop_ids = (self.eod_id,)
        self.exact_bytes = inner.exact_bytes
        is_text_splitter = isinstance(splitter, Splitter)  # splitting itself gains from processes
        self.gains_from_processes = splitter.gains_from_processes and (
            is_text_splitter or inner.gains_from_processes
        )

    @property
    def special_ids(self) -> tuple[int, ...]:
        """BOS, EOS and EOD, and the inner end-of-text id, which marked documents never contain."""
        return (self.inner.eos_id, self.bos_id, self.eos_id, self.eod_id)

    @property
    def byte_pieces(self) -> frozenset[int]:
        """Byte-fallback pieces of the inner tokenizer."""
        return self.inner.byte_pieces

    @property
    def text_changes(self) -> str | None:
        return self.inner.text_changes

    def state(self) -> dict[str, Any]:
        return {
            "kind": "sentences",
            "inner": self.inner.state(),
            "splitter": self.splitter.name,
            "language": getattr(self.splitter, "language", "en"),
            "max_sentence_tokens": self.max_sentence_tokens,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "SentenceTokenizer":
        """Rebuilds the tokenizer from `state`, without loading the splitter's model."""
        return cls(
            tokenizer_from_state(state["inner"]),
            parse_splitter(state["splitter"], state["language"]),
            max_sentence_tokens=state["max_sentence_tokens"],
        )

    def use_one_core(self) -> None:
        self.inner.use_one_core()

    def _byte_counts(self) -> Sequence[int]:
        return [*self.inner.token_bytes.tolist(), *[0] * MARKERS]

    # Text to ids

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.encode_arrays([text])[0]]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the marked documents as int64 arrays, without their last EOS."""
        return [ids for ids, _ in self.encode_measured(texts)]

    def encode_measured(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        marked = (self._marked(*parts) for parts in self._sentences(texts))
        # not np.append, which widens the type
        return [
            (np.insert(ids, len(ids), self.eod_id), np.insert(sizes, len(sizes), 0))
            for ids, sizes in marked
        ]

    def prompt_ids(self, text: str) -> list[int]:
        """Returns the marked sentences of `text`, the last one open; only BOS for empty text."""
        return [int(i) for i in self.measured_prompt(text)[0]]

    def measured_prompt(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        return self._marked(*self._sentences([text])[0])

    def sentence_prompt_ids(self, sentences: Sequence[str]) -> list[int]:
        """Returns `prompt_ids` of the concatenation of the given sentences."""
        text = "".join(sentences)
        ends = tidy(text, np.cumsum([len(s) for s in sentences]).tolist())
        measured = self.inner.encode_measured([text])
        return [int(i) for i in self._marked(*self._cut([text], measured, [ends])[0])[0]]

    def prompt_sentences(self, text: str) -> list[list[int]]:
        """Returns the words of each sentence of a prompt; one empty sentence for empty text."""
        return [sentence.tolist() for sentence, _ in self.measured_sentences(text)]

    def measured_sentences(self, text: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns `prompt_sentences` with the UTF-8 bytes that each word covers."""
        ids, sizes, ends = self._sentences([text])[0]
        return list(zip(np.split(ids, ends[:-1]), np.split(sizes, ends[:-1]), strict=True))

    def continued_sentences(self, context: str, text: str) -> tuple[list[list[int]], int]:
        """Returns the words of each sentence of context and text, and the context's word count.

        The two are tokenised separately, so that no word spans the join, but split into sentences
        together.
        """
        parts = [*self.inner.encode_measured([context]), *self.inner.measure_continuations([text])]
        ids, sizes = (np.concatenate(part) for part in zip(*parts, strict=True))
        if isinstance(self.splitter, SpanSplitter):
            ends = self.splitter.token_ends(len(ids))
        else:
            whole = context + text
            ends = self._cut([whole], [(ids, sizes)], self.splitter.ends([whole]))[0][2]
        return [sentence.tolist() for sentence in np.split(ids, ends[:-1])], len(parts[0][0])

    def _marked(
        self, ids: np.ndarray, sizes: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns words and their bytes with markers around all sentences but an open last one."""
        marks = (self.bos_id, self.eos_id)
        return _with_marks(ids, ends, marks), _with_marks(sizes, ends, (0, 0))

    def _sentences(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns words, their UTF-8 bytes, and sentence ends in words, for each text."""
        measured = self.inner.encode_measured(texts)
        if isinstance(self.splitter, SpanSplitter):
            return [(*m, self.splitter.token_ends(len(m[0]))) for m in measured]
        return self._cut(texts, measured, self.splitter.ends(texts))

    def _cut(
        self,
        texts: Sequence[str],
        measured: Sequence[tuple[np.ndarray, np.ndarray]],
        ends: Sequence[np.ndarray],
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns `_sentences` of texts with the given sentence ends in characters."""
        return [
            (ids, sizes, self._cap(ids, _token_ends(text, _running(sizes), characters)))
            for text, (ids, sizes), characters in zip(texts, measured, ends, strict=True)
        ]

    def _cap(self, ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Adds ends to sentences that are too long."""
        limit, lengths = self.max_sentence_tokens, np.diff(ends, prepend=0)
        if lengths.max(initial=0) <= limit:
            return ends
        more = []
        for end, length in zip(ends[lengths > limit], lengths[lengths > limit], strict=True):
            start = end - length
            after = np.append(start, np.flatnonzero(self._punctuation[ids[start:end]]) + start + 1)
            while end - start > limit:  # cut after the last punctuation within reach
                cut = after[np.searchsorted(after, start + limit, side="right") - 1]
                start = cut if cut > start else start + limit
                more.append(start)
        return np.sort(np.append(ends, more))

    @cached_property
    def _punctuation(self) -> np.ndarray:
        """Whether each id of the inner tokenizer ends in punctuation, (V0,) bool."""
        pieces = (
            self.inner.decode_continuation([i]).rstrip() for i in range(self.inner.vocab_size)
        )
        return np.array([piece.endswith(_PUNCTUATION) and piece != ' "' for piece in pieces])

    def __getstate__(self) -> dict[str, Any]:
        """Omits the vocabulary tables, which another process rebuilds."""
        tables = ("_punctuation", "token_bytes")
        return {key: value for key, value in vars(self).items() if key not in tables}

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` without markers."""
        return self.inner.decode([int(i) for i in ids if i < self.bos_id])

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` after other text, without markers."""
        return self.inner.decode_continuation([int(i) for i in ids if i < self.bos_id])

    def encode_continuation(self, text: str) -> list[int]:
        return self.inner.encode_continuation(text)


def _with_marks(values: np.ndarray, ends: np.ndarray, marks: tuple[int, int]) -> np.ndarray:
    """Inserts a mark before each sentence and after each but the last."""
    is_long = len(values) > long_texts.PART  # int32 saves memory
    starts = np.append(0, ends[:-1])
    positions = np.repeat(starts, 2)[1:]  # end and start of adjacent sentences coincide
    between = np.tile(marks[::-1], len(ends) - 1)
    return np.insert(
        values.astype(np.int32 if is_long else np.int64), positions, np.append(marks[0], between)
    )


def check_length(splitter: Splitter | SpanSplitter, max_sentence_tokens: int) -> None:
    """Raises a ValueError if the splitter cannot produce sentences that short."""
    if max_sentence_tokens < 1:
        raise ValueError(f"max_sentence_tokens={max_sentence_tokens} must be at least 1.")
    if isinstance(splitter, SpanSplitter) and splitter.length > max_sentence_tokens:
        raise ValueError(
            f"splitter={splitter.name!r} makes spans of {splitter.length} tokens, but "
            f"max_sentence_tokens={max_sentence_tokens}: set it to {splitter.length} or more."
        )


def _running(sizes: np.ndarray) -> np.ndarray:
    """Returns the cumulative sum of sizes, int32 for texts of up to 2 GB."""
    total = int(sizes.sum(dtype=np.int64))
    return np.cumsum(sizes, dtype=np.int32 if total < 2**31 else np.int64)


def _token_ends(text: str, sizes: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the sentence ends in tokens.

    Args:
        text: Text of the sentences.
        sizes: UTF-8 bytes up to the end of each token.
        ends: Sentence ends in characters.
    """
    if not text.isascii():
        starts = [0, *ends[:-1]]
        ends = np.cumsum([len(text[a:b].encode()) for a, b in zip(starts, ends, strict=True)])
    cuts = np.searchsorted(sizes, ends.astype(sizes.dtype)) + 1
    return np.unique(np.minimum(cuts, len(sizes))) if len(ends) else np.zeros(1, dtype=np.int64)
