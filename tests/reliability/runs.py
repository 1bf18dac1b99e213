"""Real processes of train.py that are killed, resumed and compared."""

import os
import random
import signal
import time
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch.utils._pytree import keystr
from torch.utils._pytree import tree_flatten_with_path as leaves

from lightning_models.checkpoint import read_whole
from tests.programs import ROOT, Program

FIXED = (
    "--data=datamodules.LocalText",
    "--data.block_size=32",
    "--data.batch_size=4",
    "--model.config.dim=16",
    "--model.config.num_layers=1",
    "--model.config.num_heads=2",
    "--model.config.dropout=0.2",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.enable_model_summary=false",
    "--trainer.log_every_n_steps=1",
    "--samples.every_n_validations=0",
)
SHARDED = (
    f"--config={ROOT}/configs/trainer/fsdp.yaml",
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.precision=32-true",
)
IN_PARTS = (*SHARDED, "--trainer.strategy.sharded_checkpoints=in_background")
LOGGED = ("train/loss", "train/bpb", "val/loss", "val/bpb", "epoch")


class Run:
    """A training run in a folder of its own, in one process after the other."""

    def __init__(self, text: Path, root: Path, *extra: str, **environment: str) -> None:
        self.root, self.name = root, "TransformerLM"
        self.command = [str(ROOT / "train.py"), "fit", *FIXED]
        self.command += [f"--data.data_files={text}", f"--data.cache_dir={root.parent}/cache"]
        self.command += [f"--trainer.default_root_dir={root}", *extra]
        self.environment = {**os.environ, **environment}
        self.forks_ranks = "--trainer.devices=2" in extra

    @property
    def folder(self) -> Path:
        return self.root / self.name / "version_0"

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    def start(self, *extra: str) -> Program:
        """Starts, or with ``--ckpt_path=last`` goes on."""
        words = (*self.command, *extra)
        return Program(*words, env=self.environment, forks_ranks=self.forks_ranks)

    def resume(self) -> Program:
        return self.start("--ckpt_path=last")


def children(pid: int) -> list[int]:
    """The processes that it has started itself."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def step_lines(process):
    """Yields the step number of each progress line."""
    for line in process.stdout:
        if line.startswith("step "):
            yield int(line.split()[1].rstrip(":").split("/")[0])


def at_step(process, step, signum=signal.SIGKILL, delay=0.0, group=None):
    """Sends a signal as soon as it reports that step, to its whole group if ``group``.

    Unless ``group`` is given, all its processes get a kill or Ctrl-C, as from a terminal.
    """
    reached = next((n for n in step_lines(process) if n >= step), None)
    assert reached is not None, process.stderr.read()[-3000:]
    time.sleep(delay)
    if group if group is not None else signum in (signal.SIGKILL, signal.SIGINT):
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)
    return reached


def killed(process, step, delay=0.0):
    """Kills without mercy and returns the last step that the process had reported."""
    reached = at_step(process, step, delay=delay)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    return reached


def finished(process, code=0, timeout=120):
    """Waits for the end; returns what was written to stderr."""
    _, errors = process.communicate(timeout=timeout)
    assert process.returncode == code, errors[-3000:]
    return errors


def logged(folder: Path) -> dict:
    """Returns {(tag, step): value} over all event files, as TensorBoard shows them.

    A start message with step n purges what was logged from there on; files are in the order of
    their start.
    """
    values: dict = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=_started):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log") and event.session_log.status == 1:
                values = {key: value for key, value in values.items() if key[1] < event.step}
            for item in event.summary.value:
                value = (
                    item.tensor.float_val[0]
                    if item.HasField("tensor") and len(item.tensor.float_val)
                    else item.simple_value
                )
                if item.tag in LOGGED:
                    values[item.tag, event.step] = value
    return values


def _started(path: Path) -> tuple:
    second, *_, number = path.name.removeprefix("events.out.tfevents.").split(".")
    return int(second), path.stat().st_ctime_ns, number


def same(a, b) -> bool:
    """Whether two nested structures are equal, tensors in every bit; not the order of their keys.

    A sharded optimiser that was restored names its settings in another order.
    """
    ours, theirs = ({keystr(path): leaf for path, leaf in leaves(x)[0]} for x in (a, b))
    return ours.keys() == theirs.keys() and all(
        torch.equal(x, theirs[key]) if isinstance(x, torch.Tensor) else x == theirs[key]
        for key, x in ours.items()
    )


def differences(ours: Run, theirs: Run, steps: int) -> list[str]:
    """Returns what is not the same, bit for bit, at the end of two runs of so many steps.

    Of weights, optimiser, schedule, random states and logged losses.
    """
    a, b = (read_whole(run.last) for run in (ours, theirs))
    found = [f"ended at {end['global_step']}" for end in (a, b) if end["global_step"] != steps]
    states = ("state_dict", "optimizer_states", "lr_schedulers", "resume_state")
    found += [key for key in states if not same(a[key], b[key])]
    first, second = logged(ours.folder), logged(theirs.folder)
    losses = {step for tag, step in first if tag == "train/loss"}
    found += [f"train/loss of {step}" for step in sorted(losses ^ set(range(steps)))]
    found += [f"{key}: logged by one" for key in sorted(first.keys() ^ second.keys())]
    both = sorted(first.keys() & second.keys())
    return found + [f"{k}: {first[k]}, {second[k]}" for k in both if first[k] != second[k]]


def seeded(seed: int) -> random.Random:
    """A generator whose seed shows up in the report of a failed test."""
    print(f"seed {seed}")
    return random.Random(seed)
