"""Gates and gradient norms over a training."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SELF_ATTENTION, MEMORY_ATTENTION, FEED_FORWARD = (
    "self_attention",
    "memory_attention",
    "feed_forward",
)
COMPONENTS = {
    "attention": SELF_ATTENTION,
    "attention_norm": SELF_ATTENTION,
    "memory_attention": MEMORY_ATTENTION,
    "memory_norm": MEMORY_ATTENTION,
    "feed_forward": FEED_FORWARD,
    "feed_forward_norm": FEED_FORWARD,
}
"""The component that a sub-module of a block belongs to; the norm goes with the layer it feeds. In
parallel blocks one norm feeds both attentions and counts as self-attention."""

Place = tuple[int, str]
"""A layer (1-based), and what of it."""

_GATE = re.compile(r"(?:^|\.)blocks\.(\d+)\.memory_attention\.gate$")
_SUBLAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.(\w+)\.")


class History:
    """Numbers of the places of a network, at steps of its training; a row a step."""

    def __init__(self) -> None:
        """Starts empty."""
        self.places: list[Place] = []
        self.steps: list[int] = []
        """Optimiser steps."""
        self.sentence_steps: list[int] = []
        """Sentence steps so far; 0 where the model does not count them."""
        self.rows: list[list[float]] = []
        """One number a place each."""

    def add(self, step: int, sentence_steps: int, values: Mapping[Place, float]) -> None:
        """Adds a row; rows of other places, of a model that was built differently, are dropped."""
        if self.places != list(values):
            self.forget_from(0)
            self.places = list(values)
        self.steps.append(step)
        self.sentence_steps.append(sentence_steps)
        self.rows.append(list(values.values()))

    def forget_from(self, step: int) -> None:
        """Drops the rows of ``step`` and later ones, which a training is about to write again."""
        kept = sum(each < step for each in self.steps)
        for column in (self.steps, self.sentence_steps, self.rows):
            del column[kept:]

    @property
    def values(self) -> np.ndarray:
        """float64 (rows, places)."""
        return np.array(self.rows, dtype=np.float64).reshape(len(self.rows), len(self.places))

    @property
    def clock(self) -> tuple[str, Sequence[int]]:
        """What the x axis of figures counts, and where each row stands on it."""
        if any(self.sentence_steps):
            return "sentence steps", self.sentence_steps
        return "optimiser steps", self.steps

    def records(self, value: str, name: str | None = None) -> list[dict[str, Any]]:
        """Returns a table with one line a number.

        Args:
            value: heading of the numbers.
            name: heading of the places' names; None: they are left out.
        """
        return [
            {"step": step, "sentence_steps": sentence_steps, "layer": layer}
            | ({} if name is None else {name: part})
            | {value: number}
            for step, sentence_steps, row in zip(
                self.steps, self.sentence_steps, self.rows, strict=True
            )
            for (layer, part), number in zip(self.places, row, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """Returns plain values, as checkpoints hold them."""
        return {
            "places": [list(place) for place in self.places],
            "steps": list(self.steps),
            "sentence_steps": list(self.sentence_steps),
            "rows": [list(row) for row in self.rows],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "History":
        """Returns what ``state`` was taken from."""
        history = cls()
        history.places = [(int(layer), str(part)) for layer, part in state["places"]]
        history.steps, history.sentence_steps = list(state["steps"]), list(state["sentence_steps"])
        history.rows = [list(row) for row in state["rows"]]
        return history


def gates(model: nn.Module) -> dict[Place, float]:
    """Returns g_mem of every layer that reads memory, by layer; empty if there is none.

    With sharded parameters all ranks have to call this.
    """
    found = [
        (int(match[1]) + 1, parameter.detach())
        for name, parameter in model.named_parameters()
        if (match := _GATE.search(name))
    ]
    if not found:
        return {}
    values = torch.stack([_whole(gate).reshape(()) for _, gate in found]).tolist()
    return {(layer, "gate"): value for (layer, _), value in zip(found, values, strict=True)}


def gradient_norms(model: nn.Module) -> dict[Place, float]:
    """Returns the 2-norm of the gradient of every component of every layer, 0 without a gradient.

    Components are self-attention within sentences, cross-attention to memory with its gate, and
    the feed-forward layer, each with the norm in front of it; embeddings, sentence head, final norm
    and output matrix are none. With sharded parameters all ranks have to call this.
    """
    places: dict[Place, int] = {}
    gradients: list[Tensor] = []
    place_of: list[int] = []
    for name, parameter in model.named_parameters():
        match = _SUBLAYER.search(name)
        if match is None or match[2] not in COMPONENTS:
            continue
        place = int(match[1]) + 1, COMPONENTS[match[2]]
        index = places.setdefault(place, len(places))
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            place_of.append(index)
    squares = torch.zeros(len(places), dtype=torch.float64)
    if gradients:
        norms = _whole(torch.stack(torch._foreach_norm(gradients)))
        squares.index_add_(0, torch.tensor(place_of), norms.cpu().double().square())
    return dict(zip(places, squares.sqrt().tolist(), strict=True))


def shares(norms: Mapping[Place, float]) -> dict[str, float] | None:
    """Returns each component's share of the gradient, by its name; they add up to 1.

    A component's part is the sum of its norms over layers; see :func:`gradient_norms`. None if
    there is no gradient, or one that is not finite.

    NOTE(paper): Fig. 8 shows the fraction of "gradient magnitude", averaged across layers and over
    training, and leaves open which norm that is, and what is averaged first. Here it is the 2-norm
    of a layer's component before clipping; layers are summed, so a component that is in every layer
    counts more than one that is in every other, and every logged step weighs the same.
    """
    total = math.fsum(norms.values())
    if not 0 < total < math.inf:
        return None
    return {
        component: math.fsum(norm for (_, part), norm in norms.items() if part == component) / total
        for component in dict.fromkeys(COMPONENTS.values())
    }


def shares_over(history: History) -> dict[str, np.ndarray]:
    """Returns the share of each component at every row of gradient norms, float64 (rows,)."""
    found = [shares(dict(zip(history.places, row, strict=True))) for row in history.rows]
    return {
        part: np.array([row[part] for row in found if row is not None])
        for part in dict.fromkeys(COMPONENTS.values())
    }


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
