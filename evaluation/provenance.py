"""What a result says about where it comes from, under the keys of the JSON files."""

from typing import Any

from datamodules import LanguageDataModule
from evaluation.arguments import Split
from evaluation.device import Precision
from evaluation.rebuild import changed_fields
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint


def describe_data(checkpoint: Checkpoint, data: LanguageDataModule, split: Split) -> dict[str, Any]:
    """Returns what rebuilds the data, and the fingerprints of theirs and the training's text."""
    return {
        "recipe": data.recipe(),
        "split": split,
        "fingerprint": data.fingerprint,
        "trained_on": checkpoint.data_state.get("fingerprint"),
    }


def describe_settings(
    checkpoint: Checkpoint,
    model: LanguageModel,
    data: LanguageDataModule,
    *,
    batches: int,
    of_batches: int,
    precision: Precision,
) -> dict[str, Any]:
    """Returns how much of the split was measured, and how."""
    return {
        "batches": batches,
        "of_batches": of_batches,
        "batch_size": data.eval_batch_size,
        "precision": precision,
        "device": str(model.device),
        "set": changed_fields(checkpoint, model),
    }
