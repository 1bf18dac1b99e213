"""Thinking States while it thinks for itself: sequential reading, and speculative prefill.

Built on ``thinking_states``; every pass starts from the ids. Thoughts and answers are greedy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference import qwen2
from tests.reference import thinking_states as ts
from tests.reference import thinking_states_grid as grid
from tests.reference.qwen2 import Weights
from tests.reference.thinking_states import Setup, Thoughts


def think(weights: Weights, setup: Setup, hidden: Tensor) -> list[int]:
    """Z, greedily, of a chunk's hidden states (m, D); the EOS is after it.

    A thought that has ``max_thought_tokens`` tokens and no EOS gets one.
    """
    thought: list[int] = []
    for _ in range(setup.max_thought_tokens):
        # the id that stands for the unknown next token is not an input of its own prediction
        logits = ts.thought_logits(weights, setup, hidden, [*thought, setup.thought_eos])
        following = int(logits[-1].argmax())
        if following == setup.thought_eos:
            break
        thought.append(following)
    return [*thought, setup.thought_eos]


def think_along(
    weights: Weights,
    setup: Setup,
    tokens: Sequence[int],
    q: int,
    thoughts: Thoughts | None = None,
) -> dict[int, list[int]]:
    """All thoughts of the model's own within a list of ids, chunk by chunk.

    ``thoughts`` are those of earlier chunks that are known already. Chunk number -> Z.
    """
    known = {k: list(thought) for k, thought in (thoughts or {}).items()}
    chunks = ts.chunks_of(setup, q, len(tokens))
    decides = setup.think_in_decode
    for k in grid.thinking_chunks(setup.kind, setup.chunk_size, q, len(tokens), decides):
        if k in known:
            continue
        read = ts.forward(weights, setup, tokens[: chunks[k].tokens[-1] + 1], q, known)
        hidden = torch.stack([read.tapped[token] for token in chunks[k].tokens])
        known[k] = think(weights, setup, hidden)
    return known


class Scored(NamedTuple):
    """Log-probabilities (A,) of an answer's tokens in nats, and the thoughts they rest on."""

    log_probs: Tensor
    thoughts: dict[int, list[int]]


def score(weights: Weights, setup: Setup, query: list[int], answer: list[int]) -> Scored:
    """log p of each token of ``answer`` (its EOS is one) after query and prefix.

    The model thinks for itself, under ``think_in_decode`` also while it reads the answer.
    """
    tokens, q = [*query, *setup.prefix, *answer[:-1]], len(query)
    thoughts = think_along(weights, setup, tokens, q)
    read = ts.forward(weights, setup, tokens, q, thoughts)
    labels = [-100] * (len(tokens) - len(answer)) + answer
    return Scored(qwen2.label_log_probs(read.logits, labels), thoughts)


class Answered(NamedTuple):
    tokens: list[int]
    thoughts: dict[int, list[int]]


def answer_greedily(
    weights: Weights, setup: Setup, query: list[int], max_new_tokens: int
) -> Answered:
    tokens, q = [*query, *setup.prefix], len(query)
    start, thoughts = len(tokens), think_along(weights, setup, tokens, q)
    while len(tokens) - start < max_new_tokens:
        thoughts = think_along(weights, setup, tokens, q, thoughts)
        logits = ts.forward(weights, setup, tokens, q, thoughts).logits[-1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] == setup.eos:
            break
    return Answered(tokens[start:], thoughts)


class Prefill(NamedTuple):
    """What reading a query leaves.

    Attributes:
        thoughts: Chunk number -> Z, of all chunks that end within the query.
        state: S (c, D) of the last of them, which the chunk after it receives; zeros if trivial
            or there is none.
        read: The backbone's states at the query's tokens.
        rounds: Passes of the backbone.
    """

    thoughts: dict[int, list[int]]
    state: Tensor
    read: ts.Read
    rounds: int


def last_state(weights: Weights, setup: Setup, thoughts: Thoughts) -> Tensor:
    """C of the thought of the highest chunk; zeros without any."""
    last = thoughts[max(thoughts)] if thoughts else [setup.thought_eos]
    return ts.compress(weights, setup, last)


def speculative_prefill(weights: Weights, setup: Setup, query: list[int]) -> Prefill:
    """The query read by speculation (Sec. 3.3; App. A.2 with its indices put right).

    ::

        pos = 0; S = 0
        loop: run M on chunks pos.. with states [S, 0, .., 0] after what is committed
              Z_i = T(H_i) for i >= pos; j = first i with Z_i != [EOS]
              none: commit all, stop
              commit chunks pos..j; S = C(Z_j); stop if j is the last chunk; pos = j + 1

    Committed are rows of the backbone; they are looked at only to check that a later pass, which
    computes them again, finds them unchanged. A chunk at the query's end that has not ended
    (absolute) is read but does not think.
    """
    q = len(query)
    chunks = ts.chunks_of(setup, q, q)
    committed: dict[int, list[int]] = {}
    kept: list[Tensor] = []
    pos = rounds = 0
    while True:
        rounds += 1
        read = ts.forward(weights, setup, query, q, committed)  # not committed: state 0
        for before, now in zip(kept, read.tapped, strict=False):
            torch.testing.assert_close(before, now, rtol=0, atol=1e-12)
        fresh = speculated(weights, setup, read, chunks, pos)
        full = [k for k, thought in fresh.items() if thought != [setup.thought_eos]]
        stop = full[0] if full else len(chunks) - 1
        committed |= {k: thought for k, thought in fresh.items() if k <= stop}
        kept = list(read.tapped[: chunks[stop].tokens[-1] + 1])
        pos = stop + 1
        if pos == len(chunks):
            return Prefill(committed, last_state(weights, setup, committed), read, rounds)


def speculated(
    weights: Weights, setup: Setup, read: ts.Read, chunks: Sequence[grid.Chunk], pos: int
) -> dict[int, list[int]]:
    """Thoughts of the ended chunks from number ``pos`` on, from one pass, none in another's."""
    fresh = {}
    for k in range(pos, len(chunks)):
        if chunks[k].ended:
            hidden = torch.stack([read.tapped[token] for token in chunks[k].tokens])
            fresh[k] = think(weights, setup, hidden)
    return fresh
