"""Questions with reasoning steps and answers, as text and as tokens.

In an `Example`, a marker follows the part of the query from which each step can be inferred. Every
text is tokenised separately, and `align` returns the query token of each step (Thinking States,
Sec. 3.4, App. A.3). This is the token before its marker, with these rules:

- if the marker falls inside a token, this is that token;
- spaces before a marker are ignored: most tokenizers make them part of the next word's token, which
would be one token too late;
- if no text precedes the marker, it is the EOS before the query;
- each token takes one step. The steps of consecutive markers go to successive tokens, from the
first marker's token on (App. A.3); if they reach the token of a later marker, its step moves on as
well. NOTE(paper): the last rule is ours; the paper leaves this open.
- all steps that would fall after the query's end belong to its last token.

The model joins the steps of a chunk, with a separator token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

import numpy as np

from datamodules.encoding import as_utf8
from datamodules.tokenizer_base import Tokenizer

MARKER = "<T>"
"""Marks a position in a query at which a step can be inferred (Thinking States, Sec. 3.4)."""


@dataclass(frozen=True)
class Example:
    """A question, its reasoning steps in order, and its answer.

    Attributes:
        query: Text without markers.
        steps: Text of each reasoning step.
        markers: Offset of each step's marker in the query, in characters, non-decreasing; the text
            before it suffices to infer the step.
        answer: Text of the answer, with its leading space.
        group: Group for accuracies, e.g. the number of operations.

    Raises:
        ValueError: If a text is empty, the numbers of steps and markers differ, or a marker is out
            of order or outside the query.
    """

    query: str
    steps: tuple[str, ...]
    markers: tuple[int, ...]
    answer: str
    group: int = 0

    def __post_init__(self) -> None:
        """Checks the texts and the markers."""
        if not (self.query and self.answer and all(self.steps)):
            raise ValueError(f"the query, the answer or a step is empty: {self}")
        if len(self.steps) != len(self.markers):
            raise ValueError(f"{len(self.steps)} steps have {len(self.markers)} markers")
        positions = (0, *self.markers, len(self.query))
        if any(before > after for before, after in pairwise(positions)):
            raise ValueError(f"markers={self.markers} are not in order within the query")

    @classmethod
    def from_marked(
        cls, marked: str, steps: Sequence[str], answer: str, group: int = 0, marker: str = MARKER
    ) -> "Example":
        """Builds an example from a query with markers; spaces are kept.

        Raises:
            ValueError: If the numbers of markers and steps differ.
        """
        query, markers = marked.replace(marker, ""), offsets(marked, marker)
        return cls(query, tuple(steps), markers, answer, group)

    def marked(self, marker: str = MARKER) -> str:
        """Returns the query with its markers."""
        text, start = "", 0
        for marker_end in self.markers:
            text += self.query[start:marker_end] + marker
            start = marker_end
        return text + self.query[start:]

    def after(self, text: str) -> "Example":
        """Returns the example with `text` prepended to its query."""
        markers = tuple(position + len(text) for position in self.markers)
        return replace(self, query=text + self.query, markers=markers)


def offsets(marked: str, marker: str = MARKER) -> tuple[int, ...]:
    """Returns the offsets of a text's markers in the text without markers."""
    return tuple(accumulate(map(len, marked.split(marker)[:-1])))


# ---- the token of each step


@dataclass(frozen=True)
class Alignment:
    """Query tokens of the R steps of an example.

    Attributes:
        places: Index of each step's token, with the EOS before the query as 0; (R,) int64,
            non-decreasing; only the query's last token may occur more than once.
        shifts: Offset of each step's token from the token before its marker; (R,) int64,
            non-negative, positive if another step already had that token.
    """

    places: np.ndarray
    shifts: np.ndarray


def align(query: str, markers: Sequence[int], sizes: np.ndarray) -> Alignment:
    """Returns the query token of each step.

    Args:
        query: Text without markers.
        markers: Offset of each step's marker, in characters, non-decreasing.
        sizes: UTF-8 bytes of each token of the query, without EOS; they sum to the text's size.
    """
    first_choice = marker_tokens(query, markers, sizes)
    positions = spread(first_choice, last=len(sizes))
    return Alignment(positions, positions - first_choice)


