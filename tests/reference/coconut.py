"""Coconut on the Qwen2 backbone: continuous thoughts computed from scratch, one after another.

A row is a list of pieces: an id, or ``LATENT`` where a thought stands. The p-th thought is the
hidden state after the final norm at the position in front of it, and is fed as it is, as an input
embedding. Every thought is computed by a pass over all that stands before it; gradients flow
through all of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference import qwen2
from tests.reference.chain import chain_tokens
from tests.reference.qwen2 import Shape, Weights

LATENT = -1
"""Stands for a thought in a row."""

# ---- the curriculum


def stage_of(epoch: int, epochs_per_stage: int) -> int:
    """The stage of an epoch (from 0)."""
    return epoch // epochs_per_stage


def stage_counts(
    stage: int, steps: int, max_stage: int, c_thought: int, pad_latent_to_max: bool = True
) -> tuple[int, int]:
    """Training's (n, m): the first n steps are left out, m thoughts stand in for them.

    Up to ``max_stage``: n = stage and m = stage * c_thought, however many ``steps`` the row has
    (n may exceed them). After it: n = all steps, m = max_stage * c_thought, where the row has
    fewer steps than stages and ``pad_latent_to_max`` is off steps * c_thought.
    """
    if stage <= max_stage:
        return stage, stage * c_thought
    stages = max_stage if pad_latent_to_max else min(steps, max_stage)
    return steps, stages * c_thought


def evaluation_latents(
    stage: int, steps: int, max_stage: int, c_thought: int, pad_latent_to_max: bool = True
) -> int:
    """m at inference: min(stage, max_stage) * c_thought.

    Without ``pad_latent_to_max`` a row's steps bound it too, in all stages (unlike in training).
    """
    highest = max_stage if pad_latent_to_max else min(steps, max_stage)
    return min(stage, highest) * c_thought


# ---- the text


class Text(NamedTuple):
    """Pieces that are read (ids or LATENT) and what stands after each (-100: not predicted)."""

    pieces: list[int]
    labels: list[int]


def text_of(
    query: Sequence[int],
    latents: int,
    chain: Sequence[int],
    prefix: Sequence[int],
    answer: Sequence[int],
    markers: tuple[int, int] | None,
    score_prefix: bool = False,
) -> Text:
    """Query, <start>, latents, <end>, remaining chain, prefix, answer with its EOS.

    The chain and the answer are predicted, under ``score_prefix`` the prefix too.

    Args:
        query: Ids.
        latents: m.
        chain: Ids of the steps that are left, see ``remaining``.
        prefix: Ids between chain and answer.
        answer: Ids, the EOS after.
        markers: Ids of <start> and <end>; None: neither (then ``latents`` must be 0).
        score_prefix: Whether the prefix is predicted.
    """
    if markers is None and latents:
        raise ValueError(f"{latents} latents need their markers")
    thinking = [] if markers is None else [markers[0], *[LATENT] * latents, markers[1]]
    unscored = [-100] * (len(query) + len(thinking))
    ahead = list(prefix) if score_prefix else [-100] * len(prefix)
    pieces = [*query, *thinking, *chain, *prefix, *answer]
    return Text(pieces[:-1], [*unscored, *chain, *ahead, *answer][1:])


def remaining(steps: Sequence[Sequence[int]], n: int, separator: Sequence[int]) -> list[int]:
    """Ids of the steps after the first n, the separator in front of each."""
    return chain_tokens(steps[n:], separator)


# ---- the model


class Read(NamedTuple):
    """Inputs (N, D) with the thoughts in place, post-norm states (N, D), and logits (N, V)."""

    inputs: Tensor
    last: Tensor
    logits: Tensor


def read(
    weights: Weights,
    shape: Shape,
    pieces: Sequence[int],
    barred: Sequence[int] = (),
    replace: Callable[[Tensor, int], Tensor] = lambda thought, _: thought,
) -> Read:
    """A row read from left to right; a thought cannot stand first.

    ``replace`` says what is fed in place of the thought of each number from 0.
    """
    rows: list[Tensor] = []
    thoughts = 0
    for piece in pieces:
        if piece == LATENT:
            thought = qwen2.last_states(weights, shape, torch.stack(rows))[-1]
            rows.append(replace(thought, thoughts))
            thoughts += 1
        else:
            rows.append(qwen2.embed(weights, [piece])[0])
    inputs = torch.stack(rows)
    last = qwen2.last_states(weights, shape, inputs)
    return Read(inputs, last, qwen2.bar(last @ qwen2.head_matrix(weights).T, barred))


def log_probs(weights: Weights, shape: Shape, text: Text, barred: Sequence[int] = ()) -> Tensor:
    return qwen2.label_log_probs(read(weights, shape, text.pieces, barred).logits, text.labels)


def nll(
    weights: Weights, shape: Shape, texts: Sequence[Text], barred: Sequence[int] = ()
) -> Tensor:
    """The loss of a batch: the mean over all its labels, nats."""
    return -torch.cat([log_probs(weights, shape, text, barred) for text in texts]).mean()
