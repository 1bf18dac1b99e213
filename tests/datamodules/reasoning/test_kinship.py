"""Stories: true in their family, answered by the rules, the same for everybody."""

import hashlib
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch

from datamodules import Kinship
from datamodules.reasoning.kinship import (
    COMPOSITION,
    FAMILIES,
    GENDERS,
    MAX_HOPS,
    NAMES,
    POSSESSIVE,
    RELATIONS,
    SENTENCES,
    VERSION,
    WORDS,
    Draws,
    Family,
    chain,
    family,
    people_of,
    split_of_names,
    write_story,
)
from datamodules.store import SPLITS

SIZES = {"train_stories": 40, "val_stories": 9, "test_stories": 12}
KNOWN_TEXT = (1, "4f3a593dfa9b6a74")  # VERSION and digest: change both or neither


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("kinship"))

    def build(**options) -> Kinship:
        defaults = {**SIZES, "block_size": 640, "batch_size": 4, "num_proc": 1, "cache_dir": cache}
        data = Kinship(**{**defaults, **options})
        data.prepare_data()
        data.setup()
        return data

    return build


def compose(kinds):
    """The kinds that follow from a chain between different people, joined in every order.

    In "my father's father's son" the last two make a brother, so he is an uncle, where the first
    two alone would leave it open.
    """
    table = {(i, i + 1): {kind} for i, kind in enumerate(kinds)}
    for width in range(2, len(kinds) + 1):
        for start in range(len(kinds) - width + 1):
            end = start + width
            table[start, end] = {
                COMPOSITION[first, second]
                for middle in range(start + 1, end)
                for first in table[start, middle]
                for second in table[middle, end]
                if (first, second) in COMPOSITION
            }
    return table[0, len(kinds)]


# ---- families and rules


def test_the_rules_are_those_that_hold_in_every_family():
    """Over all triples of people of all families of a seed; none is missing."""
    seen = defaultdict(set)
    for number in range(FAMILIES):
        grown = family(0, number)
        for a, kin in enumerate(grown.kin):
            for b, first in kin.items():
                for c, second in grown.kin[b].items():
                    if c != a:
                        seen[first, second].add(grown.relation(a, c))
    certain = {pair: kinds for pair, kinds in seen.items() if len(kinds) == 1 and None not in kinds}
    assert certain == {pair: {kind} for pair, kind in COMPOSITION.items()}


def test_a_hand_made_family():
    grown = Family()
    husband, wife = grown.add("male"), grown.add("female")
    grown.marry(husband, wife)
    son, daughter = (grown.beget(husband, wife, gender) for gender in GENDERS)
    bride = grown.add("female")
    grown.marry(son, bride)
    grandson = grown.beget(son, bride, "male")
    assert grown.relation(grandson, wife) == "grandparent"
    assert grown.relation(grandson, daughter) == "pibling"
    assert grown.relation(daughter, grandson) == "nibling"
    assert grown.relation(bride, husband) == "parent_in_law"
    assert grown.relation(bride, daughter) == grown.relation(daughter, bride) == "sibling_in_law"
    assert grown.relation(wife, bride) == "child_in_law"
    assert grown.relation(husband, wife) == "spouse"


# ---- stories


@pytest.mark.parametrize("hops", [1, 2, 3, 4, 7, 10])
def test_rules_and_genealogy_agree_on_the_answer(hops):
    for i in range(60):
        place, facts = chain(0, hops, Draws(f"{hops}/{i}"))
        first, last = facts[0].a, facts[-1].b
        assert len(facts) == hops
        assert len(people_of(facts)) == hops + 1
        assert all(one.b == other.a for one, other in pairwise(facts))
        assert all(place.relation(fact.a, fact.b) == fact.relation for fact in facts)
        assert compose([fact.relation for fact in facts]) == {place.relation(first, last)}


