"""Trains every method for two steps and saves its weights; started on one or on two processes.

Usage: python -m torch.distributed.run --nproc_per_node N tests/ddp_worker.py TEXT CACHE OUT
The batch of all processes together is four windows, or streams, whatever N is.
"""

import os
import sys
from pathlib import Path

import lightning as L
import torch
from methods import METHODS


def main(text: str, cache: str, out: str) -> None:
    """Writes OUT/<method>.pt from rank zero."""
    torch.set_num_threads(1)
    processes = int(os.environ["WORLD_SIZE"])
    for method in METHODS:
        model = method.build(**method.alone)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=processes,
            strategy="ddp",
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
        metrics = dict(trainer.callback_metrics)
        (validated,) = trainer.validate(model, data, verbose=False)
        if trainer.is_global_zero:
            metrics = {"train/loss": metrics["train/loss"].item(), **validated}
            saved = {"weights": model.network.state_dict(), "metrics": metrics}
            saved["sentence_steps"] = getattr(model, "sentence_steps", 0)
            torch.save(saved, Path(out) / f"{method.name}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
