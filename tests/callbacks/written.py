"""What an analysis has written and logged, and whether the training around it stayed the same."""

import csv
import random

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def table(folder, name, step=0):
    """The lines of a table of a validation, or of the file of that name."""
    path = folder / (name if name.endswith(".csv") else f"val-step={step}-{name}.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(folder, step=0):
    """The numbers of a validation by name."""
    return {line["name"]: float(line["value"]) for line in table(folder, "scalars", step)}


def names(folder, step=0):
    """What the files of a validation are called."""
    prefix = f"val-step={step}-"
    return {path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")}


def check_second_validation(log, tag, prefix, files):
    """Files, pictures and scalars of the validation at step 2, the only one; returns the events."""
    folder = log / tag
    assert names(folder, 2) == files
    assert len(list(folder.iterdir())) == len(files)
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(log)).Reload()
    tags = events.Tags()
    drawn = {f"{tag}/{name.removesuffix('.png')}" for name in files if name.endswith(".png")}
    assert set(tags["images"]) == drawn
    found = scalars(folder, 2)
    assert {name for name in tags["scalars"] if name.startswith(prefix)} == set(found)
    for name, value in found.items():
        (event,) = events.Scalars(name)
        assert event.step == 1  # that of the validation's own scalars
        assert event.value == pytest.approx(value, rel=1e-4)
    return events


def check_training_is_the_same(train, added=()):
    """Trains without and with the callback: weights, metrics, draws and modes agree.

    Args:
        train: returns trainer and model after a training; takes whether the callback is there.
        added: how names of metrics begin that only the callback logs.
    """
    ends = []
    for is_there in (False, True):
        random.seed(0)
        np.random.seed(0)
        trainer, model = train(is_there)
        draws = torch.rand(1).item(), np.random.rand(), random.random()
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.startswith(tuple(added))
        }
        modes = [child.training for child in model.modules()]
        counts = getattr(model, "sentence_steps", None)
        ends.append((model.state_dict(), metrics, draws, modes, counts))
    (weights, *rest), (weights_with, *rest_with) = ends
    assert rest_with == rest
    assert weights_with.keys() == weights.keys()
    assert all(torch.equal(weights_with[name], weight) for name, weight in weights.items())
