"""GSM8K and GSM8K-Aug as questions with reasoning (Thinking States, Sec. 4.3 and App. A.5.2).

The word problems come from the hub or from files. Their steps are equations, which are placed by
rule (`placement`) or by an `aligned_file`, written by `align`. Each of its lines is a JSON object;
keys other than these two are ignored::

    {"query": "A robe takes 2 bolts of blue fiber and half that much<T> white fiber. ...<T>",
     "thinking": ["<<2/2=1>>", "<<2+1=3>>"]}

A line applies to a problem if its query without markers and its steps equal the problem's exactly
(App. A.5.2).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, get_args

from datamodules.base import choice_problems, raise_problems
from datamodules.corpus import REMOVE_REPEATS, published_repeats
from datamodules.files import format_of
from datamodules.hub import check_revision
from datamodules.local_corpora import FILE_KEYS, identify
from datamodules.numbers import same_number
from datamodules.readers import read_lines, read_rows
from datamodules.reasoning.examples import MARKER, Example, offsets
from datamodules.reasoning.module import FileSplits, ReasoningDataModule
from datamodules.reasoning.placement import At, PlacementRule, counts_of
from datamodules.store import Split
from datamodules.word_problems import (
    ANNOTATION,
    PUBLISHED,
    REPOSITORY,
    RESULT,
    GSM8KName,
    Problem,
    Problems,
    fetch_problems,
    read_problems,
    result_of,
)

# ---- problems and their solutions


BAR = "||"
"""Separator of question and solution in the files of GSM8K-Aug."""


@dataclass(frozen=True)
class SolvedProblem:
    """A word problem and its solution.

    Attributes:
        question: Text of the question, as published.
        equations: The calculations of the solution in order, as published: ``<<48/2=24>>``;
            sentences in whynlp/gsm8k-aug-nl.
        answer: The result, without thousands separators.
    """

    question: str
    equations: tuple[str, ...]
    answer: str

    @property
    def identity(self) -> str:
        """32 hex digits that identify the question and its equations."""
        text = json.dumps([self.question, *self.equations])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def solved_problem(problem: Problem) -> SolvedProblem:
    """Returns a problem with its steps: the equations in its calculator annotations.

    The text between them and calculations without an annotation are omitted. Separately published
    steps are kept unchanged.
    """
    answer = result_of(problem.answer).replace(",", "")
    annotated = tuple(ANNOTATION.findall(problem.answer))
    steps = annotated if problem.steps is None else problem.steps
    return SolvedProblem(problem.question, steps, answer)


def read_solved(paths: Iterable[Path], key: str) -> Iterator[SolvedProblem]:
    """Yields the problems of files.

    Args:
        paths: Files in GSM8K's jsonl format, or GSM8K-Aug's txt with one problem per line,
            ``question|| <<expr=value>> <<expr=value>> #### value``; both also as .gz and .zst.
        key: Option that names the files, for messages.

    Raises:
        ValueError: If a file is missing or empty, or a line is not a problem.
    """
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{key} ({path}): no such file")
        if check_format(path) == "jsonl":
            yield from map(solved_problem, read_problems(path, key).rows)
        else:
            yield from _read_augmented(path, key)


def check_format(path: Path) -> str:
    """Returns "jsonl" or "text".

    Raises:
        ValueError: If the suffix names another format.
    """
    file_format = format_of(path)
    if file_format == "parquet":
        raise ValueError(
            f"{path}: problems are read from jsonl (GSM8K's format) or txt (GSM8K-Aug's), not from "
            "parquet. Convert the file."
        )
    return file_format


def _read_augmented(path: Path, key: str) -> Iterator[SolvedProblem]:
    empty = True
    for line_number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            empty = False
            yield _augmented(line, f"{path}, line {line_number}")
    if empty:
        raise ValueError(f"{key} ({path}) is empty; name a text file of GSM8K-Aug")


def _augmented(line: str, where: str) -> SolvedProblem:
    question, bar, solution = line.partition(BAR)
    if not (bar and question.strip() and result_of(solution)):
        raise ValueError(
            f"{where}: expected 'question{BAR}<<expr=value>> ... {RESULT} value', as in GSM8K-Aug"
        )
    return solved_problem(Problem(question.strip(), solution))


CURE = "Pass your copy with data.data_files=train.jsonl and data.test_files=test.jsonl"


# ---- problems with their markers


class MarkedProblems:
    """Marker offsets of problems, from an aligned file.

    Args:
        path: jsonl file, also as .gz or .zst.

    Attributes:
        counts: Number of lines read, and of lines left out by reason.

    Raises:
        ValueError: If a line is not an object with the two keys.
    """

    def __init__(self, path: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._markers: dict[str, tuple[int, ...]] = {}
        for where, row in read_rows(path):
            marked, steps = fields_of(row, where)
            self.counts["aligned file: lines"] += 1
            markers = offsets(marked)
            if len(markers) == len(steps):
                problem = SolvedProblem(marked.replace(MARKER, ""), steps, "")
                self._markers.setdefault(problem.identity, markers)
            else:
                self.counts["aligned file: lines with another number of markers than steps"] += 1

    def find(self, problem: SolvedProblem) -> tuple[int, ...] | None:
        """Returns the marker offsets in a problem's question, or None if the file has none."""
        return self._markers.get(problem.identity)


