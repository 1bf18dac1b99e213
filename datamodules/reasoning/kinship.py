"""Kinship stories: chains of stated relations that imply another relation.

A seeded generator in the style of CLUTRR (Sinha et al. 2019, arXiv 1908.06177). CLUTRR's text is
crowd-sourced; here it is written from templates, so any number of stories can be generated without
a download:

    Anna is Paul's mother. Anna's brother is Mark.
    Question: How is Mark related to Paul?
    Answer: uncle

CLUTRR's rules are `COMPOSITION`, its kinship graph is `family`, "backward chaining", which replaces
a fact by two that imply it, is `chain`, and its noise facts are `distractions`.

"B is A's mother" is the relation ``parent`` from A to B; B's gender selects the word. In the
families of `family`, children have two married parents, nobody marries twice, and relatives do not
marry. Uncles, aunts, nephews and nieces are relatives by blood; brothers- and sisters-in-law are
the siblings of one's spouse and the spouses of one's siblings.
"""

import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from datamodules.answers import AnswerDataModule
from datamodules.base import raise_problems, range_problems
from datamodules.store import SPLITS, Split

VERSION = 1
"""Incremented with every change of the text; part of the corpus' identity."""
FAMILIES = 64
"""Genealogies per seed; each story picks one and names its people."""
MAX_HOPS = 12
"""Longest chain for which the families are large enough, tested for every answer."""
MAX_DISTRACTORS = 10
_SHARES: dict[Split, range] = {"train": range(8), "val": range(8, 9), "test": range(9, 10)}
"""Residues modulo 10 of a hash of the names, by split."""

# ---- relations and words


Gender = Literal["male", "female"]
RelationType = str
"""A key of `WORDS`; ``pibling`` is uncle or aunt, ``nibling`` nephew or niece."""
GENDERS: tuple[Gender, ...] = ("male", "female")

