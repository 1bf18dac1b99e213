"""Base data module for questions with reasoning steps and answers."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from lightning.pytorch.utilities import rank_zero_info

from datamodules.base import LanguageDataModule, choice_problems, limited_batches, range_problems
from datamodules.corpus import REMOVE_REPEATS, Repeats, split_of
from datamodules.local_corpora import FILE_KEYS, Patterns, files_of_splits, identify
from datamodules.order import RowOrder
from datamodules.reasoning.batches import ReasoningSource
from datamodules.reasoning.examples import Example, FixedTokens
from datamodules.reasoning.preparation import (
    KEPT,
    VERSION,
    Examples,
    ExampleStore,
    Reports,
    format_reports,
    prepare_examples,
    why_empty,
)
from datamodules.sources import BatchSource, Rows, step_rows
from datamodules.store import SPLITS, Split
from datamodules.tokenizer_base import Tokenizer

# ---- rows of splits


Row = TypeVar("Row")


class FileSplits:
    """Locations of the rows of each split.

    Args:
        patterns: Paths and globs of each split, all None if the rows are not in files.
        check: Raises a ValueError for a file that cannot be read.
        val_fraction: Share of the training rows held out for validation if it has no separate rows.
        test_fraction: Share of the training rows held out for testing if it has no separate rows.
        published: Splits that have separate rows if there are no files.

    Raises:
        ValueError: If there are files of other splits, but none for training.
    """

    def __init__(
        self,
        patterns: Patterns,
        check: Callable[[Path], Any],
        *,
        val_fraction: float,
        test_fraction: float,
        published: Iterable[Split] = (),
    ) -> None:
        self._patterns, self._check = patterns, check
        self._fractions: dict[Split, float] = {"val": val_fraction, "test": test_fraction}
        self.has_files = patterns["train"] is not None
        keys = [FILE_KEYS[split] for split in SPLITS[1:] if patterns[split] is not None]
        if keys and not self.has_files:
            raise ValueError(
                f"{' and '.join(keys)} name files, but data_files is null. Set data.data_files "
                "too: either all splits come from files or none does."
            )
        named_splits = {split for split in SPLITS if patterns[split] is not None}
        self._separate = named_splits if self.has_files else set(published)

    @cached_property
    def files(self) -> dict[Split, list[Path]]:
        """Files of each split, in reading order.

        Raises:
            ValueError: If a file is missing, of unknown format, or in two splits.
        """
        return files_of_splits(self._patterns, self._check)

    @property
    def shares(self) -> dict[str, float]:
        """Held-out shares of the training rows."""
        return {
            f"{split}_fraction": 0.0 if split in self._separate else fraction
            for split, fraction in self._fractions.items()
        }

    def source(self) -> dict[str, Any]:
        """Returns the identity of the rows: file names, sizes and hashes, and shares."""
        if not self.has_files:
            return self.shares
        files = {split: [identify(path) for path in paths] for split, paths in self.files.items()}
        return {**self.shares, "files": files}

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have rows."""
        return split == "train" or split in self._separate or self._fractions[split] > 0

    def how_to_get(self, split: Split) -> str:
        """Returns the remedy for an empty split, for messages."""
        if split == "train":
            return "Check data.data_files."
        share, key = self._fractions[split], FILE_KEYS[split]
        return f"Set data.{split}_fraction (now {share}), or data.{key} with data.data_files."

    def rows(self, split: Split, read: Callable[[Split], Iterable[Row]]) -> Iterator[Row]:
        """Yields the rows of a split.

        Args:
            split: Split to read.
            read: Yields the rows of a separate source, in an order that never changes.
        """
        if split != "train" and split in self._separate:
            yield from read(split)
            return
        for index, row in enumerate(read("train")):
            if split_of(index, **self.shares) == split:
                yield row


# ---- the data module


