"""Exact resumption: position, random states, unfinished steps, interrupted validations."""

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from callbacks import resume_position as position
from callbacks.hooks import gather
from callbacks.random_state import RandomState
from callbacks.trainer_state import in_accumulation, validation_follows, validation_unfinished

_UNLIMITED = -1


class ResumeState(L.Callback):
    """Makes a resumed run identical to an uninterrupted one.

    - The run continues after the batches that it has processed, in the same epoch: Lightning
      considers an epoch that ``max_steps`` or ``max_time`` has cut short as finished.
    - The random states of all ranks (torch, CUDA, numpy, Python) are part of the checkpoint.
    - The state after a training batch is restored before the next one, so that validation, text
      samples, checkpoints and new epochs in between never change the draws of training; and before
      a validation, so that a repeated validation has the same draws.
    - A checkpoint between two accumulated micro-batches also holds the sums for ``train/loss`` and
      the gradient so far. With several ranks this is the ranks' mean: equal in value after the next
      synchronisation, but not in every bit.
    - If the data module sets the rows of a step (``order_of_steps``), a run continues with the same
      rows on a different number of devices and with micro-batches of a different size: the loops'
      count of micro-batches is converted.
    """

    def __init__(self) -> None:
        self._state: RandomState | None = None
        self._gradients: dict[str, Tensor] = {}
        self._sums: dict[str, list[float]] = {}
        self._step_start = 0  # number of batches before the current optimiser step

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # ranks have built equal models from one seed; from here on their dropout masks differ
        if self._state is None:
            if trainer.global_rank:
                torch.manual_seed(torch.initial_seed() + trainer.global_rank)
            self._state = RandomState.capture()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            if name in self._gradients:
                gradient = self._gradients[name].to(parameter.device, parameter.dtype)
                if gradient.shape != parameter.shape:  # in older checkpoints
                    gradient = gradient.reshape(parameter.shape)
                if isinstance(parameter, DTensor) and not isinstance(gradient, DTensor):
                    gradient = distribute_tensor(
                        gradient, parameter.device_mesh, parameter.placements
                    )
                parameter.grad = gradient
        model: Any = pl_module
        if self._sums:
            model.train_metrics.add_sums(self._sums)
        self._gradients, self._sums = {}, {}
        position.restore_log_step(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._state is not None:
            self._state.restore()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._state = RandomState.capture()
        if not in_accumulation(trainer):
            self._step_start = position.processed_batches(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # a validation draws the same numbers in the first process and in a resumed one
        if self._state is not None and not trainer.sanity_checking:
            self._state.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # a later ``fit`` in the same process starts from scratch
        self._state = None
        self._gradients, self._sums = {}, {}
        self._step_start = 0

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = self._state or RandomState.capture()
        in_step = position.place_in_step(trainer)
        unfinished = in_step[0] > 0  # also if an error ends the next batch
        model: Any = pl_module
        checkpoint[position.RESUME_STATE] = {
            "random": gather(state.plain()),
            "unfinished_step": unfinished,
            "step_start": self._step_start,
            "step_place": in_step,
            "order_of_steps": position.order_of_steps(trainer),
            "gradients": _mean_gradients(trainer, pl_module) if unfinished else {},
            "sums": gather(model.train_metrics.sums()) if unfinished else [],
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # restores this rank's states; warns if the checkpoint cannot be continued exactly
        if trainer.state.fn != TrainerFn.FITTING:
            return
        same_steps = position.convert_micro_batches(trainer, checkpoint)
        position.restore_position(trainer, checkpoint)
        self._begin_step(trainer, checkpoint)
        saved = checkpoint.get(position.RESUME_STATE)
        if saved is None:
            rank_zero_warn(
                "the checkpoint has no random state (it was written without ResumeState): "
                "random draws of the resumed run start from the seed"
            )
            return
        states = saved["random"]
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint was written by {len(states)} processes, but this run has "
                f"{trainer.world_size}: it continues, but with different random draws"
                f"{'' if same_steps else ' and batches'}"
            )
        if trainer.global_rank < len(states):
            self._state = RandomState.from_plain(states[trainer.global_rank])
        self._gradients = saved["gradients"]
        sums = saved.get("sums", [])  # missing in older checkpoints
        if len(sums) != trainer.world_size:  # rank 0 gets all
            sums = [_added(sums)]
        if trainer.global_rank < len(sums):
            self._sums = sums[trainer.global_rank]
        if saved["unfinished_step"] and not self._gradients:  # in checkpoints of older versions
            rank_zero_warn(
                "the checkpoint was written between two accumulated micro-batches of sharded "
                "parameters: the gradient of the unfinished step is lost"
            )

    def _begin_step(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        """Continues the optimiser step of the checkpoint, or begins a new one."""
        saved = checkpoint.get(position.RESUME_STATE) or {}
        batches = position.processed_batches(trainer)
        if saved.get("unfinished_step"):
            position.check_step(trainer, saved.get("step_place"), int(checkpoint["global_step"]))
            past, _ = position.place_in_step(trainer)
            self._step_start = saved.get("step_start", batches - past)
        else:
            self._step_start = batches
        begin_step = getattr(trainer.datamodule, "begin_step", None)  # type: ignore[attr-defined]
        if begin_step is not None:
            begin_step(self._step_start)


def _mean_gradients(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Tensor]:
    """Returns each parameter's gradient, averaged over ranks; sharded ones already are.

    Sharded gradients stay sharded, since the strategy chooses the format of checkpoints.
    """
    return {
        name: parameter.grad.clone()
        if isinstance(parameter.grad, DTensor)
        else torch.as_tensor(trainer.strategy.reduce(parameter.grad.clone(), reduce_op="mean"))
        for name, parameter in pl_module.named_parameters()
        if parameter.grad is not None
    }


def _added(sums: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Adds the sums of all ranks."""
    names = dict.fromkeys(name for rank_sums in sums for name in rank_sums)
    pairs = {name: [rank_sums[name] for rank_sums in sums if name in rank_sums] for name in names}
    return {name: [math.fsum(part) for part in zip(*pairs[name], strict=True)] for name in names}


class PendingValidation(L.Callback):
    """Makes a run that ended during a validation repeat it from its first batch.

    In a checkpoint that is written before the end of a validation, the state of Lightning's loops
    is as if the process had died in the validation's first batch. The loops then repeat the
    validation with the same epoch and the same logged step.
    """

    def __init__(self) -> None:
        self._pending = False
        self._step = 0
        self._max_steps: int | None = None  # the limit while it is lifted

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[position.PENDING_VALIDATION] = validation_unfinished(trainer)
        if checkpoint[position.PENDING_VALIDATION]:
            progress = checkpoint["loops"]["fit_loop"][position.VALIDATION_PROGRESS]
            zeros = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
            progress["current"] = zeros
            progress["total"] = {**zeros, "ready": 1, "started": 1}
            progress["is_last_batch"] = False

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # the key is missing in older checkpoints
        self._pending = bool(checkpoint.get(position.PENDING_VALIDATION, False))
        self._step = int(checkpoint["global_step"])
        if trainer.strategy.restore_checkpoint_after_setup:  # then after on_fit_start
            self._lift(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # else Lightning considers a run finished even if its last validation is pending; the
        # schedule has been built with the true number of steps by now
        self._lift(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._pending and not validation_follows(trainer):
            self._settle(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the pending validation has started, so the limit is restored
        if self._pending:
            self._settle(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._pending:
            self._settle(trainer)

    def _lift(self, trainer: L.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        if self._pending and self._max_steps is None and 0 <= loop.max_steps <= self._step:
            self._max_steps, loop.max_steps = loop.max_steps, _UNLIMITED

    def _settle(self, trainer: L.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._pending = False
        loop.val_loop.batch_progress.total.reset()  # or later checkpoints would look pending too
        if self._max_steps is not None:
            loop.max_steps, self._max_steps = self._max_steps, None
