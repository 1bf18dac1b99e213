"""Kinship stories: who is related to whom, one stated relation after the other.

A seeded generator in the manner of CLUTRR (Sinha et al. 2019, arXiv 1908.06177). Its text is
crowd-sourced; here templates write it, so any number of stories can be made without a download:

    Anna is Paul's mother. Anna's brother is Mark.
    Question: How is Mark related to Paul?
    Answer: uncle

CLUTRR's rules are `COMPOSITION`, its kinship graph is `family`, "backward chaining", which replaces
a fact by two that imply it, is `chain`, and its noise facts are `distractions`.

"B is A's mother" is kind ``parent`` from A to B; B's gender chooses the word. In the families of
`family` children have two married parents, nobody marries twice, relatives do not marry. Uncles,
aunts, nephews and nieces are relatives by blood; brothers- and sisters-in-law are the siblings of
one's spouse and the spouses of one's siblings.
"""

import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from datamodules.answers import AnswerDataModule
from datamodules.base import outside, refuse
from datamodules.store import SPLITS, Split

VERSION = 1
"""Raised with any change that gives other text; part of the corpus' identity."""
FAMILIES = 64
"""Genealogies per seed; stories choose one of them and give its people names of their own."""
MOST_HOPS = 12
"""Longest chain that the families are large enough for, tested for every answer."""
MOST_DISTRACTORS = 10
_SHARES: dict[Split, range] = {"train": range(8), "val": range(8, 9), "test": range(9, 10)}
"""Of ten sets of names."""

# ---- relations and words


Gender = Literal["male", "female"]
Kind = str
"""A key of `WORDS`; ``pibling``: uncle or aunt, ``nibling``: nephew or niece."""
GENDERS: tuple[Gender, ...] = ("male", "female")

WORDS: dict[Kind, dict[Gender, str]] = {
    "parent": {"male": "father", "female": "mother"},
    "child": {"male": "son", "female": "daughter"},
    "sibling": {"male": "brother", "female": "sister"},
    "spouse": {"male": "husband", "female": "wife"},
    "grandparent": {"male": "grandfather", "female": "grandmother"},
    "grandchild": {"male": "grandson", "female": "granddaughter"},
    "pibling": {"male": "uncle", "female": "aunt"},
    "nibling": {"male": "nephew", "female": "niece"},
    "parent_in_law": {"male": "father-in-law", "female": "mother-in-law"},
    "child_in_law": {"male": "son-in-law", "female": "daughter-in-law"},
    "sibling_in_law": {"male": "brother-in-law", "female": "sister-in-law"},
}
KINDS: tuple[Kind, ...] = tuple(WORDS)
RELATIONS: tuple[str, ...] = tuple(word for words in WORDS.values() for word in words.values())

_RULES = """
parent: parent=grandparent child=sibling sibling=pibling spouse=parent parent_in_law=grandparent
child: parent=spouse child=grandchild sibling=child spouse=child_in_law nibling=grandchild
sibling: parent=parent child=nibling sibling=sibling spouse=sibling_in_law
sibling: grandparent=grandparent pibling=pibling
spouse: parent=parent_in_law child=child sibling=sibling_in_law grandchild=grandchild
spouse: parent_in_law=parent child_in_law=child_in_law
grandparent: spouse=grandparent
grandchild: sibling=grandchild
pibling: parent=grandparent
nibling: sibling=nibling
parent_in_law: spouse=parent_in_law
child_in_law: spouse=child child=grandchild parent_in_law=spouse
"""
COMPOSITION: dict[tuple[Kind, Kind], Kind] = {
    (first, second): both
    for first, _, pairs in (line.partition(": ") for line in _RULES.split("\n")[1:-1])
    for second, both in (pair.split("=") for pair in pairs.split())
}
"""(kind from A to B, kind from B to C) -> kind from A to C, for three different people.

A line of `_RULES` begins with the first kind. It holds the pairs that have one answer in every
family, and all of them: a parent's child is a sibling, since it is not oneself, but a grandparent's
child may be a parent or an uncle.
"""

