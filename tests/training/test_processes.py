"""Several processes, started as a user starts them."""

import os
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only

from evaluation.cli import main as evaluate
from tests.programs import ROOT, run
from tests.training.conftest import checkpoint_folder, load
from training import main, processes
from training.errors import UserError


@pytest.fixture
def fit_on_two(data_arguments, model_arguments, quick):
    """Trains in two processes on the CPU with a trainer config of the project."""

    def fit(config: str, root: Path, *extra: str) -> Path:
        command = ["train.py", "fit"]
        command += [f"--config={ROOT}/configs/trainer/{config}.yaml", *data_arguments]
        command += [*model_arguments, *quick, "--trainer.devices=2", "--trainer.precision=32-true"]
        command += ["--trainer.accumulate_grad_batches=2", "--trainer.max_steps=4"]
        command += ["--checkpoint.save_top_k=-1", "--checkpoint.every_n_train_steps=2"]
        done = run(*command, f"--trainer.default_root_dir={root}", *extra)
        assert done.returncode == 0, done.stderr[-3000:]
        (folder,) = root.iterdir()  # named by the model
        return checkpoint_folder(root, model=folder.name)

    return fit


def stopped_and_resumed(fit_on_two, config, tmp_path, *extra):
    """Returns the folder of a whole run, and what a run resumed in its middle ends with otherwise.

    Dropout must have drawn differently on the two ranks.
    """
    whole = fit_on_two(config, tmp_path / "whole", *extra)
    resumed = fit_on_two(config, tmp_path / "resumed", f"--ckpt_path={whole}/step=2.ckpt", *extra)
    ours, theirs = load(whole / "last.ckpt"), load(resumed / "last.ckpt")
    first, second = ours["resume_state"]["random"]
    assert not torch.equal(first["torch_cpu"], second["torch_cpu"])
    ends = [
        {f"random state of {n}": s["torch_cpu"] for n, s in enumerate(c["resume_state"]["random"])}
        | c["state_dict"]
        | {"step": torch.tensor(c["global_step"])}
        for c in (ours, theirs)
    ]
    assert ends[0]["step"] == 4
    assert ends[0].keys() == ends[1].keys()
    return whole, [key for key, value in ends[0].items() if not torch.equal(value, ends[1][key])]


def test_two_ddp_processes_resume_exactly(fit_on_two, tmp_path):
    _, different = stopped_and_resumed(fit_on_two, "ddp", tmp_path)
    assert different == []


@pytest.mark.slow
def test_two_sharded_processes_resume_exactly_and_load_on_one(fit_on_two, tmp_path, capsys):
    whole, different = stopped_and_resumed(fit_on_two, "fsdp", tmp_path)
    assert different == []
    validate = ["validate", f"--ckpt_path={whole}/last.ckpt", "--trainer.accelerator=cpu"]
    assert main([*validate, "--trainer.devices=1"]) == 0
    assert "val/loss" in capsys.readouterr().out


@pytest.mark.slow
def test_sharded_forks_and_their_thresholds_resume_exactly(fit_on_two, tmp_path):
    """The score matrix has two rows, one a rank; thresholds are means over the ranks."""
    forking = "--model=lightning_models.ThoughtbubblesLM", "--model.config.fork_layers=[0,1]"
    rule = "--model.config.num_layers=2", "--model.config.allocation=threshold"
    positions = "--model.config.positions=rope"
    options = (*forking, *rule, positions)
    whole, different = stopped_and_resumed(fit_on_two, "fsdp", tmp_path, *options)
    assert different == []
    weights = load(whole / "last.ckpt")["state_dict"]
    assert weights["network.forks.1.threshold"].isfinite()
    assert weights["network.forks.1.updates"] == 8  # four steps of two micro-batches


# ---- what launchers have started, and what the trainer asks for


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
    "LOCAL_RANK": "0",
    "RANK": "0",
}
SLURM = {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")}
SLURM |= {"SLURM_NNODES": "1", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1"}
TWO_OF_DDP = ("--trainer.devices=2", "--trainer.strategy=ddp")


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "2"}, ["--trainer.devices=1"]),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, TWO_OF_DDP),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, TWO_OF_DDP),
        ({**SLURM, "SLURM_NTASKS": "1"}, TWO_OF_DDP),
        ({**SLURM, "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"}, TWO_OF_DDP),
        ({**SLURM, "SLURM_NTASKS": "2"}, TWO_OF_DDP),  # Lightning wants them per node
        ({"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, TWO_OF_DDP),  # not from srun
    ],
    ids=str,
)
def test_other_sizes_than_the_launchers_are_refused(
    fit, tmp_path, monkeypatch, capsys, environment, options
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    root = tmp_path / "root"
    assert fit(root, "--trainer.max_steps=2", *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "devices" in line
    assert ".." not in line
    assert not root.exists()


def test_of_refused_processes_one_speaks(fit, tmp_path, monkeypatch, capsys):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        fit(tmp_path, "--trainer.max_steps=2", "--trainer.devices=1")
    assert end.value.code == 2
    assert "error" not in capsys.readouterr().err


def test_of_refused_job_steps_one_speaks(fit, tmp_path, monkeypatch, capsys):
    for name, value in {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert fit(tmp_path, *TWO_OF_DDP) == 2
    assert "error" not in capsys.readouterr().err


def test_a_process_that_launches_a_second_run_is_not_ended(monkeypatch):
    monkeypatch.setenv(processes.LAUNCHER, str(os.getpid()))
    processes.end_with_launcher()
    assert "launcher" not in {thread.name for thread in threading.enumerate()}


def test_a_run_leaves_no_mark_of_a_launcher_behind(fit, tmp_path, monkeypatch):
    """A program that this process starts later would take itself for a rank, and end."""
    marks = []

    def refuse(launcher, *arguments, **options):
        marks.append(os.environ[processes.LAUNCHER])
        raise UserError("refused")

    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", refuse)
    assert fit(tmp_path, *TWO_OF_DDP, "--trainer.accelerator=cpu") == 2
    assert marks == [str(os.getpid())]
    assert processes.LAUNCHER not in os.environ


def test_tasks_of_a_sweep_are_runs_of_one_process(fit, tmp_path, monkeypatch):
    """``srun`` starts them, each with arguments of its own; each is the first of its run."""
    monkeypatch.setattr(rank_zero_only, "rank", 3)  # Lightning has read SLURM_PROCID
    for name, value in {**SLURM, "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}.items():
        monkeypatch.setenv(name, value)
    options = ("--trainer.max_steps=2", "--trainer.devices=1", "--loggers=csv")
    options += ("--trainer.log_every_n_steps=1",)
    assert fit(tmp_path, *options) == 0
    folder = checkpoint_folder(tmp_path)
    assert load(folder / "last.ckpt")["global_step"] == 2
    assert (folder.parent / "metrics.csv").is_file()


@pytest.mark.parametrize("rank", ["0", "7"])
def test_tasks_that_nobody_asked_for_are_warned_of(fit, tmp_path, monkeypatch, rank):
    for name, value in {**SLURM, "SLURM_NTASKS": "8", "SLURM_PROCID": rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    with pytest.warns(UserWarning, match="SLURM has 8 tasks.* each task trains a separate run"):
        assert fit(tmp_path, "--trainer.max_steps=1") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_evaluate_is_one_process(monkeypatch, capsys, rank):
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2", "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    assert evaluate(["perplexity", "--ckpt", "nowhere"]) == 2
    assert capsys.readouterr().err.count("torchrun has started several processes") == 1 - rank
