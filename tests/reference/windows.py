"""Packed rows, one token at a time."""

import numpy as np


def packed_row(stream, number, *, block_size, rows, seed, eos_id) -> list[int]:
    """Row `number` (T+1 ids): documents joined in the epoch's order, one EOS in front of them."""
    epoch, index = divmod(number, rows)
    philox = np.random.Philox(key=[seed, 2], counter=[0, 0, 0, epoch])
    ends = stream.document_ends.tolist()
    draws = philox.random_raw(len(ends)).tolist()
    joined = [eos_id]
    for document in sorted(range(len(ends)), key=lambda d: draws[d]):
        first = ends[document - 1] if document else 0
        joined += [int(stream.gather(np.array([p]))[0]) for p in range(first, ends[document])]
    return joined[index * block_size :][: block_size + 1]
