"""GSM8K: word problems of grade-school mathematics with worked answers (arXiv 2110.14168).

An answer is a solution in words, one step per line, with calculator annotations at its results
(``2 * 3 = <<2*3=6>>6``); its last line is ``#### 6``. There are 7,473 training problems and 1,319
test problems, on the hub as openai/gsm8k, or in local copies of train.jsonl and test.jsonl.

GSM8K-Aug has 385,620 training problems, written by GPT-4 after GSM8K's, 500 validation problems
and GSM8K's test problems (arXiv 2311.01460), on the hub as whynlp/gsm8k-aug, whose steps are
equations, and as whynlp/gsm8k-aug-nl, whose steps are sentences.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, Literal

from datamodules.hub import HubFiles, check_rows
from datamodules.local_corpora import identify
from datamodules.readers import read_rows, read_table
from datamodules.store import Split

REPOSITORY: Final = "openai/gsm8k"
CONFIG = "main"
RESULT = "####"
"""Precedes the result, in the last line of an answer."""

GSM8KName = Literal["openai/gsm8k", "whynlp/gsm8k-aug", "whynlp/gsm8k-aug-nl"]
_AUGMENTED: dict[Split, tuple[str, int]] = {
    "train": ("*train*.parquet", 385_620),
    "val": ("*validation*.parquet", 500),
    "test": ("*test*.parquet", 1319),
}
PUBLISHED: dict[GSM8KName, dict[Split, tuple[str, int]]] = {
    REPOSITORY: {
        "train": (f"{CONFIG}/train-*.parquet", 7473),
        "test": (f"{CONFIG}/test-*.parquet", 1319),
    },
    "whynlp/gsm8k-aug": _AUGMENTED,
    "whynlp/gsm8k-aug-nl": _AUGMENTED,
}
"""Files on the hub and number of problems, by split."""

ANNOTATION = re.compile(r"<<[^<>]*>>")
"""A calculation in a worked answer: ``<<2*3=6>>``."""


@dataclass(frozen=True)
class Problem:
    """A word problem.

    Attributes:
        question: Text of the question.
        answer: The published worked answer, with annotations and the line of the result.
        steps: Steps, if they are published separately. Defaults to the annotated ones.
    """

    question: str
    answer: str
    steps: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Problems:
    """The problems of a split, in order.

    Attributes:
        rows: The problems, at least one.
        origin: Identity of the source: the hub's name and commit, or the file's name, size and
            hash.
    """

    rows: list[Problem]
    origin: dict[str, Any]


def without_annotations(answer: str) -> str:
    """Returns a worked answer without its ``<<...>>``."""
    return ANNOTATION.sub("", answer)


def result_of(answer: str) -> str:
    """Returns the text after the last ``####`` of a worked answer, or "" if there is none."""
    return answer.rpartition(RESULT)[2].strip() if RESULT in answer else ""


def read_problems(file: str | Path, key: str) -> Problems:
    """Returns the problems of a jsonl file (also .gz, .zst) with the fields question and answer.

    Args:
        file: The published train.jsonl or test.jsonl, or a file with GSM8K-Aug's rows, which have
            ``steps`` and only the result as the answer.
        key: Option that names the file, for messages.

    Raises:
        ValueError: If the file is missing or empty, or a line is not a problem.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"{key} ({file}): no such file; name a jsonl file of GSM8K")
    try:
        rows = list(_problems(read_rows(path)))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if not rows:
        raise ValueError(f"{key} ({file}) is empty; name a jsonl file of GSM8K")
    return Problems(rows, {"file": identify(path)})


def fetch_problems(
    split: Split, *, cure: str, dataset: GSM8KName = REPOSITORY, revision: str | None = None
) -> Problems:
    """Returns the problems of a split on the hub, or in its cache without a network.

    No code of the repository is run; it consists of parquet files. Warns if the number of problems
    differs from the published one.

    Args:
        split: A split of the dataset.
        cure: How to pass a local copy; the message continues it with "or".
        dataset: Repository.
        revision: Commit, branch or tag, the newest commit by default.

    Raises:
        CorpusUnavailableError: If they cannot be fetched.
        ValueError: If a row is not a problem.
    """
    pattern, published = PUBLISHED[dataset][split]
    files = HubFiles(dataset, pattern, revision=revision, corpus="GSM8K", label=split, cure=cure)
    commit = files.pin()["commit"]
    rows = chain.from_iterable(map(read_table, files))
    labels = (f"{dataset} ({split}), row {index}" for index in count(1))
    problems = list(_problems(zip(labels, rows, strict=False)))
    check_rows(f"{dataset} ({split}) at {commit}", len(problems), published)
    config = {"config": CONFIG} if dataset == REPOSITORY else {}
    return Problems(problems, {"hub": dataset, **config, "split": split, "commit": commit})


def _problems(rows: Iterable[tuple[str, Any]]) -> Iterator[Problem]:
    """Yields the problems of (location for messages, row) pairs.

    Separate steps are read in GSM8K-Aug's format, with only the result as the answer; an answer
    with ``####`` has GSM8K's format, whose rows may have any other fields.

    Raises:
        ValueError: If a row lacks a question or an answer with its result, or its steps are not a
            list of strings.
    """
    for where, row in rows:
        fields = [row.get(name) for name in ("question", "answer")] if isinstance(row, dict) else []
        texts = [field for field in fields if isinstance(field, str) and field.strip()]
        if len(texts) < 2:
            raise ValueError(
                f"{where}: expected an object with the strings 'question' and 'answer', as in GSM8K"
            )
        question, answer = texts
        steps = None if RESULT in answer else _steps_apart(row.get("steps"), where)
        if steps is not None:
            answer = f"{' '.join(steps)} {RESULT} {answer}"
        if not result_of(answer):
            raise ValueError(f"{where}: the answer does not end in a line '{RESULT} RESULT'")
        yield Problem(question=question, answer=answer, steps=steps)


def _steps_apart(steps: Any, where: str) -> tuple[str, ...] | None:
    """Returns the field ``steps`` of a row, if it has one.

    Raises:
        ValueError: If it is not a list of strings.
    """
    if steps is None:
        return None
    if isinstance(steps, list) and all(isinstance(step, str) for step in steps):
        return tuple(steps)
    raise ValueError(
        f"{where}: 'steps' is {reprlib.repr(steps)}; use a list of strings, as in GSM8K-Aug, or an "
        f"answer that ends in a line '{RESULT} RESULT'"
    )
