"""Generated texts: the same for everybody, and their answers follow from what stands before."""

import hashlib
import re
from collections import Counter

import pytest

from datamodules import SyntheticText
from datamodules.synthetic import PEOPLE, TASKS, THINGS, VERSIONS

KNOWN_TEXT = {
    "recall": (1, "eb13168fbdd9de4f"),
    "hops": (1, "2eb1b1ec2bbec697"),
    "operands": (2, "13dfbf81d58390ce"),
    "cipher": (1, "e8f59b278b529ef1"),
}
"""Version and digest: change both or neither."""


def documents(task, split="train", **options):
    return [*SyntheticText(task=task, cache_dir="unused", **options).documents(split)]


@pytest.mark.parametrize("task", TASKS)
def test_texts_never_change(task):
    text = "\n".join(documents(task, train_documents=20))
    assert (VERSIONS[task], hashlib.sha256(text.encode()).hexdigest()[:16]) == KNOWN_TEXT[task]


@pytest.mark.parametrize("task", TASKS)
def test_a_text_depends_on_its_place_alone(task):
    few, many = (documents(task, train_documents=count) for count in (3, 9))
    assert many[:3] == few
    assert len(set(many + documents(task, "val") + documents(task, "test"))) == 9 + 200 + 400
    assert documents(task, train_documents=3, document_seed=1) != few
    held_out = documents(task, "val", length=9, held_out_length=7, val_documents=3)
    assert held_out == documents(task, "val", length=7, val_documents=3)


def test_facts_are_stated_once_and_asked_once_at_most_later():
    distances, given = Counter(), Counter()
    for text in documents("recall", train_documents=300):
        sentences = text.split(". ")
        assert len(sentences) == 40
        facts, asked = {}, set()
        for place, sentence in enumerate(sentences):
            if found := re.fullmatch(r"(\w+) (has|gives) the (\w+)\.?", sentence):
                person, verb, thing = found.groups()
                if verb == "has":
                    assert person not in facts
                    facts[person] = place, thing
                    given[thing] += 1
                else:
                    assert person not in asked
                    assert facts[person][1] == thing
                    asked.add(person)
                    distances[place - facts[person][0]] += 1
            else:
                assert sentence.rstrip(".") == "It rains"
        assert facts.keys() <= set(PEOPLE)
    assert distances.keys() >= {*range(1, 30)}
    assert distances[1] > 3 * distances[8] > 0
    assert given.keys() == set(THINGS)
    assert max(given.values()) < 1.2 * min(given.values())  # about 620 of each, deviation 25


@pytest.mark.parametrize("letters", [4, 8])
def test_hops_follow_the_map_as_often_as_they_say(letters):
    counts = Counter()
    sizes = {"letters": letters, "levels": letters - 1, "length": 12}
    for text in documents("hops", train_documents=200, **sizes):
        first, *words = text.split(" ")
        assert (first, len(words)) == ("Map", letters + 2 * 12)
        follows = dict(words[:letters])
        assert set(follows) == set(follows.values()) == set("abcdefgh"[:letters])
        for question, answer in zip(words[letters::2], words[letters + 1 :: 2], strict=True):
            place, count = question[0], question.count("x")
            assert question == place + "x" * count
            for _ in range(count):
                place = follows[place]
            assert place == answer != question[0]
            counts[count] += 1
    assert counts.keys() == {*range(1, letters)}
    assert min(counts.values()) > 0.8 * max(counts.values())


@pytest.mark.parametrize("letters", [4, 8])
def test_answers_are_the_latest_values_of_the_operands_in_order(letters):
    counts, values, updated = Counter(), Counter(), Counter()
    sizes = {"letters": letters, "levels": letters - 1, "length": 12}
    for text in documents("operands", train_documents=200, **sizes):
        first, *words = text.split(" ")
        assert (first, len(words)) == ("Map", letters + 3 * 12)
        assert {word[0] for word in words[:letters]} == {*"abcdefgh"[:letters]}
        assert {len(word) for word in words[:letters]} == {2}
        for place in range(letters, len(words), 3):
            update, question, answer = words[place : place + 3]
            stated = words[:letters] + words[letters : place + 1 : 3]
            latest = [[word[1] for word in stated if word[0] == letter][-1] for letter in question]
            assert len(set(question)) == len(question)
            assert answer == "".join(latest)
            counts[len(question)] += 1
            values[update[1]] += 1
            updated[update[0]] += 1
    for counter, keys in (
        (counts, range(1, letters)),
        (values, "pqr"),
        (updated, "abcdefgh"[:letters]),
    ):
        assert counter.keys() == {*keys}
        assert min(counter.values()) > 0.8 * max(counter.values())


def test_a_cipher_has_one_of_sixteen_keys_and_shows_a_pair_every_four_tokens():
    seen = {}
    for text in documents("cipher", train_documents=400, length=40):
        tokens = text.split(" ")
        assert len(tokens) == 4 * 40 - 1
        assert tokens[0::4] == ["two"] * 40
        assert (tokens[1::4], tokens[3::4]) == (["three"] * 40, ["one"] * 39)
        pairs = tokens[2::4]
        key = dict(pairs)
        assert all(key[letter] == code for letter, code in pairs)
        if len(key) == 8:  # all but one text in 25
            assert sorted(key.values()) == [*"ABCDEFGH"]
            seen.setdefault("".join(key[letter] for letter in "abcdefgh"), []).append(pairs)
    assert len(seen) == 16
    for letter in range(8):  # a letter alone says nothing of its code
        assert sorted(key[letter] for key in seen) == [*"AABBCCDDEEFFGGHH"]
    texts = [len(pairs) for pairs in seen.values()]
    assert sum(texts) > 350
    assert max(texts) < 3 * min(texts)  # about 24 of each


@pytest.mark.parametrize("letters", [5, 8])
def test_hops_of_a_whole_cycle_are_refused(letters):
    with pytest.raises(ValueError, match=f"levels={letters} must be at most {letters - 1}"):
        SyntheticText(task="hops", levels=letters, letters=letters, cache_dir="unused")


@pytest.mark.parametrize("key", ["levels", "letters"])
def test_levels_and_letters_are_part_of_the_identity_of_texts_that_have_them(key):
    def source(task, value):
        sizes = {"levels": 3, "letters": 6, key: value}
        return SyntheticText(task=task, cache_dir="unused", **sizes).source()

    for task in ("recall", "cipher"):
        assert source(task, 4) == source(task, 5)
        assert key not in source(task, 4)
    for task in ("hops", "operands"):
        assert source(task, 4) != source(task, 5)
