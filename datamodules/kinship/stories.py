"""Stories by number."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from datamodules.kinship.draws import Draws
from datamodules.kinship.family import FAMILIES, Family, family
from datamodules.kinship.relations import COMPOSITION, GENDERS, KINDS, WORDS, Gender, Kind
from datamodules.kinship.wording import NAMES, POSSESSIVE, QUESTION, SENTENCES
from datamodules.store import Split

MOST_HOPS = 12
"""Longest chain that the families are large enough for, tested for every answer."""
MOST_DISTRACTORS = 10

VERSION = 1
"""Raised with any change that gives other text; part of the corpus' identity."""

_SHARES: dict[Split, range] = {"train": range(8), "val": range(8, 9), "test": range(9, 10)}
_SHARE_OF = 10


@dataclass(frozen=True)
class Fact:
    """`b` is `a`'s `kind`; people are places in their family."""

    a: int
    b: int
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Story:
    """What is told, asked and answered.

    Attributes:
        facts: The chain from the first person to the last, in its order.
        told: All facts in the order of the sentences, distractors included.
        names: Name of each person in the story, by place in the family.
        prompt: Sentences and question, up to the answer.
        answer: A space and what the chain's last person is to the first.
    """

    facts: tuple[Fact, ...]
    told: tuple[Fact, ...]
    names: dict[int, str]
    prompt: str
    answer: str


def tell(
    seed: int,
    split: Split,
    index: int,
    *,
    hops: int,
    distractors: int = 0,
    shuffle: bool = False,
) -> Story:
    """Returns a story: a pure function of the arguments.

    No story is in two splits: the set of its names decides the split.

    Args:
        seed: Of all stories and of the families they are about.
        split: Which part of the corpus.
        index: Number of the story in it.
        hops: k, the facts between the two people that are asked about, in [1, `MOST_HOPS`].
        distractors: Facts about people who have nothing to do with the answer, in
            [0, `MOST_DISTRACTORS`].
        shuffle: Whether facts are told in any order, or as the chain goes.
    """
    draws = Draws(f"story/{seed}/{split}/{index}")
    place, facts = chain(seed, hops, draws)
    extra = distractions(place, facts, distractors, draws)
    told = _order(facts, extra, shuffle, draws)
    names = _names(place, told, split, draws)
    first, last = facts[0].a, facts[-1].b
    sentences = [_sentence(place, fact, names, draws) for fact in told]
    question = QUESTION.format(a=names[first], b=names[last])
    kind = place.relation(first, last)
    assert kind is not None
    return Story(
        facts=tuple(facts),
        told=tuple(told),
        names=names,
        prompt=" ".join(sentences) + "\n" + question,
        answer=" " + WORDS[kind][place.people[last].gender],
    )


def chain(seed: int, hops: int, draws: Draws) -> tuple[Family, list[Fact]]:
    """Returns a family and k facts that lead through k + 1 of its people.

    As CLUTRR does: begin with one fact, which will be the answer, and replace facts by two that
    imply them, until there are k. So the answer always follows from the facts. Each of the 22
    answers is equally likely.
    """
    kind, gender = draws.pick(KINDS), draws.pick(GENDERS)
    while True:
        place = family(seed, draws.below(FAMILIES))
        found = _facts(place, kind, gender)
        facts: list[Fact] | None = [draws.pick(found)] if found else None
        while facts and len(facts) < hops:
            facts = _longer(place, facts, draws)
        if facts:
            return place, facts


def _facts(place: Family, kind: Kind, gender: Gender) -> list[Fact]:
    return [
        Fact(a, b, kind)
        for a, kin in enumerate(place.kin)
        for b, other in kin.items()
        if other == kind and place.people[b].gender == gender
    ]


def _longer(place: Family, facts: list[Fact], draws: Draws) -> list[Fact] | None:
    """Returns the chain with one of its facts replaced by two, None where none can be."""
    used = people_of(facts)
    for i in draws.shuffled(range(len(facts))):
        a, b = facts[i].a, facts[i].b
        ways = [
            (Fact(a, c, kind), Fact(c, b, place.kin[c][b]))
            for c, kind in place.kin[a].items()
            if c not in used and (kind, place.relation(c, b)) in COMPOSITION
        ]
        if ways:
            return [*facts[:i], *draws.pick(ways), *facts[i + 1 :]]
    return None


def distractions(place: Family, facts: Sequence[Fact], count: int, draws: Draws) -> list[Fact]:
    """Returns `count` facts, each about somebody of the chain and somebody new.

    Each hangs on the chain by one end, so that it implies nothing about the question. Where the
    family has no more people, there are fewer.
    """
    chained = sorted(people_of(facts))
    used, extra = set(chained), []
    for _ in range(count):
        free = [(a, b) for a in chained for b in place.kin[a] if b not in used]
        if not free:
            break
        a, b = draws.pick(free)
        used.add(b)
        extra.append(Fact(a, b, place.kin[a][b]))
    return extra


def people_of(facts: Sequence[Fact]) -> set[int]:
    """Returns everybody whom the facts are about."""
    return {person for fact in facts for person in (fact.a, fact.b)}


def _order(facts: Sequence[Fact], extra: Sequence[Fact], shuffle: bool, draws: Draws) -> list[Fact]:
    if shuffle:
        return draws.shuffled([*facts, *extra])
    told = list(facts)
    for fact in extra:  # anywhere, the chain keeps its order
        told.insert(draws.below(len(told) + 1), fact)
    return told


def _names(place: Family, told: Sequence[Fact], split: Split, draws: Draws) -> dict[int, str]:
    people = sorted(people_of(told))
    while True:
        free: dict[Gender, list[str]] = {gender: list(NAMES[gender]) for gender in NAMES}
        names = {}
        for person in people:
            pool = free[place.people[person].gender]
            names[person] = pool.pop(draws.below(len(pool)))
        if split_of(names.values()) == split:
            return names


def split_of(names: Iterable[str]) -> Split:
    """Returns the split of a story about people of these names: 8 of 10 sets of names train."""
    share = zlib.crc32(" ".join(sorted(names)).encode()) % _SHARE_OF
    return next(split for split, shares in _SHARES.items() if share in shares)


def _sentence(place: Family, fact: Fact, names: dict[int, str], draws: Draws) -> str:
    return draws.pick(SENTENCES[fact.kind]).format(
        a=names[fact.a],
        b=names[fact.b],
        r=WORDS[fact.kind][place.people[fact.b].gender],
        his=POSSESSIVE[place.people[fact.a].gender],
    )
