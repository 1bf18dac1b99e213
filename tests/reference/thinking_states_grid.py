"""The chunks of Thinking States and the thoughts they should have (Sec. 3.4, App. A.3).

A sequence is a query of q tokens (t = 0, .., q - 1) and the answer's prefix and tokens after it
(t = q, ..). It is cut by slicing lists, where that is meant with literal padding that is thrown
away afterwards. Three ways (the paper leaves the rest of a division by c open):

left_align  the query is filled up with pads in front to a multiple of c, then cut; what follows
            the query is cut from its end on: the query's end is a chunk's end.
partial     the query is cut from its start on, its last chunk may be short and counts as whole;
            what follows is cut from the query's end on.
absolute    the whole sequence is cut from its start on.

A chunk thinks after its last token: a chunk whose last token has not come has not thought.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """One chunk of a sequence.

    ``tokens`` are indices into the sequence; ``places[i]`` is the row of the state S (c, D) that
    ``tokens[i]`` receives; ``ended`` says whether its last token is there.
    """

    tokens: list[int]
    places: list[int]
    ended: bool


def num_query_chunks(q: int, c: int) -> int:
    """How many chunks have query tokens: ceil(q / c)."""
    return -(-q // c)


def cut(kind: str, c: int, q: int, length: int) -> list[Chunk]:
    """The chunks, in order, of the first ``length`` >= q tokens of a sequence."""
    if not 1 <= q <= length:
        raise ValueError(f"a sequence of {length} tokens has no query of {q}")
    if kind == "absolute":
        return [piece(slots, c) for slots in slices(list(range(length)), c)]
    answer = [piece(slots, c) for slots in slices(list(range(q, length)), c)]
    if kind == "partial":
        short = [piece(slots, c)._replace(ended=True) for slots in slices(list(range(q)), c)]
        return short + answer
    if kind == "left_align":
        pads: list[int | None] = [None] * (num_query_chunks(q, c) * c - q)
        return [piece(slots, c) for slots in slices(pads + list(range(q)), c)] + answer
    raise ValueError(f"kind={kind!r} is none of left_align, partial, absolute")


def slices(slots: Sequence[int | None], c: int) -> list[list[int | None]]:
    return [list(slots[start : start + c]) for start in range(0, len(slots), c)]


def piece(slots: list[int | None], c: int) -> Chunk:
    """A slice without its pads (None)."""
    real = [(t, place) for place, t in enumerate(slots) if t is not None]
    return Chunk([t for t, _ in real], [place for _, place in real], ended=len(slots) == c)


def chunk(kind: str, c: int, q: int, t: int) -> int:
    """Number of the chunk (from 0) that token t is in."""
    return find(kind, c, q, t)[0]


def place(kind: str, c: int, q: int, t: int) -> int:
    """Which row of its chunk's state token t receives."""
    return find(kind, c, q, t)[1]


def find(kind: str, c: int, q: int, t: int) -> tuple[int, int]:
    for number, found in enumerate(cut(kind, c, q, max(q, t + 1))):
        if t in found.tokens:
            return number, found.places[found.tokens.index(t)]
    raise ValueError(f"token {t} is in no chunk")


def end(kind: str, c: int, q: int, k: int) -> int:
    """The token after which chunk k thinks; it may lie after the sequence's end."""
    return cut(kind, c, q, q + (k + 1) * c)[k].tokens[-1]


def thinking_chunks(
    kind: str, c: int, q: int, length: int, think_in_decode: bool = False
) -> list[int]:
    """Numbers of the chunks that have thought within the first ``length`` tokens.

    These are the chunks with query tokens, under ``think_in_decode`` all; only those whose last
    token is there.
    """
    n = num_query_chunks(q, c)
    chunks = cut(kind, c, q, length)
    return [k for k, one in enumerate(chunks) if one.ended and (k < n or think_in_decode)]


def gold_targets(
    kind: str,
    c: int,
    q: int,
    steps: Sequence[Sequence[int]],
    places: Sequence[int],
    separator: int,
    eos: int,
) -> list[list[int]]:
    """What each of the query's chunks should think, a list of ceil(q / c) lists of ids.

    Chunk k has the steps assigned to its tokens, in order, one ``separator`` id between two steps,
    and ``eos`` after; without a step it is [eos].

    Args:
        kind: left_align, partial or absolute.
        c: Tokens of a chunk.
        q: Tokens of the query.
        steps: Ids of each reasoning step.
        places: Token of the query that each step is assigned to, 0 <= place < q.
        separator: Id between two steps of one chunk.
        eos: Id that ends a thought.
    """
    thoughts: list[list[int]] = [[] for _ in range(num_query_chunks(q, c))]
    for step, token in zip(steps, places, strict=True):
        if not 0 <= token < q:
            raise ValueError(f"step place {token} is no token of a query of {q} tokens")
        mine = thoughts[chunk(kind, c, q, token)]
        mine.extend([separator, *step] if mine else step)
    return [[*thought, eos] for thought in thoughts]


def gold_thoughts(
    kind: str,
    c: int,
    q: int,
    length: int,
    targets: Sequence[Sequence[int]],
    eos: int,
    think_in_decode: bool = False,
) -> dict[int, list[int]]:
    """Chunk number -> target, of the chunks that think within the sequence.

    ``targets`` are those of ``gold_targets``; chunks after the query have [eos].
    """
    return {
        k: list(targets[k]) if k < len(targets) else [eos]
        for k in thinking_chunks(kind, c, q, length, think_in_decode)
    }
