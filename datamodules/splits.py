"""Which split a document belongs to, where the corpus has none of its own."""

from collections.abc import Iterable, Iterator

from datamodules.store import Split

_GOLDEN = 0.6180339887498949  # its multiples mod 1 spread evenly without a period


def split_of(index: int, *, val_fraction: float, test_fraction: float) -> Split:
    """Returns the split of the corpus' document number `index` (from 0).

    Multiples of the golden ratio mod 1 fall evenly on [0, 1), so the shares are met closely in a
    small corpus too, no period of the corpus (every tenth document a licence) is mirrored in a
    split, and no pass over the corpus is needed. Documents 1 and 2 lie where the intervals of val
    and test begin: three documents give all three splits something, however small the fractions.
    """
    place = (index - 1) * _GOLDEN % 1.0
    if place < val_fraction:
        return "val"
    roomy = val_fraction <= _GOLDEN and test_fraction <= 1.0 - _GOLDEN
    test_start = _GOLDEN if roomy else val_fraction
    return "test" if test_start <= place < test_start + test_fraction else "train"


def split_documents(
    documents: Iterable[str], *, val_fraction: float, test_fraction: float
) -> Iterator[tuple[Split, str]]:
    """Yields each document with its split, in the given order."""
    for index, text in enumerate(documents):
        yield split_of(index, val_fraction=val_fraction, test_fraction=test_fraction), text
