"""What analyses that run behind validations have in common."""

from pathlib import Path
from typing import Any

import lightning as L


class Analysis(L.Callback):
    """Runs behind every n-th validation of a training, and behind each standalone one.

    How many validations have passed is in checkpoints.
    """

    def __init__(self, every_n_validations: int) -> None:
        """Chooses how often.

        Args:
            every_n_validations: of the validations within training; 0: never there.
        """
        self.every_n_validations = every_n_validations
        self._validations = 0
        self._loaded_step = 0
        self._folder = Path()

    def state_dict(self) -> dict[str, Any]:
        """Returns how many validations have passed."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Counts on from the checkpoint."""
        self._validations = state_dict["validations"]

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Notes the step that is evaluated; the trainer knows it in training only."""
        self._loaded_step = 0 if trainer.state.fn == "fit" else checkpoint["global_step"]

    def _find_folder(self, trainer: L.Trainer, name: str) -> Path:
        """Returns the folder of that name in the log folder, the same on all ranks."""
        folder = trainer.log_dir  # this broadcasts it
        if not isinstance(folder, str | Path):  # no logger, or the stand-in of fast_dev_run
            folder = trainer.default_root_dir
        return Path(folder) / name

    def _is_due(self, trainer: L.Trainer) -> bool:
        """Returns whether the validation that begins is to be analysed."""
        if trainer.sanity_checking:
            return False
        if trainer.state.fn != "fit":
            return True
        every = self.every_n_validations
        return bool(every) and (self._validations + 1) % every == 0

    def _count(self, trainer: L.Trainer) -> None:
        """Counts a validation that ends."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validations += 1

    def _step(self, trainer: L.Trainer) -> int:
        """Returns the optimiser step of the weights that are looked at."""
        return self._loaded_step or trainer.global_step
