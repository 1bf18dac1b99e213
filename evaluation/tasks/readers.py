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

    @property
    def given(self) -> int:
        """Tokens before the first scored one."""
        return self.scored.index(True)

    @property
    def number(self) -> int:
        """A number that only depends on the tokens before the first scored one, 62 bits.

        What a method draws at random follows it: the same for all answers of a question, whatever
        batch or order they come in.
        """
        return _number_of(self.tokens[: self.given])

    @property
    def whole_number(self) -> int:
        """The same of all tokens, for texts that are scored as wholes, each with its own draws."""
        return _number_of(self.tokens)

    def prefixes(self) -> Iterator["Piece"]:
        """Yields, for each scored token, the tokens up to it, of which it alone is scored."""
        for place in np.flatnonzero(self.scored).tolist():
            ends = tuple(end for end in self.ends if end <= place)
            yield Piece(
                self.tokens[: place + 1],
                (*[False] * place, True),
                (*ends, place + 1) if self.ends else (),
            )


def _number_of(tokens: Sequence[int]) -> int:
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
    def batch(self, pieces: Sequence[Piece]) -> Batch:
        """Returns the batch of pieces within the limit, their scored tokens as targets."""

    def whole_batch(self, pieces: Sequence[Piece]) -> Batch:
        """Returns `batch` of texts that are scored as wholes, nothing of them given.

        A method that infers something from what is given bounds the likelihood of the text instead.
        """
        batch = self.batch(pieces)
        batch.pop("context", None)
        return batch | {"sequence_id": torch.tensor([piece.whole_number for piece in pieces])}

    def shared_batch(self, pieces: Sequence[Piece]) -> tuple[Batch, list[Piece]]:
        """Returns the batch of pieces, in which what several are given stands once, as ``prefix``.

        ``LanguageModel.score`` has the keys. Also returns the pieces that its targets belong to,
        which begin with the last given token.
        """
        prefixes = dict.fromkeys(piece.tokens[: piece.given] for piece in pieces)
        index = {prefix: row for row, prefix in enumerate(prefixes)}
        after = rests(pieces)
        batch = self.batch(after)
        batch.pop("context", None)
        rows = [torch.tensor(prefix) for prefix in prefixes]
        batch |= {
            "sequence_id": torch.tensor([piece.number for piece in pieces]),
            "prefix": pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.eos_id),
            "prefix_lengths": torch.tensor([len(row) for row in rows]),
            "prefix_row": torch.tensor([index[piece.tokens[: piece.given]] for piece in pieces]),
        }
        return batch, after

    def document(self, text: str) -> Piece:
        """Returns a whole text, from its start to its end, all of which is read."""
        return self.piece("", text)

    @abstractmethod
    def scored_of(self, per_target: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
        """Returns of each piece the values of its scored tokens, in order.

        Args:
            per_target: In the shape of the batch's targets.
            pieces: Those of the batch.
        """

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


def rests(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns the pieces from their last given token on."""
    return [
        Piece(piece.tokens[piece.given - 1 :], piece.scored[piece.given - 1 :]) for piece in pieces
    ]


class WindowReader(Reader):
    """Plain tokens."""

    def piece(self, context: str, continuation: str) -> Piece:
        """Returns both texts, encoded and split as the module's docstring has it."""
        given, after = (self._apart if self.documents else self._together)(context, continuation)
        if self.documents or not given or self.tokenizer.text_bos_id is not None:
            given = [self.tokenizer.start_id, *given]
        marks = (*[False] * len(given), *[True] * len(after))
        return Piece((*given, *after), marks)

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
        """Returns `pieces` of a whole text, as the harness scores one.

        Its ``hf`` model puts BOS before all that the tokenizer gives: where that begins with BOS,
        it is a target.
        """
        piece = self.piece("", text)
        if self.tokenizer.text_bos_id is not None:
            tokens = (self.tokenizer.text_bos_id, *piece.tokens)
            piece = Piece(tokens, (False, *[True] * len(piece.tokens)))
        return windows(piece, self.limit)

    def document(self, text: str) -> Piece:
        """Returns a whole text; the end of the document after it is the last target."""
        piece = self.piece("", text)
        return Piece((*piece.tokens, self.tokenizer.eos_id), (*piece.scored, True))

    @lru_cache(maxsize=64)  # noqa: B019 (a reader lives as long as its results are asked for)
    def _encoded(self, text: str) -> tuple[int, ...]:
        """All answers of a question have one context."""
        return tuple(self.tokenizer.encode(text))

    def batch(self, pieces: Sequence[Piece]) -> Batch:
        """Returns the batch dict of windows, and ``context`` (B,): tokens that are given.

        The last token of a piece is a target only: a model that is not causal must not read it.
        """
        size = len(pieces), max(len(piece.tokens) for piece in pieces) - 1
        tokens = torch.full(size, self.tokenizer.eos_id)
        targets, mask = torch.full(size, IGNORE), torch.zeros(size, dtype=torch.bool)
        for row, piece in enumerate(pieces):
            inputs, length = torch.tensor(piece.tokens), len(piece.tokens) - 1
            tokens[row, :length], mask[row, :length] = inputs[:-1], True
            scored = torch.tensor(piece.scored[1:])
            targets[row, :length] = inputs[1:].where(scored, IGNORE)
        return {
            "tokens": tokens,
            "targets": targets,
            "mask": mask,
            "sequence_id": torch.tensor([piece.number for piece in pieces]),
            "context": torch.tensor([piece.given for piece in pieces]),
        }

    def scored_of(self, per_target: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
        """Returns the values at the scored tokens; that at t belongs to token t + 1."""
        return [
            per_target[row, np.flatnonzero(piece.scored) - 1] for row, piece in enumerate(pieces)
        ]


class MarkedReader(WindowReader):
    """A flat stream of sentences between BOS and EOS, which are read and not scored."""

    tokenizer: SentenceTokenizer

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int], int]:
        return split_words(self.tokenizer, context, continuation, apart=self.documents)

    def piece(self, context: str, continuation: str) -> Piece:
        """Returns both texts with marks, the last sentence open."""
        words, ends, given = self._split(context, continuation)
        tokens: list[int] = []
        scored: list[bool] = []
        begin = 0
        for end in ends:
            tokens += [self.tokenizer.eos_id] * (begin > 0) + [self.tokenizer.bos_id]
            scored += [False] * (1 + (begin > 0))
            tokens += words[begin:end]
            scored += [place >= given for place in range(begin, end)]
            begin = end
        return Piece(tuple(tokens), tuple(scored))


class SentenceReader(Reader):
    """Words in sentences; the marks around them are the batch's."""

    tokenizer: SentenceTokenizer

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int], int]:
        return split_words(self.tokenizer, context, continuation, apart=self.documents)

    def piece(self, context: str, continuation: str) -> Piece:
        """Returns the words of both texts."""
        words, ends, given = self._split(context, continuation)
        scored = tuple(place >= given for place in range(len(words)))
        return Piece(tuple(words), scored, tuple(ends))

    def batch(self, pieces: Sequence[Piece]) -> Batch:
        """Returns the keys of `datamodules.sentences.batches.grid_batch`."""
        batch = written_batch(
            [[piece.tokens[a:b] for a, b in _spans(piece)] for piece in pieces],
            [piece.number for piece in pieces],
            bos_id=self.tokenizer.bos_id,
            eos_id=self.tokenizer.eos_id,
        )
        scored = torch.zeros_like(batch["mask"])
        for row, piece in enumerate(pieces):
            for sentence, (a, b) in enumerate(_spans(piece)):
                scored[row, sentence, : b - a] = torch.tensor(piece.scored[a:b])
        batch["targets"] = batch["targets"].where(scored, IGNORE)
        return batch

    def shared_batch(self, pieces: Sequence[Piece]) -> tuple[Batch, list[Piece]]:
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
        return self.batch(pieces) | {"owners": owners}, list(pieces)

    def scored_of(self, per_target: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
        """Returns the values at the scored words; slot s predicts word s of its sentence."""
        found = []
        for row, piece in enumerate(pieces):
            spans = enumerate(_spans(piece))
            values = [per_target[row, sentence, : b - a] for sentence, (a, b) in spans]
            found.append(torch.cat(values)[torch.tensor(piece.scored)])
        return found

    def read_tokens(self, piece: Piece) -> int:
        """Returns the slots that are computed: words, and the marks of each sentence."""
        return len(piece.tokens) + 2 * len(piece.ends)


class QuestionReader(Reader):
    """A question, which is the context, and its answer."""

    def piece(self, context: str, continuation: str) -> Piece:
        """Returns the question after BOS or EOS, and the answer with an EOS, which is scored."""
        query = self.tokenizer.prompt_ids(context)
        answer = [*self.tokenizer.encode_continuation(continuation), self.tokenizer.eos_id]
        return Piece((*query, *answer), (*[False] * len(query), *[True] * len(answer)))

    def document(self, text: str) -> Piece:
        """Returns a question without an answer."""
        return self.piece(text, "")

    def batch(self, pieces: Sequence[Piece]) -> Batch:
        """Returns the keys of `datamodules.reasoning.batches` but ``num_bytes``, without steps."""
        queries, answers = (
            [torch.tensor(piece.tokens[cut(piece)]) for piece in pieces]
            for cut in (lambda one: slice(one.given), lambda one: slice(one.given, None))
        )
        rows, eos = len(pieces), self.tokenizer.eos_id
        targets = pad_sequence(answers, batch_first=True, padding_value=IGNORE)
        return {
            "query": pad_sequence(queries, batch_first=True, padding_value=eos),
            "query_lengths": torch.tensor([len(query) for query in queries]),
            "steps": torch.full((rows, 1, 1), eos),
            "step_lengths": torch.zeros(rows, 1, dtype=torch.int64),
            "step_places": torch.full((rows, 1), -1),
            "targets": targets,
            "sequence_id": torch.tensor([piece.number for piece in pieces]),
            "group": torch.zeros(rows, dtype=torch.int64),
        }

    def scored_of(self, per_target: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
        """Returns the values of the answers and their ends."""
        return [
            per_target[row, : len(piece.tokens) - piece.given] for row, piece in enumerate(pieces)
        ]


def _spans(piece: Piece) -> list[tuple[int, int]]:
    return list(zip((0, *piece.ends[:-1]), piece.ends, strict=True))


def split_words(
    tokenizer: SentenceTokenizer, context: str, continuation: str, *, apart: bool = False
) -> tuple[list[int], list[int], int]:
    """Returns the words of both texts, where their sentences end, and how many are given.

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
    return words, ends, min(given, len(words) - 1)


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

    Of ``documents``, whole texts rather than a task's (see ``Reader``), models that read questions
    only take contexts as questions.

    Raises:
        ValueError: if a task's texts are to be read and it reads questions only, or its tokenizer
            is of another kind.
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
