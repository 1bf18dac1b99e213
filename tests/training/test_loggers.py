"""Loggers next to and in place of TensorBoard: names, folders, resumption, figures and text."""

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from lightning_utilities.core.imports import RequirementCache
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks.logging import log_images, log_text
from evaluation.runs import find_compared, read_scalars
from lightning_models.checkpoint import read_checkpoint
from training.errors import UserError
from training.loggers import MetricsFile, MLFlowRun, RunPlace, WandbRun, build_loggers

IMAGE = np.full((4, 6, 3), 128, dtype=np.uint8)
OFTEN = ("--trainer.log_every_n_steps=1", "--checkpoint.every_n_train_steps=2")
CONSTANT = ("--model.optimizer.schedule=constant", "--model.optimizer.warmup=0")


def test_a_csv_file_alone_holds_what_tensorboard_would_and_resumes(fit, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    both = ("--loggers=tensorboard,csv", "--name=a", *OFTEN, *CONSTANT)
    assert fit(whole, *both, "--trainer.max_steps=6") == 0
    alone = ("--loggers=csv", "--name=a", *OFTEN, *CONSTANT)
    assert fit(parts, *alone, "--trainer.max_steps=4") == 0
    with (parts / "a" / "metrics.csv").open("a") as file:
        file.write("0,0.1,9,1.0\n0,0.")  # a later step, and a torn line, of a killed process
    resumed = ("--ckpt_path=last", "--name=a", *OFTEN, *CONSTANT)  # the loggers are the run's
    assert fit(parts, *resumed, "--trainer.max_steps=6") == 0
    tables = [pd.read_csv(root / "a" / "metrics.csv") for root in (whole, parts)]
    losses = [table.set_index("step")["train/loss"].dropna() for table in tables]
    assert list(losses[0].index) == list(losses[1].index) == [0, 1, 2, 3, 4, 5]
    assert losses[0].to_dict() == losses[1].to_dict()
    assert not list((parts / "a").glob("events*"))
    events = read_scalars(whole / "a")["train/loss"]
    assert read_scalars(parts / "a")["train/loss"] == pytest.approx(events)
    ((run,), _) = find_compared([str(parts)], skip=False)
    assert run.name == "a"
    assert len(run.scalars["train/loss"]) == 6
    other = ("--loggers=tensorboard", "--trainer.max_steps=8")
    assert fit(parts, *resumed, *other) == 0
    assert list((parts / "a").glob("events*"))


def test_an_unknown_logger_is_named(fit, tmp_path, capsys):
    assert fit(tmp_path, "--loggers=tensorbord") == 2
    assert "loggers (tensorbord) must be among tensorboard, csv, wandb" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    def missing(*args):
        raise ModuleNotFoundError("wandb")

    monkeypatch.setattr(WandbRun, "__init__", missing)
    with pytest.raises(UserError, match=r"pip install -e '.\[wandb\]'"):
        build_loggers(["wandb"], RunPlace(tmp_path, "", "a", "1"))


def test_a_new_csv_file_is_not_one_of_another_run(tmp_path):
    first = MetricsFile(tmp_path, "", "a", None)
    first.log_metrics({"x": 1.0}, 3)
    first.log_metrics({"x": 1.0}, 3)  # as after a checkpoint
    first.save()
    again = MetricsFile(tmp_path, "", "a", 3)
    again.log_metrics({"x": 2.0, "y": torch.tensor(1.0)}, 3)
    again.save()
    assert read_scalars(tmp_path / "a") == {"x": {3: 2.0}, "y": {3: 1.0}}


def test_a_row_is_written_once_whatever_its_values(tmp_path):
    """A checkpoint has the row written early; figures come to W&B's and MLflow's as objects."""
    figure, rows = object(), []
    log = MetricsFile(tmp_path, "", "a", None)
    log.experiment.log_metrics = lambda metrics, step: rows.append((step, dict(metrics)))
    nan = {"loss": float("nan"), "figure": figure}
    for metrics, step in ((nan, 1), ({**nan, "loss": torch.tensor(torch.nan)}, 1), (nan, 2)):
        log.log_metrics(metrics, step)
    log.log_metrics({"loss": 1.0, "figure": object()}, 2)
    assert [step for step, _ in rows] == [1, 2, 2]


def test_wandb_takes_values_text_and_figures_offline(fit, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    arguments = ("--loggers=wandb", "--name=a", "--trainer.max_steps=2", *OFTEN)
    assert fit(tmp_path, *arguments) == 0
    run = wandb.run
    try:
        assert run.name == "a"
        assert run.id == read_checkpoint(tmp_path / "a" / "checkpoints" / "last.ckpt").run_id
        assert run.config["trainer"]["max_steps"] == 2
        assert run.summary["train/loss"] > 0
        logger = WandbRun(tmp_path / "a", "a", run.id)
        log_images(logger, "figure", [IMAGE, IMAGE // 2], 1)
        log_text(logger, "text", "a **word**", 1)
        media = tmp_path / "a" / "wandb" / "latest-run" / "files" / "media"
        assert len(list(media.rglob("*.png"))) == 2
        assert any("word" in file.read_text() for file in media.rglob("*.table.json"))
        assert not list(tmp_path.rglob("events*"))
    finally:
        wandb.finish()


def test_mlflow_takes_values_text_and_figures_and_goes_on(fit, tmp_path):
    pytest.importorskip("mlflow")
    arguments = ("--loggers=mlflow", "--name=a", *OFTEN)
    assert fit(tmp_path, *arguments, "--trainer.max_steps=2") == 0
    assert fit(tmp_path, *arguments, "--trainer.max_steps=4", "--ckpt_path=last") == 0
    saved = read_checkpoint(tmp_path / "a" / "checkpoints" / "last.ckpt")
    logger = MLFlowRun(tmp_path, tmp_path / "a", "a", saved.run_id)
    log_images(logger, "figure", [IMAGE], 3)
    log_text(logger, "text", "a **word**", 3)
    run = logger.experiment.get_run(logger.run_id)
    assert run.info.run_name == "a"
    assert run.data.params["trainer/max_steps"] == "2"
    history = logger.experiment.get_metric_history(logger.run_id, "train/loss")
    assert [value.step for value in history] == [0, 1, 2, 3]
    artifacts = tmp_path / "mlartifacts" / logger.run_id / "artifacts"
    assert (artifacts / "figure" / "1" / "step=3.png").stat().st_size > 0
    assert "word" in (artifacts / "text" / "step=3.md").read_text()


def test_tensorboard_has_the_settings_of_a_run(fit, tmp_path):
    assert fit(tmp_path, "--name=a", "--trainer.max_steps=1", *CONSTANT) == 0
    saved = yaml.safe_load((tmp_path / "a" / "hparams.yaml").read_text())
    assert saved["model"] == "lightning_models.TransformerLM"
    assert (saved["model.config.dim"], saved["trainer.max_steps"]) == (16, 1)
    assert saved["data.batch_size"] == 4
    events = EventAccumulator(str(tmp_path / "a")).Reload()
    kept = events.summary_metadata
    start = kept["_hparams_/session_start_info"].plugin_data.content
    assert b"model.config.dim" in start
    assert b"val/loss" in kept["_hparams_/experiment"].plugin_data.content


def test_a_logger_without_its_package_names_the_extra(fit, tmp_path, capsys, monkeypatch):
    missing = RequirementCache("wandb>=9999")
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", missing)
    assert fit(tmp_path, "--trainer.max_steps=1", "--trainer.logger=WandbLogger") == 2
    assert "pip install -e '.[wandb]'" in capsys.readouterr().err
