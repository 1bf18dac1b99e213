"""Numbers of answers, by hand: shares, questions first, overlaps, times, labels."""

import math
from types import SimpleNamespace

import pytest
import torch

from callbacks.answer_accuracy import Question, Reply
from callbacks.recorded_thoughts import RowThinking, Thought
from evaluation.reason import asking
from evaluation.reason.asking import Timing, time_in_turn
from evaluation.reason.contestants import check_same_questions, numbered
from evaluation.reason.report import answer_row, measure_answers, overlaps, reason_table
from evaluation.scoring import share_of

TEXTS = dict.fromkeys(("decode", "decode_continuation"), lambda ids: "")
TOKENIZER = SimpleNamespace(**TEXTS, vocab_size=99, eos_id=0, text_bos_id=None)


def question(number, answer=(5,), group=0):
    return Question(query=[0, 1, 2, 3], answer=list(answer), steps=[], group=group, number=number)


def rows(flags):
    replies = (Reply(question(n, group=n % 2), [5, 0], "", flag) for n, flag in enumerate(flags))
    return [answer_row(TOKENIZER, "any", reply) for reply in replies]


def numbers_of(flags, again=None):
    return measure_answers(rows(flags), "steps", again and rows(again))


def test_shares_and_their_errors():
    error = pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert share_of([True, False, True, True]) == (0.75, error, 4)
    nothing = share_of([])
    assert math.isnan(nothing.value)
    assert math.isnan(nothing.error)
    assert nothing.questions == 0
    groups = numbers_of([True, False, True, True, False])["by_group"]
    assert [(group["steps"], group["accuracy"]) for group in groups] == [(0, 2 / 3), (1, 0.5)]


def test_what_a_question_in_front_changes():
    numbers = numbers_of([True, True, False, False, False], [True, False, True, False, False])
    shares = {"accuracy": (2 / 5, 5), "recovered": (1 / 3, 3), "intervention": (3 / 5, 5)}
    for name, (share, count) in shares.items():
        assert numbers[f"question_first_{name}"] == share
        assert numbers[f"question_first_{name}_questions"] == count
    assert not [key for key in numbers_of([True]) if "first" in key]


def test_what_one_solves_and_another_does_not():
    flags = {
        "a": [True, True, True, False],
        "b": [True, False, False, True],
        "c": [False] * 4,
    }
    pairs = overlaps({label: rows(own) for label, own in flags.items()})
    shares = {
        (pair["solves"], pair["fails"]): tuple(
            pair[key] for key in ("questions", "share_of_solved", "share_of_questions")
        )
        for pair in pairs
    }
    assert shares["a", "b"] == (2, 2 / 3, 0.5)
    assert shares["b", "a"] == (1, 0.5, 0.25)
    assert math.isnan(shares["c", "a"][1])
    results = [{"label": label, **numbers_of(flags[label])} for label in "ab"]
    kept = [pair for pair in pairs if "c" not in (pair["solves"], pair["fails"])]
    facts = {"data": {"split": "test"}, "settings": {"device": "cpu", "rounds": None}}
    table = reason_table({"results": results, "overlap": kept, "baseline": None, **facts})
    lines = [line.split() for line in table.splitlines()]
    assert ["a", "-", "0.6667", "(2)"] in lines
    assert ["b", "0.5000", "(1)", "-"] in lines


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


def test_labels_that_are_there_already_are_numbered():
    assert numbered(["A", "B", "A", "A"]) == ["A", "B", "A #2", "A #3"]


def test_other_questions_are_no_variant():
    first = [[question(0), question(1)]]
    check_same_questions(first, [[question(0), question(1)]])
    for other in ([[question(0)]], [[question(0), question(1, answer=(6,))]]):
        with pytest.raises(ValueError, match="the data have other questions"):
            check_same_questions(first, other)
