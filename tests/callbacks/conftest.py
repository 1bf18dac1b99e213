"""A tiny real model, and trainers with the callbacks under test only."""

import lightning as L
import pytest

from callbacks.analysis.report import AnalysisReport
from lightning_models import OptimizerConfig, TransformerConfig, TransformerLM

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 1,
    "log_every_n_steps": 1,
}


@pytest.fixture
def make_model():
    def make(kind=TransformerLM, **changes):
        sizes = {"vocab_size": 257, "block_size": 32, "dim": 16, "num_layers": 1, "num_heads": 2}
        optimizer = OptimizerConfig(schedule="constant", warmup=0)
        L.seed_everything(0, verbose=False)
        return kind(TransformerConfig(**{**sizes, **changes}), optimizer)

    return make


@pytest.fixture
def make_trainer(tmp_path):
    def make(*callbacks, **options):
        options = {**QUIET, "default_root_dir": tmp_path, **options}
        return L.Trainer(callbacks=list(callbacks), **options)

    return make


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(AnalysisReport, "drawn", lambda report: {})


class Recorder(L.Callback):
    """Keeps what is logged after each training batch."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, *_):
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})
