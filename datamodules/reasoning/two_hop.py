"""Two-hop questions: what is the r2 of the r1 of e1? (Thinking States, Sec. 4.3).

A generated world has people, works, companies, cities and countries, and relations between them.
All names are invented, so that no model knows a fact beforehand. A relation is a function: each
subject of its type has one object.

Files have questions about the real world, in one of two published formats. Both are csv with a
header and one question per row; other columns are ignored.

`TwoHopFact.csv`, and SOCRATES, of Yang et al. (arXiv 2402.16837, 2411.16679; on the hub as
soheeyang/TwoHopFact and soheeyang/SOCRATES):

| column | content |
|---|---|
| ``e1.value``, ``e2.value``, ``e3.value`` | names of subject, bridge and answer |
| ``e2.aliases``, ``e3.aliases`` | other names, a Python tuple of tuples of strings; optional |
| ``r1(e1).prompt``, ``r2(e2).prompt`` | the facts up to their objects, "The singer of X is" |
| ``r2(r1(e1)).prompt`` | the question, "The mother of the singer of X is" |

`two_hop.csv` with templates of Biran et al. (arXiv 2406.12775, "Hopping Too Late"):

| column | content |
|---|---|
| ``e1_label``, ``e2_label``, ``e3_label`` | names of subject, bridge and answer |
| ``e2_aliases``, ``e3_aliases`` | other names, a Python list of strings; optional |
| ``r1_template``, ``r2_template`` | the relations with ``{}``: "the spouse of {}", "{} is led by" |
| ``source_prompt`` | the question, "the spouse of the performer of X is" |
"""

import ast
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from datamodules.base import choice_problems, raise_problems, range_problems
from datamodules.files import open_text
from datamodules.hub import HubFiles, check_rows
from datamodules.local_corpora import identify
from datamodules.readers import read_rows
from datamodules.reasoning.examples import Example
from datamodules.reasoning.kinship import NAMES, Draws
from datamodules.reasoning.module import FileSplits, ReasoningDataModule
from datamodules.store import SPLITS, Split

# ---- facts and questions


@dataclass(frozen=True)
class Hop:
    """A fact, as a question and as a statement.

    Attributes:
        question: Question for the object: "Who is the author of The Silent Harbour?"
        phrase: Statement up to the object: "the author of The Silent Harbour is".
        subject: Name of the subject, as in `question`.
        object: The answer.
        aliases: Other names of the object.
    """

    question: str
    phrase: str
    subject: str
    object: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the object, `object` first."""
        return tuple(dict.fromkeys((self.object, *self.aliases)))

    @property
    def statement(self) -> str:
        """The fact as a sentence without its full stop."""
        return f"{self.phrase} {self.object}"


@dataclass(frozen=True)
class Chain:
    """Two facts that share the bridge entity, and a question over both.

    Attributes:
        question: Question that names the first fact's subject and asks for the second fact's
            object, without naming the bridge entity.
        first: The fact about e1, whose object is the bridge entity e2.
        second: The fact about e2, whose object is the answer e3.
    """

    question: str
    first: Hop
    second: Hop


def end_of(subject: str, question: str) -> int:
    """Returns the end of the last mention of a subject in a question, or the question's length."""
    start = question.rfind(subject)
    return len(question) if start < 0 else start + len(subject)


# ---- a generated world


EntityType = Literal["book", "film", "song", "company", "person", "city", "country", "currency"]

VERSION = 1
"""Incremented with every change of the text; part of the data's identity."""


@dataclass(frozen=True)
class Relation:
    """A functional relation: each subject has exactly one object.

    Attributes:
        of: Type of the subject.
        name: Noun of the relation; "the NAME of SUBJECT" is the object.
        to: Type of the object.
    """

    of: EntityType
    name: str
    to: EntityType

    def phrase(self, subject: str) -> str:
        """Returns the phrase that denotes the object of a subject."""
        return f"the {self.name} of {subject}"

    def question(self, subject: str) -> str:
        """Returns the question for the object of a subject."""
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


