"""What callbacks share: random states, evaluation, settings, and the range of arguments."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from callbacks import (
    AnswerAccuracy,
    NonFinite,
    PosteriorAnalysis,
    Predictions,
    Samples,
    SaveCheckpoints,
    Termination,
    Throughput,
)
from callbacks.dials import dialled, has_dial
from callbacks.random_state import RandomState, undisturbed
from tests.callbacks.analyses import CASES

# ---- random states and modes


def draws():
    return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)


def test_a_state_survives_a_checkpoint(tmp_path):
    random.gauss(0, 1)  # leaves its second value for the next call
    np.random.randn()
    state = RandomState.capture()
    expected = draws()
    torch.save(state.plain(), tmp_path / "state")
    draws()
    RandomState.from_plain(torch.load(tmp_path / "state", weights_only=True)).restore()
    assert draws() == expected


def test_random_states_and_modes_are_put_back():
    """After an error, too."""
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
    state = RandomState.capture()
    expected = draws()
    state.restore()
    modes = []

    def fails_inside():
        with undisturbed(module):
            modes.extend((module.training, module[0].training, torch.is_grad_enabled()))
            draws()
            raise KeyError

    with pytest.raises(KeyError):
        fails_inside()
    assert modes == [False, False, False]
    assert draws() == expected
    assert (module.training, module[0].training, module[1].training) == (True, True, False)


# ---- another setting


@dataclass(frozen=True)
class Config:
    width: int = 1
    depth: int = 2

    def __post_init__(self):
        if self.depth < 0:
            raise ValueError(f"depth ({self.depth}) must not be negative")


class Part(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        if config is not None:
            self.config = config


def nested():
    model, config = Part(Config()), Config()
    model.add_module("own", Part(model.config))
    model.own.add_module("deep", Part(model.config))
    model.add_module("other", Part(config))
    model.add_module("none", Part())
    return model


def test_every_holder_of_the_configuration_sees_the_change():
    model = nested()
    before = [vars(module).get("config") for module in model.modules()]
    with dialled(model, "depth", 5):
        assert [part.config.depth for part in (model, model.own, model.own.deep)] == [5, 5, 5]
        assert model.other.config.depth == 2  # an equal one that is not its own
        assert model.config.width == 1
    after = [vars(module).get("config") for module in model.modules()]
    assert all(one is two for one, two in zip(before, after, strict=True))


def test_the_configuration_is_put_back_after_an_error():
    model = nested()
    config = model.config
    with pytest.raises(KeyError), dialled(model, "depth", 5):
        raise KeyError
    assert model.config is model.own.config is model.own.deep.config is config
    with pytest.raises(ValueError, match=r"depth \(-1\)"), dialled(model, "depth", -1):
        pass
    assert model.config is config


def test_a_configuration_without_the_field_is_refused():
    model = nested()
    assert has_dial(model, "depth")
    assert not has_dial(model, "inner_steps")
    assert not has_dial(model.none, "depth")
    with (
        pytest.raises(ValueError, match="inner_steps: the configuration of Part has no such"),
        dialled(model, "inner_steps", 1),
    ):
        pass


# ---- arguments

WRONG = [
    (AnswerAccuracy, "num_batches", 0),
    (AnswerAccuracy, "max_new_tokens", 0),
    (NonFinite, "max_skipped_in_a_row", -1),
    (Predictions, "max_new_tokens", -1),
    (Samples, "every_n_validations", -1),
    (Samples, "max_new_tokens", -1),
    (Samples, "temperature", -1.0),
    (Samples, "seed", -1),
    (SaveCheckpoints, "every_n_train_steps", 0),
    (Termination, "stall_minutes", 0.0),
    (Throughput, "peak_tflops", 0.0),
    (PosteriorAnalysis, "steps", (4, -2)),
]
WRONG += [
    (case.kind, name, least - 1)
    for case in CASES
    for name, least in ({"num_batches": 1, "every_n_validations": 0} | case.least).items()
]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_values_are_checked(kind, name, value):
    with pytest.raises(ValueError, match=name) as refused:
        kind(**{name: value})
    assert str(min(value) if isinstance(value, tuple) else value) in str(refused.value)
