"""Overview of a run before training: parameters, FLOPs per token, batch and tokens."""

import math
from typing import Any

import lightning as L


class ModelOverview(L.Callback):
    """Prints a model's parameters, its FLOPs per token, and the batch of a step.

    It replaces Lightning's summary, whose FLOPs ignore attention and repeated passes;
    ``trainer.enable_model_summary: false`` disables both.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            whole = getattr(data, "rows", "windows") != "windows"
            print(overview(pl_module, data.row_tokens("train") if whole else None), flush=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the number of batches per epoch is known only now
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.is_global_zero and hasattr(data, "step_batch"):
            print(_planned_batch(trainer, data), flush=True)


def _planned_batch(trainer: Any, data: Any) -> str:
    """Returns `batch_line` of a run that starts or resumes."""
    steps, epoch = trainer.estimated_stepping_batches, trainer.num_training_batches
    batch = data.step_batch(trainer.world_size, trainer.accumulate_grad_batches).within(epoch)
    accumulate, tokens, total = batch.accumulate, batch.size * data.unit_tokens(), None
    if not math.isinf(steps):
        # The last step of an epoch may have fewer micro-batches.
        epochs, rest = divmod(steps, math.ceil(epoch / accumulate))
        micro_batches = epochs * epoch + min(rest * accumulate, epoch)
        total = micro_batches * tokens / accumulate
    return batch_line(batch, tokens, data.rows, steps=steps, total=total)


def batch_line(
    batch: Any, tokens: float, rows: str, *, steps: float | None, total: float | None
) -> str:
    """Returns the batch of an optimiser step, its tokens and the run's tokens, in one line.

    Args:
        batch: The data module's ``StepBatch``.
        tokens: Number of tokens of the batch.
        rows: Type of the rows; the number of tokens is exact for ``windows`` only.
        steps: Number of optimiser steps of the run; None or infinity if it has no limit.
        total: Number of tokens of the run, or None if unknown.
    """
    bound = {"windows": "", "sentences": "at most "}.get(rows, "about ")
    of_size, devices = "" if batch.unit == "rows" else bound, batch.devices
    # Devices may share a step of sentences unevenly.
    qualifier = "" if batch.micro * batch.accumulate * devices == batch.size else "at most "
    parts = [
        f"global batch {of_size}{batch.size:,} {batch.unit} = {qualifier}{batch.micro:,} "
        f"micro-batch x {batch.accumulate} accumulated x "
        f"{devices} device{'s' if devices > 1 else ''}",
        f"{bound}{round(tokens):,} tokens per step",
    ]
    if steps is not None:
        parts.append("no last step" if math.isinf(steps) else f"{steps:,.0f} steps")
    if total is not None:
        parts.append(f"{bound}{round(total):,} tokens in all")
    return ", ".join(parts)


def overview(model: Any, row_tokens: int | None = None) -> str:
    """Returns a model's parameters, context and FLOPs per token, in one line.

    Args:
        model: A ``LanguageModel`` with its network, on any device.
        row_tokens: Number of tokens per row if rows are documents or questions, None for windows.
    """
    parameters = list(model.network.parameters())
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    note = f" ({frozen:,} of them frozen)" if frozen else ""
    context = row_tokens or model.config.block_size
    rows = "context of" if row_tokens is None else "rows of about"
    scoring, step = (model.flops_per_token(context, training=way) for way in (False, True))
    planned = " (planned; texts decide)" if model.adaptive or model.adaptive_training else ""
    return (
        f"{type(model).__name__}: {sum(p.numel() for p in parameters):,} parameters{note}, "
        f"{rows} {context} tokens; FLOPs per token{planned}: {quantity(scoring)} scoring, "
        f"{quantity(step)} training"
    )


def quantity(value: float) -> str:
    """Formats a number with three digits and a unit of thousands, such as ``5.62 M``."""
    units = ["", " K", " M", " G", " T", " P", " E"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g}{units[0]}"