_NAMING: dict[EntityType, Callable[[Draws], str]] = {
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
    """All entities and facts of a world, a pure function of the arguments.

    Args:
        sizes: Number of entities of each type, positive.
        seed: Non-negative seed.

    Attributes:
        entities: Names by type; no name occurs twice.
        facts: Fact by (relation, subject).
    """

    def __init__(self, sizes: Mapping[EntityType, int], seed: int) -> None:
        used: set[str] = set()
        self.entities: dict[EntityType, list[str]] = {
            entity_type: _names(entity_type, count, Draws(f"names/{seed}/{entity_type}"), used)
            for entity_type, count in sizes.items()
        }
        self.facts: dict[tuple[Relation, str], Hop] = {}
        for relation in RELATIONS:
            self._relate(relation, Draws(f"facts/{seed}/{relation.of}/{relation.name}"))

    def _relate(self, relation: Relation, draws: Draws) -> None:
        """Gives every subject an object other than itself."""
        for subject in self.entities[relation.of]:
            others = [name for name in self.entities[relation.to] if name != subject]
            phrase = f"{relation.phrase(subject)} is"
            question, chosen = relation.question(subject), draws.pick(others)
            self.facts[relation, subject] = Hop(question, phrase, subject, chosen)

    def chains(self) -> Iterator[Chain]:
        """Yields all two-hop questions whose three entities differ."""
        for (relation, subject), first in self.facts.items():
            for asked in RELATIONS:
                second = self.facts.get((asked, first.object))
                if asked.of == relation.to and second is not None and second.object != subject:
                    yield Chain(asked.question(relation.phrase(subject)), first, second)


def _names(entity_type: EntityType, count: int, draws: Draws, used: set[str]) -> list[str]:
    """Returns new names and adds them to `used`."""
    names: list[str] = []
    while len(names) < count:
        name = _NAMING[entity_type](draws)
        if name not in used:
            used.add(name)
            names.append(name)
    return names


# ---- files of questions


PUBLISHED = {"soheeyang/TwoHopFact": 45_595, "soheeyang/SOCRATES": 7_232}
"""Number of questions of datasets on the hub, according to their README."""

_LONGEST_FIELD = 2**24  # characters; the default limit of csv is too low for TwoHopFact


_Columns = Mapping[str, tuple[str, ...]]

_NEEDED = ("names", "facts", "question")
_PROMPTS: _Columns = {
    "names": ("e1.value", "e2.value", "e3.value"),
    "facts": ("r1(e1).prompt", "r2(e2).prompt"),
    "question": ("r2(r1(e1)).prompt",),
    "aliases": ("e2.aliases", "e3.aliases"),
}
_TEMPLATES: _Columns = {
    "names": ("e1_label", "e2_label", "e3_label"),
    "facts": ("r1_template", "r2_template"),
    "question": ("source_prompt",),
    "aliases": ("e2_aliases", "e3_aliases"),
}


def check_csv(path: Path) -> None:
    """Raises a ValueError for a suffix other than csv."""
    if path.suffix.lower() != ".csv":
        raise ValueError(f"{path}: two-hop questions are read from csv files. Convert the file.")


def read_chains(path: Path) -> Iterator[Chain]:
    """Yields the questions of a csv file in either format.

    Raises:
        ValueError: If it is not UTF-8, has other columns or no rows, or a row lacks a value.
    """
    with open_text(path) as file:
        text = file.read().decode("utf-8-sig")
    csv.field_size_limit(_LONGEST_FIELD)
    rows = csv.DictReader(io.StringIO(text, newline=""))
    columns = _format(path, rows.fieldnames or ())
    empty = True
    for row in rows:
        empty = False
        yield _chain(row, columns, f"{path}, line {rows.line_num}")
    if empty:
        raise ValueError(f"{path} has no questions. Remove it from the files, or fill it.")


def _format(path: Path, header: Iterable[str]) -> _Columns:
    """Returns the columns of a file's format."""
    needed = []
    for columns in (_PROMPTS, _TEMPLATES):
        needed.append([name for field in _NEEDED for name in columns[field]])
        if set(header).issuperset(needed[-1]):
            return columns
    raise ValueError(
        f"{path}: the columns match neither format: {', '.join(needed[0])} (TwoHopFact), or "
        f"{', '.join(needed[1])} (Hopping Too Late)."
    )


def _chain(row: Mapping[str, str | None], columns: _Columns, where: str) -> Chain:
    def value(name: str) -> str:
        """Returns the non-empty text of a column."""
        text = (row.get(name) or "").strip()
        if not text:
            raise ValueError(f"{where}: the column {name!r} is empty. Fix or remove the row.")
        return text

    subject, bridge, answer = map(value, columns["names"])
    first, second = map(value, columns["facts"])
    if columns is _TEMPLATES:
        first, second = _filled(first, subject, where), _filled(second, bridge, where)
    others = [_aliases(row.get(name)) for name in columns["aliases"]]
    return Chain(
        question=value(columns["question"][0]),
        first=Hop(first, first, subject, bridge, others[0]),
        second=Hop(second, second, bridge, answer, others[1]),
    )


def _filled(template: str, subject: str, where: str) -> str:
    """Returns the statement of a template, up to its object.

    A template that begins with its entity already ends in a verb: "{} is led by".
    """
    before, braces, after = template.partition("{}")
    if not braces:
        raise ValueError(f"{where}: the template {template!r} has no {{}} for the entity.")
    return before + subject + (after or " is")


def _aliases(cell: str | None) -> tuple[str, ...]:
    """Returns the names in an arbitrarily nested Python literal; none if it is invalid."""
    try:
        return tuple(dict.fromkeys(_texts(ast.literal_eval(cell or "()"))))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


# ---- the data module


Steps = Literal["bridge", "facts"]

_WORKS: tuple[EntityType, ...] = ("book", "film", "song")


class TwoHop(ReasoningDataModule):
    """Who is the teacher of the author of The Silent Harbour of Braldou?

    *Full knowledge* (one_hop: true): training has every fact as a one-hop question, including the
    facts of test questions, and the two-hop questions that are not held out. No two-hop question is
    in two splits. *Parametric knowledge* (known_file, one_hop: false): the facts come from the real
    world, and only questions are kept whose two facts the base model knows, as measured by
    docs/papers/known_facts.py.

    Without files the world is generated (`Knowledge`): two-hop questions cover all pairs of
    composable facts, in a seeded order. Files have one of the published formats (see above).
    Markers are after the first entity, whose name completes the first fact, and at the end of the
    question.

    NOTE(paper): the paper specifies neither questions nor sizes nor the text of the steps. The step
    of a one-hop question is its fact, so that thoughts can learn facts that no composed question in
    training needs.

    Args:
        dataset: Dataset on the hub of csv files in one of the formats, such as
            soheeyang/TwoHopFact. Null reads data_files or generates a world.
        revision: Commit, branch or tag of the dataset on the hub. Null uses the newest commit.
        data_files: Questions: one path or glob of csv files, or a list of them. Null reads dataset
            or generates a world.
        val_files: Validation questions. Null holds out val_fraction of the two-hop questions.
        test_files: Test questions. Null holds out test_fraction of the two-hop questions.
        known_file: jsonl file that says which facts a model knows. Null keeps all questions.
        one_hop: Whether training has the facts of all splits as one-hop questions.
        steps: 'bridge' for the entity between the two hops, 'facts' for both facts as statements.
        works: Number of books, of films, and of songs in a generated world.
        people: Number of people in a generated world.
        companies: Number of companies in a generated world.
        cities: Number of cities in a generated world.
        countries: Number of countries, and of currencies, in a generated world.
        knowledge_seed: Seed of a generated world and of the order of its questions.
        **kwargs: See `ReasoningDataModule`.

    Raises:
        ValueError: If an argument is invalid, or question_first is set, since questions have no
            context; when preparing, if a file cannot be read.
    """

    path_arguments: ClassVar[frozenset[str]] = ReasoningDataModule.path_arguments | {"known_file"}
    # Files are identified by their content, and fractions count only where they are used.
    not_in_source: ClassVar[frozenset[str]] = (
        ReasoningDataModule.not_in_source | path_arguments | {"dataset", "revision"}
    )
    group_name: ClassVar[str] = "hops"

    def __init__(
        self,
        *,
        dataset: str | None = None,
        revision: str | None = None,
        data_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        known_file: str | None = None,
        one_hop: bool = True,
        steps: Steps = "bridge",
        works: int = 200,
        people: int = 300,
        companies: int = 60,
        cities: int = 60,
        countries: int = 20,
        knowledge_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._splits = FileSplits(
            {"train": data_files, "val": val_files, "test": test_files},
            check_csv,
            val_fraction=self.val_fraction,
            test_fraction=self.test_fraction,
        )
        self._dataset, self._revision = dataset, revision
        if dataset is not None and data_files is not None:
            raise ValueError(
                f"dataset={dataset!r} and data_files both name questions. Set data.dataset or "
                "data.data_files to null."
            )
        if dataset is None and revision is not None:
            raise ValueError(
                f"revision={revision!r} belongs to a dataset on the hub, but dataset is null. Set "
                "data.revision to null, or set data.dataset."
            )
        self._known_file = None if known_file is None else Path(known_file).expanduser()
        self._one_hop, self._steps = one_hop, steps
        self._sizes: dict[EntityType, int] = {
            **dict.fromkeys(_WORKS, works),
            "person": people,
            "company": companies,
            "city": cities,
            "country": countries,
            "currency": countries,
        }
        self._knowledge_seed = knowledge_seed
        self._check(
            works=works, people=people, companies=companies, cities=cities, countries=countries
        )

    def _check(self, **sizes: int) -> None:
        problems = [
            *range_problems(2, **sizes),
            *range_problems(0, knowledge_seed=self._knowledge_seed),
        ]
        raise_problems(problems + choice_problems(get_args(Steps), steps=self._steps))
        if self.question_first:
            raise ValueError(
                "question_first=True has no effect here: a two-hop question has no context. Set "
                "data.question_first to false."
            )
        if self._known_file is not None and not self._known_file.is_file():
            raise ValueError(
                f"known_file={str(self._known_file)!r}: no such file. Write one with "
                "docs/papers/known_facts.py, or set data.known_file to null."
            )
        if self._known_file is not None and self._is_generated:
            raise ValueError(
                "known_file is for questions in files: no model knows a generated world. Set "
                "data.dataset or data.data_files, or data.known_file to null."
            )

    # Sources of the questions

    @property
    def _is_generated(self) -> bool:
        return self._dataset is None and not self._splits.has_files

    @cached_property
    def _hub(self) -> HubFiles:
        return HubFiles(
            str(self._dataset),
            "*.csv",
            revision=self._revision,
            corpus=type(self).__name__,
            label="csv files",
            cure="Pass your copy with data.data_files=..., and data.dataset=null",
        )

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Resolves the commit of the dataset on the hub; nothing for other sources."""
        return {} if self._dataset is None else self._hub.pin(stored or None)

    def source(self) -> dict[str, Any]:
        published = {"dataset": self._dataset, "revision": self._revision}
        return {
            **super().source(),
            **self._splits.source(),
            **{key: value for key, value in published.items() if value is not None},
            "known": None if self._known_file is None else identify(self._known_file),
            "generator": VERSION,
        }

    def expects(self, split: Split) -> bool:
        return self._splits.expects(split)

    def how_to_get(self, split: Split) -> str:
        hint = " Check that data.known_file covers them." if self._known_file else ""
        return self._splits.how_to_get(split) + hint

    def repeats_cure(self) -> None:
        """Returns None, because questions of other splits are left out and counted."""

    @cached_property
    def _knowledge(self) -> Knowledge:
        return Knowledge(self._sizes, self._knowledge_seed)

    @cached_property
    def _questions(self) -> dict[Split, list[Chain]]:
        """All two-hop questions of each split."""
        return {split: list(self._splits.rows(split, self._read)) for split in SPLITS}

    def _read(self, split: Split) -> list[Chain]:
        """Returns the questions of the files of a split, of the hub, or generated ones."""
        if self._dataset is not None:
            return self._fetched
        if self._splits.has_files:
            return [chain for path in self._splits.files[split] for chain in read_chains(path)]
        return Draws(f"order/{self._knowledge_seed}").shuffled(list(self._knowledge.chains()))

    @cached_property
    def _fetched(self) -> list[Chain]:
        """All questions of the dataset on the hub."""
        chains = [chain for path in self._hub for chain in read_chains(path)]
        where = f"{self._dataset} at {self._hub.pin()['commit']}"
        check_rows(where, len(chains), PUBLISHED.get(str(self._dataset)))
        return chains

    @cached_property
    def _known(self) -> dict[str, bool] | None:
        return None if self._known_file is None else read_known(self._known_file)

    def chains(self, split: Split) -> Iterator[Chain]:
        """Yields the kept two-hop questions of a split.

        No question is in two splits: the test split takes precedence, then validation.
        """
        later = SPLITS[SPLITS.index(split) + 1 :]
        seen = {chain.question for other in later for chain in self._questions[other]}
        for chain in self._questions[split]:
            reason = "asked before" if chain.question in seen else self._unknown(chain)
            seen.add(chain.question)
            if reason is None:
                yield chain
            else:
                self.notice(f"questions of two hops left out, {reason}")

    def _unknown(self, chain: Chain) -> str | None:
        """Returns why a question must be left out, or None to keep it."""
        if self._known is None:
            return None
        answers = [self._known.get(hop.question) for hop in (chain.first, chain.second)]
        if None in answers:
            return "known_file does not have a fact"
        return None if all(answers) else "a fact is not known"

    # Examples

    def examples(self, split: Split) -> Iterator[Example]:
        """Yields the examples of a split: two-hop questions, after the facts in training."""
        if split == "train" and self._one_hop:
            for hop in self._facts():
                self.notice("questions of one hop")
                yield self._fact(hop)
        for chain in self.chains(split):
            self.notice("questions of two hops")
            yield self._question(chain)

    def _facts(self) -> Iterator[Hop]:
        """Yields the facts of the world, or of the questions of all splits, without duplicates.

        The first of several facts with the same question is used, as in docs/papers/known_facts.py.
        """
        if self._is_generated:
            yield from self._knowledge.facts.values()
            return
        chains = (chain for split in SPLITS for chain in self._questions[split])
        stay = (chain for chain in chains if self._unknown(chain) is None)
        first: dict[str, Hop] = {}
        for hop in (hop for chain in stay for hop in (chain.first, chain.second)):
            first.setdefault(hop.question, hop)
        yield from first.values()

    def _fact(self, hop: Hop) -> Example:
        step = hop.object if self._steps == "bridge" else hop.statement
        marker = end_of(hop.subject, hop.question)
        return Example(hop.question, (step,), (marker,), f" {hop.object}", 1)

    def _question(self, chain: Chain) -> Example:
        bridge, answer = chain.first.object, f" {chain.second.object}"
        marker = end_of(chain.first.subject, chain.question)
        if self._steps == "bridge":
            return Example(chain.question, (bridge,), (marker,), answer, 2)
        facts = (chain.first.statement, chain.second.statement)
        return Example(chain.question, facts, (marker, len(chain.question)), answer, 2)

    def is_right(self, text: str, answer: str) -> bool:
        """Returns whether an answer is the right name, ignoring case and a final period."""
        return _plain(text) == _plain(answer)


def _plain(name: str) -> str:
    return name.strip().removesuffix(".").casefold()


def read_known(path: Path) -> dict[str, bool]:
    """Returns whether each fact is known, by its question (see docs/papers/known_facts.py).

    Args:
        path: jsonl file of objects with a string ``question`` and a boolean ``known``.

    Raises:
        ValueError: If a line has a different form.
    """
    known: dict[str, bool] = {}
    for where, row in read_rows(path):
        question = row.get("question") if isinstance(row, dict) else None
        if not isinstance(question, str) or not isinstance(row.get("known"), bool):
            raise ValueError(
                f"{where}: expected an object with a string 'question' and a boolean 'known'"
            )
        known[question] = row["known"]
    return known