WORDS: dict[RelationType, dict[Gender, str]] = {
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
RELATION_TYPES: tuple[RelationType, ...] = tuple(WORDS)
RELATIONS: tuple[str, ...] = tuple(word for forms in WORDS.values() for word in forms.values())

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
COMPOSITION: dict[tuple[RelationType, RelationType], RelationType] = {
    (first, second): both
    for first, _, pairs in (line.partition(": ") for line in _RULES.split("\n")[1:-1])
    for second, both in (pair.split("=") for pair in pairs.split())
}
"""(relation from A to B, relation from B to C) -> relation from A to C, for three different people.

A line of `_RULES` begins with the first relation. The rules are exactly the pairs with a single
answer in every family: a parent's child is a sibling, since it is not oneself, but a grandparent's
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

# {a} is the person, with the possessive {his}; {b} the relative; {r} the word for the relation.
# Every sentence states the relation of b to a, and b's gender through the word.
_PLAIN = (
    "{b} is {a}'s {r}.",
    "{a}'s {r} is {b}.",
    "{b} is the {r} of {a}.",
    "The {r} of {a} is called {b}.",
)
_EVENTS: dict[RelationType, tuple[str, ...]] = {
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
SENTENCES: dict[RelationType, tuple[str, ...]] = {
    relation: (*_PLAIN, *events) for relation, events in _EVENTS.items()
}
QUESTION = "Question: How is {b} related to {a}?\nAnswer:"
"""Prompt of the answer, which is a space and the word for the relation."""

# ---- random draws that are the same in every Python version


T = TypeVar("T")


class Draws:
    """Random choices from one key.

    The standard generator guarantees reproducibility across versions only for seeding with a string
    and for `random()`; everything here is built on these two.

    Args:
        key: Any string; the choices are a pure function of it and the previous calls.
    """

    def __init__(self, key: str) -> None:
        self._random = random.Random(key)

    def below(self, n: int) -> int:
        """Returns an integer in [0, n)."""
        return int(self._random.random() * n)

    def between(self, low: int, high: int) -> int:
        """Returns an integer in [low, high]."""
        return low + self.below(high - low + 1)

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
    """A member of a family; people are identified by their index in `Family.people`."""

    gender: Gender
    parents: list[int] = field(default_factory=list)
    """Both parents, or none if they are not part of the family."""
    spouses: list[int] = field(default_factory=list)
    """At most one."""
    children: list[int] = field(default_factory=list)


@dataclass
class Family:
    """A genealogy over four generations, with the families of its spouses.

    No two people are related in two ways, because spouses come from separate families.
    """

    people: list[Person] = field(default_factory=list)

    def relation(self, a: int, b: int) -> RelationType | None:
        """Returns the relation of `b` to `a`, or None if there is no word for it."""
        return self.kin[a].get(b)

    @cached_property
    def kin(self) -> list[dict[int, RelationType]]:
        """For each person a, the relations {b: relation of b to a} that have a word."""
        return [self._kin_of(person, a) for a, person in enumerate(self.people)]

    def _kin_of(self, person: Person, a: int) -> dict[int, RelationType]:
        siblings = self._siblings(a)
        groups: dict[RelationType, list[int]] = {
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
        return {b: relation for relation, members in groups.items() for b in members}

    def _siblings(self, a: int) -> list[int]:
        parents = self.people[a].parents
        return [c for c in self.people[parents[0]].children if c != a] if parents else []

    def add(self, gender: Gender) -> int:
        """Adds a person without relatives; returns their index."""
        self.people.append(Person(gender))
        return len(self.people) - 1

    def marry(self, a: int, b: int) -> tuple[int, int]:
        """Marries two people; returns them."""
        self.people[a].spouses, self.people[b].spouses = [b], [a]
        return a, b

    def beget(self, a: int, b: int, gender: Gender) -> int:
        """Adds a child of the couple; returns the child's index."""
        child = self.add(gender)
        self.people[child].parents = [a, b]
        self.people[a].children.append(child)
        self.people[b].children.append(child)
        return child


@cache
def family(seed: int, index: int) -> Family:
    """Returns genealogy `index` of a seed: four generations, about 60 people."""
    draws, grown = Draws(f"family/{seed}/{index}"), Family()

    def couple() -> tuple[int, int]:
        """Adds a married couple."""
        return grown.marry(grown.add("male"), grown.add("female"))

    def children(a: int, b: int, low: int, high: int) -> list[int]:
        """Adds `low` to `high` children of a couple."""
        count = draws.between(low, high)
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
    for married, high in ((0.8, 5), (0.5, 4)):
        generation = [
            child
            for person in generation
            if draws.chance(married)
            for child in children(*grown.marry(person, spouse_of(person)), 1, high)
        ]
    return grown


# ---- stories


class Fact(NamedTuple):
    """`b` is the `relation` of `a`; people are indices in their family."""

    a: int
    b: int
    relation: RelationType


@dataclass(frozen=True, kw_only=True)
class Story:
    """A story with its question and answer.

    Attributes:
        facts: The chain from the first person to the last, in order.
        stated: All facts in the order of the sentences, including distractors.
        names: Name of each person in the story, by index in the family.
        prompt: Sentences and question, up to the answer.
        answer: A space and the relation of the chain's last person to the first.
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
    """Generates a story, as a pure function of the arguments.

    No story is in two splits, because the set of its names determines the split.

    Args:
        seed: Seed of all stories and families.
        split: Split of the story.
        index: Index of the story in the split.
        hops: Number k of facts between the two people in question, in [1, `MAX_HOPS`].
        distractors: Number of facts that are irrelevant to the answer, in [0, `MAX_DISTRACTORS`].
        shuffle: Whether facts are stated in random order or in the order of the chain.
    """
    draws = Draws(f"story/{seed}/{split}/{index}")
    genealogy, facts = chain(seed, hops, draws)
    stated = _order(facts, distractions(genealogy, facts, distractors, draws), shuffle, draws)
    names = _names(genealogy, stated, split, draws)
    first, last = facts[0].a, facts[-1].b
    sentences = [_sentence(genealogy, fact, names, draws) for fact in stated]
    question = QUESTION.format(a=names[first], b=names[last])
    relation = genealogy.relation(first, last)
    assert relation is not None
    return Story(
        facts=tuple(facts),
        stated=tuple(stated),
        names=names,
        prompt=" ".join(sentences) + "\n" + question,
        answer=" " + WORDS[relation][genealogy.people[last].gender],
    )


def chain(seed: int, hops: int, draws: Draws) -> tuple[Family, list[Fact]]:
    """Returns a family and k facts that connect k + 1 of its people.

    As in CLUTRR, it starts with one fact, which becomes the answer, and replaces facts by two that
    imply them until there are k, so the answer always follows from the facts. Each of the 22
    answers is equally likely.
    """
    relation, gender = draws.pick(RELATION_TYPES), draws.pick(GENDERS)
    while True:
        genealogy = family(seed, draws.below(FAMILIES))
        candidates = [
            Fact(a, b, relation)
            for a, kin in enumerate(genealogy.kin)
            for b, other in kin.items()
            if other == relation and genealogy.people[b].gender == gender
        ]
        facts: list[Fact] | None = [draws.pick(candidates)] if candidates else None
        while facts and len(facts) < hops:
            facts = _longer(genealogy, facts, draws)
        if facts:
            return genealogy, facts


def _longer(genealogy: Family, facts: list[Fact], draws: Draws) -> list[Fact] | None:
    """Returns the chain with one of its facts replaced by two, or None if none can be."""
    used = people_of(facts)
    for i in draws.shuffled(range(len(facts))):
        a, b, _ = facts[i]
        options = [
            (Fact(a, c, relation), Fact(c, b, genealogy.kin[c][b]))
            for c, relation in genealogy.kin[a].items()
            if c not in used and (relation, genealogy.relation(c, b)) in COMPOSITION
        ]
        if options:
            return [*facts[:i], *draws.pick(options), *facts[i + 1 :]]
    return None


def distractions(genealogy: Family, facts: Sequence[Fact], count: int, draws: Draws) -> list[Fact]:
    """Returns up to `count` facts, each about a person of the chain and a new one.

    Each touches the chain at one end only, so it implies nothing about the question. There are
    fewer if the family runs out of people.
    """
    chained = sorted(people_of(facts))
    used, extra = set(chained), []
    for _ in range(count):
        free = [(a, b) for a in chained for b in genealogy.kin[a] if b not in used]
        if not free:
            break
        a, b = draws.pick(free)
        used.add(b)
        extra.append(Fact(a, b, genealogy.kin[a][b]))
    return extra


def people_of(facts: Sequence[Fact]) -> set[int]:
    """Returns all people in the facts."""
    return {person for fact in facts for person in (fact.a, fact.b)}


def _order(facts: Sequence[Fact], extra: Sequence[Fact], shuffle: bool, draws: Draws) -> list[Fact]:
    if shuffle:
        return draws.shuffled([*facts, *extra])
    stated = list(facts)
    for fact in extra:  # at a random position; the chain keeps its order
        stated.insert(draws.below(len(stated) + 1), fact)
    return stated


def _names(genealogy: Family, stated: Sequence[Fact], split: Split, draws: Draws) -> dict[int, str]:
    while True:
        free = {gender: list(names) for gender, names in NAMES.items()}
        names = {}
        for person in sorted(people_of(stated)):
            pool = free[genealogy.people[person].gender]
            names[person] = pool.pop(draws.below(len(pool)))
        if split_of_names(names.values()) == split:
            return names


def split_of_names(names: Iterable[str]) -> Split:
    """Returns the split of a story about people with these names; 8 of 10 sets of names train."""
    share = zlib.crc32(" ".join(sorted(names)).encode()) % 10
    return next(split for split, shares in _SHARES.items() if share in shares)


def _sentence(genealogy: Family, fact: Fact, names: dict[int, str], draws: Draws) -> str:
    return draws.pick(SENTENCES[fact.relation]).format(
        a=names[fact.a],
        b=names[fact.b],
        r=WORDS[fact.relation][genealogy.people[fact.b].gender],
        his=POSSESSIVE[genealogy.people[fact.a].gender],
    )


# ---- the data module


class Kinship(AnswerDataModule):
    """Stories of k stated relations followed by a question, after CLUTRR (arXiv 1908.06177).

    Training and validation stories are short, test stories longer. Each hop count of a split has
    the same number of stories (plus or minus one), and accuracy is reported for each. No story is
    in two splits. Nothing is downloaded.

    Validation does not measure composition: short chains have few sequences of relations, and
    nearly all sequences in validation occur in training, so a lookup table would suffice. Testing
    does, because its sequences are longer than those in training.

    `val_fraction` and `test_fraction` have no effect, because the splits have explicit sizes.

    NOTE(paper): Thoughtbubbles (Fig. 7) names CLUTRR but gives neither lengths nor sizes. Training
    on 2 to 4 hops and testing on up to 10 follow CLUTRR's experiments; the sizes are ours. CLUTRR's
    sentences are crowd-sourced and some of its rules are held out; ours are templates, and all
    rules occur in training.

    Args:
        hops: Numbers of stated relations per training and validation story.
        test_hops: Numbers of stated relations per test story.
        train_stories: Number of training stories.
        val_stories: Number of validation stories; 0 omits the split.
        test_stories: Number of test stories; 0 omits the split.
        distractors: Number of further facts per story, which are irrelevant to the answer.
        shuffle_facts: Whether the facts are stated in random order instead of the chain's.
        story_seed: Seed of the stories and their families, non-negative; story i of a split is a
            pure function of (story_seed, split, i).
        **kwargs: See `AnswerDataModule`.

    Raises:
        ValueError: If an argument is out of range; in `setup`, if a story is longer than
            block_size.
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
            if not counts or not all(1 <= count <= MAX_HOPS for count in counts):
                raise ValueError(f"{key}={list(counts)} must be numbers from 1 to {MAX_HOPS}.")
        problems = range_problems(1, train_stories=train_stories)
        problems += range_problems(
            0, val_stories=val_stories, test_stories=test_stories, story_seed=story_seed
        )
        raise_problems(problems + range_problems(0, MAX_DISTRACTORS, distractors=distractors))
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
        """Returns None, because no story is in two splits."""

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

    def groups(self, split: Split, indices: np.ndarray) -> np.ndarray:
        """Returns the hops of each story."""
        hops = np.array(self._hops[split], dtype=np.int64)
        return hops[indices % len(hops)]
