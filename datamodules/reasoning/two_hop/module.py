"""Two-hop questions with full or parametric knowledge (Thinking States, Sec. 4.3)."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from datamodules.local_corpora import identify
from datamodules.readers import read_rows
from datamodules.reasoning.examples import Example
from datamodules.reasoning.file_splits import FileSplits
from datamodules.reasoning.kinship import Draws
from datamodules.reasoning.module import ReasoningDataModule
from datamodules.reasoning.two_hop.files import check_csv, read_chains
from datamodules.reasoning.two_hop.hops import Chain, Hop, end_of
from datamodules.reasoning.two_hop.knowledge import VERSION, Kind, Knowledge
from datamodules.store import SPLITS, Split

Steps = Literal["bridge", "facts"]

_WORKS: tuple[Kind, ...] = ("book", "film", "song")


class TwoHop(ReasoningDataModule):
    """Who is the teacher of the author of The Silent Harbour of Braldou?

    *Full knowledge* (one_hop: true): training has every fact as a question of one hop, those of the
    test questions too, and the two-hop questions that are not held out. No two-hop question is in
    two splits. *Parametric knowledge* (known_file, one_hop: false): the facts are those of the real
    world, and only questions stay whose two facts the base model knows; ``python
    evaluate.py known_facts`` finds out which.

    Without files the world is generated (`knowledge`): two-hop questions go through all pairs of
    facts that fit together, in a seeded order. Files are in one of the public formats
    (`files`). Markers stand after the first entity, whose name completes the first fact,
    and at the end of the question.

    NOTE(paper): the paper names neither its questions, nor sizes, nor what the steps say. A step of
    a question of one hop is that fact, so that thoughts can learn facts that no composed question
    in training needs.

    Args:
        data_files: Questions: one path or glob of csv files, or a list of them; null: generated.
        val_files: Validation questions; null holds out val_fraction of the two-hop questions.
        test_files: Test questions; null holds out test_fraction of the two-hop questions.
        known_file: jsonl of facts with whether a model knows them; null: all questions stay.
        one_hop: Whether training has the facts of all splits as questions of one hop.
        steps: 'bridge': the entity between the two hops; 'facts': both facts as statements.
        works: Generated: number of books, of films, and of songs.
        people: Generated: number of people.
        companies: Generated: number of companies.
        cities: Generated: number of cities.
        countries: Generated: number of countries, and of currencies.
        knowledge_seed: Generated: seed of the world and of the order of its questions.
        **kwargs: See `ReasoningDataModule`.

    Raises:
        ValueError: An argument is unusable, question_first too: a question is all there is; when
            preparing: a file cannot be read.
    """

    path_arguments: ClassVar[frozenset[str]] = ReasoningDataModule.path_arguments | {"known_file"}
    # Files are named by their content, shares by those that apply.
    not_in_source: ClassVar[frozenset[str]] = ReasoningDataModule.not_in_source | path_arguments
    group_name: ClassVar[str] = "hops"

    def __init__(
        self,
        *,
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
        self._known_file = None if known_file is None else Path(known_file).expanduser()
        self._one_hop, self._steps = one_hop, steps
        self._sizes: dict[Kind, int] = {
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
        for key, size in sizes.items():
            if size < 2:
                raise ValueError(f"{key}={size} must be at least 2.")
        if self._knowledge_seed < 0:
            raise ValueError(f"knowledge_seed={self._knowledge_seed} must be at least 0.")
        if self._steps not in get_args(Steps):
            raise ValueError(f"steps={self._steps!r} must be 'bridge' or 'facts'.")
        if self.question_first:
            raise ValueError(
                "question_first=True has no meaning here: a two-hop question is about nothing in "
                "front of it. Set data.question_first to false."
            )
        if self._known_file is not None and not self._known_file.is_file():
            raise ValueError(
                f"known_file={str(self._known_file)!r}: there is no such file. Write one with "
                "`python evaluate.py known_facts`, or set data.known_file to null."
            )
        if self._known_file is not None and not self._splits.has_files:
            raise ValueError(
                "known_file is about questions in files: no model knows a generated world. Set "
                "data.data_files, or data.known_file to null."
            )

    # Where the questions are from

    def source(self) -> dict[str, Any]:
        """Returns the options, the files by content, and the version of the generator."""
        return {
            **super().source(),
            **self._splits.source(),
            "known": None if self._known_file is None else identify(self._known_file),
            "generator": VERSION,
        }

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have questions."""
        return self._splits.expects(split)

    def how_to_get(self, split: Split) -> str:
        """Returns what gives an empty split questions, for messages."""
        about = " Does data.known_file know any of them?" if self._known_file else ""
        return self._splits.how_to_get(split) + about

    @cached_property
    def _knowledge(self) -> Knowledge:
        return Knowledge(self._sizes, self._knowledge_seed)

    @cached_property
    def _questions(self) -> dict[Split, list[Chain]]:
        """All two-hop questions of each split."""
        return {split: list(self._splits.rows(split, self._read)) for split in SPLITS}

    def _read(self, split: Split) -> list[Chain]:
        """Returns the questions of the files of a split, or generated ones."""
        if self._splits.has_files:
            return [chain for path in self._splits.files[split] for chain in read_chains(path)]
        return Draws(f"order/{self._knowledge_seed}").shuffled(list(self._knowledge.chains()))

    @cached_property
    def _known(self) -> dict[str, bool] | None:
        return None if self._known_file is None else read_known(self._known_file)

    def chains(self, split: Split) -> Iterator[Chain]:
        """Yields the two-hop questions of a split that stay.

        No question is in two splits: the test's stay in the test, then validation's.
        """
        behind = SPLITS[SPLITS.index(split) + 1 :]
        seen = {chain.question for other in behind for chain in self._questions[other]}
        for chain in self._questions[split]:
            reason = "asked before" if chain.question in seen else self._unknown(chain)
            seen.add(chain.question)
            if reason is None:
                yield chain
            else:
                self.notice(f"questions of two hops left out, {reason}")

    def _unknown(self, chain: Chain) -> str | None:
        """Returns why a model cannot be asked a question, None if it can."""
        if self._known is None:
            return None
        answers = [self._known.get(hop.question) for hop in (chain.first, chain.second)]
        if None in answers:
            return "known_file does not have a fact"
        return None if all(answers) else "a fact is not known"

    # Examples

    def examples(self, split: Split) -> Iterator[Example]:
        """Yields the examples of a split: in training facts first, then two-hop questions."""
        if split == "train" and self._one_hop:
            for hop in self._facts():
                self.notice("questions of one hop")
                yield self._fact(hop)
        for chain in self.chains(split):
            self.notice("questions of two hops")
            yield self._question(chain)

    def _facts(self) -> Iterator[Hop]:
        """Yields the facts of the world, or of the questions of all splits, each question once.

        Of facts with the same question the first counts, as for ``evaluate.py known_facts``.
        """
        if not self._splits.has_files:
            yield from self._knowledge.hops()
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
        """Returns whether a written answer is the right name; case and a final period are free."""
        return _plain(text) == _plain(answer)


def _plain(name: str) -> str:
    return name.strip().removesuffix(".").casefold()


def read_known(path: Path) -> dict[str, bool]:
    """Returns which facts are known, by their questions, as ``evaluate.py known_facts`` writes it.

    Args:
        path: jsonl of objects with the text ``question`` and the truth value ``known``.

    Raises:
        ValueError: A line is not such an object.
    """
    known: dict[str, bool] = {}
    for where, row in read_rows(path):
        question = row.get("question") if isinstance(row, dict) else None
        if not isinstance(question, str) or not isinstance(row.get("known"), bool):
            raise ValueError(
                f"{where}: expected an object with the text 'question' and the truth value 'known'"
            )
        known[question] = row["known"]
    return known
