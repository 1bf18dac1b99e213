"""Batches of token windows: rows of T tokens cut from a token stream, by index.

A corpus implements one method, `documents(split)`, and inherits the rest: splits, tokenizer, text
store (`corpus`), loaders, ranks and resuming (`base`), windows (here).

The stream of a split is its documents, each ending in EOS. An EOS is assumed at position -1, as the
context of the very first token, so that every stored token is a target. If the tokenizer begins
texts with BOS, so do documents, and evaluation reads BOS without predicting it. A window is a row
of T+1 tokens: the first T are the inputs, the last T the targets.

Three orders define row n:

| order | rows | use |
|---|---|---|
| `RandomWindows` | from random positions, no masking | training (Thoughtbubbles) |
| `PackedWindows` | documents in a new order each epoch, cut into consecutive rows | training |
| `EvaluationWindows` | the stream cut from its beginning, the last row padded | evaluation |

`WindowSource` groups rows into the batches of one rank. All randomness is counter-based (Philox),
keyed by seed and row index or epoch. It has no state, so any batch can be built without the
previous ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from datamodules.base import LanguageDataModule, choice_problems, range_problems
from datamodules.corpus import REMOVE_REPEATS
from datamodules.order import EpochOrder, draws, epoch_order
from datamodules.sources import (
    Batch,
    BatchSource,
    CountedSource,
    DealtPrompts,
    RowSource,
    step_rows,
)
from datamodules.store import Split, TokenStream
from datamodules.tokenizer_base import Tokenizer

IGNORE = -100  # target of positions without prediction, and padding in rows


class WindowOrder(ABC):
    """Rows by index.

    Args:
        stream: Tokens of the split, N of them.
        block_size: Number of targets per row, T.
        eos_id: Token before the stream.

    Attributes:
        block_size: Number of targets per row, T.
    """

    def __init__(self, stream: TokenStream, *, block_size: int, eos_id: int) -> None:
        self._stream, self.block_size, self._eos_id = stream, block_size, eos_id

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows per epoch."""

    @abstractmethod
    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Returns the stream positions of rows, (B, T+1) int64.

        -1 is the EOS before the stream, -2 padding. Row indices (B,) continue over epochs.
        """

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Returns rows (B, T+1) int64, tokens or -100; indices (B,) continue over epochs."""
        return self.cut(self.positions(indices))

    def cut(self, positions: np.ndarray) -> np.ndarray:
        """Returns the tokens at `positions`, -100 for padding."""
        tokens = self._stream.gather(np.maximum(positions, 0))
        tokens[positions == -1] = self._eos_id
        tokens[positions == NOWHERE] = IGNORE
        return tokens

    def bytes_at(self, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns the UTF-8 bytes of the tokens `rows` at `positions`, 0 outside the stream."""
        inside = positions >= 0
        sizes = self._stream.bytes_at(np.maximum(positions, 0), np.where(inside, rows, 0))
        return np.where(inside, sizes, 0)


NOWHERE = -2  # position of padding in rows; -1 is the EOS before the stream


def _full_windows(stream: TokenStream, block_size: int) -> int:
    """Returns the number of full windows in the stream.

    Raises:
        ValueError: If there is none.
    """
    if len(stream) < block_size:
        raise ValueError(
            f"block_size={block_size} is longer than the split's {len(stream)} tokens. Lower "
            "block_size, or use more text."
        )
    return len(stream) // block_size


class RandomWindows(WindowOrder):
    """Windows of T+1 consecutive tokens at random positions, drawn with replacement.

    Args:
        stream: Tokens of the split, N of them.
        block_size: Number of targets per row, T.
        eos_id: Token before the stream.
        seed: Non-negative seed; row g is a pure function of (seed, g).

    Raises:
        ValueError: If the stream has fewer than T tokens.
    """

    def __init__(self, stream: TokenStream, *, block_size: int, eos_id: int, seed: int) -> None:
        super().__init__(stream, block_size=block_size, eos_id=eos_id)
        self._seed = seed
        self._rows = _full_windows(stream, block_size)

    def __len__(self) -> int:
        """Returns N // T, the number of rows that `PackedWindows` has before grouping."""
        return self._rows

    def positions(self, indices: np.ndarray) -> np.ndarray:
        starts = draws(indices, seed=self._seed) % np.uint64(
            len(self._stream) - self.block_size + 1
        )
        return starts.astype(np.int64)[:, None] - 1 + np.arange(self.block_size + 1)


class PackedWindows(WindowOrder):
    """Documents in a new order each epoch, joined, and cut into consecutive rows of T targets.

    Each token is a target at most once per epoch. The last tokens that do not fill a row and the
    last rows that do not fill a batch over all ranks are dropped in that epoch.

    Args:
        stream: Tokens of the split, N of them.
        block_size: Number of targets per row, T.
        eos_id: Token before the stream.
        seed: Non-negative seed; the order of an epoch is a pure function of (seed, epoch).
        rows_per_batch: Number of rows per batch over all ranks, or per step. An epoch has a
            multiple of it.

    Raises:
        ValueError: If the stream has fewer than T tokens, or fewer rows than one batch takes.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        block_size: int,
        eos_id: int,
        seed: int,
        rows_per_batch: int = 1,
    ) -> None:
        super().__init__(stream, block_size=block_size, eos_id=eos_id)
        self._seed = seed
        rows = _full_windows(stream, block_size)
        self._rows = num_batches(rows, rows_per_batch, drop_last=True) * rows_per_batch
        self._orders: dict[int, EpochOrder] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Omits the cached orders, which data-loading workers open again."""
        return {**vars(self), "_orders": {}}

    def __len__(self) -> int:
        """Returns the number of rows per epoch."""
        return self._rows

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Returns the positions of rows, (B, T+1); row n is row n % len of epoch n // len."""
        epochs, indices = np.divmod(indices, self._rows)
        result = np.empty((len(indices), self.block_size + 1), dtype=np.int64)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            result[in_epoch] = self._cut_epoch(int(epoch), indices[in_epoch] * self.block_size - 1)
        return result

    def _cut_epoch(self, epoch: int, starts: np.ndarray) -> np.ndarray:
        """Returns the stream positions of rows that start at `starts` in an epoch's order."""
        order = self._order(epoch)
        stops = starts + self.block_size + 1
        # One entry per (row, document) pair, row by row: K entries in all for B rows.
        firsts = np.searchsorted(order.ends, starts, side="right")
        counts = np.searchsorted(order.ends, stops - 1, side="right") - firsts + 1
        row = np.repeat(np.arange(len(starts)), counts)
        begins = np.cumsum(counts) - counts
        index = np.arange(len(row)) - begins[row] + firsts[row]  # (K,) document in the order
        ends = order.ends[index]
        # Each document fills the positions since..until of its row, in the order's coordinates.
        until = np.minimum(ends, stops[row])
        since = np.concatenate([[0], until[:-1]])
        since[begins] = starts
        # Offset from the order's coordinates to the stored stream, constant per document.
        shifts = np.repeat(self._stream.ends(order.documents[index]) - ends, until - since)
        positions = starts[:, None] + np.arange(self.block_size + 1)
        shifted = positions + shifts.reshape(positions.shape)  # (B, T+1)
        return np.where(positions < 0, -1, shifted)

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            self._orders = {epoch: epoch_order(self._stream, seed=self._seed, epoch=epoch)}
        return self._orders[epoch]


class EvaluationWindows(WindowOrder):
    """The stream cut from its beginning, with each of its N tokens scored in exactly one row.

    Row n starts S n tokens into the stream. Except in row 0, its first T - S targets were scored in
    earlier rows and serve as context. A stream that begins with BOS needs no EOS before it, so its
    rows start one token later.

    Args:
        stream: Tokens of the split, N of them.
        block_size: Number of targets per row, T.
        eos_id: Token before the stream.
        stride: S, at most T, the number of targets that a row adds. Defaults to T, without overlap.
        bos_id: BOS of the documents, or None if they have none.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        block_size: int,
        eos_id: int,
        stride: int | None = None,
        bos_id: int | None = None,
    ) -> None:
        super().__init__(stream, block_size=block_size, eos_id=eos_id)
        self._stride = block_size if stride is None else stride
        self._first = -1 if bos_id is None else 0

    def __len__(self) -> int:
        """Returns 1 + ceil((N - T) / S) for N targets; 1 for at most T, 0 without tokens."""
        size = len(self._stream)
        targets = size - 1 - self._first
        return (size > 0) + -(-max(0, targets - self.block_size) // self._stride)

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Returns the positions of rows, (B, T+1), padded after the stream and in extra rows."""
        starts = indices[:, None] * self._stride + self._first
        positions = starts + np.arange(self.block_size + 1)
        outside = (positions >= len(self._stream)) | (indices[:, None] >= len(self))
        return np.where(outside, NOWHERE, positions)


def as_batch(
    rows: np.ndarray,
    sizes: np.ndarray,
    indices: np.ndarray,
    *,
    eos_id: int,
    context: int = 0,
    bos_id: int | None = None,
) -> Batch:
    """Returns the batch dict of rows (B, T+1).

    The first ``context`` targets of every row but row 0 are not predicted, and ``bos_id`` never is,
    because the beginning of a text is given.

    Keys: ``tokens`` (B, T) int64; ``targets`` (B, T) int64, -100 at positions without prediction;
    ``mask`` (B, T) bool, true on real tokens; ``sequence_id`` (B,) int64, the row's index;
    ``num_bytes`` (B,) int64, UTF-8 bytes of the targets.

    Args:
        rows: Tokens, or -100.
        sizes: UTF-8 bytes of each token of the rows, (B, T+1) int64.
        indices: Indices of the rows (B,).
        eos_id: Token at padded inputs.
        context: Number of targets at the beginning of each row that are only context.
        bos_id: BOS of the documents, or None if they have none.
    """
    padded = torch.from_numpy(rows)
    inputs, targets = padded[:, :-1], padded[:, 1:].clone()
    mask = inputs != IGNORE
    targets[indices > 0, :context] = IGNORE
    if bos_id is not None:
        targets[targets == bos_id] = IGNORE
    return {
        "tokens": torch.where(mask, inputs, eos_id),
        "targets": targets,
        "mask": mask,
        "sequence_id": torch.from_numpy(indices),
        "num_bytes": target_bytes(targets, sizes[:, 1:]),
    }


def target_bytes(targets: Tensor, sizes: np.ndarray) -> Tensor:
    """Returns the UTF-8 bytes of each row's targets, (B,) int64.

    Args:
        targets: Target ids (B, ...), -100 at positions without prediction.
        sizes: UTF-8 bytes of each target, of the same shape.
    """
    counted = torch.where(targets != IGNORE, torch.from_numpy(sizes), 0)
    return counted.flatten(1).sum(1)


class WindowSource(RowSource):
    """Batches of windows.

    Args:
        order: Windows by index.
        eos_id: Token at padded inputs.
        drop_last: Whether to drop the last rows that do not fill a batch over all ranks (training).
            Evaluation keeps them and pads the last batches with rows without targets, so that every
            rank has the same number of batches.
        special_ids: Ids of tokens that are not lexical; see `batch`.
        context: Number of targets at the beginning of every row but row 0 that are not predicted.
        bos_id: BOS of documents, if they have one. Evaluation does not predict it; training does,
            so that every row has T targets.
        **rows: See `RowSource`.

    Raises:
        ValueError: With `drop_last`, if not even one batch remains.
    """

    def __init__(
        self,
        order: WindowOrder,
        *,
        eos_id: int,
        drop_last: bool = False,
        special_ids: Sequence[int] = (),
        context: int = 0,
        bos_id: int | None = None,
        **rows: int,
    ) -> None:
        super().__init__(**rows)
        self._order, self._context = order, context
        self._special_ids = torch.tensor(special_ids, dtype=torch.int64)
        self._eos_id, self._bos_id = eos_id, bos_id
        steps = num_batches(len(order), self._rows_per_step, drop_last=drop_last)
        self._batches = steps * self._accumulate

    def __len__(self) -> int:
        """Returns the number of batches per rank and epoch."""
        return self._batches

    def counts(self, n: int) -> dict[str, float]:
        """Returns the number of targets of training batch `n` over all ranks; every row is full."""
        return {"targets": float(self._rows_per_batch * self._order.block_size)}

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank; see `as_batch`.

        With `special_ids` it also has ``lexical`` (B, T) bool, true where a target is not special.
        """
        indices = self._indices(n)
        positions = self._order.positions(indices)
        rows = self._order.cut(positions)
        batch = as_batch(
            rows,
            self._order.bytes_at(positions, rows),
            indices,
            eos_id=self._eos_id,
            context=self._context,
            bos_id=self._bos_id,
        )
        if len(self._special_ids):
            targets = batch["targets"]
            batch["lexical"] = (targets != IGNORE) & ~torch.isin(targets, self._special_ids)
        return batch

    def target_sizes(self, n: int) -> Tensor:
        """Returns the UTF-8 bytes of each target of batch `n`, (B, T) int64."""
        positions = self._order.positions(self._indices(n))
        rows = self._order.cut(positions)
        return torch.from_numpy(self._order.bytes_at(positions, rows)[:, 1:])


def num_batches(rows: int, rows_per_batch: int, *, drop_last: bool) -> int:
    """Returns the number of batches over all ranks in an epoch.

    Raises:
        ValueError: With `drop_last`, if there are fewer rows than one batch takes.
    """
    if not drop_last:
        return -(-rows // rows_per_batch)
    if rows < rows_per_batch:
        raise ValueError(
            f"batch_size, global_batch: one batch over all devices takes {rows_per_batch} windows, "
            f"but the train split has only {rows}. Lower it or block_size, or use more text."
        )
    return rows // rows_per_batch


class PromptSource(DealtPrompts):
    """Batches of prompts for a model to continue.

    Each prompt follows `Tokenizer.start_id`, so that its first token is scored too. Batches have
    the keys of `as_batch` and the width of their longest prompt.

    Args:
        prompts: Texts of the prompts.
        tokenizer: Tokenizer of the prompts.
        block_size: Maximum length of a prompt, in tokens.
        **rows: See `DealtPrompts`.

    Raises:
        ValueError: If a prompt is longer than `block_size`.
    """

    def __init__(
        self, prompts: Sequence[str], tokenizer: Tokenizer, *, block_size: int, **rows: int
    ) -> None:
        super().__init__(prompts, **rows)
        self._tokenizer = tokenizer
        self._encoded = [tokenizer.measured_prompt(prompt) for prompt in prompts]
        for index, (ids, _) in enumerate(self._encoded):
            if len(ids) - 1 > block_size:
                raise ValueError(
                    f"prompt {index + 1} has {len(ids) - 1} tokens, but the model reads at most "
                    f"block_size={block_size}. Shorten it."
                )

    def _built(self, indices: list[int]) -> Batch:
        encoded = [self._encoded[index] for index in indices]
        width = max(2, *(len(ids) for ids, _ in encoded))
        rows = np.full((len(encoded), width), IGNORE, dtype=np.int64)
        sizes = np.zeros_like(rows)
        for row, counts, (ids, covered) in zip(rows, sizes, encoded, strict=True):
            row[: len(ids)] = ids
            counts[: len(ids)] = covered
        return as_batch(rows, sizes, np.array(indices), eos_id=self._tokenizer.eos_id)


# The data module

Report = Literal["all", "lexical"]


class TextDataModule(LanguageDataModule):
    """A text corpus in batches of token windows.

    Training batch n of rank r has the windows with the global indices (n * world_size + r) * B + b
    for b < B, where B is the number of rows of its micro-batch.

    Args:
        block_size: Length of a window, in tokens (T).
        train_windows: 'packed' cuts documents in a new order each epoch, with each token once;
            'random' starts anywhere.
        report: Targets that loss and perplexity cover in evaluation: 'all', or only 'lexical' ones,
            without the tokens that end documents (and sentences, if they are marked). Bits per byte
            cover all.
        eval_stride: S, the number of targets that each window adds in evaluation: windows start S
            tokens apart, and each target is scored after at least T - S tokens, at T / S times the
            compute. Null uses T, without overlap.
        **kwargs: See `LanguageDataModule` and `TextCorpus`.

    Raises:
        ValueError: If arguments are out of range; the message lists all of them.
    """

    may_overlap: ClassVar[bool] = True
    not_in_source: ClassVar[frozenset[str]] = LanguageDataModule.not_in_source | {
        "block_size",
        "train_windows",
        "report",
        "eval_stride",
    }

    def __init__(
        self,
        *,
        block_size: int = 256,
        train_windows: Literal["packed", "random"] = "packed",
        report: Report = "all",
        eval_stride: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._block_size = block_size
        self.train_windows = train_windows
        self.report = report
        self.eval_stride = eval_stride
        super().__init__(**kwargs)

    def _problems(self) -> list[str]:
        problems = [*range_problems(1, block_size=self.block_size), *super()._problems()]
        problems += choice_problems(("packed", "random"), train_windows=self.train_windows)
        problems += choice_problems(("all", "lexical"), report=self.report)
        if self.eval_stride is not None and not 1 <= self.eval_stride <= max(1, self.block_size):
            problems.append(
                f"eval_stride={self.eval_stride} must be between 1 and block_size={self.block_size}"
            )
        return problems

    def repeats_cure(self) -> str | None:
        return REMOVE_REPEATS

    def setup(self, stage: str | None = None) -> None:
        """Opens the store, and checks the size of batches before a model is built.

        Raises:
            ValueError: If the train split is too small for one batch.
        """
        super().setup(stage)
        if stage == "fit" and self.trainer is not None:  # a corpus of sentences has no trainer
            self.training_source()

    @property
    def block_size(self) -> int:
        """Length T of a window in tokens."""
        return self._block_size

    def rows_per_target(self, split: Split, batches: int | None = None) -> float:
        """Returns the positions computed per target: T / S, or less for a short text."""
        if self.eval_stride is None:
            return 1.0
        size, length = len(self.stream(split)), self.block_size
        rows = 1 + -(-max(0, size - length) // self.eval_stride)
        if batches is not None:
            rows = min(rows, batches * self.eval_batch_size)
        return rows * length / min(size, length + (rows - 1) * self.eval_stride)

    def training_source(self) -> CountedSource:
        rows, stream, eos_id = self._training_rows(), self.stream("train"), self.tokenizer.eos_id
        order: RandomWindows | PackedWindows
        if self.train_windows == "random":
            order = RandomWindows(stream, block_size=self.block_size, eos_id=eos_id, seed=self.seed)
        else:
            order = PackedWindows(
                stream,
                block_size=self.block_size,
                eos_id=eos_id,
                seed=self.seed,
                rows_per_batch=step_rows(**rows),
            )
        return WindowSource(order, eos_id=eos_id, drop_last=True, **rows)

    def evaluation_source(self, split: Split) -> BatchSource:
        """Returns this rank's batches, which score every token of a split once.

        Raises:
            ValueError: If the split is empty.
        """
        stream = self.stream(split)
        self._refuse_empty(split, len(stream))
        stride = self.eval_stride or self.block_size
        eos_id, bos_id = self.tokenizer.eos_id, self.tokenizer.text_bos_id
        windows = EvaluationWindows(
            stream, block_size=self.block_size, eos_id=eos_id, stride=stride, bos_id=bos_id
        )
        return WindowSource(
            windows,
            batch_size=self.eval_batch_size,
            eos_id=eos_id,
            bos_id=bos_id,
            special_ids=self.tokenizer.special_ids if self.report == "lexical" else (),
            context=self.block_size - stride,
            **self._ranks(),
        )

    def prompt_source(self, prompts: Sequence[str]) -> PromptSource:
        """Returns batches of prompts, each after BOS, or EOS if the tokenizer has no BOS.

        Raises:
            ValueError: If a prompt is longer than a window.
        """
        sizes = {"block_size": self.block_size, "batch_size": self.eval_batch_size}
        return PromptSource(prompts, self.tokenizer, **sizes, **self._ranks())

    def order(self) -> dict[str, Any]:
        keys = ("block_size", "batch_size", "train_windows", "seed")
        return {key: getattr(self, key) for key in keys}