def test_the_longest_chains_have_every_answer():
    answers = Counter(write_story(0, "test", i, hops=MAX_HOPS).answer[1:] for i in range(400))
    assert set(answers) == set(RELATIONS)
    assert max(answers.values()) < 3 * min(answers.values()) + 15


def test_a_story_can_be_read_back():
    """Every sentence states its fact and nothing else of the family is said."""
    for i in range(50):
        story = write_story(1, "train", i, hops=4)
        body, question, last = story.prompt.split("\n")
        sentences = [sentence.strip() + "." for sentence in body.split(".") if sentence]
        assert len(sentences) == 4
        for sentence, fact in zip(sentences, story.stated, strict=True):
            a, b = story.names[fact.a], story.names[fact.b]
            assert a in sentence
            assert b in sentence
            assert any(f" {word}" in sentence for word in WORDS[fact.relation].values())
        ends = story.names[story.facts[-1].b], story.names[story.facts[0].a]
        assert question == "Question: How is {} related to {}?".format(*ends)
        assert last == "Answer:"
        assert story.answer[0] == " "
        assert story.answer[1:] in RELATIONS


def test_text_changes_only_with_the_version():
    """Prepared text is found again by the version: other text under the same one would be stale."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for i in range(300):
            story = write_story(0, split, i, hops=1 + i % 10, distractors=i % 3, shuffle=i % 2 == 1)
            digest.update(f"{story.prompt}{story.answer}".encode())
    assert (VERSION, digest.hexdigest()[:16]) == KNOWN_TEXT


def test_longer_chains_are_new_and_short_ones_are_not():
    """What the docstring says of validation and test."""

    def sequences(split, hops, count):
        stories = (write_story(0, split, i, hops=hops[i % len(hops)]) for i in range(count))
        return [tuple(fact.relation for fact in story.facts) for story in stories]

    trained = set(sequences("train", [2, 3, 4], 3000))
    validated = sequences("val", [2, 3, 4], 300)
    assert sum(kinds in trained for kinds in validated) > 0.9 * len(validated)
    assert not trained & set(sequences("test", [5, 10], 100))


def test_distractors_and_order_change_neither_chain_nor_answer():
    plain = write_story(0, "val", 3, hops=3)
    story = write_story(0, "val", 3, hops=3, distractors=4)
    chained = people_of(story.facts)
    extra = [fact for fact in story.stated if fact not in story.facts]
    assert (plain.facts, plain.answer) == (story.facts, story.answer)
    assert all(fact.a in chained and fact.b not in chained for fact in extra)
    assert len({fact.b for fact in extra}) == len(extra) == 4
    assert tuple(fact for fact in story.stated if fact in story.facts) == story.facts
    shuffled = [write_story(0, "val", i, hops=5, shuffle=True) for i in range(5)]
    assert all(set(story.stated) == set(story.facts) for story in shuffled)
    assert any(story.stated != story.facts for story in shuffled)


def test_no_story_is_in_two_splits():
    for split in SPLITS:
        for i in range(20):
            assert split_of_names(write_story(0, split, i, hops=2).names.values()) == split


def test_names_give_the_gender_and_sentences_are_complete():
    assert not set(NAMES["male"]) & set(NAMES["female"])
    assert all(len(set(names)) == len(names) > MAX_HOPS + 11 for names in NAMES.values())
    assert set(WORDS) == set(SENTENCES)
    for kind, templates in SENTENCES.items():
        for template in templates:
            text = template.format(a="<a>", b="<b>", r="<r>", his=POSSESSIVE["male"])
            assert all(text.count(part) == 1 for part in ("<a>", "<b>", "<r>")), (kind, template)
            assert text.endswith(".")
            assert text.count(".") == 1


# ---- batches


def rows_of(data, split):
    source = data.evaluation_source(split)
    for n in range(len(source)):
        batch = source.batch(n)
        for row in range(len(batch["tokens"])):
            yield {key: value[row] for key, value in batch.items()}


def test_a_row_is_one_story_and_its_answer_is_marked(make):
    data = make()
    decode, eos = data.tokenizer.decode, data.tokenizer.eos_id
    expected = list(data.questions("test"))
    rows = [row for row in rows_of(data, "test") if row["answer"].any()]
    assert len(rows) == len(expected) == 12
    for row, (question, answer), hops in zip(rows, expected, [5, 6, 7, 8, 9, 10] * 2, strict=True):
        tokens, targets = row["tokens"], row["targets"]
        assert tokens[0] == eos
        assert decode(tokens[row["mask"]][1:].tolist()) == question + answer
        assert torch.equal(targets >= 0, row["answer"])
        assert decode(targets[row["answer"]][:-1].tolist()) == answer
        assert targets[row["answer"]][-1] == eos
        assert row["num_bytes"] == len(answer)
        assert row["group"] == hops
    for split in SPLITS:
        longest = max(len(q + a) + 1 for q, a in data.questions(split))
        assert data.evaluation_source(split).batch(0)["tokens"].shape == (4, longest)
    *_, filling = rows_of(make(eval_batch_size=5), "val")  # 9 stories, 10 rows
    assert (filling["targets"] == -100).all()
    assert not (filling["answer"] | filling["mask"]).any()
    assert (filling["group"], filling["num_bytes"]) == (-1, 0)


def test_loss_on_all_predicts_the_story_too(make):
    data = make(loss_on="all")
    row = next(rows_of(data, "val"))
    question, answer = next(data.questions("val"))
    predicted = row["targets"][row["targets"] >= 0]
    assert data.tokenizer.decode(predicted[:-1].tolist()) == question + answer
    assert data.tokenizer.decode(row["targets"][row["answer"]][:-1].tolist()) == answer
    assert row["num_bytes"] == len(question + answer)
    assert data.fingerprint == make().fingerprint
    source = data.training_source()
    assert source.counts(0)["targets"] == (source.batch(0)["targets"] >= 0).sum()
    apart = make(tokenizer="bpe:300")  # an answer has the same tokens wherever it stands
    row = next(rows_of(apart, "test"))
    candidates = [apart.tokenizer.encode(text) for text in apart.candidates()]
    assert row["targets"][row["answer"]][:-1].tolist() in candidates


def test_splits_may_be_left_out(make):
    data = make(val_stories=0, test_stories=0)
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match="test_stories"):
        data.test_dataloader()


def test_stories_that_do_not_fit_are_left_out_and_counted(make):
    sizes = [len(q + a) + 1 for q, a in make().questions("test")]  # with an EOS
    answers = [a for _, a in make().questions("test")]
    block_size = max(max(len(q + a) + 1 for q, a in make().questions("train")), min(sizes))
    longer = sum(size > block_size for size in sizes)
    assert 0 < longer < len(sizes)
    with pytest.warns(UserWarning, match=f"{longer} of {len(sizes)} questions of the test split"):
        data = make(block_size=block_size)
    assert (data.left_out("test"), data.left_out("train")) == (longer, 0)
    source = data.evaluation_source("test")
    batches = [source.batch(n) for n in range(len(source))]
    asked = [
        (number, bytes(targets[targets >= 0].tolist()[:-1]).decode())
        for batch in batches
        for number, targets in zip(batch["sequence_id"].tolist(), batch["targets"], strict=True)
        if (targets >= 0).any()
    ]
    assert asked == [
        (number, answers[number]) for number, size in enumerate(sizes) if size <= block_size
    ]
    assert max(batch["tokens"].shape[1] for batch in batches) <= block_size


def test_a_story_of_the_training_that_does_not_fit_says_what_would(make):
    longest = max(len(q + a) + 1 for q, a in make().questions("train"))
    with pytest.raises(ValueError, match=f"train split has {longest} tokens .*block_size"):
        make(block_size=longest - 1)
    assert make(block_size=longest).block_size == longest
