"""Parity and Vars: the paper's wording, and states that follow from the text."""

import hashlib
import re
from collections import Counter

import pytest

from datamodules import StateTracking
from datamodules.reasoning.state_tracking import VERSION, assignments, parity
from datamodules.store import SPLITS

KNOWN_TEXT = (1, "ad809da45f9c9c8f")  # VERSION and digest: change both or neither


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("state_tracking"))

    def build(**options) -> StateTracking:
        sizes = {"train_examples": 40, "val_examples": 9, "test_examples": 12}
        defaults = {**sizes, "block_size": 1500, "batch_size": 4, "cache_dir": cache}
        data = StateTracking(**{**defaults, **options})
        data.prepare_data()
        data.setup()
        return data

    return build


# ---- what the text says, read without the generator


def coin(text):
    """The state that a text about a coin ends in, sentence by sentence."""
    first, *sentences = [part.strip() for part in text.split(".") if part.strip()]
    words = first.split()
    assert words[:5] == ["The", "coin", "starts", "at", "state"]
    up = {"heads": True, "tails": False}[words[5]]
    for sentence in sentences:
        who, verb = re.fullmatch(r"(\w+) (flips|doesn't flip) the coin", sentence).groups()
        assert who in ("Alice", "Bob")
        up = up != (verb == "flips")
    return "heads" if up else "tails"


def variables(text, modulus):
    """The values that a text about variables ends in, and the variable that changed last."""
    head, rest = text.removeprefix("Track the variables values: "), ""
    values = {}
    while match := re.match(r"(\w)=(\d+)(; | |$)", head):
        values[match[1]] = int(match[2])
        head = head[match.end() :]
        if match[3] != "; ":
            rest = head
            break
    last = None
    for operation in rest.split():
        left, right = operation.split("=")
        same, term = right.split("+")
        assert left == same != term
        values[left] += int(term) if term.isdigit() else values[term]
        values[left] %= modulus
        last = left
    return values, last


def fronts(example):
    return [example.query[:marker] for marker in example.markers]


@pytest.mark.parametrize("split", SPLITS)
def test_every_step_is_the_coins_state_where_its_marker_stands(split):
    data = StateTracking()
    for i in range(150):
        example = data.example(split, i)
        assert len(example.steps) == example.group + 1
        assert [coin(front) for front in fronts(example)] == list(example.steps)
        assert example.answer == f" {coin(example.query)}"
        assert all(front.endswith(".") for front in fronts(example))
        assert example.query.count(".") == len(example.markers)


@pytest.mark.parametrize(("count", "modulus"), [(1, 2), (2, 10), (5, 100)])
def test_every_step_is_the_variable_that_changed(count, modulus):
    data = StateTracking(task="vars", variables=count, modulus=modulus)
    for i in range(150):
        example = data.example("val", i)
        assert len(example.steps) == example.group
        for front, step in zip(fronts(example), example.steps, strict=True):
            values, last = variables(front, modulus)
            assert step == f"{last}={values[last]}"
        values, _ = variables(example.query, modulus)
        assert list(values) == list("abcde"[:count])
        assert all(0 <= value < modulus for value in values.values())
        assert example.answer == "".join(f" {name}={value}" for name, value in values.items())
        assert not re.search(r"\+0\b", example.query)


def scripted(*draws):
    """Draws these, and checks that each is possible."""
    left = list(draws)

    def below(n):
        value = left.pop(0)
        assert 0 <= value < n
        return value

    return below


def test_the_papers_coin():
    example = parity(3, scripted(1, *(0, 0), *(1, 1), *(0, 1)))
    assert example.marked(" <T>") + StateTracking().answer_prefix + example.answer == (
        "The coin starts at state heads. <T> Alice doesn't flip the coin. <T> Bob flips the coin. "
        "<T> Alice flips the coin. <T> The final state of the coin is heads"
    )
    assert example.steps == ("heads", "heads", "tails", "heads")
    assert example.group == 3


