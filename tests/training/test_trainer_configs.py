"""The trainer configs of the project."""

from pathlib import Path

import pytest
import yaml

from training import LatentCLI

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs" / "trainer").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_builds_a_trainer(path):
    on_cpu = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
    trainer = LatentCLI([f"--config={path}", *on_cpu], run=False).trainer
    content = yaml.safe_load(path.read_text())["trainer"]
    assert "gradient_clip_val" not in content, "clipping belongs to a method's recipe"
    assert trainer.precision == content["precision"]
    strategy = content.get("strategy", {}).get("class_path", "SingleDeviceStrategy")
    assert type(trainer.strategy).__name__ == strategy.rpartition(".")[2]


def test_there_is_one_for_each_machine():
    assert [path.stem for path in CONFIGS] == ["cpu", "ddp", "fsdp", "gpu"]
