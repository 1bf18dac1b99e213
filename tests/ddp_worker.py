"""Trains methods for two steps and saves their weights: one rank of two.

Usage: LOCAL_RANK=0|1 MASTER_ADDR=... MASTER_PORT=... python tests/ddp_worker.py TEXT CACHE OUT
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from formats import SENTENCES, StoredSentences
from methods import IN_FULL, Method

RUNS = [
    *IN_FULL,
    replace(
        next(method for method in IN_FULL if method.format is SENTENCES),
        name="streams of a corpus",
        format=StoredSentences(),
    ),
]
"""Each method on fixed batches or windows, and one that reads sentences on those of a corpus."""


def train(method: Method, text: str, cache: str, processes: int) -> dict[str, Any]:
    """Returns weights and metrics after two steps, the same on every rank.

    The batch of all processes together is four windows, or streams, whatever their number is.
    """
    model = method.build(**method.alone)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="auto" if processes == 1 else "ddp",
        precision="64-true",
        max_steps=2,
        accumulate_grad_batches=2,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = method.format.dealt(text, cache, processes)
    trainer.fit(model, data)
    metrics = {"train/loss": trainer.callback_metrics["train/loss"].item()}
    (validated,) = trainer.validate(model, data, verbose=False)
    return {
        "weights": model.network.state_dict(),
        "metrics": metrics | validated,
        "sentence_steps": getattr(model, "sentence_steps", 0),
    }


def main(text: str, cache: str, out: str) -> None:
    """Writes OUT/<method>.pt from rank zero, for all methods in one process group."""
    torch.set_num_threads(1)
    for method in RUNS:
        result = train(method, text, cache, processes=2)
        if torch.distributed.get_rank() == 0:
            torch.save(result, Path(out) / f"{method.name}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
