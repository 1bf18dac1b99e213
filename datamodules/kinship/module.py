"""Kinship stories as a data module."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from datamodules.answers import AnswerDataModule
from datamodules.kinship.relations import RELATIONS
from datamodules.kinship.stories import MOST_DISTRACTORS, MOST_HOPS, VERSION, tell
from datamodules.store import Split


class Kinship(AnswerDataModule):
    """Stories of k stated relations that end in a question, after CLUTRR (arXiv 1908.06177).

    A story: Anna is Paul's mother. Anna's brother is Mark. Question: How is Mark related to Paul?
    Answer: uncle.

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
        shuffle_facts: Whether the facts are told in any order; else as the chain goes.
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
        _check_hops(hops=hops, test_hops=test_hops)
        _check_ranges(
            train_stories=(train_stories, 1, None),
            val_stories=(val_stories, 0, None),
            test_stories=(test_stories, 0, None),
            distractors=(distractors, 0, MOST_DISTRACTORS),
            story_seed=(story_seed, 0, None),
        )
        self._hops: dict[Split, Sequence[int]] = {"train": hops, "val": hops, "test": test_hops}
        self._sizes: dict[Split, int] = {
            "train": train_stories,
            "val": val_stories,
            "test": test_stories,
        }
        self._distractors, self._shuffle_facts = distractors, shuffle_facts
        self._story_seed = story_seed

    def source(self) -> dict[str, Any]:
        """Returns the options, and the version of the generator."""
        return {**super().source(), "generator": VERSION}

    def expects(self, split: Split) -> bool:
        """Returns whether a split has stories."""
        return self._sizes[split] > 0

    def how_to_get(self, split: Split) -> str:
        """Returns what gives a split stories, for messages."""
        return f"Set {split}_stories above 0."

    def questions(self, split: Split) -> Iterator[tuple[str, str]]:
        """Yields (story with question, answer) of a split."""
        for index in range(self._sizes[split]):
            story = tell(
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


def _check_hops(**given: Sequence[int]) -> None:
    for key, hops in given.items():
        if not hops or not all(1 <= count <= MOST_HOPS for count in hops):
            raise ValueError(f"{key}={list(hops)} must be numbers from 1 to {MOST_HOPS}.")


def _check_ranges(**given: tuple[int, int, int | None]) -> None:
    for key, (value, least, most) in given.items():
        if value < least:
            raise ValueError(f"{key}={value} must be at least {least}.")
        if most is not None and value > most:
            raise ValueError(f"{key}={value} must be at most {most}.")