class ReasoningDataModule(LanguageDataModule):
    """Batches of questions, reasoning steps and answers.

    A task implements `examples(split)`, and overrides `expects` and `how_to_get` for splits of
    explicit sizes, `group_name` for grouping accuracies, and `is_right` for grading answers. While
    it generates examples, it reports counts with `notice`; they appear in meta.json and in
    `report`.

    The rows are the same for every method, which builds its inputs from them. See `batches` for the
    keys. A row of text has the query, `step_separator` and text of each step, `answer_prefix`, the
    answer, and an EOS.

    `val_fraction` and `test_fraction` have no effect, unless a task splits by them and removes them
    from its `not_in_source`.

    Args:
        block_size: Maximum length of a row of text in tokens, including the EOS before the query
            and the EOS after the answer. Batches are only as wide as their rows need.
        train_windows: 'packed' visits each example once per epoch, in a new order; 'random' draws
            examples with replacement.
        max_length: Maximum length of a training example in tokens, counted as for block_size.
            Longer ones are left out and counted. Null keeps all. Examples of other splits are left
            out only if they are longer than block_size.
        answer_prefix: Fixed text before every answer, which is not scored and is also inserted at
            inference. In methods with one latent state per chunk, the state after the last chunk of
            a query enters here, so it must not be empty.
        step_separator: Text before every step in a written chain of thought.
        question_first: Whether the question precedes its context (Thinking States, Fig. 5), if the
            task can separate them.
        **kwargs: See `LanguageDataModule` and `TextCorpus`.

    Raises:
        ValueError: If an argument is out of range; in `setup`, if a training row is longer than
            block_size.
    """

    rows: ClassVar[str] = "reasoning"
    document_noun: ClassVar[str] = "question"
    group_name: ClassVar[str] = "group"
    """Name of ``group`` in results."""
    not_in_source: ClassVar[frozenset[str]] = LanguageDataModule.not_in_source | {
        "block_size",
        "train_windows",
        "val_fraction",
        "test_fraction",
    }

    def __init__(
        self,
        *,
        block_size: int = 512,
        train_windows: Literal["packed", "random"] = "packed",
        max_length: int | None = None,
        answer_prefix: str = "\nThe answer is",
        step_separator: str = "\n",
        question_first: bool = False,
        **kwargs: Any,
    ) -> None:
        self._block_size = block_size
        self.train_windows = train_windows
        self.max_length = max_length
        self.answer_prefix = answer_prefix
        self.step_separator = step_separator
        self.question_first = question_first
        self._noticed: Counter[str] = Counter()
        super().__init__(**kwargs)

    # Implemented by tasks

    @abstractmethod
    def examples(self, split: Split) -> Iterable[Example]:
        """Yields the examples of a split, in an order that never changes.

        It is called once for each split when the data are prepared, and once more for 'train' if a
        tokenizer is trained.
        """

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have examples; if it has none, that is an error."""
        return True

    def how_to_get(self, split: Split) -> str:
        return f"{type(self).__name__} has no examples for it."

    def repeats_cure(self) -> str | None:
        """Returns the advice on questions in several splits, or None to skip that check."""
        return REMOVE_REPEATS

    def is_right(self, text: str, answer: str) -> bool:
        """Returns whether a generated answer is correct, ignoring surrounding whitespace.

        Args:
            text: Text that a model generated after the answer prefix.
            answer: The example's answer.
        """
        return text.strip() == answer.strip()

    def notice(self, name: str, count: int = 1) -> None:
        """Adds to a count of the split whose examples are being generated, for `report`.

        Args:
            name: Human-readable description, e.g. "steps placed by a tie".
            count: Number of occurrences.
        """
        self._noticed[name] += count

    # Text

    def documents(self, split: Split) -> Iterator[str]:
        """Yields the texts of a split, for training a tokenizer: queries, steps and answers."""
        for example in self.examples(split):
            yield example.query
            for step in example.steps:
                yield from (self.step_separator, step)
            yield from (self.answer_prefix, example.answer)

    def _description(self) -> dict[str, Any]:
        return {**super()._description(), "reasoning": VERSION}

    def _problems(self) -> list[str]:
        problems = super()._problems()
        problems += range_problems(1, block_size=self.block_size, max_length=self.max_length)
        problems += choice_problems(("packed", "random"), train_windows=self.train_windows)
        if not self.answer_prefix:
            problems.append("answer_prefix='' must not be empty, e.g. '\\nThe answer is'")
        if not self.step_separator:
            problems.append("step_separator='' must not be empty, e.g. '\\n'")
        return problems

    # Preparing

    def prepare_data(self) -> None:
        """Tokenises and aligns the examples into `store_dir`, unless the store exists.

        It logs the numbers of kept and omitted examples.

        Raises:
            ValueError: If an expected split has no examples, or the task or the tokenizer has a
                problem.
        """
        if not self.store_dir.exists():
            rank_zero_info(f"Preparing {self.store_dir}")
        self._repeats = None if self.repeats_cure() is None else Repeats()
        wrote = prepare_examples(
            self.store_dir,
            description=self._pinned_description,
            examples=self._counted_examples,
            make_tokenizer=self._make_tokenizer,
            wording=self._wording,
            max_length=self.max_length,
            noticed=lambda: dict(self._noticed),
            check=self._check_reports,
        )
        self._verify_for_training()
        self._warn_of_repeats()
        if wrote:
            rank_zero_info(f"{type(self).__name__}: {format_reports(self.report())}")
        self._log_commits()

    def _pinned_description(self) -> dict[str, Any]:
        """Returns the description for meta.json, with the source pinned, e.g. to a commit."""
        origin = dict(self.pin(None))
        return {**self._description(), "origin": origin, "notes": self._log_notes()}

    def _counted_examples(self, split: Split) -> Iterator[Example]:
        """Yields the examples of a split, counting its notices from zero."""
        self._noticed.clear()  # a tokenizer may have been trained on the same examples
        for example in self.examples(split):
            if self._repeats is not None:
                self._repeats.add(split, example.query)
            yield example

    def _check_reports(self, reports: Reports) -> None:
        for split in SPLITS:
            if self.expects(split) and not reports[split][KEPT]:
                reason = why_empty(split, reports[split], self._spec.name)
                none = f"The {split} split has no examples. {self.how_to_get(split)}"
                raise ValueError(none if reason is None else reason)

    def setup(self, stage: str | None = None) -> None:
        """Opens the store.

        Raises:
            ValueError: If it is missing or damaged, or a training row is longer than block_size.
        """
        super().setup(stage)
        lengths = {
            split: self.stored(split).row_lengths(self.wording())
            for split in SPLITS
            if self._store.longest(split) > self.block_size
        }
        self._leave_out(lengths, stage, ", or max_length to leave out longer ones")

    @cached_property
    def _store(self) -> ExampleStore:
        return ExampleStore(self.store_dir)

    # Prepared data

    def stored(self, split: Split) -> Examples:
        """Returns the tokenised examples of a split of the prepared data."""
        self._store.check_tokenizer(self.tokenizer)
        return self._store.examples(split, self.tokenizer.token_bytes.numpy())

    def report(self) -> dict[Split, dict[str, int]]:
        """Returns counts per split: examples read, kept, left out by reason, and notices."""
        return {split: self._store.report(split) for split in SPLITS}

    def longest_thought(self, chunk_size: int) -> int:
        """Returns the length of the longest training thought; see `Examples.longest_thought`.

        Models limit thoughts to this length at inference.
        """
        return self.stored("train").longest_thought(chunk_size)

    def wording(self) -> FixedTokens:
        """Returns the ids of the answer prefix and of the step separator."""
        return self._wording(self.tokenizer)

    def _wording(self, tokenizer: Tokenizer) -> FixedTokens:
        fixed = (self.answer_prefix, self.step_separator)
        prefix, separator = (tokenizer.encode_continuation(text) for text in fixed)
        return FixedTokens(tuple(prefix), tuple(separator))

    # Batches

    @property
    def block_size(self) -> int:
        """Maximum length of a row of text in tokens."""
        return self._block_size

    def row_tokens(self, split: Split) -> int:
        """Returns the mean number of tokens per row of a split.

        It covers the query, the answer prefix and the answer, but not the steps, which each model
        writes itself.
        """
        mean = self.stored(split).mean_query_and_answer()
        return round(mean) + len(self.wording().answer_prefix)

    def training_source(self) -> ReasoningSource:
        """Returns the training batches of this rank by index.

        Raises:
            ValueError: If the train split is too small for one batch.
        """
        return self._source("train", self._training_rows(), training=True)

    def evaluation_source(self, split: Split) -> ReasoningSource:
        """Returns this rank's batches, which cover every example of a split once, in order.

        Examples longer than block_size are left out; see `left_out`.

        Raises:
            ValueError: If the split is empty, or all of its examples are too long.
        """
        self._refuse_empty(split, len(self.stored(split)))
        rows: Rows = {"batch_size": self.eval_batch_size, **self._ranks()}
        return self._source(split, rows, training=False)

    def _source(self, split: Split, rows: Rows, *, training: bool) -> ReasoningSource:
        examples = self.stored(split)
        order = RowOrder(
            len(examples),
            order=self.train_windows if training else None,
            rows_per_batch=step_rows(**rows),
            seed=self.seed,
            kept=None if training else self._fitting(split),
        )
        batches = order.batches * rows.get("accumulate", 1)
        return ReasoningSource(
            examples,
            order,
            eos_id=self.tokenizer.eos_id,
            start_id=self.tokenizer.start_id,
            counter=self._counter() if training else None,
            epoch_batches=self._epoch_batches(batches) if training else None,
            **rows,
        )

    def _epoch_batches(self, available: int) -> int | None:
        """Returns the batches per trainer epoch, or None if all epochs repeat the first."""
        if self.trainer is None:
            return available
        if getattr(self.trainer, "overfit_batches", 0) > 0:  # set by Trainer, not declared
            return None
        return limited_batches(available, self.trainer.limit_train_batches)

    def _counter(self) -> Any:
        """Returns the trainer's model's counter of normalisers, if it has one."""
        model = None if self.trainer is None else getattr(self.trainer, "lightning_module", None)
        return getattr(model, "counter", None)

    def prompt_source(self, prompts: Sequence[str]) -> BatchSource:
        """Raises: a question without its answer has nothing to score.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"predict scores the tokens of prompts, but {type(self).__name__} has questions whose "
            "answers alone are scored. Use `python evaluate.py reason` for answers to the "
            "questions of a split, or `python evaluate.py generate` for answers to other "
            "questions."
        )

    def order(self) -> dict[str, Any]:
        """Returns the settings that, with data and world size, determine batch n."""
        keys = ("batch_size", "train_windows", "seed")
        return {key: getattr(self, key) for key in keys}
