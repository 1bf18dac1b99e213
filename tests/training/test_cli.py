"""Defaults, links, callbacks and the four verbs of the command line."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from docstring_parser import attrdoc

from callbacks import (
    GradientNorm,
    Progress,
    ResumeState,
    Samples,
    SaveCheckpoints,
    ScheduleChange,
    Termination,
    Throughput,
)
from tests.programs import ROOT, run
from tests.training.conftest import checkpoint_folder, load
from training import LatentCLI, main

TRAIN = ROOT / "train.py"


def build(*args: str) -> LatentCLI:
    """Everything but the run itself."""
    return LatentCLI([*args, "--trainer.accelerator=cpu"], run=False)


def write(path: Path, content: dict) -> str:
    path.write_text(yaml.safe_dump(content))
    return f"--config={path}"


def test_a_config_may_give_only_the_block_size(tmp_path):
    cli = build(write(tmp_path / "a.yaml", {"data": {"init_args": {"block_size": 48}}}))
    assert type(cli.model).__name__ == "TransformerLM"
    assert type(cli.datamodule).__name__ == "PythonDocs"
    assert cli.model.config.block_size == cli.datamodule.block_size == 48
    assert cli.model.config.vocab_size == cli.datamodule.vocab_size


def test_another_data_class_keeps_what_it_understands(tmp_path):
    first = write(tmp_path / "a.yaml", {"data": {"init_args": {"block_size": 48, "batch_size": 3}}})
    cli = build(first, "--data=datamodules.LocalText", "--data.data_files=x.txt")
    assert type(cli.datamodule).__name__ == "LocalText"
    assert (cli.datamodule.block_size, cli.datamodule.batch_size) == (48, 3)


def test_a_later_config_wins_and_keeps_the_rest(tmp_path):
    model = {"class_path": "lightning_models.TransformerLM"}
    sizes = {"dim": 32, "num_heads": 4, "num_layers": 3}
    first = write(tmp_path / "a.yaml", {"model": {**model, "init_args": {"config": sizes}}})
    second = {"model": {**model, "init_args": {"config": {"dim": 64}}}}
    config = build(first, write(tmp_path / "b.yaml", second)).model.config
    assert (config.dim, config.num_heads, config.num_layers) == (64, 4, 3)


def test_the_seed_is_fixed():
    build()
    first = torch.rand(3)
    build()
    assert torch.equal(first, torch.rand(3))


@pytest.fixture
def kernels():
    """The kernels of a fresh process, put back afterwards."""
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.set_float32_matmul_precision("highest")
    yield lambda: (torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision())
    torch.backends.cuda.enable_cudnn_sdp(before[0])
    torch.set_float32_matmul_precision(before[1])


def test_kernels_are_chosen_by_options(kernels):
    build()
    assert kernels() == (False, "highest")
    build("--cudnn_attention=true", "--matmul_precision=high")
    assert kernels() == (True, "high")


def test_standing_callbacks_and_their_options():
    cli = build(
        "--checkpoint.every_n_train_steps=7",
        "--samples.prompts=[a, b]",
        "--throughput.peak_tflops=2",
    )
    kinds = [type(callback) for callback in cli.trainer.callbacks]
    standing = (SaveCheckpoints, GradientNorm, Progress, ResumeState, Samples, Throughput)
    for kind in (*standing, ScheduleChange, Termination):
        assert kinds.count(kind) == 1, kind
    checkpoint = cli.trainer.checkpoint_callback
    assert checkpoint.every_n_train_steps == 7
    assert (checkpoint.monitor, checkpoint.save_last) == ("val/loss", True)
    (samples,) = (c for c in cli.trainer.callbacks if isinstance(c, Samples))
    assert samples.prompts == ["a", "b"]


@pytest.mark.parametrize(
    ("switch", "gone"),
    [
        ("--trainer.enable_progress_bar=false", "Progress"),
        ("--trainer.enable_checkpointing=false", "SaveCheckpoints"),
    ],
)
def test_lightning_switches_remove_their_callback(switch, gone):
    names = {type(callback).__name__ for callback in build(switch).trainer.callbacks}
    assert gone not in names
    assert "ResumeState" in names


def test_callbacks_of_a_config_stand_beside_the_others(fit, tmp_path):
    stopping = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "val/loss", "stopping_threshold": 100.0},
    }
    config = write(tmp_path / "stop.yaml", {"trainer": {"callbacks": [stopping]}})
    assert fit(tmp_path, config, "--trainer.max_steps=9", "--trainer.val_check_interval=2") == 0
    end = load(checkpoint_folder(tmp_path) / "last.ckpt")
    assert end["global_step"] == 2
    assert any(key.startswith("EarlyStopping") for key in end["callbacks"])
    assert any(key.startswith("SaveCheckpoints") for key in end["callbacks"])


def test_fit_leaves_checkpoints_config_and_logs_in_one_folder(trained):
    folder = trained / "TransformerLM" / "version_0"
    names = {path.name for path in folder.iterdir()}
    assert {"checkpoints", "config.yaml"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    steps = {path.name for path in (folder / "checkpoints").iterdir()}
    assert steps == {".lock", "last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6.ckpt"}


def test_the_best_and_the_last_are_kept_by_default(fit, tmp_path):
    assert fit(tmp_path, "--trainer.max_steps=5", "--trainer.val_check_interval=2") == 0
    folder = checkpoint_folder(tmp_path)
    (best,) = folder.glob("best-step=*.ckpt")
    assert load(best)["global_step"] in (2, 4)
    assert load(folder / "last.ckpt")["global_step"] == 5


@pytest.mark.parametrize(("verb", "shown"), [("validate", "val/loss"), ("test", "test/loss")])
def test_evaluation_needs_nothing_but_the_checkpoint(trained, verb, shown, capsys):
    path = checkpoint_folder(trained) / "last.ckpt"
    assert main([verb, f"--ckpt_path={path}", "--trainer.accelerator=cpu"]) == 0
    assert shown in capsys.readouterr().out


def test_evaluating_untrained_weights_says_so(data_arguments, model_arguments):
    arguments = [*data_arguments, *model_arguments, "--trainer.accelerator=cpu"]
    with pytest.warns(UserWarning, match="untrained"):
        assert main(["validate", *arguments, "--trainer.limit_val_batches=1"]) == 0


def test_predict_needs_the_checkpoint_and_prompts(trained, tmp_path):
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("latent thought\nmemory\n")
    options = [f"--data.predict_file={prompts}", f"--predictions.output={output}"]
    options += ["--predictions.max_new_tokens=5", "--trainer.accelerator=cpu"]
    assert main(["predict", f"--ckpt_path={checkpoint_folder(trained)}/last.ckpt", *options]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["latent thought", "memory"]


def test_print_config_reads_like_a_manual(capsys, monkeypatch):
    done = run(TRAIN, "fit", "--print_config=comments")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    for words in (
        "D, width of the residual stream.",  # a field of the model's config
        "Peak learning rate.",
        "Length of a window, in tokens (T).",  # an argument of the data
        "Optimiser steps between two ``last.ckpt``",  # an argument of a callback
        "follow the typed values",
        "the newest complete one of the newest run below",
    ):
        assert words in text, words
    values = yaml.safe_load(text)
    assert values["checkpoint"]["monitor"] == "val/loss"
    assert values["weights_only"] is True
    # without comments it has the same values, and looks for no descriptions, which takes long
    monkeypatch.setattr(attrdoc.AttributeDocstrings, "get_attr_docs", None)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--print_config"])
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out) == values


def test_the_program_is_started_as_documented(trained, tmp_path):
    """As a user does: a process of its own, lines instead of a bar, exit code 0."""
    path = checkpoint_folder(trained) / "last.ckpt"
    command = ["fit", f"--ckpt_path={path}", "--trainer.max_steps=8"]
    options = ["--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    options += [f"--trainer.default_root_dir={tmp_path}", "--trainer.limit_val_batches=1"]
    done = run(TRAIN, *command, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert lines[0].startswith("step 7/8: train/loss ")
    assert "left 0:00:0" in lines[-1]
    assert "v_num" not in done.stdout
    assert "\r" not in done.stdout


def test_a_fit_without_config_and_model_says_what_it_trains(
    data_arguments, quick, tmp_path, monkeypatch
):
    small = [f"--model.config.{size}" for size in ("num_layers=2", "dim=32", "num_heads=2")]
    common = ["fit", *data_arguments, *quick, *small, f"--trainer.default_root_dir={tmp_path}"]
    said = []
    monkeypatch.setattr("training.cli.rank_zero_info", said.append)
    assert main([*common, "--trainer.max_steps=1"]) == 0
    (line,) = said
    assert "training the default, TransformerLM, on " in line
    assert "-c configs/" in line
    assert main([*common, "--trainer.max_steps=1", "--model=TransformerLM"]) == 0
    assert said == [line]


def test_training_without_a_validation_split_says_so_in_one_line(tmp_path):
    write(tmp_path / "a.yaml", {"model": {"init_args": {"config": {"dim": 16, "num_layers": 1}}}})
    common = ["--trainer.accelerator=cpu", f"--data.cache_dir={tmp_path}/cache"]
    options = ["--data.val_fraction=0", "--data.block_size=16", "--trainer.max_steps=2"]
    options += ["--model.config.num_heads=2", f"--trainer.default_root_dir={tmp_path}"]
    done = run(TRAIN, "fit", f"--config={tmp_path}/a.yaml", *options, *common)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("Training without validation: there is no val split. ") == 1
    assert "Total length of" not in said
    checkpoint = next(tmp_path.rglob("last.ckpt"))
    refused = run(TRAIN, "validate", f"--ckpt_path={checkpoint}", *common)
    assert refused.returncode == 2
    assert "error: The val split is empty." in refused.stderr


FINDER = ("--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=40")
FLAT = ("--model.optimizer.schedule=constant", "--model.optimizer.warmup=0")


def test_the_learning_rate_finder_trains_as_if_its_rate_were_typed(fit, tmp_path):
    steps = ("--trainer.max_steps=3", "--trainer.log_every_n_steps=1", *FLAT)
    assert fit(tmp_path / "found", *steps, *FINDER) == 0
    found = load(checkpoint_folder(tmp_path / "found") / "last.ckpt")
    rate = found["recipe"]["model"]["init_args"]["optimizer"]["lr"]
    assert {group["lr"] for group in found["optimizer_states"][0]["param_groups"]} == {rate}
    assert fit(tmp_path / "typed", *steps, f"--model.optimizer.lr={rate!r}") == 0
    typed = load(checkpoint_folder(tmp_path / "typed") / "last.ckpt")
    for name, weight in typed["state_dict"].items():
        assert torch.equal(found["state_dict"][name], weight), name
    assert fit(tmp_path / "default", *steps) == 0
    default = load(checkpoint_folder(tmp_path / "default") / "last.ckpt")
    assert default["recipe"]["model"]["init_args"]["optimizer"]["lr"] != rate


def test_no_callback_changes_the_batch(fit, tmp_path, capsys):
    assert fit(tmp_path, "--trainer.callbacks+=BatchSizeFinder") == 2
    said = capsys.readouterr().err
    assert "trainer.callbacks (BatchSizeFinder)" in said
    assert "python train.py plan" in said