_MALE = """
Aaron Adam Alan Albert Andrew Anthony Arthur Benjamin Bernard Brian Bruce Calvin Carl Charles
Chester Clarence Clifford Curtis Daniel David Dennis Derek Donald Douglas Duncan Edgar Edward Eric
Ernest Eugene Felix Francis Frank Fred Gary George Gilbert Glenn Gordon Gregory Harold Harry Henry
Herbert Howard Hugh Isaac Jack Jacob Jason Jeremy Jerome Joe John Jonathan Joseph Keith Kenneth
Kevin Larry Lawrence Leonard Lloyd Louis Marcus Mark Martin Matthew Michael Nicholas Norman Oliver
Oscar Owen Patrick Paul Peter Philip Quentin Ralph Raymond Richard Robert Roger Ronald Russell
Samuel Scott Simon Stanley Stephen Steven Terry Theodore Thomas Timothy Victor Vincent Walter
Warren Wesley
"""
_FEMALE = """
Agnes Alice Amanda Amy Andrea Angela Anna Audrey Barbara Betty Beverly Bonnie Brenda Camille Carol
Caroline Catherine Charlotte Christine Claire Clara Crystal Cynthia Daisy Debra Denise Diana Donna
Doris Dorothy Edith Eleanor Elizabeth Emily Esther Eva Evelyn Fiona Florence Gloria Grace Hannah
Harriet Heather Helen Ida Irene Isabel Jane Janet Jean Jennifer Jessica Joan Josephine Joyce
Judith Julia Karen Katherine Kathleen Kelly Laura Lillian Linda Lisa Lois Louise Lucy Margaret
Maria Marjorie Martha Mary Megan Melissa Michelle Mildred Monica Nancy Natalie Nicole Nora Olivia
Paula Phyllis Rachel Rebecca Rita Rose Ruth Sandra Sarah Sharon Sheila Sophia Susan Sylvia Teresa
Victoria Virginia Wendy Yvonne
"""
NAMES: dict[Gender, tuple[str, ...]] = {
    "male": tuple(_MALE.split()),
    "female": tuple(_FEMALE.split()),
}
POSSESSIVE: dict[Gender, str] = {"male": "his", "female": "her"}

# Whose relative it is: {a}, with the possessive {his}; the relative: {b}; the relation's word: {r}.
# Every sentence says what b is to a, and b's gender by the word.
_PLAIN = (
    "{b} is {a}'s {r}.",
    "{a}'s {r} is {b}.",
    "{b} is the {r} of {a}.",
    "The {r} of {a} is called {b}.",
)
_EVENTS: dict[Kind, tuple[str, ...]] = {
    "parent": (
        "{a} called {his} {r} {b} on Sunday.",
        "On Monday {a} met {his} {r} {b} at the airport.",
        "{a} asked {his} {r}, {b}, for advice.",
    ),
    "child": (
        "{a} taught {his} {r} {b} to swim.",
        "Every evening {a} practises the piano with {his} {r} {b}.",
        "{a} bought a present for {his} {r}, {b}.",
    ),
    "sibling": (
        "{a} and {his} {r} {b} went to the park.",
        "{a} quarrelled with {his} {r} {b} about football.",
        "{a} lent a bicycle to {his} {r}, {b}.",
    ),
    "spouse": (
        "{a} and {his} {r} {b} painted the house.",
        "{a} danced with {his} {r} {b} until midnight.",
        "{a} cooked dinner for {his} {r}, {b}.",
    ),
    "grandparent": (
        "{a} spent the summer with {his} {r} {b}.",
        "In winter {a} visits {his} {r} {b} by train.",
        "{a} loves the stories of {his} {r}, {b}.",
    ),
    "grandchild": (
        "{a} read a book to {his} {r} {b}.",
        "{a} showed old photographs to {his} {r} {b}.",
        "{a} baked a cake for {his} {r}, {b}.",
    ),
    "pibling": (
        "{a} went fishing with {his} {r} {b}.",
        "After school {a} works in the bakery of {his} {r} {b}.",
        "{a} got a letter from {his} {r}, {b}.",
    ),
    "nibling": (
        "{a} took {his} {r} {b} to the zoo.",
        "{a} knitted a sweater for {his} {r} {b}.",
        "{a} wrote a card to {his} {r}, {b}.",
    ),
    "parent_in_law": (
        "{a} helped {his} {r} {b} in the garden.",
        "At the wedding {a} sat beside {his} {r} {b}.",
        "{a} had lunch with {his} {r}, {b}.",
    ),
    "child_in_law": (
        "{a} drove {his} {r} {b} to the station.",
        "{a} repaired the computer of {his} {r} {b}.",
        "{a} played cards with {his} {r}, {b}.",
    ),
    "sibling_in_law": (
        "{a} watched a film with {his} {r} {b}.",
        "Last spring {a} opened a restaurant with {his} {r} {b}.",
        "{a} borrowed a ladder from {his} {r}, {b}.",
    ),
}
SENTENCES: dict[Kind, tuple[str, ...]] = {
    kind: (*_PLAIN, *events) for kind, events in _EVENTS.items()
}
QUESTION = "Question: How is {b} related to {a}?\nAnswer:"
"""Ends where the answer begins; the answer is a space and the relation's word."""

