"""Gradient norms, and the guard against non-finite steps and weights."""

import itertools
import math
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from callbacks.hooks import AgreedEnd, SumsOverRanks, gather
from callbacks.trainer_state import (
    checkpoint_to_resume,
    has_scaler,
    log_interval,
    unscaled,
)

SHOWN_IDS = 16
SETTINGS = ("lr", "weight_decay")
_IS_LOSS = "the loss of batch"


class NonFiniteError(AgreedEnd):
    """Raised when a loss, gradient, weight or optimiser setting becomes non-finite."""

    exit_code = 3


class _MicroBatch(NamedTuple):
    """One micro-batch of the current optimiser step."""

    idx: int
    sequence_id: Tensor | None
    loss: Tensor
    terms: dict[str, Tensor]


class NonFinite(L.Callback):
    """Keeps nan and infinity out of the weights, and non-finite weights out of checkpoints.

    Once per optimiser step, before the update, it checks the losses of the micro-batches, the
    gradient norm and the settings that scale the update on all ranks, so that weights, optimiser
    state and ``last.ckpt`` stay finite. A finite update can still overflow, so the weights are also
    checked at each bad step and before each checkpoint is written. Non-finite weights end the
    program with either action.

    With a loss scaler (16-mixed) gradients overflow by design and the scaler skips those steps, so
    only the losses are checked.

    Args:
        action: ``stop`` ends the program with exit code 3 and a message. ``skip`` skips the
            optimiser step, so that weights and optimiser state do not change while the schedule
            continues, and counts it in ``train/skipped_steps``.
        max_skipped_in_a_row: Maximum number of consecutive skipped steps; one more ends the
            program.
    """

    def __init__(
        self, action: Literal["stop", "skip"] = "stop", max_skipped_in_a_row: int = 10
    ) -> None:
        if max_skipped_in_a_row < 0:
            raise ValueError(f"max_skipped_in_a_row ({max_skipped_in_a_row}) must not be negative")
        self.action = action
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self.skipped = 0
        self._in_a_row = 0
        self._step: list[_MicroBatch] = []
        self._batch: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        model: Any = pl_module
        self._step.append(
            _MicroBatch(
                idx=trainer.fit_loop.epoch_loop.total_batch_idx,
                sequence_id=self._batch.get("sequence_id"),
                loss=unscaled(trainer, loss),
                terms=getattr(model, "last_terms", {}),
            )
        )
        self._batch = None

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # the only synchronisation with the device and with other ranks per step
        step, self._step = self._step, []
        scaled = has_scaler(trainer)
        norm = None if scaled else _step_norm(trainer, optimizer)
        values = [micro.loss.float() for micro in step] + ([] if norm is None else [norm.float()])
        settings = _describe_settings(trainer, optimizer)
        if settings:
            raise NonFiniteError(f"{_untouched(trainer, optimizer, settings)} {_cure(trainer)}")
        if _all_finite(trainer, values):
            self._in_a_row = 0
        else:
            check_weights(trainer)
            self._skip_or_raise(trainer, optimizer, _describe(trainer, step, norm))
            if not scaled:  # else the scaler skips the step
                _drop_gradients(optimizer)
        if self.skipped:
            pl_module.log("train/skipped_steps", float(self.skipped))

    def _skip_or_raise(
        self, trainer: L.Trainer, optimizer: torch.optim.Optimizer, problems: list[str]
    ) -> None:
        """Counts the step as skipped, or raises a NonFiniteError."""
        if self.action == "skip" and self._in_a_row < self.max_skipped_in_a_row:
            self.skipped += 1
            self._in_a_row += 1
            head = _head(trainer, optimizer, problems)
            rank_zero_warn(f"{head}. This optimiser step is skipped ({self.skipped} so far)")
            return
        cause = ""
        if self.action == "skip":
            cause = f" This exceeds nonfinite.max_skipped_in_a_row ({self._in_a_row})."
        raise NonFiniteError(
            f"{_untouched(trainer, optimizer, problems)}{cause} {_cure(trainer)}, or with "
            "--nonfinite.action skip"
        )

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        check_weights(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # older checkpoints also hold "spikes" and "usual_loss", which are ignored
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]


def check_weights(trainer: L.Trainer) -> None:
    """Checks all weights in one pass, with one synchronisation.

    Raises:
        NonFiniteError: On all ranks, if any rank has non-finite weights.
    """
    if weights_are_finite(trainer):
        return
    bad = [
        name
        for name, parameter in trainer.lightning_module.named_parameters()
        if not bool(_local(parameter).isfinite().all())
    ]
    names = sorted({name for rank in gather(bad) for name in rank})
    raise NonFiniteError(
        f"the weights are not finite after step {trainer.global_step}: an update overflowed in "
        f"{len(names)} parameters (first: {names[0]}). They are not saved. {_cure(trainer)}"
    )


def weights_are_finite(trainer: L.Trainer) -> bool:
    """Returns whether the weights are finite on all ranks; collective."""
    weights = [_local(p.detach()) for p in trainer.lightning_module.parameters()]
    weights = [weight for weight in weights if weight.numel() and weight.is_floating_point()]
    # a finite norm proves finite weights; an infinite one may be an overflow
    norm = torch.nn.utils.get_total_norm(weights)
    finite = bool(norm.isfinite()) or all(bool(weight.isfinite().all()) for weight in weights)
    return not trainer.strategy.reduce_boolean_decision(not finite, all=False)


