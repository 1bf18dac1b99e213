"""Texts as a model reads them, and which of their tokens are scored.

The harness asks for the log-likelihood of a continuation after a context. Where one ends and the
other begins, in tokens, is decided as its ``hf`` model does it: both are encoded together, white
space at the context's end goes to the continuation, an empty context is BOS or the end-of-text
token, and texts begin with BOS where the tokenizer begins them so. Where a token spans the join,
the context is read as encoded alone, and as many tokens of the whole are left out as that has.

``LoadedModel.score`` reads whole texts (``documents``): all tokens of the context are kept and the
continuation is encoded alone, so that the scored tokens are exactly its text.

| reader | for models of | what is scored |
|---|---|---|
| `WindowReader` | windows of tokens | the continuation's tokens |
| `MarkedReader` | windows over marked sentences | its words, not the marks between sentences |
| `SentenceReader` | sentences (Thought Gestalt) | its words, not the marks |
| `QuestionReader` | questions, the context, with answers | the answer's tokens and its end |
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
class Piece:
    """Tokens that the model reads at once.

    Attributes:
        tokens: In order; of a `SentenceReader` without marks.
        scored: Whether each is scored; the first one of a window never is, the last one always.
        ends: Where sentences end, in tokens, of a `SentenceReader`; else empty.
    """

    tokens: tuple[int, ...]
    scored: tuple[bool, ...]
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, given: Sequence[int], scored: Sequence[int]) -> "Piece":
        """Returns a piece of given tokens and of the tokens that are scored after them."""
        return cls((*given, *scored), (*[False] * len(given), *[True] * len(scored)))

    @property
    def given(self) -> int:
        """Tokens before the first scored one."""
        return self.scored.index(True)

    def prefixes(self) -> Iterator["Piece"]:
        """Yields, for each scored token, the tokens up to it, of which it alone is scored."""
        for place in np.flatnonzero(self.scored).tolist():
            ends = tuple(end for end in self.ends if end <= place)
            yield Piece(
                self.tokens[: place + 1],
                (*[False] * place, True),
                (*ends, place + 1) if self.ends else (),
            )


def stream_of(tokens: Sequence[int]) -> int:
    """Returns the 62-bit number of the random stream for tokens.

    Scored texts follow what they are given: the draws are the same for all answers of a question,
    whatever batch or order they come in.
    """
    digest = hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


class Reader(ABC):
    """Turns texts into tokens, and tokens into batches.

    Args:
        tokenizer: The one the model was trained with.
        limit: Most tokens that the model reads at once; None: any number.
        documents: Whether contexts begin documents, after BOS or the end-of-text token as in
            training, and continuations are encoded alone; the harness' contexts stand alone.

    Attributes:
        spanned: Requests so far in which a token spans the join of context and continuation.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int | None, *, documents: bool = False) -> None:
        self.tokenizer, self.limit, self.documents = tokenizer, limit, documents
        self.spanned = 0

    @abstractmethod
    def piece(self, context: str, continuation: str) -> Piece:
        """Returns both texts, the continuation's tokens scored; it may be longer than the limit."""

    @abstractmethod
    def rows(self, pieces: Sequence[Piece]) -> Batch:
        """Returns the tokens of pieces within the limit, and the scored ones as targets."""

    def batch(self, pieces: Sequence[Piece], *, whole: bool = False) -> Batch:
        """Returns ``rows`` with ``sequence_id`` (B,), and ``context`` (B,): tokens that are given.

        Args:
            pieces: At least one.
            whole: Whether nothing is given: a method that infers something from what is given
                bounds the likelihood of the text instead, and each text has its own draws.
        """
        given = [piece.tokens if whole else piece.tokens[: piece.given] for piece in pieces]
        batch = self.rows(pieces) | {"sequence_id": torch.tensor(list(map(stream_of, given)))}
        return batch if whole else batch | {"context": torch.tensor(list(map(len, given)))}

    def shared_batch(self, pieces: Sequence[Piece]) -> Batch:
        """Returns the batch of pieces, in which what several are given stands once, as ``prefix``.

        ``LanguageModel.score`` has the keys. Rows begin with the last given token.
        """
        given = [piece.tokens[: piece.given] for piece in pieces]
        index = {prefix: row for row, prefix in enumerate(dict.fromkeys(given))}
        rests = [
            Piece(piece.tokens[piece.given - 1 :], piece.scored[piece.given - 1 :])
            for piece in pieces
        ]
        prefixes = [torch.tensor(prefix) for prefix in index]
        return self.rows(rests) | {
            "sequence_id": torch.tensor(list(map(stream_of, given))),
            "prefix": pad_sequence(prefixes, batch_first=True, padding_value=self.tokenizer.eos_id),
            "prefix_lengths": torch.tensor([len(prefix) for prefix in prefixes]),
            "prefix_row": torch.tensor([index[prefix] for prefix in given]),
        }

    def document(self, text: str) -> Piece:
        """Returns a whole text, from its start to its end, all of which is read."""
        return self.piece("", text)

    def pieces(self, context: str, continuation: str) -> list[Piece]:
        """Returns the texts in pieces within the limit; together they score each token once.

        A continuation that fits is one piece, the context cut on the left. A longer one is read in
        windows that each have as much before them as fits, as the harness' rolling windows.
        """
        return windows(self.piece(context, continuation), self.limit)

    def prompt(self, text: str) -> list[int]:
        """Returns what a model reads before it continues ``text``; at least one token.

        Of models of sentences these are marked, the last one open.
        """
        marked = isinstance(self.tokenizer, SentenceTokenizer)
        if marked or self.tokenizer.text_bos_id is not None:
            return self.tokenizer.prompt_ids(text)
        return self.tokenizer.encode(text) or [self.tokenizer.eos_id]

    def rolling_pieces(self, text: str) -> list[Piece]:
        """Returns `pieces` of a whole text, as the harness scores one."""
        return self.pieces("", text)

    def read_tokens(self, piece: Piece) -> int:
        """Returns how many tokens the model reads of a piece."""
        return len(piece.tokens) - 1


