"""Says where a resumed run goes on with another learning rate than the checkpoint's."""

import math

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch.optim.lr_scheduler import LambdaLR

TOLERANCE = 0.01


class ScheduleChange(L.Callback):
    """Warns if the schedule of a resumed run, at its step, is not where the checkpoint left it.

    A schedule is a function of the length of the run: with another one the learning rate jumps.
    The restored optimiser has the checkpoint's rate for the next step, the scheduler computes this
    run's. Another peak rate is no change of the schedule (see ``KeepOptimizerSettings``).
    """

    def __init__(self) -> None:
        self._end = math.inf

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the length by which the schedule was built; ``PendingValidation`` may lift it."""
        self._end = trainer.estimated_stepping_batches

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compares; at this point all is restored and nothing has been stepped yet."""
        if trainer.ckpt_path is None:
            return
        for config in trainer.lr_scheduler_configs:
            rates = _rates(config.scheduler) if isinstance(config.scheduler, LambdaLR) else None
            if rates is not None and not math.isclose(*rates, rel_tol=TOLERANCE):
                end = "has no end" if math.isinf(self._end) else f"ends at step {int(self._end)}"
                rank_zero_info(  # a Python warning would take two lines, one of them of code
                    f"warning: the schedule now {end}: the learning rate goes from {rates[0]:.1e} "
                    f"to {rates[1]:.1e}"
                )


def _rates(scheduler: LambdaLR) -> tuple[float, float] | None:
    """Returns the checkpoint's rate and this schedule's; None if the peak rates differ."""
    group, base = scheduler.optimizer.param_groups[0], scheduler.base_lrs[0]
    if scheduler.optimizer.defaults["lr"] != base:  # what was configured, which nothing restores
        return None
    return float(group["lr"]), float(base * scheduler.lr_lambdas[0](scheduler.last_epoch))
