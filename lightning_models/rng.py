"""Random numbers that depend on what they are for, not on what was drawn before."""

import numpy as np
import torch


def seeded_generator(*key: int) -> torch.Generator:
    """Returns a CPU generator whose stream is a pure function of ``key`` (64-bit integers).

    Different keys give independent streams: (seed, step) for draws that all ranks must share,
    (seed, sequence id) for draws that must not depend on batching.
    """
    words = [len(key)]  # each number as two words of 32 bits: no two keys share their words
    for number in key:
        words += [number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF]
    state = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state & 0x7FFFFFFFFFFFFFFF)
