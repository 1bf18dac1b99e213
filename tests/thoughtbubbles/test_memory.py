"""Peak memory of a training step, measured in processes of their own."""

import argparse

import pytest

from benchmarks.harness import in_a_process

SHAPE = {
    "device": "cpu",
    "layers": 4,
    "dim": 128,
    "heads": 4,
    "context": 128,
    "batch": 8,
    "vocab": 50304,
    "fork_layers": [1, 2, 3],
    "kappa": 4,
    "bf16": False,
    "llama": False,
    "compile": False,
}


@pytest.mark.slow
def test_a_large_vocabulary_costs_little_more_than_the_plain_decoder_at_as_many_positions():
    settings = vars(argparse.Namespace(**SHAPE))
    ours, plain = (
        in_a_process("benchmarks.forking", {**settings, "side": side}) for side in ("ours", "plain")
    )
    assert ours <= 1.3 * plain
