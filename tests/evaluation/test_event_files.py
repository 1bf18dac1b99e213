"""Logged values are read as they count."""

from evaluation.runs import read_scalars
from training.runtime import EventLog


def log(folder, values, purge_step=None):
    logger = EventLog(folder.parent, name="", version=folder.name, purge_step=purge_step)
    for step, value in values.items():
        logger.log_metrics({"val/bpb": value}, step)
    logger.finalize("success")


def test_of_a_resumed_run_the_later_values_count(tmp_path):
    log(tmp_path / "run", {0: 4.0, 1: 3.0, 2: 9.0})
    log(tmp_path / "run", {2: 2.5, 3: 2.0}, purge_step=2)
    values = read_scalars(tmp_path / "run")["val/bpb"]
    assert values == {0: 4.0, 1: 3.0, 2: 2.5, 3: 2.0}


def test_every_tag_is_read_and_of_a_folder_without_files_none(tmp_path):
    logger = EventLog(tmp_path, name="", version="run")
    for step in range(11_000):  # TensorBoard keeps 10,000 by default
        logger.log_metrics({"train/loss": float(step)}, step)
    logger.log_metrics({"val/loss": 2.0}, 10_999)
    logger.finalize("success")
    scalars = read_scalars(tmp_path / "run")
    assert scalars["train/loss"] == {step: float(step) for step in range(11_000)}
    assert scalars["val/loss"] == {10_999: 2.0}
    assert read_scalars(tmp_path) == {}
