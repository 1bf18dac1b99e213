"""Run folders as train.py leaves them, of checkpoints that are there already."""

import csv

import torch

from training.loggers import EventLog

LOGGED = {"val/bpb": 8.0, "val/loss": 5.5, "throughput/tokens_per_second": 100.0}
RECORD = """# run: abc
# command: train.py fit
# commit: {commit}
# torch: 2
seed_everything: {seed}
trainer:
  precision: 32-true
  accumulate_grad_batches: 1
"""


def place(folder, name, model):
    """The checkpoint of a run in its folder, which is made."""
    path = folder / name / model / "version_0" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    return path


def dress(checkpoint, seed, commit="c1", **logged):
    """Adds log and record to a checkpoint."""
    log = EventLog(checkpoint.parents[3], name=checkpoint.parents[2].name, version="version_0")
    for step in (0, 1):
        log.log_metrics({**LOGGED, **{k: v + step for k, v in logged.items()}}, step)
    log.finalize("success")
    (checkpoint.parents[1] / "config.yaml").write_text(RECORD.format(commit=commit, seed=seed))


def grown(source, target, factor):
    """A copy of a checkpoint with larger weights."""
    content = torch.load(source, weights_only=True)
    for weight in content["state_dict"].values():
        weight.mul_(factor)
    torch.save(content, target)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_model(rows):
    return {row["model"]: row for row in rows}
