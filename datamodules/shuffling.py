"""A seeded order of documents that do not fit into memory."""

import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

_SHUFFLE = 3  # second half of the Philox key; `windows` has the others


def shuffled(documents: Iterable[str], *, seed: int, folder: Path) -> Iterator[str]:
    """Yields the documents in an order that is a pure function of their number and `seed`.

    They wait in a temporary file in `folder`, as large as the text; memory holds 8 bytes a
    document. The order sorts raw Philox output, which is the same in every version of numpy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        ends = array("q", [0])
        for text in documents:
            ends.append(ends[-1] + file.write(text.encode("utf-8", "surrogatepass")))
        philox = np.random.Philox(key=[seed, _SHUFFLE])
        for i in np.argsort(philox.random_raw(len(ends) - 1), kind="stable"):
            file.seek(ends[i])
            yield file.read(ends[i + 1] - ends[i]).decode("utf-8", "surrogatepass")