def marker_tokens(query: str, markers: Sequence[int], sizes: np.ndarray) -> np.ndarray:
    """Returns the token before each marker, (R,) int64; 0 is the EOS before the query.

    Args:
        query: Text without markers.
        markers: Offset of each marker, in characters.
        sizes: UTF-8 bytes of each token of the query.
    """
    read = [len(query[:marker].rstrip().encode("utf-8")) for marker in markers]
    ends = np.concatenate([[0], np.cumsum(sizes)])  # bytes read after the EOS and after each token
    return np.searchsorted(ends, np.array(read, dtype=np.int64), side="left")


def spread(first_choice: np.ndarray, last: int) -> np.ndarray:
    """Returns the tokens of steps, with one step per token.

    token[r] = min(max(first_choice[r], token[r - 1] + 1), last)

    Args:
        first_choice: Token before each step's marker, (R,) int64, non-decreasing.
        last: The query's last token.
    """
    steps = np.arange(len(first_choice))
    return np.minimum(np.maximum.accumulate(first_choice - steps) + steps, last)


# ---- examples to tokens


@dataclass(frozen=True)
class FixedTokens:
    """Token ids of the fixed text in rows.

    Attributes:
        answer_prefix: Tokens before every answer, not scored, and also inserted at inference.
        step_separator: Tokens before every step of a written chain of thought.
    """

    answer_prefix: tuple[int, ...]
    step_separator: tuple[int, ...]


BATCH = 1024
"""Number of examples to tokenise together, on all cores if the library supports it."""


@dataclass(frozen=True)
class EncodedExample:
    """An example as tokens.

    Attributes:
        texts: Ids of the query, of each step, and of the answer, without EOS.
        token_sizes: UTF-8 bytes that each of these ids covers.
        sizes: UTF-8 bytes of each of these texts.
        alignment: Query tokens of the steps, or None if the ids do not decode to the texts, so that
            offsets are meaningless.
        group: Group of the example.
    """

    texts: list[np.ndarray]
    token_sizes: list[np.ndarray]
    sizes: list[int]
    alignment: Alignment | None
    group: int

    def without_steps(self) -> "EncodedExample":
        """Returns the example with only its query and answer."""
        empty = np.empty(0, dtype=np.int64)
        ends = slice(None, None, len(self.texts) - 1)
        return replace(
            self,
            texts=self.texts[ends],
            token_sizes=self.token_sizes[ends],
            sizes=self.sizes[ends],
            alignment=Alignment(empty, empty),
        )

    def row_length(self, wording: FixedTokens) -> int:
        """Returns the length of EOS, query, separators and steps, prefix, answer and EOS."""
        separators = (len(self.texts) - 2) * len(wording.step_separator)
        return 1 + sum(map(len, self.texts)) + separators + len(wording.answer_prefix) + 1


def encode_examples(
    examples: Iterable[Example], tokenizer: Tokenizer
) -> Iterator[list[EncodedExample]]:
    """Yields the encoded examples in order, in lists of up to `BATCH`."""
    rest = iter(examples)
    while batch := list(islice(rest, BATCH)):
        yield _encode_batch(batch, tokenizer)


def _encode_batch(examples: Sequence[Example], tokenizer: Tokenizer) -> list[EncodedExample]:
    segments = [(item.query, *item.steps, item.answer) for item in examples]
    clean = [[as_utf8(text) for text in texts] for texts in segments]
    queries = tokenizer.encode_measured([texts[0][0] for texts in clean])
    rest = iter(tokenizer.measure_continuations([t for texts in clean for t, _ in texts[1:]]))
    encoded = []
    for example, texts, query in zip(examples, clean, queries, strict=True):
        ids, covered = zip(query, *islice(rest, len(texts) - 1), strict=True)
        alignment = None
        if _restored(example, ids, tokenizer):
            alignment = align(example.query, example.markers, covered[0])
        sizes = [size for _, size in texts]
        encoded.append(EncodedExample([*ids], [*covered], sizes, alignment, example.group))
    return encoded


def _restored(example: Example, ids: Sequence[np.ndarray], tokenizer: Tokenizer) -> bool:
    """Returns whether the concatenated ids decode to the joined texts (faster than per text)."""
    text = "".join((example.query, *example.steps, example.answer))
    return tokenizer.decode(np.concatenate(ids).tolist()) == text
