"""Random genealogies without names, and who is what to whom in them."""

from dataclasses import dataclass, field
from functools import cache, cached_property

from datamodules.kinship.draws import Draws
from datamodules.kinship.relations import GENDERS, Gender, Kind

FAMILIES = 64
"""Genealogies per seed; stories choose one of them and give its people names of their own."""


@dataclass
class Person:
    """Somebody of a family; people are named by their place in `Family.people`.

    Attributes:
        gender: 'male' or 'female'.
        parents: Both parents, or none for those whose origin is not part of the family.
        spouse: The one married, if any.
        children: All children, in both parents' lists.
    """

    gender: Gender
    parents: tuple[int, ...] = ()
    spouse: int | None = None
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
        return [self._kin_of(a) for a in range(len(self.people))]

    def _kin_of(self, a: int) -> dict[int, Kind]:
        person = self.people[a]
        siblings = self._siblings(a)
        by_marriage = [] if person.spouse is None else [person.spouse]
        groups: dict[Kind, list[int]] = {
            "parent": list(person.parents),
            "child": person.children,
            "sibling": siblings,
            "spouse": by_marriage,
            "grandparent": [g for p in person.parents for g in self.people[p].parents],
            "grandchild": [g for c in person.children for g in self.people[c].children],
            "pibling": [s for p in person.parents for s in self._siblings(p)],
            "nibling": [c for s in siblings for c in self.people[s].children],
            "parent_in_law": [p for s in by_marriage for p in self.people[s].parents],
            "child_in_law": self._spouses(person.children),
            "sibling_in_law": [b for s in by_marriage for b in self._siblings(s)]
            + self._spouses(siblings),
        }
        return {b: kind for kind, members in groups.items() for b in members}

    def _siblings(self, a: int) -> list[int]:
        parents = self.people[a].parents
        return [c for c in self.people[parents[0]].children if c != a] if parents else []

    def _spouses(self, group: list[int]) -> list[int]:
        found = (self.people[a].spouse for a in group)
        return [spouse for spouse in found if spouse is not None]

    # ---- growing

    def add(self, gender: Gender) -> int:
        """Adds somebody without relatives; returns their place."""
        self.people.append(Person(gender))
        return len(self.people) - 1

    def marry(self, a: int, b: int) -> None:
        """Makes two people spouses."""
        self.people[a].spouse, self.people[b].spouse = b, a

    def beget(self, a: int, b: int, gender: Gender) -> int:
        """Adds a child of the couple; returns its place."""
        child = self.add(gender)
        self.people[child].parents = (a, b)
        self.people[a].children.append(child)
        self.people[b].children.append(child)
        return child


@cache
def family(seed: int, number: int) -> Family:
    """Returns genealogy `number` of a seed over four generations, some 60 people."""
    draws, grown = Draws(f"family/{seed}/{number}"), Family()
    generation = _children(grown, draws, *_couple(grown, draws), draws.between(4, 6))
    for married, most in ((0.8, 5), (0.5, 4)):
        generation = [
            child
            for person in generation
            if draws.chance(married)
            for child in _children(
                grown, draws, person, _wed(grown, draws, person), draws.between(1, most)
            )
        ]
    return grown


def _couple(grown: Family, draws: Draws) -> tuple[int, int]:
    husband, wife = grown.add("male"), grown.add("female")
    grown.marry(husband, wife)
    return husband, wife


def _children(grown: Family, draws: Draws, a: int, b: int, count: int) -> list[int]:
    return [grown.beget(a, b, draws.pick(GENDERS)) for _ in range(count)]


def _wed(grown: Family, draws: Draws, person: int) -> int:
    """Returns a spouse for `person`, often with parents and siblings of their own."""
    gender: Gender = "female" if grown.people[person].gender == "male" else "male"
    if draws.chance(0.5):
        parents = _couple(grown, draws)
        spouse = grown.beget(*parents, gender)
        _children(grown, draws, *parents, draws.between(0, 2))
    else:
        spouse = grown.add(gender)
    grown.marry(person, spouse)
    return spouse