# ---- draws that every Python version makes alike


T = TypeVar("T")


class Draws:
    """Random choices from one key.

    Of the standard generator only seeding with a text and `random()` are promised to give the same
    in every version; all else here is made of these two.

    Args:
        key: Any text; the choices are a pure function of it and of the calls so far.
    """

    def __init__(self, key: str) -> None:
        self._random = random.Random(key)

    def below(self, n: int) -> int:
        """Returns an integer in [0, n)."""
        return int(self._random.random() * n)

    def between(self, least: int, most: int) -> int:
        """Returns an integer in [least, most]."""
        return least + self.below(most - least + 1)

    def chance(self, probability: float) -> bool:
        """Returns True with that probability."""
        return self._random.random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """Returns one of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Returns the items in a random order."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in items]


# ---- families


@dataclass
class Person:
    """A member of a family; people are named by their place in `Family.people`."""

    gender: Gender
    parents: list[int] = field(default_factory=list)
    """Both, or none for those whose origin is not part of the family."""
    spouses: list[int] = field(default_factory=list)
    """One at most."""
    children: list[int] = field(default_factory=list)


@dataclass
class Family:
    """A genealogy over four generations, with the families that people marry into.

    No two people are related in two ways: spouses come from families of their own.
    """

    people: list[Person] = field(default_factory=list)

    def relation(self, a: int, b: int) -> Kind | None:
        """Returns what `b` is to `a`, read off parents, spouses and children; None: no word."""
        return self.kin[a].get(b)

    @cached_property
    def kin(self) -> list[dict[int, Kind]]:
        """For each person a, {b: what b is to a} over everybody with a word for it."""
        return [self._kin_of(person, a) for a, person in enumerate(self.people)]

    def _kin_of(self, person: Person, a: int) -> dict[int, Kind]:
        siblings = self._siblings(a)
        groups: dict[Kind, list[int]] = {
            "parent": person.parents,
            "child": person.children,
            "sibling": siblings,
            "spouse": person.spouses,
            "grandparent": [b for p in person.parents for b in self.people[p].parents],
            "grandchild": [b for c in person.children for b in self.people[c].children],
            "pibling": [b for p in person.parents for b in self._siblings(p)],
            "nibling": [b for s in siblings for b in self.people[s].children],
            "parent_in_law": [b for s in person.spouses for b in self.people[s].parents],
            "child_in_law": [b for c in person.children for b in self.people[c].spouses],
            "sibling_in_law": [b for s in person.spouses for b in self._siblings(s)]
            + [b for s in siblings for b in self.people[s].spouses],
        }
        return {b: kind for kind, members in groups.items() for b in members}

    def _siblings(self, a: int) -> list[int]:
        parents = self.people[a].parents
        return [c for c in self.people[parents[0]].children if c != a] if parents else []

    def add(self, gender: Gender) -> int:
        """Adds somebody without relatives; returns their place."""
        self.people.append(Person(gender))
        return len(self.people) - 1

    def marry(self, a: int, b: int) -> tuple[int, int]:
        """Makes two people spouses; returns them."""
        self.people[a].spouses, self.people[b].spouses = [b], [a]
        return a, b

    def beget(self, a: int, b: int, gender: Gender) -> int:
        """Adds a child of the couple; returns its place."""
        child = self.add(gender)
        self.people[child].parents = [a, b]
        self.people[a].children.append(child)
        self.people[b].children.append(child)
        return child


@cache
def family(seed: int, number: int) -> Family:
    """Returns genealogy `number` of a seed over four generations, some 60 people."""
    draws, grown = Draws(f"family/{seed}/{number}"), Family()

    def couple() -> tuple[int, int]:
        """Adds two who are married."""
        return grown.marry(grown.add("male"), grown.add("female"))

    def children(a: int, b: int, least: int, most: int) -> list[int]:
        """Adds some children of two parents."""
        count = draws.between(least, most)
        return [grown.beget(a, b, draws.pick(GENDERS)) for _ in range(count)]

    def spouse_of(person: int) -> int:
        """Adds a spouse, often with parents and siblings."""
        gender: Gender = "female" if grown.people[person].gender == "male" else "male"
        if not draws.chance(0.5):
            return grown.add(gender)
        parents = couple()
        spouse = grown.beget(*parents, gender)
        children(*parents, 0, 2)
        return spouse

    generation = children(*couple(), 4, 6)
    for married, most in ((0.8, 5), (0.5, 4)):
        generation = [
            child
            for person in generation
            if draws.chance(married)
            for child in children(*grown.marry(person, spouse_of(person)), 1, most)
        ]
    return grown


# ---- stories


class Fact(NamedTuple):
    """`b` is `a`'s `kind`; people are places in their family."""

    a: int
    b: int
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Story:
    """What is stated, asked and answered.

    Attributes:
        facts: The chain from the first person to the last, in its order.
        stated: All facts in the order of the sentences, distractors included.
        names: Name of each person in the story, by place in the family.
        prompt: Sentences and question, up to the answer.
        answer: A space and what the chain's last person is to the first.
    """

    facts: tuple[Fact, ...]
    stated: tuple[Fact, ...]
    names: dict[int, str]
    prompt: str
    answer: str


