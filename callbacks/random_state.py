"""Random states, and evaluation during training without side effects."""

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class RandomState:
    """Random states of torch (CPU and every CUDA device), numpy and Python."""

    torch_cpu: Tensor
    torch_cuda: list[Tensor]
    numpy: Any
    python: tuple[Any, ...]

    @classmethod
    def capture(cls) -> "RandomState":
        """Returns the current state, in a few microseconds."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(legacy=True), random.getstate())

    def restore(self) -> None:
        """Restores the generators; CUDA's only if the number of devices is the same."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda and torch.cuda.device_count() == len(self.torch_cuda):
            torch.cuda.set_rng_state_all(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def plain(self) -> dict[str, Any]:
        """Returns only tensors and plain values, which load with ``weights_only=True``."""
        algorithm, keys, position, has_gauss, cached = self.numpy
        version, internal, gauss_next = self.python
        return {
            "torch_cpu": self.torch_cpu,
            "torch_cuda": self.torch_cuda,
            "numpy": [
                str(algorithm),
                torch.from_numpy(keys.astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ],
            "python": [version, torch.tensor(internal), gauss_next],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RandomState":
        """Rebuilds a state from the output of ``plain``, whose tensors may be on any device."""
        algorithm, keys, *rest = plain["numpy"]
        version, internal, gauss_next = plain["python"]
        return cls(
            torch_cpu=plain["torch_cpu"].cpu(),
            torch_cuda=[state.cpu() for state in plain["torch_cuda"]],
            numpy=(algorithm, keys.cpu().numpy().astype(np.uint32), *rest),
            python=(version, tuple(internal.tolist()), gauss_next),
        )


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluates ``module`` without gradients; restores random states and every submodule's mode.

    They are restored after errors too, unlike with Lightning's ``isolate_rng``. Sharded parameters
    are gathered on every rank, so this is a collective operation.
    """
    random_state = RandomState.capture()
    modes = {child: child.training for child in module.modules()}
    module.eval()
    gathered = getattr(module, "gathered", nullcontext)
    try:
        with torch.no_grad(), gathered():
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode
        random_state.restore()
