"""Where the sentences of a split lie in its marked token stream.

That takes 8 bytes a sentence. For a large split it is a file next to the shards, memory-mapped:
ranks and loading processes, however many, hold it once, in the system's cache. One of them writes
it, the others wait for its lock.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_warn

from datamodules.store import TokenStream

SHARED_FROM = 2**24  # tokens: where a smaller split has its sentences is known in a moment
_PART = 2**22  # tokens that are looked at together
_SAMPLED = 64  # sentences that are looked at when a file is opened
_ENDS = np.dtype("<i8")
_NAME = "sentences"


class SentenceIndex:
    """The sentences of a split, numbered over all documents; pickled by path.

    Args:
        stream: Marked tokens of the split.
        eos_id: Ends a sentence.

    Attributes:
        stream: The same.
    """

    def __init__(self, stream: TokenStream, eos_id: int) -> None:
        self.stream, self._eos_id = stream, eos_id

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what opens the same files elsewhere."""
        return SentenceIndex, (self.stream, self._eos_id)

    def __len__(self) -> int:
        """Returns the number of sentences."""
        return len(self.ends)

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each sentence ends in the stream, after its EOS; int64, ascending."""
        return sentence_ends(self.stream, self._eos_id)

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Number of the sentence after each document's last one; int64, ascending."""
        return np.searchsorted(self.ends, self.stream.document_ends) + 1

    def starts(self, sentences: np.ndarray) -> np.ndarray:
        """Returns where those sentences begin in the stream, at their BOS; int64."""
        numbers = np.asarray(sentences, dtype=np.int64)
        return np.where(numbers > 0, self.ends[np.maximum(numbers - 1, 0)], 0)

    def ends_document(self, stops: np.ndarray) -> np.ndarray:
        """Returns whether a document ends in front of those sentences, bool."""
        document = np.searchsorted(self.document_ends, stops)
        return self.document_ends[np.minimum(document, len(self.document_ends) - 1)] == stops

    def lexical(self, firsts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the words in runs of sentences, int64.

        Args:
            firsts: First sentence of each run.
            stops: The sentence after its last one, or the first one if the run is empty; of the
                same document, so that no EOD but the last one's lies in the run.
        """
        slots = self.starts(stops) - self.starts(firsts)
        return slots - 2 * (stops - firsts) - (self.ends_document(stops) & (stops > firsts))


def sentence_ends(stream: TokenStream, eos_id: int) -> np.ndarray:
    """Returns where the sentences of a stream end, int64, from a file where there is one.

    A large index that cannot be written (a read-only or full disk) is kept in memory, with a
    warning.
    """
    if len(stream) < SHARED_FROM:
        return np.concatenate([np.empty(0, _ENDS), *_scan(stream, eos_id)])
    path = stream.beside(_NAME)
    try:
        with FileLock(stream.beside(f"{_NAME}.lock")):
            ends = _opened(path, stream, eos_id)
            return _written(path, stream, eos_id) if ends is None else ends
    except OSError as error:
        ends = _opened(path, stream, eos_id)  # a read-only cache needs no lock
        if ends is not None:
            return ends
        rank_zero_warn(
            f"{path} cannot be written ({error}): every process keeps in its own memory where the "
            "sentences are, 8 bytes each."
        )
        return np.concatenate(list(_scan(stream, eos_id)))


def _scan(stream: TokenStream, eos_id: int) -> Iterator[np.ndarray]:
    """Yields, in parts, the places after each EOS."""
    for first in range(0, len(stream), _PART):
        tokens = stream.gather(np.arange(first, min(first + _PART, len(stream))))
        yield (np.flatnonzero(tokens == eos_id) + first + 1).astype(_ENDS)


def _opened(path: Path, stream: TokenStream, eos_id: int) -> np.ndarray | None:
    """Returns the ends in a file, None where there is none, or a sample is not of the stream."""
    if not path.is_file() or path.stat().st_size < _ENDS.itemsize:
        return None
    ends = np.memmap(path, _ENDS, "r")
    sample = ends[np.unique(np.linspace(0, len(ends) - 1, _SAMPLED, dtype=np.int64))]
    ascending = sample[0] > 0 and sample[-1] == len(stream) and (sample[1:] > sample[:-1]).all()
    return ends if ascending and (stream.gather(sample - 1) == eos_id).all() else None


def _written(path: Path, stream: TokenStream, eos_id: int) -> np.ndarray:
    """Writes the ends to a file that is there only when it is whole, and returns them."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for ends in _scan(stream, eos_id):
                file.write(ends.data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return np.memmap(path, _ENDS, "r")
