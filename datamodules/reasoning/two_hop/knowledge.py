"""A generated world: people, works, companies, cities and countries, and how they are related.

All names are made up, so that no model knows a fact beforehand. A relation is a function: one
object for each subject of its kind.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from datamodules.reasoning.kinship import NAMES, Draws
from datamodules.reasoning.two_hop.hops import Chain, Hop

Kind = Literal["book", "film", "song", "company", "person", "city", "country", "currency"]

VERSION = 1
"""Raised with any change that gives other text; part of the data's identity."""


@dataclass(frozen=True)
class Relation:
    """What everything of a kind has one of.

    Attributes:
        of: Kind of the subject.
        name: "the NAME of SUBJECT" is the object.
        to: Kind of the object.
    """

    of: Kind
    name: str
    to: Kind

    def phrase(self, subject: str) -> str:
        """Returns what the object is called by its subject."""
        return f"the {self.name} of {subject}"

    def question(self, subject: str) -> str:
        """Returns a question for the object."""
        return f"{'Who' if self.to == 'person' else 'What'} is {self.phrase(subject)}?"


RELATIONS = (
    Relation("book", "author", "person"),
    Relation("film", "director", "person"),
    Relation("song", "singer", "person"),
    Relation("company", "founder", "person"),
    Relation("company", "home city", "city"),
    Relation("person", "birthplace", "city"),
    Relation("person", "teacher", "person"),
    Relation("person", "employer", "company"),
    Relation("city", "mayor", "person"),
    Relation("city", "country", "country"),
    Relation("country", "anthem", "song"),
    Relation("country", "currency", "currency"),
    Relation("country", "president", "person"),
)

_FIRST = (*NAMES["female"], *NAMES["male"])
_ONSETS = (*"bdfghklmnprstvwz", "br", "dr", "gr", "kl", "pr", "st", "tr")
_VOWELS = (*"aeiou", "ai", "ea", "ou")
_CODAS = ("", "", "l", "n", "r", "s", "th")
_TITLES = """
Amber Ancient Bitter Broken Burning Crimson Crooked Distant Empty Endless Fallen Fading Forgotten
Frozen Gentle Golden Hidden Hollow Iron Last Lonely Lost Marble Midnight Narrow Northern Pale
Patient Quiet Restless Sacred Scarlet Secret Seventh Silent Silver Sleeping Stolen Velvet Winter
"""
_THINGS = """
Anchor Arrow Bridge Candle Castle Compass Crown Dawn Door Feather Flame Forest Fountain Garden
Ghost Harbour Harvest Hour Island Key Lantern Letter Meadow Mirror Moon Mountain Orchard Path
Pearl River Road Rose Sailor Shadow Shore Stone Storm Stranger Tower Valley Violin Voyage Window
"""
_TRADES = ("Bakeries", "Clocks", "Engines", "Fabrics", "Instruments", "Mills", "Papers", "Tools")
_TOWNS = ("burg", "field", "ford", "mouth", "port", "ton")
_MONEY = ("crown", "mark", "penny", "pound")


def _word(draws: Draws) -> str:
    syllables = (draws.pick(_ONSETS) + draws.pick(_VOWELS) + draws.pick(_CODAS) for _ in range(2))
    return "".join(syllables).capitalize()


def _title(draws: Draws) -> str:
    return draws.pick(_TITLES.split())


def _thing(draws: Draws) -> str:
    return draws.pick(_THINGS.split())


_NAMING: dict[Kind, Callable[[Draws], str]] = {
    "book": lambda draws: f"The {_title(draws)} {_thing(draws)} of {_word(draws)}",
    "film": lambda draws: f"{_thing(draws)} of the {_title(draws)} {_thing(draws)}",
    "song": lambda draws: f"{_title(draws)} {_thing(draws)} in {_word(draws)}",
    "company": lambda draws: f"{_word(draws)} {draws.pick(_TRADES)}",
    "person": lambda draws: f"{draws.pick(_FIRST)} {_word(draws)}",
    "city": lambda draws: _word(draws) + draws.pick(_TOWNS),
    "country": lambda draws: _word(draws) + draws.pick(("ia", "land", "stan")),
    "currency": lambda draws: f"{_word(draws).lower()} {draws.pick(_MONEY)}",
}


class Knowledge:
    """All entities and all facts: a pure function of the arguments.

    Args:
        sizes: Number of entities of each kind, positive.
        seed: Non-negative.

    Attributes:
        entities: Names by kind; no name occurs twice.
        facts: Object by (relation, subject).
    """

    def __init__(self, sizes: Mapping[Kind, int], seed: int) -> None:
        used: set[str] = set()
        self.entities: dict[Kind, list[str]] = {
            kind: _names(kind, count, Draws(f"names/{seed}/{kind}"), used)
            for kind, count in sizes.items()
        }
        self.facts: dict[tuple[Relation, str], str] = {}
        for relation in RELATIONS:
            self._relate(relation, Draws(f"facts/{seed}/{relation.of}/{relation.name}"))

    def _relate(self, relation: Relation, draws: Draws) -> None:
        """Gives every subject an object other than itself."""
        for subject in self.entities[relation.of]:
            others = [name for name in self.entities[relation.to] if name != subject]
            self.facts[relation, subject] = draws.pick(others)

    def hops(self) -> Iterator[Hop]:
        """Yields all facts."""
        for relation, subject in self.facts:
            yield self._hop(relation, subject)

    def _hop(self, relation: Relation, subject: str) -> Hop:
        return Hop(
            question=relation.question(subject),
            phrase=f"{relation.phrase(subject)} is",
            subject=subject,
            object=self.facts[relation, subject],
        )

    def chains(self) -> Iterator[Chain]:
        """Yields all questions of two hops whose three entities differ."""
        for (first, subject), bridge in self.facts.items():
            for second in RELATIONS:
                if second.of != first.to or self.facts[second, bridge] == subject:
                    continue
                yield Chain(
                    question=second.question(first.phrase(subject)),
                    first=self._hop(first, subject),
                    second=self._hop(second, bridge),
                )


def _names(kind: Kind, count: int, draws: Draws, used: set[str]) -> list[str]:
    """Returns new names, which are then used."""
    names: list[str] = []
    while len(names) < count:
        name = _NAMING[kind](draws)
        if name not in used:
            used.add(name)
            names.append(name)
    return names
