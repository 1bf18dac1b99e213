"""One optimiser step of a run again: its batches, their losses, row by row."""

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from callbacks.hooks import AgreedEnd, gather, undisturbed, unscaled, write_whole
from callbacks.nonfinite import total_norm

SHOWN = 3
"""Rows that the message names."""


class Replayed(AgreedEnd):
    """A replay that has reached its step; the message says what was found, and where it is."""

    exit_code = 0


class Replay(L.Callback):
    """Ends a run before the update of one optimiser step, after writing what the step consists of.

    A run that resumes from a checkpoint is the uninterrupted one in every bit, so the batches and
    losses are those that the step had. ``replay-step=N.json`` has the learning rate, the gradient's
    norm before clipping, and for each micro-batch of each rank its objective, as it was divided for
    accumulation, its terms, and its rows: ``sequence_id``, number of ``tokens``, ``nats`` per token
    (as scored with the weights before the update, without dropout; ``likelihood`` says what they
    are) and ``text``.
    """

    def __init__(self, step: int, folder: Path) -> None:
        """Chooses the step.

        Args:
            step: optimiser step, from 1, as progress lines and warnings count.
            folder: where the file is written.
        """
        self.step, self.folder = step, folder
        self._batches: list[dict[str, Any]] = []
        self._batch: Any = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the batches of the step."""
        self._batch = batch if trainer.global_step == self.step - 1 else None

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Notes a micro-batch and its losses."""
        if self._batch is not None:
            model: Any = pl_module
            micro = {
                "number": trainer.fit_loop.epoch_loop.total_batch_idx,
                "objective": unscaled(trainer, loss).item(),
                "terms": {name: value.item() for name, value in model.last_terms.items()},
            }
            self._batches.append({**micro, "batch": self._batch})

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Writes the file, and ends the run on all ranks.

        Raises:
            Replayed: if this is the step.
        """
        if not self._batches:
            return
        norm = total_norm(optimizer).item()
        with undisturbed(pl_module):
            own = [{**micro, **self._rows(trainer, pl_module, micro)} for micro in self._batches]
        ranks = gather([{k: v for k, v in micro.items() if k != "batch"} for micro in own])
        found = {
            "step": self.step,
            "checkpoint": trainer.ckpt_path and str(trainer.ckpt_path),
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
            "grad_norm": norm,
            "batches": [{"rank": r, **m} for r, micros in enumerate(ranks) for m in micros],
        }
        path = self.folder / f"replay-step={self.step}.json"
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(_plain(found), indent=1, ensure_ascii=False)
            write_whole(path, text)
        raise Replayed(_summary(found, path))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Only a run that does not reach the step gets here.

        Raises:
            ValueError: so that the program ends in one line.
        """
        raise ValueError(
            f"replay ({self.step}): the run ends after step {trainer.global_step}, name one that "
            "it has"
        )

    def _rows(
        self, trainer: L.Trainer, pl_module: L.LightningModule, micro: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the rows of a micro-batch as plain values, with what their numbers are."""
        model: Any = pl_module
        batch = micro["batch"]
        with model.precision_context():
            scores = model.score(batch)
        counted = (batch["targets"] >= 0).flatten(1)
        nats = (scores.log_prob.flatten(1).double().sum(1) + scores.sequence_term).neg()
        nats /= scores.num_targets.clamp(min=1)
        decode = trainer.datamodule.tokenizer.decode_continuation  # type: ignore[attr-defined]
        ids = [
            row[mask].tolist()
            for row, mask in zip(batch["targets"].flatten(1), counted, strict=True)
        ]
        values = {
            "sequence_id": batch["sequence_id"].tolist(),
            "tokens": scores.num_targets.tolist(),
            "nats": nats.tolist(),
            "text": [decode(row) for row in ids],
        }
        rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        return {"likelihood": scores.kind, "rows": rows}


def _plain(value: Any) -> Any:
    """Returns nested values with numbers that JSON does not have as text."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _summary(found: dict[str, Any], path: Path) -> str:
    """Returns the losses, the rows of the highest, and where the rest is."""
    lines = [
        f"step {found['step']}: objective "
        + ", ".join(f"{micro['objective']:.6g}" for micro in found["batches"])
        + f", gradient norm {found['grad_norm']:.4g}, learning rate {found['lr'][0]:.3g}"
    ]
    rows = [
        (row["nats"], micro["number"], micro["rank"], row)
        for micro in found["batches"]
        for row in micro["rows"]
    ]
    rows.sort(key=lambda each: (math.isfinite(each[0]), -each[0]))
    for nats, number, rank, row in rows[:SHOWN]:
        lines.append(
            f"  {nats:.4g} nats a token: batch {number}, rank {rank}, sequence_id "
            f"{row['sequence_id']}: {row['text'][:60]!r}"
        )
    return "\n".join([*lines, f"all rows: {path}"])
