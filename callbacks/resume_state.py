"""Everything a resumed run needs besides weights, optimiser and data position."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from callbacks.random_state import RandomState
from callbacks.trainer_state import gather, in_accumulation

KEY = "resume_state"


class ResumeState(L.Callback):
    """Makes a resumed run equal the uninterrupted one, and training independent of its breaks.

    - The random states of all ranks (torch, CUDA, numpy, Python) are part of the checkpoint.
    - The state after one training batch is put back before the next one, so validation, text
      samples, checkpoints and new epochs in between never change the draws of training; and before
      a validation, so that one that is made up for draws the same.
    - A checkpoint between two accumulated micro-batches also holds the sums after ``train/loss``
      and the gradient so far. Over several ranks that is the ranks' mean: equal in value after the
      next synchronisation, not in every bit. Sharded gradients are not kept; resuming such a
      checkpoint warns.
    """

    def __init__(self) -> None:
        self._state: RandomState | None = None
        self._gradients: dict[str, Tensor] = {}
        self._sums: dict[str, list[float]] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the state after model construction, unless a checkpoint brought another.

        Ranks have built equal models from one seed; from here on their dropout masks differ.
        """
        if self._state is None:
            if trainer.global_rank:
                torch.manual_seed(torch.initial_seed() + trainer.global_rank)
            self._state = RandomState.capture()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Puts back the gradient of an optimiser step that the checkpoint was in the middle of."""
        for name, parameter in pl_module.named_parameters():
            if name in self._gradients:
                parameter.grad = self._gradients[name].to(parameter)
        model: Any = pl_module
        if self._sums:
            model.train_metrics.add_sums(self._sums)
        self._gradients, self._sums = {}, {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Continues the random streams where the previous training batch left them."""
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
        """Notes where the random streams are."""
        self._state = RandomState.capture()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Has a validation draw the same numbers in the first process and in a resumed one."""
        if self._state is not None and not trainer.sanity_checking:
            self._state.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets, so that a later ``fit`` of the same process starts afresh."""
        self._state = None
        self._gradients, self._sums = {}, {}

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the random states of all ranks, and the gradient of an unfinished step."""
        state = self._state or RandomState.capture()
        unfinished = in_accumulation(trainer)
        model: Any = pl_module
        checkpoint[KEY] = {
            "random": gather(state.plain()),
            "unfinished_step": unfinished,
            "gradients": _mean_gradients(trainer, pl_module) if unfinished else {},
            "sums": gather(model.train_metrics.sums()) if unfinished else [],
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes this rank's states; says so if the checkpoint cannot be continued exactly."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved = checkpoint.get(KEY)
        if saved is None:
            rank_zero_warn(
                "the checkpoint holds no random state (it was written without ResumeState): "
                "random draws of the resumed run start from the seed"
            )
            return
        states = saved["random"]
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint was written by {len(states)} processes, this run has "
                f"{trainer.world_size}: it continues, but with other random draws and batches"
            )
        if trainer.global_rank < len(states):
            self._state = RandomState.from_plain(states[trainer.global_rank])
        self._gradients = saved["gradients"]
        sums = saved.get("sums", [])  # older checkpoints have none
        if trainer.global_rank < len(sums):
            self._sums = sums[trainer.global_rank]
        if saved["unfinished_step"] and not self._gradients:
            rank_zero_warn(
                "the checkpoint was written between two accumulated micro-batches of sharded "
                "parameters: the gradient of the unfinished step is lost"
            )


def _mean_gradients(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Tensor]:
    """Returns each parameter's gradient, averaged over ranks; nothing if they are sharded."""
    gradients = {
        name: parameter.grad
        for name, parameter in pl_module.named_parameters()
        if parameter.grad is not None
    }
    if any(isinstance(gradient, DTensor) for gradient in gradients.values()):
        return {}
    return {
        name: torch.as_tensor(trainer.strategy.reduce(gradient.clone(), reduce_op="mean"))
        for name, gradient in gradients.items()
    }