def test_the_papers_variables():
    example = assignments(3, scripted(1, 2, *(0, 1, 0), *(1, 1, 0), *(1, 0, 2)))
    prefix = StateTracking(task="vars").answer_prefix
    assert example.marked(" <T>") + prefix + example.answer == (
        "Track the variables values: a=1; b=2 a=a+b <T> b=b+a <T> b=b+3 <T> Final values: a=3 b=8"
    )
    assert example.steps == ("a=3", "b=5", "b=8")


def test_text_changes_only_with_the_version():
    """Prepared text is found again by the version: other text under the same one would be stale."""
    digest = hashlib.sha256()
    for task in ("parity", "vars"):
        data = StateTracking(task=task, variables=3)
        for split in SPLITS:
            for i in range(100):
                example = data.example(split, i)
                digest.update(f"{example.marked()}{example.steps}{example.answer}".encode())
    assert (VERSION, digest.hexdigest()[:16]) == KNOWN_TEXT


# ---- which texts there are


def test_an_example_depends_on_nothing_but_its_place():
    few, many = StateTracking(train_examples=5), StateTracking(train_examples=9)
    assert list(many.examples("train"))[:5] == list(few.examples("train"))
    assert StateTracking(test_operations=[3]).example("train", 7) == few.example("train", 7)
    others = [StateTracking(example_seed=1).example("train", i) for i in range(20)]
    assert others != [few.example("train", i) for i in range(20)]
    same_lengths = StateTracking(test_operations=(1, 10))
    texts = {split: [same_lengths.example(split, i).query for i in range(20)] for split in SPLITS}
    assert len({tuple(part) for part in texts.values()}) == 3
    assert few.example("train", 10**12).group == 1 + 10**12 % 10


def test_lengths_are_even_over_their_range():
    data = StateTracking(operations=(2, 5), test_operations=(11, 40))
    for split, expected in (("train", range(2, 6)), ("val", range(2, 6)), ("test", range(11, 41))):
        groups = Counter(data.example(split, i).group for i in range(120))
        assert groups == dict.fromkeys(expected, 120 // len(expected))


@pytest.mark.parametrize("numbers", [[100], [20, 20, 40, 40], [7, 7]])
def test_exact_lengths(numbers):
    data = StateTracking(test_operations=numbers)
    assert {data.example("test", i).group for i in range(24)} == set(numbers)


def test_draws_are_even():
    examples = [StateTracking(operations=(9, 9)).example("train", i) for i in range(400)]
    answers = Counter(example.answer for example in examples)
    text = "".join(example.query for example in examples)
    assert all(150 < answers[state] < 250 for state in (" heads", " tails"))
    assert 0.45 < text.count(" flips ") / 3600 < 0.55
    assert 0.45 < text.count("Alice") / 3600 < 0.55
    assert 150 < text.count("state heads") < 250
    data = StateTracking(task="vars", operations=(9, 9), variables=3)
    text = " ".join(data.example("train", i).query for i in range(400))
    assert 0.45 < len(re.findall(r"\+[abc]", text)) / 3600 < 0.55
    targets = Counter(re.findall(r" ([abc])=[abc]\+", text))
    assert all(1100 < count < 1300 for count in targets.values())
    numbers = Counter(re.findall(r"\+(\d)", text))
    assert set(numbers) == set("123456789")
    assert max(numbers.values()) < 1.4 * min(numbers.values())


def test_the_question_may_come_first():
    for task, question in (("parity", "the final state of the coin"), ("vars", "the final values")):
        plain, asked = (StateTracking(task=task, question_first=q) for q in (False, True))
        example = asked.example("val", 3)
        first = example.query.split("? ")[0] + "? "
        assert question in first
        assert example == plain.example("val", 3).after(first)
        assert plain.fingerprint != asked.fingerprint


# ---- the data module


def test_answers_are_right_word_for_word(make):
    data = make()
    assert data.is_right(" heads", " heads")
    assert data.is_right("heads \n", " heads")
    assert not data.is_right(" heads and tails", " heads")