def fields_of(row: Any, where: str) -> tuple[str, tuple[str, ...]]:
    """Returns the marked query and the steps of a row.

    Args:
        row: A line of the file, or a teacher's reply.
        where: Its location, for the error message.

    Raises:
        ValueError: If it is not an object with these two keys.
    """
    query = row.get("query") if isinstance(row, dict) else None
    steps = row.get("thinking") if isinstance(row, dict) else None
    listed = isinstance(steps, list) and all(isinstance(step, str) for step in steps)
    if isinstance(query, str) and isinstance(steps, list) and listed:
        return query, tuple(steps)
    raise ValueError(
        f"{where}: expected an object with a string 'query', which contains {MARKER} markers, and "
        "a list of strings 'thinking'"
    )


# ---- the data module


VERSION = 2
"""Incremented with every change of texts or step positions; part of the data's identity."""


class ReasoningGSM8K(ReasoningDataModule):
    """Word problems whose solutions are equations, each placed in the question.

    Without files the problems come from the hub: openai/gsm8k, where a share of the train split is
    held out for validation, or GSM8K-Aug with its published splits. Local files have GSM8K's jsonl
    or GSM8K-Aug's txt format (see `read_solved`).

    Steps are the equations as published, ``<<48/2=24>>``. They are placed by rule (`placement`), or
    by a file that a language model wrote (`teacher`). Training problems that are not in the file
    are then left out and counted; other splits, whose markers are only for display, fall back to
    the rule. `report` has counts of the rule's decisions. The group is the number of steps.

    NOTE(paper): results lose their thousands separators, which comparisons of answers ignore.

    Args:
        dataset: Dataset on the hub, if there are no data_files: openai/gsm8k, or GSM8K-Aug as
            whynlp/gsm8k-aug (385,620 training problems, whose steps are equations) or
            whynlp/gsm8k-aug-nl (steps in words).
        revision: Commit, branch or tag of the dataset on the hub. Null uses the newest commit.
        data_files: Training problems: one path or glob, or a list of them. Null reads all splits
            from the hub.
        val_files: Validation problems. Null holds out val_fraction of the training problems.
        test_files: Test problems, with data_files. Null holds out test_fraction of the training
            problems. Without data_files the hub's test split is used.
        aligned_file: File with the marked training problems (see above). Null places them by rule.
        place_at: Position of the rule's markers: right after the last 'operand', or at the end of
            its 'clause' or 'sentence'.
        last_step_at_end: Whether the rule puts the last step after the question, as the paper's
            teacher does in all published examples.
        **kwargs: See `ReasoningDataModule`. With `question_first` the question stands before the
            facts as well as at the end, as in Fig. 5.

    Raises:
        ValueError: If an argument is invalid; when preparing, if a file or the hub cannot be read.
    """

    path_arguments: ClassVar[frozenset[str]] = ReasoningDataModule.path_arguments | {"aligned_file"}
    # Files are identified by their content, and fractions count only where they are used.
    not_in_source: ClassVar[frozenset[str]] = (
        ReasoningDataModule.not_in_source | path_arguments | {"dataset", "revision"}
    )
    group_name: ClassVar[str] = "steps"

    def __init__(
        self,
        *,
        dataset: GSM8KName = REPOSITORY,
        revision: str | None = None,
        data_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        aligned_file: str | None = None,
        place_at: At = "operand",
        last_step_at_end: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        raise_problems(choice_problems(get_args(GSM8KName), dataset=dataset))
        check_revision(revision, data_files)
        self._dataset, self._revision = dataset, revision
        self._splits = FileSplits(
            {"train": data_files, "val": val_files, "test": test_files},
            check_format,
            val_fraction=self.val_fraction,
            test_fraction=self.test_fraction,
            published=[split for split in PUBLISHED[dataset] if split != "train"],
        )
        self._aligned_file = None if aligned_file is None else Path(aligned_file).expanduser()
        if self._aligned_file is not None and not self._aligned_file.is_file():
            raise ValueError(
                f"aligned_file={aligned_file!r}: no such file. Write one with `python -m "
                "datamodules.reasoning.align teacher`, or set data.aligned_file to null."
            )
        self._rule = PlacementRule(at=place_at, last_at_end=last_step_at_end)

    # Sources of the problems

    @cached_property
    def _hub(self) -> dict[Split, Problems]:
        """Problems on the hub; empty if local files are read."""
        splits = () if self._splits.has_files else PUBLISHED[self._dataset]
        return {
            split: fetch_problems(split, cure=CURE, dataset=self._dataset, revision=self._revision)
            for split in splits
        }

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return {split: problems.origin for split, problems in self._hub.items()}

    def source(self) -> dict[str, Any]:
        published = {"dataset": self._dataset, "revision": self._revision}
        published = {} if self._splits.has_files else published
        defaults = {"dataset": REPOSITORY, "revision": None}
        return {
            **super().source(),
            **self._splits.source(),
            **{key: value for key, value in published.items() if value != defaults[key]},
            "aligned": None if self._aligned_file is None else identify(self._aligned_file),
            "reader": VERSION,
        }

    def expects(self, split: Split) -> bool:
        return self._splits.expects(split)

    def how_to_get(self, split: Split) -> str:
        check = " Check that data.aligned_file has these problems." if self._aligned_file else ""
        return self._splits.how_to_get(split) + check

    def repeats_cure(self) -> str | None:
        return REMOVE_REPEATS if self._splits.has_files else published_repeats(self.document_noun)

    def problems(self, split: Split) -> Iterator[SolvedProblem]:
        """Yields the problems of a split, in file or hub order."""
        return self._splits.rows(split, self._read)

    def _read(self, split: Split) -> Iterable[SolvedProblem]:
        if self._splits.has_files:
            return read_solved(self._splits.files[split], FILE_KEYS[split])
        return map(solved_problem, self._hub[split].rows)

    # Examples

    def examples(self, split: Split) -> Iterator[Example]:
        aligned = None if self._aligned_file is None else MarkedProblems(self._aligned_file)
        if aligned is not None and split == "train":
            for name, count in aligned.counts.items():
                self.notice(name, count)
        for problem in self.problems(split):
            markers = self._markers(problem, split, aligned)
            if markers is not None:
                yield self._example(problem, markers)

    def _markers(
        self, problem: SolvedProblem, split: Split, aligned: MarkedProblems | None
    ) -> tuple[int, ...] | None:
        """Returns the markers of a problem's steps, or None if it is left out."""
        if not problem.equations:
            self.notice("examples without steps")
            return ()
        markers = None if aligned is None else aligned.find(problem)
        if markers is not None:
            self.notice("examples placed by the aligned file")
            return markers
        if aligned is not None and split == "train":
            self.notice("left out, not in the aligned file")
            return None
        placed = self._rule(problem.question, problem.equations)
        for name, count in counts_of(placed).items():
            self.notice(name, count)
        return placed.markers

    def _example(self, problem: SolvedProblem, markers: tuple[int, ...]) -> Example:
        example = Example(
            problem.question,
            problem.equations,
            markers,
            f" {problem.answer}",
            len(problem.equations),
        )
        question = question_of(problem.question) if self.question_first else ""
        return example.after(f"{question} ") if question else example

    def is_right(self, text: str, answer: str) -> bool:
        """Returns whether a generated answer is the right number; see `datamodules.numbers`."""
        return same_number(text, answer)


def question_of(text: str) -> str:
    """Returns the last sentence of a problem if it is a question, else ""."""
    from sentencex import segment

    sentences = [sentence.strip() for sentence in segment("en", text)]
    last = next((sentence for sentence in reversed(sentences) if sentence), "")
    return last if last.endswith("?") else ""
