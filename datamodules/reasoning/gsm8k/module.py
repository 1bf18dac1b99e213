"""GSM8K and GSM8K-Aug as questions with reasoning (Thinking States, Sec. 4.3 and App. A.5.2)."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from datamodules.local_corpora import identify
from datamodules.reasoning.examples import Example
from datamodules.reasoning.file_splits import KEYS, FileSplits
from datamodules.reasoning.gsm8k.marked_problems import MarkedProblems
from datamodules.reasoning.gsm8k.placement import At, Placing, counts_of
from datamodules.reasoning.gsm8k.solved import (
    HubProblems,
    Solved,
    check_format,
    read_all,
    same_number,
    solved,
)
from datamodules.reasoning.module import ReasoningDataModule
from datamodules.store import Split

VERSION = 1
"""Raised with any change that gives other text or places; part of the data's identity."""


class ReasoningGSM8K(ReasoningDataModule):
    """Word problems whose solutions are equations, each placed where the question allows it.

    Without files the problems are the hub's openai/gsm8k, whose train split gives validation its
    share. Files are GSM8K's jsonl or GSM8K-Aug's txt (385,620 training problems; see
    `solved.read_solved`), of your own.

    Steps are the equations as published, ``<<48/2=24>>``. They are placed by rule (`placement`), or
    by a file that a language model made (`teacher/`): then training problems that are not in it are
    left out and counted, and other splits, whose markers only serve to be looked at, fall back to
    the rule. How the rule decided is in `report`. The group is the number of steps.

    NOTE(paper): results lose their thousands' commas, which the answers are compared without.

    Args:
        data_files: Training problems: one path or glob, or a list of them; null reads all from the
            hub.
        val_files: Validation problems; null holds out val_fraction of the training problems.
        test_files: Test problems, with data_files; null holds out test_fraction of the training
            problems. From the hub the test split is the hub's.
        aligned_file: The training problems, marked (`marked_problems`); null: by rule.
        place_at: Where the rule puts a marker: right after the last 'operand', or at the end of
            the 'clause' or 'sentence' that it is in.
        last_step_at_end: Whether the rule puts the last step after the question, as the teacher of
            the paper does in all its published examples.
        question_first: Whether the question is told in front as well, as in Fig. 5, which keeps it
            at the end.
        **kwargs: See `ReasoningDataModule`.

    Raises:
        ValueError: An argument is unusable; when preparing: a file or the hub cannot be read.
    """

    path_arguments: ClassVar[frozenset[str]] = ReasoningDataModule.path_arguments | {"aligned_file"}
    # Files are named by their content, shares by those that apply.
    not_in_source: ClassVar[frozenset[str]] = ReasoningDataModule.not_in_source | path_arguments
    group_name: ClassVar[str] = "steps"

    def __init__(
        self,
        *,
        data_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        aligned_file: str | None = None,
        place_at: At = "operand",
        last_step_at_end: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._splits = FileSplits(
            {"train": data_files, "val": val_files, "test": test_files},
            check_format,
            val_fraction=self.val_fraction,
            test_fraction=self.test_fraction,
            own=["test"],  # of the hub
        )
        self._aligned_file = None if aligned_file is None else Path(aligned_file).expanduser()
        if self._aligned_file is not None and not self._aligned_file.is_file():
            raise ValueError(
                f"aligned_file={aligned_file!r}: there is no such file. Write one with `python -m "
                "datamodules.reasoning.align teacher`, or set data.aligned_file to null."
            )
        self._placing = Placing(at=place_at, last_at_end=last_step_at_end)

    # Where the problems are from

    @cached_property
    def _hub(self) -> HubProblems | None:
        return None if self._splits.has_files else HubProblems()

    def remote(self) -> HubProblems | None:
        """Returns the problems on the hub; None where your files are read."""
        return self._hub

    def source(self) -> dict[str, Any]:
        """Returns the options, and the files by content."""
        return {
            **super().source(),
            **self._splits.source(),
            "aligned": None if self._aligned_file is None else identify(self._aligned_file),
            "reader": VERSION,
        }

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have problems."""
        return self._splits.expects(split)

    def how_to_get(self, split: Split) -> str:
        """Returns what gives an empty split problems, for messages."""
        about = " Is data.aligned_file about these problems?" if self._aligned_file else ""
        return self._splits.how_to_get(split) + about

    def problems(self, split: Split) -> Iterator[Solved]:
        """Yields the problems of a split, in the order of the files or of the hub."""
        return self._splits.rows(split, self._read)

    def _read(self, split: Split) -> Iterable[Solved]:
        if self._hub is None:
            return read_all(self._splits.files[split], KEYS[split])
        return map(solved, self._hub.problems("test" if split == "test" else "train").rows)

    # Examples

    def examples(self, split: Split) -> Iterator[Example]:
        """Yields the problems of a split that could be placed, and notices how."""
        aligned = None if self._aligned_file is None else MarkedProblems(self._aligned_file)
        if aligned is not None and split == "train":
            for name, count in aligned.counts.items():
                self.notice(name, count)
        for problem in self.problems(split):
            markers = self._markers(problem, split, aligned)
            if markers is not None:
                yield self._example(problem, markers)

    def _markers(
        self, problem: Solved, split: Split, aligned: MarkedProblems | None
    ) -> tuple[int, ...] | None:
        """Returns where the steps of a problem go; None if it is left out."""
        if not problem.equations:
            self.notice("examples without steps")
            return ()
        found = None if aligned is None else aligned.find(problem)
        if found is not None:
            self.notice("examples placed by the aligned file")
            return found
        if aligned is not None and split == "train":
            self.notice("left out, not in the aligned file")
            return None
        placed = self._placing(problem.question, problem.equations)
        for name, count in counts_of(placed).items():
            self.notice(name, count)
        return placed.markers

    def _example(self, problem: Solved, markers: tuple[int, ...]) -> Example:
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
        """Returns whether a written answer is the right number; see `solved.same_number`."""
        return same_number(text, answer)


def question_of(text: str) -> str:
    """Returns the last sentence of a problem, if that is a question; else nothing."""
    from sentencex import segment

    sentences = [sentence.strip() for sentence in segment("en", text)]
    last = next((sentence for sentence in reversed(sentences) if sentence), "")
    return last if last.endswith("?") else ""
