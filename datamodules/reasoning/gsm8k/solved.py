"""Word problems with the equations of their solution, from the files of GSM8K and GSM8K-Aug."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from datamodules.gsm8k import (
    RESULT,
    GSM8KSplit,
    Problem,
    Problems,
    fetch_problems,
    read_problems,
    result_of,
)
from datamodules.readers import format_of, read_lines

BAR = "||"
"""Stands between question and solution in the files of GSM8K-Aug."""

_EQUATION = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class Solved:
    """A word problem and its solution.

    Attributes:
        question: Its text, as published.
        equations: The calculations of the solution in order, as published: ``<<48/2=24>>``.
        answer: The result, without the commas of thousands.
    """

    question: str
    equations: tuple[str, ...]
    answer: str

    @property
    def identity(self) -> str:
        """32 hex digits that distinguish it from all problems with another question or solution."""
        text = json.dumps([self.question, *self.equations])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def solved(problem: Problem) -> Solved:
    """Returns a problem of GSM8K with the equations in its calculator annotations.

    Words between them are left out, and so are calculations without an annotation.
    """
    return _solved(problem.question, problem.answer)


def _solved(question: str, solution: str) -> Solved:
    answer = result_of(solution).replace(",", "")
    return Solved(question, tuple(_EQUATION.findall(solution)), answer)


def read_solved(path: Path, key: str) -> Iterator[Solved]:
    """Yields the problems of a file.

    Args:
        path: jsonl as GSM8K has it, or txt as GSM8K-Aug has it, a problem a line: ``question||
            <<expr=value>> <<expr=value>> #### value``; both also as .gz and .zst.
        key: The option that names it, for messages.

    Raises:
        ValueError: The file is missing or empty, or a line is not such a problem.
    """
    if not path.is_file():
        raise ValueError(f"{key} ({path}): there is no such file")
    if check_format(path) == "jsonl":
        yield from map(solved, read_problems(path, key).rows)
    else:
        yield from _read_augmented(path, key)


def check_format(path: Path) -> str:
    """Returns "jsonl" or "text".

    Raises:
        ValueError: The suffix is that of another format.
    """
    found = format_of(path)
    if found == "parquet":
        raise ValueError(
            f"{path}: problems are read from jsonl (as GSM8K has them) or txt (as GSM8K-Aug has "
            "them), not from parquet. Convert the file."
        )
    return found


def _read_augmented(path: Path, key: str) -> Iterator[Solved]:
    empty = True
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            empty = False
            yield _augmented(line, f"{path}, line {number}")
    if empty:
        raise ValueError(f"{key} ({path}) is empty; name a text file of GSM8K-Aug")


def _augmented(line: str, where: str) -> Solved:
    question, bar, solution = line.partition(BAR)
    if not (bar and question.strip() and result_of(solution)):
        raise ValueError(
            f"{where}: expected 'question{BAR}<<expr=value>> ... {RESULT} value', as GSM8K-Aug has "
            "it"
        )
    return _solved(question.strip(), solution)


def read_all(paths: Iterable[Path], key: str) -> Iterator[Solved]:
    """Yields the problems of several files; see `read_solved`."""
    for path in paths:
        yield from read_solved(path, key)


def same_number(text: str, answer: str) -> bool:
    """Returns whether two texts are the same number, written in any way, or the same text.

    Outer spaces, a dollar sign, thousands' commas, a final period and decimals of zero do not
    count: "$1,200.0" is " 1200". Numbers are compared as decimals, not as floats.
    """
    ours, theirs = _plain(text), _plain(answer)
    try:
        return Decimal(ours) == Decimal(theirs)
    except InvalidOperation:
        return ours == theirs


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").replace(",", "").replace("$", "")


class HubProblems:
    """The problems of GSM8K on the hub; a `prepare.Remote` that is read from its beginning."""

    def __init__(self) -> None:
        self._problems: dict[GSM8KSplit, Problems] = {}

    def problems(self, split: GSM8KSplit) -> Problems:
        """Returns the problems of a split, fetched once.

        Raises:
            CorpusUnavailableError: They cannot be fetched.
        """
        if split not in self._problems:
            cure = "Pass your copy with data.data_files=train.jsonl and data.test_files=test.jsonl"
            self._problems[split] = fetch_problems(split, cure=cure)
        return self._problems[split]

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Returns the commits that are read; see `prepare.Remote`."""
        splits: tuple[GSM8KSplit, ...] = ("train", "test")
        return {split: self.problems(split).origin for split in splits}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Does nothing: a preparation starts again."""

    def place(self, document: int) -> Mapping[str, Any] | None:
        """Returns None: there is no place to go on from."""
        return None
