"""Random numbers that depend on what they are for, not on what was drawn before."""

import numpy as np
import torch


def seeded_generator(*key: int) -> torch.Generator:
    """Returns a CPU generator whose stream is a pure function of ``key``.

    Different keys give independent streams: (seed, step) for draws that all ranks must share,
    (seed, sequence id) for draws that must not depend on batching.
    """
    words = np.random.SeedSequence([number & 0xFFFFFFFFFFFFFFFF for number in key])
    state = int(words.generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(state & 0x7FFFFFFFFFFFFFFF)
