"""What the model says of the data that it is given."""

import warnings
from types import SimpleNamespace

import pytest

from tests.thinking_states import questions
from tests.thinking_states.cases import build


class WithThoughts(questions.Questions):
    """Data that know how long the thoughts of chunks are."""

    def longest_thought(self, chunk_size):
        return 3 * chunk_size


KNOWN, UNKNOWN = {2: 1, 6: 1, 11: 1, 12: 0}, {1: 0}
"""Warnings by ``max_thought_tokens``."""


@pytest.mark.parametrize(
    ("data", "warned"), [(WithThoughts(), KNOWN), (questions.Questions(), UNKNOWN)]
)
def test_thoughts_that_inference_would_cut_are_told_of(data, warned):
    for most, times in warned.items():
        model = build(chunk_size=4, max_thought_tokens=most, answer_prefix=questions.PREFIX)
        model._trainer = SimpleNamespace(datamodule=data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.setup("fit")
        texts = [str(warning.message) for warning in caught]
        named = [text for text in texts if f"max_thought_tokens ({most})" in text]
        assert len(named) == times, texts
        assert all("set max_thought_tokens=12 or above" in text for text in named)
