"""CODI, PCCoT and SIM-CoT on the Qwen2 backbone: one question at a time, all computed from scratch.

A latent is the projected state after the final norm at the position in front of it, fed as an input
embedding. PCCoT computes all of them from the former ones, pass by pass. No cache, no padding.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference import qwen2
from tests.reference.qwen2 import Shape, Weights

Replace = Callable[[Tensor, int], Tensor]


def project(weights: Weights, state: Tensor) -> Tensor:
    """Linear, GELU, linear, LayerNorm of a state (D,); the state itself without a projection."""
    if "projection.1.weight" not in weights:
        return state
    x = weights["projection.1.weight"] @ state + weights["projection.1.bias"]
    x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    x = weights["projection.3.weight"] @ x + weights["projection.3.bias"]
    x = (x - x.mean()) / ((x - x.mean()).square().mean() + 1e-5).sqrt()
    return x * weights["projection.4.weight"] + weights["projection.4.bias"]


def latents_of(
    weights: Weights,
    shape: Shape,
    prompt: Sequence[int],
    count: int,
    filler: int,
    passes: int | None = None,
    replace: Replace = lambda latent, number: latent,
) -> list[Tensor]:
    """The latents (D,) after a prompt of ids.

    Args:
        weights: The backbone's, and the projection's.
        shape: The backbone's shape.
        prompt: Question and start marker.
        count: K.
        filler: Id whose embedding latents begin as, with passes.
        passes: T; None: one latent after the other.
        replace: Function from a latent and its number to the one fed in its place.
    """
    before = qwen2.embed(weights, prompt)
    latents: list[Tensor] = []
    if passes is None:
        for number in range(count):
            read = torch.stack([*before, *latents])
            latent = project(weights, qwen2.last_states(weights, shape, read)[-1])
            latents.append(replace(latent, number))
        return latents
    latents = list(qwen2.embed(weights, [filler] * count))
    for _ in range(passes):
        last = qwen2.last_states(weights, shape, torch.stack([*before, *latents]))
        states = last[len(prompt) - 1 :]
        latents = [replace(project(weights, states[j]), j) for j in range(count)]
    return latents


def layer_states(weights: Weights, shape: Shape, x: Tensor, place: int) -> list[Tensor]:
    """The states (D,) of one position: embedding, after each layer, and after the final norm."""
    states = [x[place]]
    for index in range(shape.layers):
        x = qwen2.layers(weights, shape, x, index, index + 1)
        states.append(x[place])
    return [*states[:-1], qwen2.final_norm(weights, shape, x)[place]]


def unbiased_std(values: Tensor) -> Tensor:
    """Over all elements."""
    return ((values - values.mean()).square().sum() / (values.numel() - 1)).sqrt()


def distance(student: Tensor, teacher: Tensor, smooth: bool) -> Tensor:
    """|s - t|, or smooth L1: (s - t)^2 / 2 where that is below 1, else |s - t| - 1/2."""
    off = (student - teacher).abs()
    return torch.where(off < 1, off.square() / 2, off - 0.5) if smooth else off


def distillation(
    students: Sequence[list[Tensor]],
    teachers: Sequence[list[Tensor]],
    smooth: bool = False,
    over_batch: bool = False,
) -> Tensor:
    """The mean over questions and layers of mean d / std(teacher); lists are one a question."""
    found = []
    for student, teacher in zip(students, teachers, strict=True):
        for layer, (s, t) in enumerate(zip(student, teacher, strict=True)):
            spread = torch.cat([one[layer] for one in teachers]) if over_batch else t
            found.append(distance(s, t.detach(), smooth).mean() / unbiased_std(spread.detach()))
    return torch.stack(found).mean()


class Read(NamedTuple):
    """A text that is read: input rows, their log-probabilities, states of one place by layer."""

    inputs: Tensor
    log_probs: Tensor
    layers: list[Tensor]


def read(weights: Weights, shape: Shape, x: Tensor, labels: Sequence[int], place: int) -> Read:
    """Rows (N, D) with a label after each (-100: none), and the states of a place in all layers."""
    last = qwen2.last_states(weights, shape, x)
    logits = last @ qwen2.head_matrix(weights).T
    found = qwen2.label_log_probs(logits, labels)
    return Read(x, found, layer_states(weights, shape, x, place))


def student(
    weights: Weights,
    shape: Shape,
    query: Sequence[int],
    latents: Sequence[Tensor],
    after: Sequence[int],
    answer: Sequence[int],
    markers: tuple[int, int],
    prefix_learned: bool = False,
) -> Read:
    """Query, start, latents, end, ``after`` (the answer prefix), answer with its EOS."""
    head = qwen2.embed(weights, [*query, markers[0]])
    rest = [markers[1], *after, *answer]
    inputs = torch.stack([*head, *latents, *qwen2.embed(weights, rest[:-1])])
    ahead = list(after) if prefix_learned else [-100] * len(after)
    labels = [-100] * (len(head) + len(latents)) + [*ahead, *answer]
    place = len(inputs) - len(answer)
    return read(weights, shape, inputs, labels, place)


def teacher(
    weights: Weights,
    shape: Shape,
    query: Sequence[int],
    chain: Sequence[int],
    prefix: Sequence[int],
    answer: Sequence[int],
) -> Read:
    """Query, chain, answer prefix, answer; all but the query learned."""
    pieces = [*query, *chain, *prefix, *answer]
    labels = [*([-100] * len(query)), *chain, *prefix, *answer][1:]
    inputs = qwen2.embed(weights, pieces[:-1])
    return read(weights, shape, inputs, labels, len(inputs) - len(answer))


# ---- SIM-CoT


def spoken(
    steps: Sequence[Sequence[int]], groups: int, separator: Sequence[int], eos: int
) -> list[list[int]]:
    """The text of each group of latents: its step, the last group all that are left, then EOS."""
    texts: list[list[int]] = []
    for number, step in enumerate(steps if groups else []):
        if number < groups:
            texts.append(list(step))
        else:
            texts[-1] += [*separator, *step]
    return [[*text, eos] for text in texts]


def decoder_of(weights: Weights) -> dict[str, Tensor]:
    """The step decoder's weights by the backbone's names."""
    own = {k.removeprefix("decoder."): v for k, v in weights.items() if k.startswith("decoder.")}
    return {"lm_head.weight" if k == "head.weight" else k: v for k, v in own.items()}


def step_loss(
    decoder: Weights,
    shape: Shape,
    latents: Sequence[Tensor],
    texts: Sequence[Sequence[int]],
    each: int,
    token_sum: bool = False,
) -> list[Tensor]:
    """The decoder's loss for a question: the mean over texts of means, or sums, over tokens.

    One value in a list, which is empty for a question that has no text.
    """
    found = []
    for group, text in enumerate(texts):
        z = latents[group * each : (group + 1) * each]
        x = torch.stack([*z, *qwen2.embed(decoder, text[:-1])])
        logits = qwen2.last_states(decoder, shape, x)[each - 1 :] @ qwen2.head_matrix(decoder).T
        nll = -qwen2.label_log_probs(logits, text)
        found.append(nll.sum() if token_sum else nll.mean())
    return [torch.stack(found).mean()] if found else []
