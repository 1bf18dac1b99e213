"""Thinking States (Sec. 3, App. A.1) as its equations say, in float64, one row at a time.

Weights are a dict: the backbone's by their names in ``transformers`` (see ``qwen2``), and

``thinking.layer.*``         T's layer, named as ``model.layers.i.*``
``thinking.norm.weight``     T's own final norm
``thinking.head.weight``     T's own output matrix; without it T uses the backbone's (tied)
``compression.layer.*``      C's layer

The embedding is the backbone's everywhere. Nothing is batched, masked or cached, and what has no
state gets none added. Rows after the vocabulary (thought EOS, separator, pad) are rows of the
embedding and head as all others: softmax runs over all rows of a head but the barred ones.

Indices of thoughts: chunk k (from 0) thinks Z_k after its last token; S_{k+1} = C(Z_k) is added
to the tokens of chunk k + 1. Chunk 0 and chunks after one that does not think receive nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference import qwen2
from tests.reference import thinking_states_grid as grid
from tests.reference.qwen2 import Shape, Weights

Thoughts = Mapping[int, Sequence[int]]
"""Chunk number -> Z, the ids of its thought with the thought EOS after."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything but the weights.

    Attributes:
        shape: The backbone's; T and C see all of their rows.
        kind: left_align, partial or absolute.
        chunk_size: c.
        inject_after: L_in: states are added to the hidden states after so many layers.
        tap_after: L_out: T reads the hidden states after so many layers.
        eos: Ends an answer.
        thought_eos: Ends a thought; alone it is the trivial thought, whose state is 0.
        pad: C fills short thoughts up with it.
        separator: Stands between two steps of one chunk.
        prefix: Ids between query and answer, never scored.
        max_thought_tokens: Most tokens of a thought of the model's own, not counting its EOS.
        think_in_decode: Chunks after the query think too.
        lm_on_query: The language model's loss covers the query's tokens after the first.
        trivial_weight: Weight of a trivial thought's loss.
        chunk_sum: Eq. 6 as printed, see ``losses``.
        barred_answers: Ids that the backbone never predicts.
        barred_thoughts: Ids that T never predicts.
    """

    shape: Shape
    kind: str
    chunk_size: int
    inject_after: int
    tap_after: int
    eos: int
    thought_eos: int
    pad: int
    separator: int
    prefix: tuple[int, ...] = ()
    max_thought_tokens: int = 8
    think_in_decode: bool = False
    lm_on_query: bool = False
    trivial_weight: float = 1.0
    chunk_sum: bool = False
    barred_answers: tuple[int, ...] = ()
    barred_thoughts: tuple[int, ...] = ()


class Row(NamedTuple):
    """A training example as ids; ``answer`` has its EOS, ``places`` are as in ``gold_targets``."""

    query: list[int]
    steps: list[list[int]]
    places: list[int]
    answer: list[int]


def with_blocks(weights: Weights, shape: Shape, tie_head: bool = False) -> dict[str, Tensor]:
    """The weights together with T and C as they start: copies of the last and the first layer.

    T's norm and head (none under ``tie_head``) are copies of the backbone's; copies are leaves.
    """
    blocks = {}
    for name, value in weights.items():
        for block, index in (("thinking", shape.layers - 1), ("compression", 0)):
            layer = f"model.layers.{index}."
            if name.startswith(layer):
                blocks[f"{block}.layer.{name.removeprefix(layer)}"] = value
    blocks["thinking.norm.weight"] = weights["model.norm.weight"]
    if not tie_head:
        blocks["thinking.head.weight"] = qwen2.head_matrix(weights)
    copies = {name: value.detach().clone().requires_grad_() for name, value in blocks.items()}
    return {**weights, **copies}


# ---- the two blocks


def thought_logits(
    weights: Weights, setup: Setup, hidden: Tensor, thought: Sequence[int]
) -> Tensor:
    """T's logits (n, V) of the n tokens of a thought (its EOS is one of them).

    T's inputs are the m rows of the chunk's hidden states and the embeddings of the thought's first
    n - 1 tokens; row m - 1 predicts token 0. Its layer is causal and sees this chunk alone. Inputs
    have consecutive positions; counted from 0 here, from c - m in a grid of right-aligned places:
    rotary attention cannot tell these apart.

    Args:
        weights: The dict described above.
        setup: Shape and barred ids.
        hidden: Hidden states (m, D) of the chunk's tokens after layer L_out, pads left out.
        thought: Ids z_1, .., z_n.
    """
    inputs = torch.cat((hidden, qwen2.embed(weights, list(thought[:-1]))))
    shape = setup.shape._replace(window=None)
    out = qwen2.decoder_layer(weights, shape, inputs, "thinking.layer")
    normed = qwen2.rms_norm(out, weights["thinking.norm.weight"], setup.shape.eps)
    matrix = weights.get("thinking.head.weight", qwen2.head_matrix(weights))
    return qwen2.bar(normed[len(hidden) - 1 :] @ matrix.T, setup.barred_thoughts)


def compress(weights: Weights, setup: Setup, thought: Sequence[int]) -> Tensor:
    """S (c, D) = C(Z): C's layer on the embedded thought with its EOS, causal, no final norm.

    A thought of n < c tokens is filled up after with pads, which are tokens like others: the
    outputs of all c positions. Of n >= c tokens: the last c outputs. Of [EOS] alone: exactly 0.
    """
    c, width = setup.chunk_size, weights["model.embed_tokens.weight"].shape[1]
    if list(thought) == [setup.thought_eos]:
        return torch.zeros(c, width, dtype=torch.float64)
    ids = list(thought) + [setup.pad] * max(0, c - len(thought))
    embedded = qwen2.embed(weights, ids)
    shape = setup.shape._replace(window=None)
    return qwen2.decoder_layer(weights, shape, embedded, "compression.layer")[-c:]


# ---- the backbone with states


class Read(NamedTuple):
    """What the backbone makes of N tokens.

    ``tapped`` (N, D) are the hidden states after layer L_out, ``last`` (N, D) those after the
    last layer and the final norm, ``logits`` (N, V) predict the next token.
    """

    tapped: Tensor
    last: Tensor
    logits: Tensor


def chunks_of(setup: Setup, q: int, length: int) -> list[grid.Chunk]:
    """The chunks of the first ``length`` tokens."""
    return grid.cut(setup.kind, setup.chunk_size, q, length)


def forward(
    weights: Weights, setup: Setup, tokens: Sequence[int], q: int, thoughts: Thoughts
) -> Read:
    """One pass over a list of ids, the first q of them the query, with the states of ``thoughts``.

    A chunk after one that is not in ``thoughts`` receives no state. The states enter after layer
    L_in, so keys and values of the layers in front of it know nothing of them.
    """
    shape = setup.shape
    x = qwen2.layers(weights, shape, qwen2.embed(weights, tokens), 0, setup.inject_after)
    rows = list(x)
    for k, chunk in enumerate(chunks_of(setup, q, max(q, len(tokens)))):
        if k - 1 in thoughts:
            state = compress(weights, setup, thoughts[k - 1])
            for token, place in zip(chunk.tokens, chunk.places, strict=True):
                if token < len(rows):
                    rows[token] = rows[token] + state[place]
    tapped = qwen2.layers(weights, shape, torch.stack(rows), setup.inject_after, setup.tap_after)
    top = qwen2.layers(weights, shape, tapped, setup.tap_after, shape.layers)
    last = qwen2.final_norm(weights, shape, top)
    logits = qwen2.bar(last @ qwen2.head_matrix(weights).T, setup.barred_answers)
    return Read(tapped, last, logits)


def sequential(
    weights: Weights, setup: Setup, tokens: Sequence[int], q: int, thoughts: Thoughts
) -> Read:
    """The same numbers, chunk by chunk (eq. 1-4 with given thoughts).

    Chunk k is read with all tokens up to its last and with the thoughts of the chunks before it,
    everything computed again; of that pass chunk k's rows are kept.
    """
    reads = []
    for k, chunk in enumerate(chunks_of(setup, q, len(tokens))):
        before = {j: thought for j, thought in thoughts.items() if j < k}
        read = forward(weights, setup, tokens[: chunk.tokens[-1] + 1], q, before)
        reads.append([rows[chunk.tokens[0] : chunk.tokens[-1] + 1] for rows in read])
    return Read(*(torch.cat(rows) for rows in zip(*reads, strict=True)))


# ---- the objective (eq. 6)


class Terms(NamedTuple):
    """Negative log-likelihoods of a row, nats.

    ``answer`` has those of the answer's tokens and its EOS, ``query`` those of query tokens
    1, .., q - 1, ``thoughts`` by chunk those of all tokens of its thought.
    """

    answer: Tensor
    query: Tensor
    thoughts: dict[int, Tensor]


def inputs_of(setup: Setup, row: Row) -> list[int]:
    """What the backbone reads in training: query, prefix, answer; not the EOS after the answer.

    A chunk that would end with that EOS has therefore not ended.
    """
    return [*row.query, *setup.prefix, *row.answer[:-1]]


def gold_of(setup: Setup, row: Row) -> dict[int, list[int]]:
    """The row's thoughts: chunk number -> Z, of the chunks that end within ``inputs_of``."""
    kind, c, q = setup.kind, setup.chunk_size, len(row.query)
    targets = grid.gold_targets(
        kind, c, q, row.steps, row.places, setup.separator, setup.thought_eos
    )
    length = len(inputs_of(setup, row))
    return grid.gold_thoughts(kind, c, q, length, targets, setup.thought_eos, setup.think_in_decode)


