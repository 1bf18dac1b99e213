"""Generated texts: the same for everybody, and their answers follow from what stands before."""

import hashlib
import re
from collections import Counter

import pytest

from datamodules import SyntheticText
from datamodules.synthetic import PEOPLE, TASKS, THINGS, VERSION

KNOWN_TEXT = {
    "recall": (1, "771c31a5d33dc777"),
    "operands": (1, "68e3a70509d4addf"),
}
"""VERSION and digest: change both or neither."""


def documents(task, split="train", **options):
    return [*SyntheticText(task=task, cache_dir="unused", **options).documents(split)]


@pytest.mark.parametrize("task", TASKS)
def test_texts_never_change(task):
    text = "\n".join(documents(task, train_documents=20))
    assert (VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == KNOWN_TEXT[task]


@pytest.mark.parametrize("task", TASKS)
def test_a_text_depends_on_its_place_alone(task):
    few, many = (documents(task, train_documents=count) for count in (3, 9))
    assert many[:3] == few
    assert len(set(many + documents(task, "val") + documents(task, "test"))) == 9 + 200 + 400
    assert documents(task, train_documents=3, document_seed=1) != few
    assert documents(task, "test", test_length=8, test_documents=3) == documents(
        task, "test", length=8, test_documents=3
    )


def test_every_fact_is_stated_once_and_asked_once_later():
    distances, given = Counter(), Counter()
    for text in documents("recall", train_documents=300):
        sentences = text.split(". ")
        assert len(sentences) == 40
        places = {}
        for place, sentence in enumerate(sentences):
            if found := re.fullmatch(r"(\w+) (has|gives) the (\w+)\.?", sentence):
                person, verb, thing = found.groups()
                places.setdefault(person, []).append((place, verb, thing))
            else:
                assert sentence.rstrip(".") == "It rains"
        assert len(places) == 16
        for (first, states, thing), (second, asks, answer) in places.values():
            assert (states, asks, thing) == ("has", "gives", answer)
            distances[second - first] += 1
            given[thing] += 1
        assert places.keys() <= set(PEOPLE)
    assert distances.keys() == {*range(1, 40)}
    assert given.keys() == set(THINGS)
    assert max(given.values()) < 1.3 * min(given.values())  # 600 of each, deviation 23


def test_products_are_those_of_the_permutations_one_after_the_other():
    """Each permutation moves three marked things; the product is the letter of where they end."""
    moves = dict(zip("abcdef", ["012", "021", "102", "120", "201", "210"], strict=True))
    lengths = Counter()
    for text in documents("operands", train_documents=100):
        terms = re.findall(r"([a-f]+)(\d)([a-f])", text)
        assert "".join(map("".join, terms)) == text
        assert len(terms) == 40
        for operands, count, product in terms:
            things = "012"
            for letter in operands:
                things = "".join(things[int(place)] for place in moves[letter])
            assert moves[product] == things
            assert len(operands) == int(count)
            lengths[len(operands)] += 1
    assert lengths.keys() == {1, 2, 3, 4}
    assert max(lengths.values()) < 1.2 * min(lengths.values())
