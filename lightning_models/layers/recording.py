"""Statistics that a network computes on request, at no cost otherwise."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_consumers: dict[str, Callable[..., None]] = {}


@contextlib.contextmanager
def recording(**consumers: Callable[..., None]) -> Iterator[None]:
    """Passes each named statistic to its consumer as the network computes it.

    In the meantime compiled networks run in eager mode, and for ``attention`` attention runs on the
    ``math`` backend. A consumer that keeps tensors should detach and move them.

    Args:
        **consumers: Functions by the name of the statistic, called with the keyword arguments of
            :func:`record`, which the network that records them documents.
    """
    before = dict(_consumers)
    _consumers.update(consumers)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _consumers.clear()
        _consumers.update(before)


def wants(name: str) -> bool:
    """Returns whether the statistic ``name`` has a consumer."""
    return name in _consumers


def is_recording() -> bool:
    """Returns whether any statistic has a consumer."""
    return bool(_consumers)


def record(name: str, **values: Any) -> None:
    """Passes ``values`` to the consumer of ``name``, if there is one.

    Check :func:`wants` first if the values are expensive to compute.
    """
    if name in _consumers:
        _consumers[name](**values)