def windows(piece: Piece, limit: int | None) -> list[Piece]:
    """Returns a piece cut into such that have at most ``limit`` inputs and score as many tokens."""
    if not any(piece.scored):
        return []
    size, begin = len(piece.tokens), piece.given
    if limit is None or size - 1 <= limit:
        return [piece]
    found = []
    while begin < size:
        end = min(begin + limit, size)
        start = max(0, end - limit - 1)
        scored = [place >= begin and piece.scored[place] for place in range(start, end)]
        if any(scored):  # marks alone are not worth a window
            last = len(scored) - scored[::-1].index(True)
            tokens = piece.tokens[start : start + last]
            found.append(Piece(tokens, tuple(scored[:last])))
        begin = end
    return found


class WindowReader(Reader):
    """Plain tokens."""

    def piece(self, context: str, continuation: str) -> Piece:
        given, after = (self._apart if self.documents else self._together)(context, continuation)
        if self.documents or not given or self.tokenizer.text_bos_id is not None:
            given = [self.tokenizer.start_id, *given]
        return Piece.of(given, after)

    def _apart(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns all tokens of the context, and the tokens of the continuation alone."""
        if not context:
            return [], self.tokenizer.encode(continuation)
        return list(self._encoded(context)), self.tokenizer.encode_continuation(continuation)

    def _together(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the context's tokens, and the rest of the whole text's, by number."""
        kept = context.rstrip()
        whole = self.tokenizer.encode(kept + context[len(kept) :] + continuation)
        given = list(self._encoded(kept)) if kept else []
        self.spanned += whole[: len(given)] != given
        if len(given) < len(whole):
            return given, whole[len(given) :]
        return whole[:-1], whole[-1:]  # the continuation is part of the context's last token

    def rolling_pieces(self, text: str) -> list[Piece]:
        # The harness' hf model puts BOS before all that the tokenizer gives: where that begins with
        # BOS, it is a target.
        piece = self.piece("", text)
        if self.tokenizer.text_bos_id is not None:
            piece = Piece.of([self.tokenizer.text_bos_id], piece.tokens)
        return windows(piece, self.limit)

    def document(self, text: str) -> Piece:
        piece = self.piece("", text)  # the end of the document is its last target
        return Piece((*piece.tokens, self.tokenizer.eos_id), (*piece.scored, True))

    @lru_cache(maxsize=64)  # noqa: B019 (a reader lives as long as its results are asked for)
    def _encoded(self, text: str) -> tuple[int, ...]:
        """All answers of a question have one context."""
        return tuple(self.tokenizer.encode(text))

    def rows(self, pieces: Sequence[Piece]) -> Batch:
        # The last token of a piece is a target only: a model that is not causal must not read it.
        rows = [torch.tensor(piece.tokens) for piece in pieces]
        scored = [torch.tensor(piece.scored) for piece in pieces]
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
    """A flat stream of sentences between BOS and EOS, which are read and not scored."""

    tokenizer: SentenceTokenizer

    def piece(self, context: str, continuation: str) -> Piece:
        """Returns both texts with marks, the last sentence open."""
        words = word_piece(self.tokenizer, context, continuation, apart=self.documents)
        tokens: list[int] = []
        scored: list[bool] = []
        for first, last in _spans(words):
            marks = [self.tokenizer.eos_id, self.tokenizer.bos_id][first == 0 :]
            tokens += [*marks, *words.tokens[first:last]]
            scored += [*[False] * len(marks), *words.scored[first:last]]
        return Piece(tuple(tokens), tuple(scored))


class SentenceReader(Reader):
    """Words in sentences; the marks around them are the batch's."""

    tokenizer: SentenceTokenizer

    def piece(self, context: str, continuation: str) -> Piece:
        return word_piece(self.tokenizer, context, continuation, apart=self.documents)

    def rows(self, pieces: Sequence[Piece]) -> Batch:
        """Returns the keys of `datamodules.sentences.batches.grid_batch`."""
        batch = written_batch(
            [[piece.tokens[a:b] for a, b in _spans(piece)] for piece in pieces],
            range(len(pieces)),
            bos_id=self.tokenizer.bos_id,
            eos_id=self.tokenizer.eos_id,
        )
        # slots that predict words, row by row, are in the order of the pieces' words
        scored = torch.tensor([mark for piece in pieces for mark in piece.scored])
        kept = torch.zeros_like(batch["mask"]).masked_scatter_(batch["lexical"], scored)
        return batch | {"targets": batch["targets"].where(kept, IGNORE)}

    def shared_batch(self, pieces: Sequence[Piece]) -> Batch:
        """Returns ``batch`` and ``owners`` (B, S), see ``ThoughtGestaltLM.score``.

        Shared is a sentence in which nothing is scored, with all before it, wherever the sentences
        of context and continuation together are the same.
        """
        first: dict[Any, int] = {}
        owners, most = [], max(len(piece.ends) for piece in pieces)
        for row, piece in enumerate(pieces):
            whole = [end for end in piece.ends if end <= piece.given]
            begun = [(piece.tokens[:end], piece.ends[:s]) for s, end in enumerate(whole, 1)]
            shared = [first.setdefault(start, row) for start in begun]
            owners.append(shared + [row] * (most - len(shared)))
        return self.batch(pieces) | {"owners": owners}

    def read_tokens(self, piece: Piece) -> int:
        return len(piece.tokens) + 2 * len(piece.ends)  # words, and the marks of each sentence


class QuestionReader(Reader):
    """A question, which is the context, and its answer."""

    def piece(self, context: str, continuation: str) -> Piece:
        # the end of the answer is scored, too
        query = self.tokenizer.prompt_ids(context)
        answer = [*self.tokenizer.encode_continuation(continuation), self.tokenizer.eos_id]
        return Piece.of(query, answer)

    def document(self, text: str) -> Piece:
        return self.piece(text, "")

    def rows(self, pieces: Sequence[Piece]) -> Batch:
        """Returns the keys of `datamodules.reasoning.batches` but ``num_bytes``, without steps."""
        queries = [torch.tensor(piece.tokens[: piece.given]) for piece in pieces]
        answers = [torch.tensor(piece.tokens[piece.given :]) for piece in pieces]
        rows, eos = len(pieces), self.tokenizer.eos_id
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
    """Returns for each row the values of its scored tokens, in order.

    Args:
        per_target: In the shape of the batch's targets.
        targets: Of the batch.
    """
    return [row[wanted != IGNORE] for row, wanted in zip(per_target, targets, strict=True)]


def _spans(piece: Piece) -> list[tuple[int, int]]:
    return list(zip((0, *piece.ends[:-1]), piece.ends, strict=True))


def word_piece(
    tokenizer: SentenceTokenizer, context: str, continuation: str, *, apart: bool = False
) -> Piece:
    """Returns the words of both texts and where their sentences end, the continuation scored.

    Sentences are cut in the whole text: a continuation may go on with the context's last one, or
    begin another. Words are cut in the whole text, too, and one that spans the join is scored;
    with ``apart`` both texts are tokenised alone.
    """
    if apart and context:
        sentences, given = tokenizer.continued_sentences(context, continuation)
    else:
        kept = len(context.rstrip().encode())
        measured = tokenizer.measured_sentences(context + continuation)
        sentences = [words.tolist() for words, _ in measured]
        covered = np.cumsum(np.concatenate([sizes for _, sizes in measured]))
        # of words that share a character the last one has its bytes
        given = int(np.searchsorted(covered, kept)) + (kept > 0 and kept in covered)
    words = [word for sentence in sentences for word in sentence]
    ends = np.cumsum([len(sentence) for sentence in sentences]).tolist()
    given = min(given, len(words) - 1)
    scored = tuple(idx >= given for idx in range(len(words)))
    return Piece(tuple(words), scored, tuple(ends))


def label(
    kind: Likelihood, causal: bool, *, from_prefixes: bool, given: bool
) -> tuple[Likelihood, bool]:
    """Returns the kind of a log-likelihood, and whether no token's depends on later tokens.

    Args:
        kind: as the model has it.
        causal: whether the model is.
        from_prefixes: whether each token was scored from its prefix alone: then all is causal, and
            nothing that was ``noncausal`` is inexact.
        given: whether a context was, from which alone an ``estimate`` is inferred.
    """
    if from_prefixes:
        return "exact" if kind == "noncausal" else kind, True
    return kind, causal or (given and kind == "estimate")


def reader_of(model: LanguageModel, tokenizer: Tokenizer, *, documents: bool = False) -> Reader:
    """Returns how a model reads texts.

    Only ``documents`` (see ``Reader``) can be questions, which are their contexts.

    Raises:
        ValueError: If the model answers questions only, or its tokenizer is of another kind.
    """
    if model.reads == "reasoning" and documents:
        return QuestionReader(tokenizer, None)
    marked = isinstance(tokenizer, SentenceTokenizer)
    if model.reads == "windows":
        kind = MarkedReader if marked else WindowReader
        return kind(tokenizer, model.context_limit, documents=documents)
    if model.reads == "sentences" and marked:
        return SentenceReader(cast(SentenceTokenizer, tokenizer), None, documents=documents)
    name = type(model).__name__
    if model.reads == "sentences":
        raise ValueError(
            f"ckpt: {name} reads sentences, and the tokenizer ({tokenizer.name}) marks none; use "
            "the one it was trained with"
        )
    raise ValueError(
        f"ckpt: {name} answers questions ({model.reads} rows) and gives no likelihood of other "
        "texts; ask it with evaluate.py reason"
    )
