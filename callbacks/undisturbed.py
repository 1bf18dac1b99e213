"""A model looked at in the middle of its training, which goes on as if nothing had been."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from callbacks.random_state import RandomState


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluates ``module`` inside; random states and every submodule's mode are put back after."""
    random_state = RandomState.capture()
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode
        random_state.restore()
