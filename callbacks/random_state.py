"""Random states, and models that are evaluated in training without disturbing them."""

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
    """States of torch (CPU and every CUDA device), numpy and Python, as these give them."""

    torch_cpu: Tensor
    torch_cuda: list[Tensor]
    numpy: Any
    python: tuple[Any, ...]

    @classmethod
    def capture(cls) -> "RandomState":
        """Returns the present state; a few microseconds."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(legacy=True), random.getstate())

    def restore(self) -> None:
        """Puts the generators back; CUDA only if there are as many devices as there were."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda and torch.cuda.device_count() == len(self.torch_cuda):
            torch.cuda.set_rng_state_all(self.torch_cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def plain(self) -> dict[str, Any]:
        """Returns tensors and plain values only, which load with ``weights_only=True``."""
        kind, keys, position, has_gauss, cached = self.numpy
        version, internal, gauss_next = self.python
        return {
            "torch_cpu": self.torch_cpu,
            "torch_cuda": self.torch_cuda,
            "numpy": [
                str(kind),
                torch.from_numpy(keys.astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ],
            "python": [version, torch.tensor(internal), gauss_next],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RandomState":
        """Returns the state that ``plain`` described (its tensors may have moved to a device)."""
        kind, keys, *rest = plain["numpy"]
        version, internal, gauss_next = plain["python"]
        return cls(
            torch_cpu=plain["torch_cpu"].cpu(),
            torch_cuda=[state.cpu() for state in plain["torch_cuda"]],
            numpy=(kind, keys.cpu().numpy().astype(np.uint32), *rest),
            python=(version, tuple(internal.tolist()), gauss_next),
        )


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluates ``module`` without gradients; restores random states and every submodule's mode.

    Also after an error, which Lightning's ``isolate_rng`` does not. Sharded parameters are whole
    on every rank; all ranks must enter.
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
