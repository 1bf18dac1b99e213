"""Tiny runs of the real command line, in this process."""

from pathlib import Path

import pytest
import torch

from training import main


@pytest.fixture(scope="session")
def data_arguments(text_file, data_cache):
    """Arguments of the real datamodule on a small file, tokenised once a session."""
    return [
        "--data=datamodules.LocalText",
        f"--data.data_files={text_file}",
        "--data.block_size=32",
        "--data.batch_size=4",
        f"--data.cache_dir={data_cache}",
    ]


@pytest.fixture(scope="session")
def model_arguments():
    """Arguments of a transformer of a few thousand parameters, with dropout."""
    return [
        "--model.config.dim=16",
        "--model.config.num_layers=1",
        "--model.config.num_heads=2",
        "--model.config.dropout=0.2",
    ]


@pytest.fixture(scope="session")
def quick():
    """Trainer arguments that keep a run on the CPU and short."""
    return [
        "--trainer.accelerator=cpu",
        "--trainer.limit_val_batches=1",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.enable_model_summary=false",
        "--samples.every_n_validations=0",
    ]


@pytest.fixture(scope="session")
def fit(data_arguments, model_arguments, quick):
    """Runs ``fit`` below a folder and returns the exit code; extra arguments come last."""

    def run(root: Path, *extra: str, bare: bool = False) -> int:
        typed = [] if bare else [*data_arguments, *model_arguments]
        return main(["fit", *typed, *quick, f"--trainer.default_root_dir={root}", *extra])

    return run


def train_six_steps(fit, root: Path) -> Path:
    keep_all = ("--checkpoint.save_top_k=-1", "--checkpoint.every_n_train_steps=2")
    assert fit(root, "--trainer.max_steps=6", *keep_all) == 0
    return root


@pytest.fixture(scope="session")
def trained(fit, tmp_path_factory):
    """Folder of a run of six steps that has kept every checkpoint; to be read only."""
    return train_six_steps(fit, tmp_path_factory.mktemp("trained"))


@pytest.fixture
def own_run(fit, tmp_path):
    """The same for one test alone, which may change it."""
    return train_six_steps(fit, tmp_path / "own")


def checkpoint_folder(root: Path, version: int = 0, model: str = "TransformerLM") -> Path:
    return root / model / f"version_{version}" / "checkpoints"


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)
