"""Statistics that analyses ask a network for, and that cost nothing when nobody asks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_consumers: dict[str, Callable[..., None]] = {}


@contextlib.contextmanager
def recording(**consumers: Callable[..., None]) -> Iterator[None]:
    """Hands every statistic of a consumer's name to it, as the network computes it.

    Compiled networks run uncompiled meanwhile; if ``attention`` is asked for, attention runs on the
    ``math`` backend. A consumer that keeps tensors should detach and move them.

    Args:
        **consumers: Functions by the name of the statistic; its arguments are those of
            :func:`record`. The network that records it documents them.
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
    """Returns whether anybody asks for the statistic ``name``."""
    return name in _consumers


def is_recording() -> bool:
    """Returns whether anybody asks for any statistic."""
    return bool(_consumers)


def record(name: str, **values: Any) -> None:
    """Hands ``values`` to the consumer of ``name``, if there is one.

    Where the values cost something to compute, ask :func:`wants` first.
    """
    if name in _consumers:
        _consumers[name](**values)
