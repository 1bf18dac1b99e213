"""Training documents cut into streams: runs of sentences through which gradients flow.

Memory is empty where a stream begins. How long streams may be grows with the epochs (section 2.3);
which streams an epoch has is a pure function of its number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datamodules.sentences.index import SentenceIndex


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """How many sentences a stream may have in each epoch.

    Attributes:
        max_sentences: S of the first epochs.
        step: How much it grows.
        epochs: After how many epochs it grows.
        limit: Largest S; None: it grows on.
    """

    max_sentences: int = 30
    step: int = 12
    epochs: int = 5
    limit: int | None = None

    def at(self, epoch: int) -> int:
        """Returns S of an epoch: ``max_sentences + step * (epoch // epochs)``, limited."""
        grown = self.max_sentences + self.step * (epoch // self.epochs)
        return grown if self.limit is None else min(grown, self.limit)


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Runs of sentences, each inside one document.

    Attributes:
        first: Number of the first sentence, int64.
        sentences: How many there are, int64.
        lexical: Their words, int64.
    """

    first: np.ndarray
    sentences: np.ndarray
    lexical: np.ndarray

    def __len__(self) -> int:
        """Returns how many streams there are."""
        return len(self.first)

    def __getitem__(self, which: np.ndarray | slice) -> "Streams":
        """Returns the streams with those numbers, in a slice, or where a mask is true."""
        return Streams(
            first=self.first[which], sentences=self.sentences[which], lexical=self.lexical[which]
        )


def joined(parts: Sequence[Streams]) -> Streams:
    """Returns the streams of all parts, in that order."""
    return Streams(
        first=np.concatenate([part.first for part in parts]),
        sentences=np.concatenate([part.sentences for part in parts]),
        lexical=np.concatenate([part.lexical for part in parts]),
    )


def runs(index: SentenceIndex, first: np.ndarray, stop: np.ndarray) -> Streams:
    """Returns the streams with those first sentences, and those after their last ones."""
    return Streams(first=first, sentences=stop - first, lexical=index.lexical(first, stop))


def cut_documents(index: SentenceIndex, *, max_sentences: int, max_lexical: int) -> Streams:
    """Returns all documents cut into runs, each the longest that both limits allow, in order.

    The longest first pieces give the fewest: longer limits never give more streams.

    Args:
        index: Sentences of the split.
        max_sentences: Most sentences of a run (S).
        max_lexical: Most words of a run; no sentence has more.
    """
    stops = index.document_ends
    begins = np.append(0, stops[:-1])[: len(stops)]
    pieces = -(-(stops - begins) // max_sentences)
    document = np.repeat(np.arange(len(stops)), pieces)
    place = np.arange(len(document)) - (np.cumsum(pieces) - pieces)[document]
    first = begins[document] + max_sentences * place
    streams = runs(index, first, np.minimum(first + max_sentences, stops[document]))
    over = np.unique(document[streams.lexical > max_lexical])
    if not len(over):
        return streams
    kept = streams[~np.isin(document, over)]
    anew = _cut_twice(index, begins[over], stops[over], max_sentences, max_lexical)
    streams = joined([kept, anew])
    return streams[np.argsort(streams.first, kind="stable")]


def _cut_twice(
    index: SentenceIndex,
    begins: np.ndarray,
    stops: np.ndarray,
    max_sentences: int,
    max_lexical: int,
) -> Streams:
    """Returns documents cut where either limit is met, in rounds of one run a document."""
    firsts, ends = [], []
    first = begins
    while len(first):
        stop = longest_prefix(index, first, np.minimum(first + max_sentences, stops), max_lexical)
        firsts.append(first)
        ends.append(stop)
        left = stop < stops
        first, stops = stop[left], stops[left]
    return runs(index, np.concatenate(firsts), np.concatenate(ends))


def longest_prefix(
    index: SentenceIndex, first: np.ndarray, stop: np.ndarray, max_lexical: np.ndarray | int
) -> np.ndarray:
    """Returns where the longest prefixes of runs end that have at most so many words.

    Args:
        index: Sentences of the split.
        first: First sentence of each run.
        stop: The sentence after its last one.
        max_lexical: Most words; where even the first sentence has more, its prefix is empty.
    """
    low, high = first, stop  # a prefix up to low fits
    while (low < high).any():
        middle = (low + high + 1) // 2
        some = np.maximum(middle, first + 1)  # of a settled, empty prefix nothing is asked
        fits = index.lexical(first, some) <= max_lexical
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        high = np.maximum(low, high)
    return low
