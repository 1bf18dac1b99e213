"""Numbers of answers, by hand: shares, means of thinking, times."""

import math
from types import SimpleNamespace

import pytest
import torch

from callbacks.answer_accuracy import Question, Reply
from callbacks.recorded_thoughts import RowThinking, Thought
from evaluation.reason import asking
from evaluation.reason.asking import Timing, time_in_turn
from evaluation.reason.scores import answer_row, measure_answers
from evaluation.scoring import share_of

TEXTS = dict.fromkeys(("decode", "decode_continuation"), lambda ids: "")
TOKENIZER = SimpleNamespace(**TEXTS, vocab_size=99, eos_id=0, text_bos_id=None)


def question(number, answer=(5,), group=0):
    return Question(query=[0, 1, 2, 3], answer=list(answer), steps=[], group=group, number=number)


def rows(flags):
    replies = (Reply(question(n, group=n % 2), [5, 0], "", flag) for n, flag in enumerate(flags))
    return [answer_row(TOKENIZER, "any", reply) for reply in replies]


def test_shares_and_their_errors():
    error = pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert share_of([True, False, True, True]) == (0.75, error, 4)
    nothing = share_of([])
    assert math.isnan(nothing.value)
    assert math.isnan(nothing.error)
    assert nothing.questions == 0
    groups = measure_answers(rows([True, False, True, True, False]), "steps")["by_group"]
    assert [(group["steps"], group["accuracy"]) for group in groups] == [(0, 2 / 3), (1, 0.5)]


def test_means_of_thinking():
    def row(number, rounds, *lengths):
        thoughts = tuple(Thought(n, tuple(range(length))) for n, length in enumerate(lengths))
        thinking = RowThinking(thoughts, rounds)
        return answer_row(TOKENIZER, "a", Reply(question(number), [1], "", True, thinking))

    found = measure_answers([row(0, 3, 0, 2, 1), row(1, 1, 0, 0)], "steps")
    means = {"rounds": 2, "chunks": 2.5, "nontrivial_chunks": 1, "thought_tokens": 1.5}
    assert means.items() <= found.items()


def test_models_are_timed_in_turn(monkeypatch):
    """A clock that only moves when a model answers: 2 s, then 3 s, then 8 s, and so on."""
    clock, order = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(asking.time, "perf_counter", lambda: clock.now)
    seconds = {"a": iter([100.0, 2.0, 4.0, 9.0]), "b": iter([100.0, 1.0, 4.0, 3.0])}

    def answering(name):
        def answer():
            order.append(name)
            clock.now += next(seconds[name])

        return answer

    a, b = time_in_turn([answering("a"), answering("b")], 3, 2, torch.device("cpu"))
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert (a.rounds, b.rounds) == ((2.0, 4.0, 9.0), (1.0, 4.0, 3.0))
    assert (a.seconds, b.seconds) == (2.0, 1.5)
    assert b.speed_up(a) == 2.0  # the median of 2, 1 and 3
    assert a.speed_up(b) == 0.5
    assert Timing((6.0,), 3).seconds == 2.0