def terms(weights: Weights, setup: Setup, row: Row) -> Terms:
    """A row's losses under its gold thoughts; states carry gradients to C and the embedding."""
    tokens, q, gold = inputs_of(setup, row), len(row.query), gold_of(setup, row)
    read = sequential(weights, setup, tokens, q, gold)
    behind = [-100] * (len(tokens) - len(row.answer)) + row.answer
    asked = row.query[1:] + [-100] * (len(tokens) - q + 1)
    chunks = chunks_of(setup, q, len(tokens))
    thoughts = {}
    for k, thought in gold.items():
        hidden = torch.stack([read.tapped[token] for token in chunks[k].tokens])
        logits = thought_logits(weights, setup, hidden, thought)
        thoughts[k] = -qwen2.label_log_probs(logits, thought)
    return Terms(
        answer=-qwen2.label_log_probs(read.logits, behind),
        query=-qwen2.label_log_probs(read.logits, asked),
        thoughts=thoughts,
    )


class Losses(NamedTuple):
    """Scalars in nats: L_LM, L_T, and what is minimised, their sum."""

    nll: Tensor
    thoughts: Tensor
    total: Tensor


def losses(weights: Weights, setup: Setup, rows: Sequence[Row]) -> Losses:
    """The losses of a batch.

    ``nll`` is the mean over the batch's target tokens: all answer tokens with their EOS and, under
    ``lm_on_query``, all query tokens but each row's first (the prefix is never a target).

    ``thoughts`` is the mean over the tokens of all thoughts in the batch, EOS included; a trivial
    thought's token has the weight ``trivial_weight`` in both the sum and the count. Under
    ``chunk_sum`` (our reading of eq. 6, whose L_T has no stated reduction) it is, for each row, the
    sum over its chunks of the chunk's mean over its tokens, a trivial chunk's term multiplied by
    ``trivial_weight``; and of that the mean over the rows.
    """
    found = [terms(weights, setup, row) for row in rows]
    targets = [row.answer for row in found]
    if setup.lm_on_query:
        targets += [row.query for row in found]
    nll = torch.cat(targets).mean()
    thoughts = (chunk_sum if setup.chunk_sum else token_mean)(setup, rows, found)
    return Losses(nll, thoughts, nll + thoughts)


def weight_of(setup: Setup, thought: Sequence[int]) -> float:
    """``trivial_weight`` of a thought that is its EOS alone, else 1."""
    return setup.trivial_weight if list(thought) == [setup.thought_eos] else 1.0


def token_mean(setup: Setup, rows: Sequence[Row], found: Sequence[Terms]) -> Tensor:
    """The weighted mean over all thought tokens; 0 where there are none."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for row, row_terms in zip(rows, found, strict=True):
        for k, thought in gold_of(setup, row).items():
            weight = weight_of(setup, thought)
            total = total + weight * row_terms.thoughts[k].sum()
            count += weight * len(thought)
    return total / count if count else total


def chunk_sum(setup: Setup, rows: Sequence[Row], found: Sequence[Terms]) -> Tensor:
    """Mean over rows of the sum over chunks of the mean over the chunk's thought tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for row, row_terms in zip(rows, found, strict=True):
        for k, thought in gold_of(setup, row).items():
            total = total + weight_of(setup, thought) * row_terms.thoughts[k].mean()
    return total / len(rows)