def write_story(
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
        shuffle: Whether facts are stated in any order, or as the chain goes.
    """
    draws = Draws(f"story/{seed}/{split}/{index}")
    place, facts = chain(seed, hops, draws)
    stated = _order(facts, distractions(place, facts, distractors, draws), shuffle, draws)
    names = _names(place, stated, split, draws)
    first, last = facts[0].a, facts[-1].b
    sentences = [_sentence(place, fact, names, draws) for fact in stated]
    question = QUESTION.format(a=names[first], b=names[last])
    kind = place.relation(first, last)
    assert kind is not None
    return Story(
        facts=tuple(facts),
        stated=tuple(stated),
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
        found = [
            Fact(a, b, kind)
            for a, kin in enumerate(place.kin)
            for b, other in kin.items()
            if other == kind and place.people[b].gender == gender
        ]
        facts: list[Fact] | None = [draws.pick(found)] if found else None
        while facts and len(facts) < hops:
            facts = _longer(place, facts, draws)
        if facts:
            return place, facts


def _longer(place: Family, facts: list[Fact], draws: Draws) -> list[Fact] | None:
    """Returns the chain with one of its facts replaced by two, None where none can be."""
    used = people_of(facts)
    for i in draws.shuffled(range(len(facts))):
        a, b, _ = facts[i]
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
    stated = list(facts)
    for fact in extra:  # anywhere, the chain keeps its order
        stated.insert(draws.below(len(stated) + 1), fact)
    return stated


def _names(place: Family, stated: Sequence[Fact], split: Split, draws: Draws) -> dict[int, str]:
    while True:
        free = {gender: list(names) for gender, names in NAMES.items()}
        names = {}
        for person in sorted(people_of(stated)):
            pool = free[place.people[person].gender]
            names[person] = pool.pop(draws.below(len(pool)))
        if split_of_names(names.values()) == split:
            return names


def split_of_names(names: Iterable[str]) -> Split:
    """Returns the split of a story about people of these names: 8 of 10 sets of names train."""
    share = zlib.crc32(" ".join(sorted(names)).encode()) % 10
    return next(split for split, shares in _SHARES.items() if share in shares)


def _sentence(place: Family, fact: Fact, names: dict[int, str], draws: Draws) -> str:
    return draws.pick(SENTENCES[fact.kind]).format(
        a=names[fact.a],
        b=names[fact.b],
        r=WORDS[fact.kind][place.people[fact.b].gender],
        his=POSSESSIVE[place.people[fact.a].gender],
    )


# ---- the data module


class Kinship(AnswerDataModule):
    """Stories of k stated relations that end in a question, after CLUTRR (arXiv 1908.06177).

    Train and validation stories are short, test stories longer. The hop counts of a split have
    equally many stories, up to one, and accuracy is reported for each. No story is in two splits.
    Nothing is downloaded.

    Validation does not measure composing: short chains have few sequences of kinds, and nearly all
    of those in validation occur in training, so a table of them answers it. The test does: no
    sequence that long was seen.

    `val_fraction` and `test_fraction` have no effect: the splits have sizes of their own.

    NOTE(paper): Thoughtbubbles (Fig. 7) names CLUTRR but neither lengths nor sizes. Hops 2 to 4 for
    training and up to 10 for the test follow CLUTRR's own experiments, the sizes are ours. CLUTRR's
    sentences are crowd-sourced and its rules partly held out; ours are templates and all rules
    occur in training.

    Args:
        hops: Stated relations per training and validation story, one or several numbers.
        test_hops: The same of the test stories.
        train_stories: Training stories.
        val_stories: Validation stories; 0: no such split.
        test_stories: Test stories; 0: no such split.
        distractors: Further facts per story, without effect on the answer.
        shuffle_facts: Whether the facts are stated in any order; else as the chain goes.
        story_seed: Seed of the stories and their families, non-negative; story i of a split is a
            pure function of (story_seed, split, i).
        **kwargs: See `AnswerDataModule`.

    Raises:
        ValueError: An argument is out of its range; in `setup`: a story is longer than block_size.
    """

    not_in_source: ClassVar[frozenset[str]] = AnswerDataModule.not_in_source | {
        "val_fraction",
        "test_fraction",
    }
    group_name: ClassVar[str] = "hops"

    def __init__(
        self,
        *,
        hops: Sequence[int] = (2, 3, 4),
        test_hops: Sequence[int] = (5, 6, 7, 8, 9, 10),
        train_stories: int = 20_000,
        val_stories: int = 1_500,
        test_stories: int = 3_000,
        distractors: int = 0,
        shuffle_facts: bool = False,
        story_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for key, counts in (("hops", hops), ("test_hops", test_hops)):
            if not counts or not all(1 <= count <= MOST_HOPS for count in counts):
                raise ValueError(f"{key}={list(counts)} must be numbers from 1 to {MOST_HOPS}.")
        problems = outside(1, train_stories=train_stories)
        problems += outside(
            0, val_stories=val_stories, test_stories=test_stories, story_seed=story_seed
        )
        refuse(problems + outside(0, MOST_DISTRACTORS, distractors=distractors))
        self._hops: dict[Split, Sequence[int]] = {"train": hops, "val": hops, "test": test_hops}
        sizes = (train_stories, val_stories, test_stories)
        self._sizes: dict[Split, int] = dict(zip(SPLITS, sizes, strict=True))
        self._distractors, self._shuffle_facts = distractors, shuffle_facts
        self._story_seed = story_seed

    def source(self) -> dict[str, Any]:
        return {**super().source(), "generator": VERSION}

    def expects(self, split: Split) -> bool:
        return self._sizes[split] > 0

    def how_to_get(self, split: Split) -> str:
        return f"Set {split}_stories above 0."

    def repeats_cure(self) -> None:
        """Returns None: no story is in two splits."""

    def questions(self, split: Split) -> Iterator[tuple[str, str]]:
        """Yields (story with question, answer) of a split."""
        for index in range(self._sizes[split]):
            story = write_story(
                self._story_seed,
                split,
                index,
                hops=self._hops[split][index % len(self._hops[split])],
                distractors=self._distractors,
                shuffle=self._shuffle_facts,
            )
            yield story.prompt, story.answer

    def candidates(self) -> list[str]:
        """Returns the 22 relations."""
        return [f" {word}" for word in RELATIONS]

    def groups(self, split: Split, numbers: np.ndarray) -> np.ndarray:
        """Returns the hops of each story."""
        hops = np.array(self._hops[split], dtype=np.int64)
        return hops[numbers % len(hops)]
