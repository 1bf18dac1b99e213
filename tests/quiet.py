"""A trainer that leaves nothing behind but what a test asks of it."""

from typing import Any

import lightning as L


def quiet_trainer(folder: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """One process on the CPU, without logger, progress bar and, without callbacks, checkpoints."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": bool(callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return L.Trainer(**{**defaults, **options})
