"""Batches of sentences that are the same over all ranks together, however many there are."""

from typing import Any

import lightning as L
import torch
from formats import SENTENCES, marked_documents

from datamodules import LocalText, Sentences
from datamodules.sentences.batches import StreamSource, stored_batch
from datamodules.sources import BatchLoader, TrainingSource

SHAPES = [
    [[6, 3, 9], [4], [2, 2, 7, 1], [5, 8]],
    [[3, 3], [1], [9], [4]],  # one rank has streams of one sentence only
    [[2, 6, 1], [7, 5], [3], [8, 2, 2, 1]],
    [[1, 1], [2], [5, 5, 5], [6]],
]
"""Numbers of content tokens of the four streams of each batch."""


class DealtStreams(L.LightningDataModule):
    """Batch n of all ranks together is the n-th of SHAPES, however many ranks there are."""

    def train_dataloader(self) -> BatchLoader:
        accumulate = self.trainer.accumulate_grad_batches
        source = TrainingSource(self, epoch_batches=len(SHAPES), accumulate=accumulate)
        return BatchLoader(source)

    def val_dataloader(self) -> BatchLoader:
        return BatchLoader(self)

    def __len__(self) -> int:
        return len(SHAPES)

    def whole(self, n: int) -> dict[str, Any]:
        size = SENTENCES.sizes["vocab_size"], SENTENCES.sizes["block_size"]
        return marked_documents(SHAPES[n], size[0] - 3, *size, seed=n, ends=2)

    def counts(self, n: int) -> dict[str, float]:
        """Targets of each kind in the batch of all ranks."""
        targets, bos = self.whole(n)["targets"], SENTENCES.sizes["vocab_size"] - 3
        kinds = {
            "targets": targets >= 0,
            "lexical": (targets >= 0) & (targets < bos),
            "eos": targets == bos + 1,
            "eod": targets == bos + 2,
        }
        return {name: float(kind.sum()) for name, kind in kinds.items()}

    def batch(self, n: int) -> dict[str, Any]:
        whole = self.whole(n)
        rows = torch.arange(self.trainer.global_rank, 4, self.trainer.world_size)
        return {key: value[rows] for key, value in whole.items()} | {
            "sentence_steps": whole["lengths"].shape[1]
        }


class StreamsOfTwo(Sentences):
    """A corpus dealt to two devices, whose batches one process takes together.

    The batches of one device with doubled budgets are others.
    """

    def __init__(self, text: str, cache: str, processes: int) -> None:
        super().__init__(
            corpus=LocalText(data_files=text, cache_dir=cache),
            splitter="spans:7",
            max_sentence_tokens=SENTENCES.sizes["block_size"] - 3,
            max_sentences=4,
            batch_tokens=60,
            batch_size=3,
            eval_batch_size=4 // processes,
        )

    def training_source(self) -> Any:
        """Batches of this rank of two, or of both."""
        ranks = self._ranks()
        if ranks["world_size"] == 2:
            return super().training_source()
        self._ranks = lambda: {"rank": 0, "world_size": 2}
        source = super().training_source()
        self._ranks = lambda: ranks
        return BothRanks(source)


class BothRanks:
    """Batches of all ranks of a source together."""

    def __init__(self, source: StreamSource) -> None:
        self.source, self.counts = source, source.counts

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, n: int) -> dict[str, Any]:
        first, sentences = self.source.streams(n)
        batch = stored_batch(self.source._index, first, sentences, first)
        return {**batch, "sentence_steps": int(sentences.max())}
