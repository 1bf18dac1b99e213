"""A question with its reasoning and its answer, as text and as tokens.

`Example` says after which part of the query each step can be inferred; a marker in the text says
so. Every text is tokenised for itself, and `align` gives the token of the query that each step
belongs to (Thinking States, Sec. 3.4, App. A.3): the token before its marker, more exactly:

- the first token after which all text before the marker has been read, where the marker
  falls inside a token;
- spaces between a marker and the text before it do not count: most tokenizers make them part
  of the next word's token, which would be one too late;
- the EOS before the query, where nothing stands before the marker;
- each token takes one step. The steps of consecutive markers go to successive tokens, the first one
  to its own (App. A.3); where such a row reaches the token of a later marker, that one's step is
  moved on in turn. NOTE(paper): the last is ours, the paper does not say.
- steps that would lie after the query's end belong to its last token, all of them.

Steps of one chunk are joined by the model, with a separator token of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

import numpy as np

from datamodules.encoding import as_utf8
from datamodules.tokenizer_base import Tokenizer

MARKER = "<T>"
"""Stands in a marked query where a step can be inferred (Thinking States, Sec. 3.4)."""


@dataclass(frozen=True)
class Example:
    """A question, its reasoning steps in order, and its answer.

    Attributes:
        query: Text without markers.
        steps: Text of each reasoning step.
        markers: Where in the query each step's marker stands, in characters, non-decreasing: the
            text before it suffices to infer the step.
        answer: Text of the answer, with the space that separates it from what stands before.
        group: What accuracies are grouped by, e.g. the number of operations.

    Raises:
        ValueError: A text is empty, the numbers of steps and markers differ, or a marker is out of
            order or place.
    """

    query: str
    steps: tuple[str, ...]
    markers: tuple[int, ...]
    answer: str
    group: int = 0

    def __post_init__(self) -> None:
        """Checks the texts and the markers."""
        if not (self.query and self.answer and all(self.steps)):
            raise ValueError(f"query, answer or a step is empty: {self}")
        if len(self.steps) != len(self.markers):
            raise ValueError(f"{len(self.steps)} steps have {len(self.markers)} markers")
        places = (0, *self.markers, len(self.query))
        if any(before > after for before, after in pairwise(places)):
            raise ValueError(f"markers={self.markers} are not in order within the query")

    @classmethod
    def from_marked(
        cls, marked: str, steps: Sequence[str], answer: str, group: int = 0, marker: str = MARKER
    ) -> "Example":
        """Returns the example of a query that has its markers in it; spaces stay where they are.

        Raises:
            ValueError: There are not as many markers as steps.
        """
        query, markers = marked.replace(marker, ""), offsets(marked, marker)
        return cls(query, tuple(steps), markers, answer, group)

    def marked(self, marker: str = MARKER) -> str:
        """Returns the query with its markers."""
        text, start = "", 0
        for place in self.markers:
            text += self.query[start:place] + marker
            start = place
        return text + self.query[start:]

    def after(self, text: str) -> "Example":
        """Returns the example with a text before its query."""
        markers = tuple(place + len(text) for place in self.markers)
        return replace(self, query=text + self.query, markers=markers)


def offsets(marked: str, marker: str = MARKER) -> tuple[int, ...]:
    """Returns where the markers of a marked text stand in the text without them."""
    return tuple(accumulate(map(len, marked.split(marker)[:-1])))


# ---- the token of each step


@dataclass(frozen=True)
class Alignment:
    """Where the R steps of an example belong.

    Attributes:
        places: Index of each step's token, the EOS before the query counted as 0; (R,) int64,
            non-decreasing; only the query's last token may occur more than once.
        shifts: Tokens from the one before the step's marker to that; (R,) int64, not negative,
            above 0 where another step had the marker's token already.
    """

    places: np.ndarray
    shifts: np.ndarray


def align(query: str, markers: Sequence[int], sizes: np.ndarray) -> Alignment:
    """Returns which token each step belongs to.

    Args:
        query: Text without markers.
        markers: Where each step's marker stands, in characters, non-decreasing.
        sizes: UTF-8 bytes of each token of the query, without EOS; they add up to the text's.
    """
    own = marker_tokens(query, markers, sizes)
    places = spread(own, last=len(sizes))
    return Alignment(places, places - own)


def marker_tokens(query: str, markers: Sequence[int], sizes: np.ndarray) -> np.ndarray:
    """Returns the token before each marker, (R,) int64; 0 is the EOS before the query.

    Args:
        query: Text without markers.
        markers: Where each marker stands, in characters.
        sizes: UTF-8 bytes of each token of the query.
    """
    read = [len(query[:marker].rstrip().encode("utf-8")) for marker in markers]
    ends = np.concatenate([[0], np.cumsum(sizes)])  # bytes read after EOS, and each token
    return np.searchsorted(ends, np.array(read, dtype=np.int64), side="left")


def spread(own: np.ndarray, last: int) -> np.ndarray:
    """Returns the tokens of steps, where each takes one step.

    place[r] = max(own[r], place[r - 1] + 1), or the last token.

    Args:
        own: Token before each step's marker, (R,) int64, non-decreasing.
        last: The query's last token.
    """
    steps = np.arange(len(own))
    return np.minimum(np.maximum.accumulate(own - steps) + steps, last)


# ---- examples to tokens


@dataclass(frozen=True)
class Wording:
    """The ids of fixed text in rows.

    Attributes:
        answer_prefix: Begins every answer, unscored, and is inserted at inference too.
        step_separator: Stands before every step of a chain of thought that is written out.
    """

    answer_prefix: tuple[int, ...]
    step_separator: tuple[int, ...]


BATCH = 1024
"""Examples that are tokenised at once, on all cores where the library can."""


@dataclass(frozen=True)
class EncodedExample:
    """An example as tokens.

    Attributes:
        texts: Ids of the query, of each step, and of the answer, without EOS.
        token_sizes: UTF-8 bytes that each of these ids covers.
        sizes: UTF-8 bytes of each of these texts.
        alignment: Where the steps belong; None where a text is not what its ids decode to, so that
            nothing can be said of places in it.
        group: The example's.
    """

    texts: list[np.ndarray]
    token_sizes: list[np.ndarray]
    sizes: list[int]
    alignment: Alignment | None
    group: int

    def without_steps(self) -> "EncodedExample":
        """Returns the query and the answer alone."""
        nothing = np.empty(0, dtype=np.int64)
        ends = slice(None, None, len(self.texts) - 1)
        return replace(
            self,
            texts=self.texts[ends],
            token_sizes=self.token_sizes[ends],
            sizes=self.sizes[ends],
            alignment=Alignment(nothing, nothing),
        )

    def row_length(self, wording: Wording) -> int:
        """Returns the tokens of EOS, query, steps after separators, prefix, answer and EOS."""
        separators = (len(self.texts) - 2) * len(wording.step_separator)
        return 1 + sum(map(len, self.texts)) + separators + len(wording.answer_prefix) + 1


def encode_examples(
    examples: Iterable[Example], tokenizer: Tokenizer
) -> Iterator[list[EncodedExample]]:
    """Yields the examples in their order, in lists of up to `BATCH`."""
    rest = iter(examples)
    while batch := list(islice(rest, BATCH)):
        yield _encode_batch(batch, tokenizer)


def _encode_batch(examples: Sequence[Example], tokenizer: Tokenizer) -> list[EncodedExample]:
    given = [(one.query, *one.steps, one.answer) for one in examples]
    clean = [[as_utf8(text) for text in texts] for texts in given]
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
    """Returns whether the ids of the texts decode to them, joined: much faster than one by one."""
    text = "".join((example.query, *example.steps, example.answer))
    return tokenizer.decode(np.concatenate(ids).tolist()) == text
