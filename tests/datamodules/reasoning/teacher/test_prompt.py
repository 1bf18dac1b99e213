"""What a language model is asked, and which replies count."""

import json

import pytest

from datamodules.reasoning.gsm8k import Solved
from datamodules.reasoning.teacher import (
    EXAMPLES,
    RejectedReplyError,
    messages,
    read_reply,
)
from tests.datamodules.reasoning.endpoint_server import PROBLEMS


def test_the_prompt_shows_examples_that_keep_its_own_rules():
    talk = messages(PROBLEMS[0])
    assert [m["role"] for m in talk] == ["system", *["user", "assistant"] * len(EXAMPLES), "user"]
    for example, reply in zip(EXAMPLES, talk[2::2], strict=True):
        problem = Solved(example.query, example.steps, example.answer.strip())
        assert read_reply(reply["content"], problem) == example.marked()
        assert example.steps[-1].endswith(f"={problem.answer}>>")
    asked = json.loads(talk[-1]["content"])
    assert asked == {"problem": PROBLEMS[0].question, "calculations": ["<<0+3=3>>"]}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"query": "a<T> b", "thinking": ["x"]}', None),
        ('{thoughts} ```json\n{"query": "a<T> b", "thinking": ["x"]}\n``` done {', None),
        ('{"query": "a <T> b", "thinking": ["x"]}', "another problem"),
        ('{"query": "A<T> b", "thinking": ["x"]}', "another problem"),
        ('{"query": "a<T> b", "thinking": ["y"]}', "other calculations"),
        ('{"query": "a b", "thinking": ["x"]}', "another number of markers"),
        ('{"query": "a<T><T> b", "thinking": ["x"]}', "another number of markers"),
        ('{"query": "a<T> b"}', "no such JSON object"),
        ('{"query": "a<T> b", "thinking": ["x"', "no such JSON object"),
        ("I cannot do that.", "no such JSON object"),
        ("[" * 100_000 + "{" * 50, "no such JSON object"),
    ],
)
def test_replies_are_checked_by_exact_match(reply, expected):
    problem = Solved("a b", ("x",), "1")
    if expected is None:
        assert read_reply(reply, problem) == "a<T> b"
    else:
        with pytest.raises(RejectedReplyError, match=expected):
            read_reply(reply, problem)