def _all_finite(trainer: L.Trainer, values: list[Tensor]) -> bool:
    """Returns whether the scalars are finite on all ranks, with one synchronisation.

    With several ranks, the same reduction sums the values of other callbacks.
    """
    if trainer.world_size == 1:
        return all(map(math.isfinite, torch.stack(values).tolist())) if values else True
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    summing = [callback for callback in callbacks if isinstance(callback, SumsOverRanks)]
    inputs = [callback.values_to_sum() for callback in summing]
    device = trainer.strategy.root_device
    scalars = torch.stack(values) if values else torch.zeros(1, device=device)
    is_bad = (~scalars.isfinite()).any().to(scalars.dtype).reshape(1)
    extra = torch.tensor(list(itertools.chain(*inputs)), dtype=scalars.dtype)
    totals = torch.cat((is_bad, extra.to(device, non_blocking=True)))
    dist.all_reduce(totals)  # Lightning's reduction would wait at a barrier first
    num_bad, *sums = totals.tolist()
    remaining = iter(sums)
    for callback, part in zip(summing, inputs, strict=True):
        callback.receive_sums(list(itertools.islice(remaining, len(part))))
    return not num_bad


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor; other tensors are returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _head(trainer: L.Trainer, optimizer: torch.optim.Optimizer, problems: list[str]) -> str:
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    text = ", ".join(f"{rate:.3g}" for rate in rates)
    return f"step {trainer.global_step + 1}, lr {text}: " + "; ".join(problems)


def _untouched(trainer: L.Trainer, optimizer: torch.optim.Optimizer, problems: list[str]) -> str:
    return f"{_head(trainer, optimizer, problems)}. The weights were not updated."


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Removes all gradients; the optimiser skips parameters without one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _describe_settings(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> list[str]:
    """Describes non-finite settings of the update, which are the same on all ranks."""
    clip = trainer.gradient_clip_val
    bad = {"trainer.gradient_clip_val": clip} if clip is not None and math.isnan(clip) else {}
    for group in optimizer.param_groups:
        values = {key: float(group.get(key, 0.0)) for key in SETTINGS}
        bad |= {key: value for key, value in values.items() if not math.isfinite(value)}
    return [f"{key} is {value}" for key, value in bad.items()]


def _describe(trainer: L.Trainer, step: list[_MicroBatch], norm: Tensor | None) -> list[str]:
    """Describes the problems of all ranks."""
    problems = [_describe_one(micro) for micro in step if not bool(micro.loss.isfinite())]
    if not problems and norm is not None and not bool(norm.isfinite()):
        batches = ", ".join(str(micro.idx) for micro in step)
        problems = [f"the gradient norm is {float(norm)} (finite losses, batches {batches})"]
    ranks = gather(problems)
    if len(ranks) == 1:
        return problems
    # A bad loss on one rank makes all gradients bad, so only its origin is named.
    origin = [(r, text) for r, part in enumerate(ranks) for text in part if _IS_LOSS in text]
    parts = origin or [(r, text) for r, part in enumerate(ranks) for text in part]
    return [f"rank {r}: {text}" for r, text in parts]


def _describe_one(micro: _MicroBatch) -> str:
    terms = ", ".join(f"{name} {float(value):.6g}" for name, value in micro.terms.items())
    text = f"{_IS_LOSS} {micro.idx} is {float(micro.loss)}"
    if terms:
        text += f" (terms: {terms})"
    if micro.sequence_id is not None:
        ids = micro.sequence_id.tolist()
        more = ", ..." if len(ids) > SHOWN_IDS else ""
        text += f", sequence_ids {', '.join(map(str, ids[:SHOWN_IDS]))}{more}"
    return text


def _cure(trainer: L.Trainer) -> str:
    path = checkpoint_to_resume(trainer)
    checkpoint = f"The last good checkpoint is {path}" if path else "No checkpoint was written yet"
    return f"{checkpoint}. Resume with a lower model.optimizer.lr or trainer.gradient_clip_val"


# ---- gradient norms


class GradientNorm(L.Callback):
    """Logs ``train/grad_norm``: the 2-norm over all parameters before clipping.

    It is the gradient of the whole optimiser step: accumulated, averaged over ranks, unscaled.

    Args:
        every_n_steps: Number of optimiser steps between logged norms. Null uses
            trainer.log_every_n_steps; 0 disables logging.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self._latest: tuple[int, Tensor] | None = None

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # Lightning clips after this hook
        interval = log_interval(trainer) if self.every_n_steps is None else self.every_n_steps
        if not interval or (trainer.global_step + 1) % interval:
            return
        norm = total_norm(optimizer)
        self._latest = trainer.global_step, norm
        pl_module.log("train/grad_norm", norm)

    def take_norm(self, step: int) -> Tensor | None:
        """Returns and clears the norm if it was measured in optimiser step ``step`` (from 0)."""
        latest, self._latest = self._latest, None
        return latest[1] if latest is not None and latest[0] == step else None


def _step_norm(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns the step's gradient norm, computed here unless ``GradientNorm`` has measured it."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        norm = (
            callback.take_norm(trainer.global_step) if isinstance(callback, GradientNorm) else None
        )
        if norm is not None:
            return norm
    return total_norm(optimizer)


def total_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """Returns the 2-norm of all gradients of an optimiser, over all shards, as a scalar."""
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
