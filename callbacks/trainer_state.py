"""What Lightning's trainer knows but does not declare, read in one place."""

import lightning as L


def log_interval(trainer: L.Trainer) -> int:
    """Returns ``trainer.log_every_n_steps`` in optimiser steps, at least 1."""
    return max(1, vars(trainer).get("log_every_n_steps") or 1)


def in_accumulation(trainer: L.Trainer) -> bool:
    """Whether the micro-batch in work, or just ended, leaves its optimiser step unfinished."""
    loop = trainer.fit_loop.epoch_loop
    return loop.batch_progress.current.ready > 0 and loop._should_accumulate()
