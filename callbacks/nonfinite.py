"""Gradient norms, and the guard against steps and weights that are not finite."""

import itertools
import math
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from callbacks.hooks import (
    AgreedEnd,
    AsksAllRanks,
    checkpoint_to_resume,
    gather,
    has_scaler,
    log_interval,
    unscaled,
)

SHOWN_IDS = 16
SETTINGS = ("lr", "weight_decay")
SPIKE_MEMORY = 100
"""Optimiser steps over which a loss is compared with those before; half of them come first."""
_IS_LOSS = "the loss of batch"


class NonFiniteError(AgreedEnd):
    """Training that has left the numbers; the message says where, and how to go on."""

    exit_code = 3


class _MicroBatch(NamedTuple):
    """What is known of one micro-batch of the optimiser step in work."""

    number: int
    sequence_id: Tensor | None
    loss: Tensor
    terms: dict[str, Tensor]


class NonFinite(L.Callback):
    """Keeps nan and infinity out of the weights, and such weights out of checkpoints.

    Checked once an optimiser step, before the optimiser, on all ranks: the losses of its
    micro-batches, the norm of its gradient, and the settings that its update is scaled by. So
    weights, optimiser state and ``last.ckpt`` stay good. An update of finite numbers can still
    overflow: the weights are checked before each checkpoint is written, and where a step is
    refused. Weights that are not finite end the program under both actions.

    Where losses are scaled (16-mixed) gradients overflow by design and the scaler drops those
    steps; then only the losses are looked at.

    A finite loss far above those before it changes nothing, but is reported with its batches, which
    ``--replay STEP`` shows.
    """

    def __init__(
        self,
        action: Literal["stop", "skip"] = "stop",
        max_skipped_in_a_row: int = 10,
        spike_deviations: float | None = 6.0,
    ) -> None:
        """Chooses what happens.

        Args:
            action: stop: the program ends with exit code 3 and a message; skip: this optimiser step
                is dropped (weights and optimiser state stay as they are, the schedule goes on) and
                counted in ``train/skipped_steps``.
            max_skipped_in_a_row: of more dropped steps in a row than this, the program ends too.
            spike_deviations: a loss is reported as a spike if it is this many standard deviations
                above the mean of the steps before; null: none is.
        """
        if spike_deviations is not None and not spike_deviations > 0:
            raise ValueError(f"spike_deviations ({spike_deviations}) must be above 0, or null")
        if max_skipped_in_a_row < 0:
            raise ValueError(f"max_skipped_in_a_row ({max_skipped_in_a_row}) must not be negative")
        self.action = action
        self.max_skipped_in_a_row = max_skipped_in_a_row
        self.skipped = 0
        self.spikes = 0
        self._in_a_row = 0
        self._usual = None if spike_deviations is None else _UsualLoss(spike_deviations)
        self._step: list[_MicroBatch] = []
        self._batch: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forgets a step that another run left unfinished."""
        self._step = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the batch for the message."""
        self._batch = batch

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Notes the micro-batch, without looking at values."""
        model: Any = pl_module
        self._step.append(
            _MicroBatch(
                number=trainer.fit_loop.epoch_loop.total_batch_idx,
                sequence_id=self._batch.get("sequence_id"),
                loss=unscaled(trainer, loss),
                terms=getattr(model, "last_terms", {}),
            )
        )
        self._batch = None

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Looks at losses and gradient, the only wait for the device, and for others, at a step.

        Raises:
            NonFiniteError: if they are not finite and the step is not to be skipped; if the
                weights are not finite already, or a setting of the optimiser.
        """
        step, self._step = self._step, []
        scaled = has_scaler(trainer)
        norm = None if scaled else total_norm(optimizer)
        values = [micro.loss.float() for micro in step] + ([] if norm is None else [norm.float()])
        settings = _describe_settings(trainer, optimizer)
        if settings:
            raise NonFiniteError(f"{_untouched(trainer, optimizer, settings)} {_cure(trainer)}")
        loss, finite = _agree(trainer, values, len(step))
        if finite:
            self._in_a_row = 0
            if self._usual is not None and step and self._usual.exceeded_by(loss):
                self._report_spike(trainer, optimizer, step)
        else:
            check_weights(trainer)
            self._refuse(trainer, optimizer, _describe(trainer, step, norm))
            if not scaled:  # the scaler sees it too and drops the step itself
                _drop_gradients(optimizer)
        if self.skipped:
            pl_module.log("train/skipped_steps", float(self.skipped))
        if self.spikes:
            pl_module.log("train/loss_spikes", float(self.spikes))

    def _report_spike(
        self, trainer: L.Trainer, optimizer: torch.optim.Optimizer, step: list[_MicroBatch]
    ) -> None:
        """Names the batches of all ranks."""
        self.spikes += 1
        ranks = gather([_describe_one(micro) for micro in step])
        found = [f"rank {r}: {text}" for r, texts in enumerate(ranks) for text in texts]
        rank_zero_info(
            f"warning: a loss spike at {_head(trainer, optimizer, found)}. Its rows: add "
            f"--ckpt_path last --replay {trainer.global_step + 1}"
        )

    def _refuse(
        self, trainer: L.Trainer, optimizer: torch.optim.Optimizer, problems: list[str]
    ) -> None:
        """Counts the step as skipped, or raises."""
        if self.action == "skip" and self._in_a_row < self.max_skipped_in_a_row:
            self.skipped += 1
            self._in_a_row += 1
            head = _head(trainer, optimizer, problems)
            rank_zero_warn(f"{head}. This optimiser step is skipped ({self.skipped} so far)")
            return
        cause = ""
        if self.action == "skip":
            cause = f" It is one more than nonfinite.max_skipped_in_a_row ({self._in_a_row})."
        raise NonFiniteError(
            f"{_untouched(trainer, optimizer, problems)}{cause} {_cure(trainer)}, or with "
            "--nonfinite.action skip"
        )

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuses a checkpoint whose weights are not finite, whoever writes it.

        Raises:
            NonFiniteError: on all ranks, if the weights are not finite on one of them.
        """
        check_weights(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts, so that a resumed run goes on counting."""
        state = {"skipped": self.skipped, "in_a_row": self._in_a_row, "spikes": self.spikes}
        return state if self._usual is None else {**state, "usual_loss": self._usual.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the counts back."""
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]
        self.spikes = state_dict.get("spikes", 0)  # older checkpoints have none
        if self._usual is not None and "usual_loss" in state_dict:
            self._usual.load(state_dict["usual_loss"])


class _UsualLoss:
    """Mean and variance of the losses so far, of the last ones more than of those before.

    Exponential averages with weights 1 / n at first, and 1 / SPIKE_MEMORY later.
    """

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._count, self._mean, self._variance = 0, 0.0, 0.0

    def exceeded_by(self, loss: float) -> bool:
        """Whether a step's mean loss is too far above those before; then counts it, cut to that."""
        limit = self._mean + self._deviations * math.sqrt(self._variance)
        spike = self._count >= SPIKE_MEMORY / 2 and loss > limit
        self._count += 1
        weight = 1.0 / min(self._count, SPIKE_MEMORY)
        distance = (limit if spike else loss) - self._mean
        self._mean += weight * distance
        self._variance = (1.0 - weight) * (self._variance + weight * distance**2)
        return spike

    def state(self) -> list[float]:
        return [self._count, self._mean, self._variance]

    def load(self, state: list[float]) -> None:
        count, self._mean, self._variance = state
        self._count = int(count)


def check_weights(trainer: L.Trainer) -> None:
    """Checks all weights in one pass, with one wait for the device.

    Raises:
        NonFiniteError: on all ranks, if weights are not finite on one of them.
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
        f"after step {trainer.global_step} the weights are not finite: an update has overflowed in "
        f"{len(names)} parameters ({names[0]} first). They are not saved. {_cure(trainer)}"
    )


def weights_are_finite(trainer: L.Trainer) -> bool:
    """Returns whether the weights of all ranks are finite, to all ranks."""
    weights = [_local(p.detach()) for p in trainer.lightning_module.parameters()]
    weights = [weight for weight in weights if weight.numel() and weight.is_floating_point()]
    norm = torch.nn.utils.get_total_norm(weights)  # finite: all are; it can overflow otherwise
    finite = bool(norm.isfinite()) or all(bool(weight.isfinite().all()) for weight in weights)
    return not trainer.strategy.reduce_boolean_decision(not finite, all=False)


def _agree(trainer: L.Trainer, values: list[Tensor], losses: int) -> tuple[float, bool]:
    """Returns the mean loss of all ranks, and whether all values of all ranks are finite.

    One exchange, with one wait for it, also answers the questions of other callbacks.

    Args:
        trainer: of the run.
        values: scalars of this rank.
        losses: how many of them, from the first, are losses.
    """
    if trainer.world_size == 1:
        here = torch.stack(values).tolist() if values else []
        finite = all(map(math.isfinite, here))
        return sum(here[:losses]) / losses if losses and finite else 0.0, finite
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    asking = [callback for callback in callbacks if isinstance(callback, AsksAllRanks)]
    questions = [callback.question() for callback in asking]
    device = trainer.strategy.root_device
    numbers = torch.stack(values) if values else torch.zeros(1, device=device)
    loss = numbers[:losses].mean() if losses else numbers.new_zeros(())
    own = torch.stack((loss / trainer.world_size, (~numbers.isfinite()).any().to(loss.dtype)))
    asked = torch.tensor(list(itertools.chain(*questions)), dtype=own.dtype)
    found = torch.cat((own, asked.to(device, non_blocking=True)))  # the list is not waited for
    dist.all_reduce(found)  # Lightning's own reduction would wait at a barrier first
    total, refused, *answers = found.tolist()
    remaining = iter(answers)
    for callback, question in zip(asking, questions, strict=True):
        callback.answer(list(itertools.islice(remaining, len(question))))
    return total, not refused


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor; of other tensors, all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _head(trainer: L.Trainer, optimizer: torch.optim.Optimizer, problems: list[str]) -> str:
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    shown = ", ".join(f"{rate:.3g}" for rate in rates)
    return f"step {trainer.global_step + 1}, lr {shown}: " + "; ".join(problems)


def _untouched(trainer: L.Trainer, optimizer: torch.optim.Optimizer, problems: list[str]) -> str:
    return f"{_head(trainer, optimizer, problems)}. The weights were not touched."


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Leaves the optimiser nothing to do: it passes over parameters without a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _describe_settings(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns which settings of the update are not finite; they are the same on all ranks."""
    clip = trainer.gradient_clip_val
    found = {"trainer.gradient_clip_val": clip} if clip is not None and math.isnan(clip) else {}
    for group in optimizer.param_groups:
        values = {key: float(group.get(key, 0.0)) for key in SETTINGS}
        found |= {key: value for key, value in values.items() if not math.isfinite(value)}
    return [f"{key} is {value}" for key, value in found.items()]


def _describe(trainer: L.Trainer, step: list[_MicroBatch], norm: Tensor | None) -> list[str]:
    """Returns what is wrong, of all ranks that see something wrong."""
    found = [_describe_one(micro) for micro in step if not bool(micro.loss.isfinite())]
    if not found and norm is not None and not bool(norm.isfinite()):
        numbers = ", ".join(str(micro.number) for micro in step)
        found = [f"the gradient norm is {float(norm)} (finite losses, batches {numbers})"]
    ranks = gather(found)
    if len(ranks) == 1:
        return found
    # One rank's bad loss makes the gradients of all bad: name the rank it came from.
    origin = [(r, text) for r, part in enumerate(ranks) for text in part if _IS_LOSS in text]
    shown = origin or [(r, text) for r, part in enumerate(ranks) for text in part]
    return [f"rank {r}: {text}" for r, text in shown]


def _describe_one(micro: _MicroBatch) -> str:
    terms = ", ".join(f"{name} {float(value):.6g}" for name, value in micro.terms.items())
    text = f"{_IS_LOSS} {micro.number} is {float(micro.loss)}"
    if terms:
        text += f" (terms: {terms})"
    if micro.sequence_id is not None:
        ids = micro.sequence_id.tolist()
        more = ", ..." if len(ids) > SHOWN_IDS else ""
        text += f", sequence_ids {', '.join(map(str, ids[:SHOWN_IDS]))}{more}"
    return text


def _cure(trainer: L.Trainer) -> str:
    path = checkpoint_to_resume(trainer)
    place = f"The last good checkpoint is {path}" if path else "No checkpoint was written yet"
    return f"{place}. Go on with a lower model.optimizer.lr or trainer.gradient_clip_val"


# ---- gradient norms


class GradientNorm(L.Callback):
    """Logs ``train/grad_norm``: the 2-norm over all parameters before clipping.

    It is the gradient of the whole optimiser step: accumulated, averaged over ranks, unscaled.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        """Chooses how often.

        Args:
            every_n_steps: optimiser steps between two values; null: trainer.log_every_n_steps,
                0: never.
        """
        self.every_n_steps = every_n_steps

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Logs the norm; Lightning clips after this hook."""
        interval = log_interval(trainer) if self.every_n_steps is None else self.every_n_steps
        if not interval or (trainer.global_step + 1) % interval:
            return
        pl_module.log("train/grad_norm", total_norm(optimizer))


def total_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Returns the 2-norm of all gradients of an optimiser, a scalar; of sharded ones, the whole."""
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
