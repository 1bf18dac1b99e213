"""Text as batches of token windows.

A corpus writes one method, `documents(split)`, and gets the rest: splits, tokenizer, text store
(`corpus`), loaders, ranks and resuming (`base`), windows (here).
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from datamodules.base import LanguageDataModule
from datamodules.prompts import PromptSource
from datamodules.store import Split
from datamodules.windows import NonOverlappingWindows, PackedWindows, RandomWindows, WindowSource

__all__ = ["TextDataModule"]

Report = Literal["all", "lexical"]


class TextDataModule(LanguageDataModule):
    """A text corpus as batches of token windows.

    Training batch n of rank r has the windows with the global numbers (n * world_size + r) *
    batch_size + b, b below batch_size.

    Args:
        block_size: Length of a window, in tokens (T).
        train_windows: 'packed' cuts documents in a new order each epoch, each token once; 'random'
            starts anywhere.
        report: What loss and perplexity count when evaluating: 'all' targets, or only 'lexical'
            ones, leaving out the tokens that end documents (and sentences, where there are such).
            Bits per byte count all.
        **kwargs: See `LanguageDataModule` and `TextCorpus`.

    Raises:
        ValueError: An argument is out of its range; the message lists all of them.
    """

    not_in_source: ClassVar[frozenset[str]] = LanguageDataModule.not_in_source | {
        "block_size",
        "train_windows",
        "report",
    }

    def __init__(
        self,
        *,
        block_size: int = 256,
        train_windows: Literal["packed", "random"] = "packed",
        report: Report = "all",
        **kwargs: Any,
    ) -> None:
        self._block_size = block_size
        self.train_windows = train_windows
        self.report = report
        super().__init__(**kwargs)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.block_size < 1:
            problems.insert(0, f"block_size={self.block_size} must be at least 1")
        if self.train_windows not in ("packed", "random"):
            problems.append(f"train_windows={self.train_windows!r} must be 'packed' or 'random'")
        if self.report not in ("all", "lexical"):
            problems.append(f"report={self.report!r} must be 'all' or 'lexical'")
        return problems

    @property
    def block_size(self) -> int:
        """T, the length of a window in tokens."""
        return self._block_size

    def training_source(self) -> WindowSource:
        """Returns the training batches of this rank by number."""
        rank, world_size = self._ranks()
        stream, eos_id = self.stream("train"), self.tokenizer.eos_id
        order: RandomWindows | PackedWindows
        if self.train_windows == "random":
            order = RandomWindows(stream, block_size=self.block_size, eos_id=eos_id, seed=self.seed)
        else:
            order = PackedWindows(
                stream,
                block_size=self.block_size,
                eos_id=eos_id,
                seed=self.seed,
                rows_per_batch=self.batch_size * world_size,
            )
        return WindowSource(
            order,
            batch_size=self.batch_size,
            eos_id=eos_id,
            token_bytes=self.tokenizer.token_bytes,
            rank=rank,
            world_size=world_size,
            drop_last=True,
        )

    def evaluation_source(self, split: Split) -> WindowSource:
        """Returns the batches of this rank that score every token of a split once.

        Raises:
            ValueError: The split is empty.
        """
        stream = self.stream(split)
        if not len(stream):
            raise ValueError(f"The {split} split is empty. {self.how_to_get(split)}")
        rank, world_size = self._ranks()
        return WindowSource(
            NonOverlappingWindows(stream, block_size=self.block_size, eos_id=self.tokenizer.eos_id),
            batch_size=self.eval_batch_size,
            eos_id=self.tokenizer.eos_id,
            token_bytes=self.tokenizer.token_bytes,
            rank=rank,
            world_size=world_size,
            special_ids=self.tokenizer.special_ids if self.report == "lexical" else (),
        )

    def prompt_source(self, prompts: Sequence[str]) -> PromptSource:
        """Returns batches of prompts, each after an EOS.

        Raises:
            ValueError: A prompt is longer than a window.
        """
        rank, world_size = self._ranks()
        return PromptSource(
            prompts,
            self.tokenizer,
            block_size=self.block_size,
            batch_size=self.eval_batch_size,
            rank=rank,
            world_size=world_size,
        )

    def order(self) -> dict[str, Any]:
        """Returns what decides, besides text and world size, which windows make batch n."""
        keys = ("block_size", "batch_size", "train_windows", "seed")
        return {key: getattr(self, key) for key in keys}
