"""Peak memory of a training step, measured in processes of their own."""

import pytest

from benchmarks import step
from benchmarks.harness import in_a_process

WORDS = "--config dim=128 num_heads=4 num_layers=4 --rows 8 --length 128 --vocab 50304"
FORKS = "--model ThoughtbubblesLM --model_config fork_layers=[1,2,3] kappa=4L"


@pytest.mark.slow
def test_a_large_vocabulary_costs_little_more_than_the_plain_decoder_at_as_many_positions():
    """Four streams a token: a plain decoder of rows four times as long has as many positions."""
    parser = step.build_parser()
    ours = vars(parser.parse_args([*WORDS.split(), *FORKS.split(), "--against", "CopyLM"]))
    plain = [*WORDS.split(), "--model", "TransformerLM", "--against", "TransformerLM"]
    theirs = {**vars(parser.parse_args(plain)), "length": 4 * 128}
    peaks = [
        in_a_process("benchmarks.step", {**options, "side": "model", "kind": "train"})
        for options in (ours, theirs)
    ]
    assert peaks[0] <= 1.3 * peaks[1]
