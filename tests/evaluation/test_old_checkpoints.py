"""Checkpoints of older versions, one a method: they load, and score as they did then.

Version 0.1.0 wrote all but ``looped``, which the parent of commit 73542e6a wrote.

``tests/fixtures`` holds them without optimiser and random states, with the text they read. The
numbers are those of ``evaluate.py perplexity --limit_batches 2`` of the version that wrote them.
"""

import json
import shutil
from pathlib import Path

import pytest

from evaluation.cli import main
from training import main as train_main

FIXTURES = Path(__file__).parents[1] / "fixtures"
NATS_PER_TOKEN = {
    "latent_thought": 4.187021416961215,
    "looped": 5.261553750373423,
    "ponderlm": 4.251230360940099,
    "thinking_states": 3.7600055024737404,
    "thought_gestalt": 4.105328790390176,
    "thoughtbubbles": 4.170814830809832,
    "transformer": 4.1774691846221685,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the text where the recipes name it."""
    (tmp_path / "data").mkdir()
    shutil.copy(FIXTURES / "text.jsonl", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", NATS_PER_TOKEN)
def test_an_old_checkpoint_scores_as_it_did(method, folder):
    shutil.copy(FIXTURES / f"{method}.ckpt", folder)  # its results are kept next to it
    options = ["--ckpt", f"{method}.ckpt", "--limit_batches", "2"]
    assert main(["perplexity", *options, "--device", "cpu", "--output", "result.json"]) == 0
    result = json.loads((folder / "result.json").read_text())
    assert result["nats_per_token"] == pytest.approx(NATS_PER_TOKEN[method], rel=1e-6)


@pytest.mark.parametrize("method", NATS_PER_TOKEN)
def test_an_old_checkpoint_is_tested_by_the_trainer(method, folder):
    options = [f"--ckpt_path={FIXTURES}/{method}.ckpt", "--trainer.limit_test_batches=1"]
    assert train_main(["test", *options, "--trainer.accelerator=cpu"]) == 0


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in FIXTURES.glob("*.ckpt")) <= 250_000
