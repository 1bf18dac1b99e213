"""What passes through batches have recorded about steps, token by token."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from callbacks.analysis.batch_parts import real_tokens
from callbacks.analysis.token_text import PART, pieces
from callbacks.step_allocation.convergence import Convergence
from callbacks.step_allocation.words import word_places


class Pass:
    """What one pass through a batch has recorded; the latest of each statistic."""

    def __init__(self) -> None:
        """Starts empty."""
        self.most = 0
        """K, the most additional steps that a token may take."""
        self.executed: np.ndarray | None = None
        """int64 (B, T), additional steps that tokens take; None: the model records none."""
        self.losses: np.ndarray | None = None
        """float (B, T, K+1): cross-entropy in nats, had the token stopped after i steps."""
        self.log_tail: np.ndarray | None = None
        """float (B, T, K+1), log w; None: the model has no router."""

    def consumers(self) -> dict[str, Callable[..., None]]:
        """Returns the functions to record with."""
        return {
            "thinking_steps": self.take_steps,
            "depth_losses": self._take_losses,
            "router": self._take_router,
        }

    def take_steps(self, *, executed: Tensor, most: int, **_: Any) -> None:
        """Takes ``thinking_steps``."""
        self.executed, self.most = executed.cpu().numpy(), int(most)

    def _take_losses(self, *, losses: Tensor, **_: Any) -> None:
        self.losses = _numpy(losses)

    def _take_router(self, *, log_tail: Tensor, **_: Any) -> None:
        self.log_tail = _numpy(log_tail)


class Columns:
    """Numbers of tokens by name, batch after batch; all columns have one entry a token."""

    def __init__(self) -> None:
        """Starts empty."""
        self._parts: defaultdict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, **values: np.ndarray) -> None:
        """Adds the tokens of a batch."""
        for name, part in values.items():
            self._parts[name].append(part)

    def merge(self, other: "Columns") -> None:
        """Adds other tokens."""
        for name, parts in other._parts.items():
            self._parts[name] += parts

    def __getitem__(self, name: str) -> np.ndarray:
        """The column of that name; empty if there is none."""
        return np.concatenate(self._parts[name]) if name in self._parts else np.empty(0)


@dataclass(frozen=True)
class TextRow:
    """The real tokens of a row that is shown (T of them)."""

    ids: np.ndarray
    """int64 (T,)."""
    texts: Sequence[str]
    """What each stands for."""
    executed: np.ndarray
    """int64 (T,)."""
    losses: np.ndarray
    """float (T, K+1), see ``Pass.losses``; nan without a target."""
    tail: np.ndarray | None
    """w (T, K+1); None without a router."""


class Findings:
    """What has been found about steps; ranks' findings can be merged.

    N tokens are analysed: those with a target, so that each is counted once where windows overlap.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.most = 0
        """K."""
        self.batches = 0
        self.tokens = Columns()
        """``ids`` int64 (N,), ``executed`` int16 (N,), ``losses`` float32 (N, K+1) and, where there
        is a tokenizer, ``place`` int8 (N,), see ``words``."""
        self.sweep: defaultdict[float, Columns] = defaultdict(Columns)
        """By alpha: ``executed`` int16 (N,), ``loss`` float32 (N,) in nats; ``difficulty`` float32
        (N,), the step-0 loss in nats, of alpha 0."""
        self.texts: dict[int, str] = {}
        """What token ids stood for when first seen."""
        self.rows: list[TextRow] = []
        """Rows that are shown."""
        self.convergence = Convergence()

    def __bool__(self) -> bool:
        """Whether any token was analysed."""
        return len(self.tokens["ids"]) > 0

    def add(self, batch: dict[str, Any], seen: Pass, tokenizer: Any, rows: int) -> None:
        """Adds the tokens of a batch.

        Args:
            batch: with ``tokens`` and ``targets`` (B, T), and ``mask`` where rows are padded.
            seen: what it has recorded, steps and losses.
            tokenizer: the data's; None: nothing is said about texts.
            rows: how many rows in all are to be shown.
        """
        assert seen.executed is not None
        assert seen.losses is not None
        chosen, ids = targets_of(batch), batch["tokens"].cpu().numpy()
        self.most, self.batches = max(self.most, seen.most), self.batches + 1
        self.tokens.add(
            ids=ids[chosen],
            executed=seen.executed[chosen].astype(np.int16),
            losses=seen.losses[chosen].astype(np.float32),
        )
        if tokenizer is not None:
            self._add_texts(batch, seen, tokenizer, rows)

    def _add_texts(self, batch: dict[str, Any], seen: Pass, tokenizer: Any, rows: int) -> None:
        """Adds what tokens stand for, and where in words they stand."""
        ids = batch["tokens"].cpu().numpy()
        places = np.zeros(ids.shape, dtype=np.int8)
        special = set(getattr(tokenizer, "special_ids", ()))
        for row, real in enumerate(real_tokens(batch)):
            own = ids[row, real].tolist()
            texts = pieces(tokenizer, own)
            letters = ["" if i in special else t for i, t in zip(own, texts, strict=True)]
            places[row, real] = word_places(letters)
            self._note_texts(own, texts)
            if len(self.rows) < rows and real.any():
                self.rows.append(_text_row(batch, row, texts, seen))
        self.tokens.add(place=places[targets_of(batch)])

    def _note_texts(self, ids: Sequence[int], texts: Sequence[str]) -> None:
        """Notes what ids stand for; those that end a character of several tokens are part of it."""
        for i, before, text in zip(ids, ["", *texts], texts, strict=False):
            self.texts.setdefault(i, PART if before == PART else text)

    def add_point(self, alpha: float, batch: dict[str, Any], seen: Pass, log_prob: Tensor) -> None:
        """Adds a pass with another alpha.

        Args:
            alpha: what the router's logits were shifted by.
            batch: that was scored.
            seen: what it has recorded; losses at alpha 0.
            log_prob: float32 (B, T), of the targets in nats.
        """
        assert seen.executed is not None
        chosen, columns = targets_of(batch), self.sweep[alpha]
        columns.add(
            executed=seen.executed[chosen].astype(np.int16),
            loss=-_numpy(log_prob)[chosen].astype(np.float32),
        )
        if seen.losses is not None:
            columns.add(difficulty=seen.losses[chosen][:, 0].astype(np.float32))

    def merge(self, other: "Findings") -> None:
        """Adds what was found in other batches."""
        self.most = max(self.most, other.most)
        self.batches += other.batches
        self.tokens.merge(other.tokens)
        for alpha, columns in other.sweep.items():
            self.sweep[alpha].merge(columns)
        self.texts = other.texts | self.texts
        self.rows += other.rows
        self.convergence.merge(other.convergence)


def targets_of(batch: dict[str, Any]) -> np.ndarray:
    """Returns bool (B, T): where something is predicted."""
    targets: Tensor = batch["targets"]
    return (targets >= 0).cpu().numpy()


def _text_row(batch: dict[str, Any], row: int, texts: Sequence[str], seen: Pass) -> TextRow:
    assert seen.executed is not None
    assert seen.losses is not None
    real = real_tokens(batch)[row]
    losses = np.where(targets_of(batch)[row, :, None], seen.losses[row], np.nan)
    return TextRow(
        ids=batch["tokens"][row].cpu().numpy()[real],
        texts=texts,
        executed=seen.executed[row, real],
        losses=losses[real],
        tail=None if seen.log_tail is None else np.exp(seen.log_tail[row, real]),
    )


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().cpu().double().numpy()
