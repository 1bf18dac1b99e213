"""The output layer, computed in chunks so that the logits of a whole batch are never in memory.

Logits are the largest tensor of a small language model (3.3 GB for 16 x 1024 tokens at V = 50304),
so losses and scores process the tokens in chunks.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_models.layers import record, segment_logsumexp, wants

IGNORE_INDEX = -100
"""Target value of positions without a prediction."""

CHUNK_ROWS = {"cpu": 256, "cuda": 2048}
"""Rows of logits in memory at a time, by device type; enough to saturate the matrix units."""


class TokenChunk(NamedTuple):
    """Consecutive states of consecutive tokens."""

    rows: slice
    """Indices of the states."""
    first: int
    """Index of the first token."""
    tokens: int
    """Number of tokens."""


def target_index(targets: Tensor) -> Tensor:
    """Returns flat targets with IGNORE_INDEX replaced by 0, a valid index for ``gather``."""
    # other ids outside the vocabulary still raise there
    return targets.reshape(-1).masked_fill(targets.reshape(-1) == IGNORE_INDEX, 0)


def product_dtype(h: Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with ``h``, which is autocast's if it is enabled."""
    if torch.is_autocast_enabled(h.device.type):
        return torch.get_autocast_dtype(h.device.type)
    return h.dtype


def chunk_rows(device: torch.device) -> int:
    """Returns the maximum number of rows of a chunk."""
    return CHUNK_ROWS.get(device.type, CHUNK_ROWS["cuda"])


def row_chunks(num_rows: int, device: torch.device) -> list[slice]:
    """Returns equal slices of the rows, at most CHUNK_ROWS each."""
    count = max(1, math.ceil(num_rows / chunk_rows(device)))
    size = max(1, math.ceil(num_rows / count))
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def token_chunks(owner: Tensor) -> list[TokenChunk]:
    """Returns chunks of about CHUNK_ROWS states that never split the states of a token.

    Args:
        owner: int64 (N,), index of the token of each state, non-decreasing.
    """
    if not len(owner):
        return []
    size = chunk_rows(owner.device)
    cuts = torch.arange(0, len(owner), size, device=owner.device)
    starts = torch.searchsorted(owner, owner[cuts])  # each moved back to its token's first state
    starts = torch.unique_consecutive(starts)  # a token may have more than one cut
    stops = torch.cat((starts[1:], starts.new_full((1,), len(owner))))
    table = torch.stack((starts, stops, owner[starts], owner[stops - 1]), dim=1)  # (chunks, 4)
    return [
        TokenChunk(slice(start, stop), first, last - first + 1)
        for start, stop, first, last in table.tolist()
    ]


def row_of_text_chunks(h: Tensor, states: int, tokens: int) -> list[TokenChunk]:
    """Returns chunks of whole rows of text, with at most CHUNK_ROWS states or a single row.

    Args:
        h: States of all rows (N, D).
        states: Number of states of a row.
        tokens: Number of tokens of a row.
    """
    size = max(1, chunk_rows(h.device) // states)  # rows of text in a chunk
    rows = len(h) // states
    return [
        TokenChunk(
            slice(row * states, min(row + size, rows) * states),
            row * tokens,
            (min(row + size, rows) - row) * tokens,
        )
        for row in range(0, rows, size)
    ]


def logits(h: Tensor, weight: Tensor) -> Tensor:
    """Returns ``h weight^T`` (n, V) in float32 or better, multiplied in the dtype of ``h``."""
    acc_dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
    with torch.autocast(h.device.type, enabled=False):
        return (h @ weight.t()).to(acc_dtype)


# ---- losses


def linear_cross_entropy(
    h: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Returns the summed cross-entropy, in nats, of logits ``h weight^T`` (float32 or float64).

    Gradients are computed in the forward pass, while the logits of a chunk are in memory, and the
    backward pass only scales them, so there is no second derivative. Gradients that are not
    required cost nothing.

    Args:
        h: Normed states (..., D). Matrix products run in their dtype or in autocast's.
        weight: Output matrix (V, D).
        targets: int64 (...), -100 at positions without a target.
        weights: Weight of each target's loss (...), without gradient. Defaults to ones.
    """
    return linear_cross_entropy_each(h, weight, targets, weights)[0]


def _scale(targets: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the weight of each target's loss, float32 or better."""
    if weights is None:
        return torch.ones_like(targets, dtype=torch.float32)
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def linear_cross_entropy_each(
    h: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the sum of :func:`linear_cross_entropy` and the loss of each target.

    The losses -log p(target) (...) in nats are unweighted, have no gradient and are 0 without a
    target. They give the loss of a class of targets without a second pass over the vocabulary.

    Args:
        h: Normed states (..., D).
        weight: Output matrix (V, D).
        targets: int64 (...), -100 at positions without a target.
        weights: Weight of each target's loss (...), without gradient. Defaults to ones.
    """
    ignored = targets == IGNORE_INDEX
    scale = _scale(targets, weights)
    scale = scale.masked_fill(ignored, 0.0)
    dtype = product_dtype(h)
    if not torch.is_grad_enabled():
        h, weight = h.detach(), weight.detach()  # the forward pass then computes no gradients
    flat = h.reshape(-1, h.shape[-1]), weight, None, target_index(targets), scale.reshape(-1)
    rows = row_chunks(len(flat[0]), h.device)
    chunks = [TokenChunk(part, part.start, part.stop - part.start) for part in rows]
    with torch.autocast(h.device.type, enabled=False):
        total, losses = _LinearCrossEntropy.apply(*flat, None, chunks, dtype)
    return total, losses.view(targets.shape).masked_fill(ignored, 0.0)


def linear_mixture_cross_entropy(
    h: Tensor,
    weight: Tensor,
    log_scores: Tensor,
    owner: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    per_row: tuple[int, int] | None = None,
) -> Tensor:
    """Returns the summed cross-entropy, in nats, of mixtures of several states' distributions.

    Token i predicts ``p_i = sum_j P_j softmax(h_j weight^T) / sum_j P_j`` over its states j
    (Thoughtbubbles, arXiv 2510.00219, eq. 11, mixed in log space). Only the probability of the
    target is needed, so no mixture over the vocabulary is computed. Chunks do not split tokens, and
    gradients are computed as in :func:`linear_cross_entropy`.

    Args:
        h: Normed states (N, D), grouped by token.
        weight: Output matrix (V, D).
        log_scores: log P of each state (N,), with gradient.
        owner: int64 (N,), index into ``targets`` of the token of each state, non-decreasing.
        targets: int64 (tokens,), -100 for tokens without a target.
        weights: Weight of each target's loss (tokens,), without gradient. Defaults to ones.
        per_row: Number of states and number of tokens of a row of text, if all rows have the same.
            Chunks then follow from them without a synchronisation with the device.
    """
    scale = _scale(targets, weights)
    scale = scale.masked_fill(targets == IGNORE_INDEX, 0.0)
    dtype = product_dtype(h)
    if not torch.is_grad_enabled():
        h, weight, log_scores = h.detach(), weight.detach(), log_scores.detach()
    chunks = token_chunks(owner) if per_row is None else row_of_text_chunks(h, *per_row)
    # every state of a token has the token's target and weight: (tokens,) -> (N,)
    flat = h, weight, log_scores, target_index(targets)[owner], scale[owner], owner
    with torch.autocast(h.device.type, enabled=False):
        return _LinearCrossEntropy.apply(*flat, chunks, dtype)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of rows of states, or of mixtures of them with ``log_scores`` and ``owner``.

    Returns the weighted sum, and -log p(target) under the distribution of each row, without
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        log_scores: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        owner: Tensor | None,
        chunks: list[TokenChunk],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss () and the loss of each row (N,), and saves the gradients."""
        need_h, need_weight = ctx.needs_input_grad[:2]
        acc_dtype = torch.promote_types(weight.dtype, torch.float32)
        states, matrix = h.to(dtype), weight.to(dtype)
        grad_h = torch.empty_like(h) if need_h else None
        grad_weight = torch.zeros_like(weight, dtype=acc_dtype) if need_weight else None
        grad_scores = None if log_scores is None else torch.empty_like(log_scores)
        total = torch.zeros((), dtype=acc_dtype, device=h.device)
        nll = torch.zeros(len(h), dtype=acc_dtype, device=h.device)
        for rows, first, count in chunks:
            # (n, V), (n, 1), (n,)
            exponentials, mass, losses = _softmax(logits(states[rows], matrix), targets[rows])
            nll[rows] = losses
            factor = scale[rows].to(losses.dtype)
            if log_scores is None or owner is None or grad_scores is None:
                total += (losses * factor).sum()
            else:
                mixed = _mix(log_scores[rows], -losses, owner[rows] - first, factor, count)
                # the gradient of log sum_j P_j p_j by log p_j is the posterior of state j
                factor = mixed.responsibilities
                grad_scores[rows] = mixed.score_gradient.to(grad_scores.dtype)
                total += mixed.loss
            if not (need_h or need_weight):
                continue
            index, column = targets[rows][:, None], factor[:, None]
            # factor (softmax - one-hot of the target), (n, V), written over the exponentials
            logit_grad = exponentials.mul_(column / mass).scatter_add_(1, index, -column).to(dtype)
            if grad_h is not None:
                grad_h[rows] = logit_grad @ matrix  # (n, V) (V, D)
            if grad_weight is not None:
                _accumulate(grad_weight, logit_grad, states[rows])
            del exponentials, logit_grad  # freed before the next chunk's logits are allocated
        ctx.save_for_backward(grad_h, grad_weight, grad_scores)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll)
        return total.to(torch.promote_types(h.dtype, torch.float32)), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_weight, grad_scores = ctx.saved_tensors
        grad = grad_outputs[0]
        if grad_h is not None:
            acc_dtype = torch.promote_types(grad_h.dtype, torch.float32)
            grad_h = (grad_h.to(acc_dtype) * grad).to(grad_h.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        if grad_scores is not None:
            grad_scores = grad_scores * grad
        return grad_h, grad_weight, grad_scores, None, None, None, None, None


def _softmax(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns exp(logits - maximum) (n, V), its sums (n, 1) and -log p(target) (n,).

    Args:
        scores: Logits (n, V), which are overwritten to save memory.
        targets: int64 (n,).
    """
    picked = scores.gather(1, targets[:, None])[:, 0]  # before the logits are overwritten
    highest = scores.amax(dim=-1, keepdim=True)
    exponentials = scores.sub_(highest).exp_()
    mass = exponentials.sum(dim=-1, keepdim=True)
    return exponentials, mass, mass.log()[:, 0] + highest[:, 0] - picked


class _Mixed(NamedTuple):
    """Loss of a chunk of mixtures, with the weights of its gradient."""

    loss: Tensor
    """Weighted sum over tokens, a scalar."""
    responsibilities: Tensor
    """Posterior of each state given the target, times the token's weight (n,)."""
    score_gradient: Tensor
    """Gradient of the loss by log P of each state (n,)."""


def _mix(log_scores: Tensor, log_prob: Tensor, token: Tensor, scale: Tensor, count: int) -> _Mixed:
    """Mixes the probability of the target over the states of each of ``count`` tokens.

    Args:
        log_scores: log P of each state (n,).
        log_prob: log p_j(target) under each state (n,).
        token: int64 (n,), index of each state's token in the chunk.
        scale: Weight of each state's token (n,).
        count: Number of tokens of the chunk.
    """
    log_scores = log_scores.to(log_prob.dtype)
    joint = segment_logsumexp(log_scores + log_prob, token, count)  # (count,), log sum_j P_j p_j
    prior = segment_logsumexp(log_scores, token, count)  # (count,), log sum_j P_j
    posterior = (log_scores + log_prob - joint[token]).exp()  # (n,), P_j p_j / sum_j P_j p_j
    share = (log_scores - prior[token]).exp()  # (n,), P_j / sum_j P_j
    # -log p(target) = prior - joint of each token; summed over states, as shares add up to one
    loss = -(scale * share * (joint - prior)[token]).sum()
    # d(prior - joint) / d log P_j = share - posterior
    return _Mixed(loss, scale * posterior, scale * (share - posterior))


def _accumulate(grad_weight: Tensor, logit_grad: Tensor, states: Tensor) -> None:
    if grad_weight.dtype == logit_grad.dtype:
        grad_weight.addmm_(logit_grad.t(), states)
    else:
        grad_weight += logit_grad.t() @ states


# ---- log-probabilities, greedy choices and entropies


class TargetScores(NamedTuple):
    """Scores in the shape of the targets, 0 and False at positions without a target."""

    log_prob: Tensor
    """log p(target) in nats, float32, or float64 for states in float64."""
    greedy: Tensor | None
    """Whether greedy decoding would choose the target, bool. None unless requested."""


@torch.no_grad()
def token_scores(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int | None = None,
    count: int | None = None,
) -> TargetScores:
    """Scores targets under logits ``h weight^T``, computed only for states with a target.

    Records ``logits``: ``logits`` (n, V) of the next targets in order. They are overwritten
    afterwards, so consumers must copy them.

    Args:
        h: Normed states (..., D).
        weight: Output matrix (V, D).
        targets: Targets (...) int64, or -100 to score none.
        vocab_size: Number of ids that may be chosen; the vocabulary's padding comes after them. By
            default the greedy choice is skipped.
        count: Number of targets, if the host knows it. By default the device counts them, with a
            synchronisation.
    """
    flat, flat_targets, dtype = h.reshape(-1, h.shape[-1]), targets.reshape(-1), product_dtype(h)
    scored = _scored_positions(flat_targets, count)  # (n,), indices in flat targets
    states, matrix, index = flat[scored].to(dtype), weight.to(dtype), flat_targets[scored]
    result = h.new_empty(len(scored), dtype=torch.promote_types(dtype, torch.float32))
    is_greedy = None if vocab_size is None else torch.empty_like(index, dtype=torch.bool)
    for rows in row_chunks(len(scored), weight.device):
        chunk = logits(states[rows], matrix)  # (n, V)
        if is_greedy is not None:
            # the vocabulary's padding must not win
            is_greedy[rows] = chunk[:, :vocab_size].argmax(dim=-1) == index[rows]
        record("logits", logits=chunk)  # before the softmax overwrites them
        result[rows] = -_softmax(chunk, index[rows])[2]
        del chunk  # frees the memory before the next chunk's logits are computed
    log_prob = _spread(result, scored, targets.shape)
    greedy = None if is_greedy is None else _spread(is_greedy, scored, targets.shape)
    return TargetScores(log_prob, greedy)


@torch.no_grad()
def mixture_scores(
    h: Tensor,
    weight: Tensor,
    log_scores: Tensor,
    owner: Tensor,
    targets: Tensor,
    vocab_size: int | None = None,
) -> TargetScores:
    """Scores targets (tokens,) under mixtures of several states' distributions.

    The mixture and the arguments are as in ``linear_mixture_cross_entropy``. Logits are computed
    only for states of tokens with a target. Records ``logits``, see ``token_scores``: the
    logarithms of the mixed distributions.

    Args:
        h: Normed states (N, D), grouped by token.
        weight: Output matrix (V, D).
        log_scores: Log P of each state (N,).
        owner: The token of each state (N,) int64, non-decreasing.
        targets: Targets (tokens,) int64, or -100 to score none.
        vocab_size: Number of ids that may be chosen. By default the greedy choice is skipped.
    """
    kept, dtype = _scored_positions(targets[owner]), product_dtype(h)
    owner, count = owner[kept], len(targets)
    states, matrix, index = h[kept].to(dtype), weight.to(dtype), targets[owner]
    scores = log_scores[kept].to(torch.promote_types(dtype, torch.float32))
    # log p(target) of each state alone, and the log of the sum of P over each token's states
    state_log_prob, prior = torch.empty_like(scores), segment_logsumexp(scores, owner, count)
    greedy = None if vocab_size is None else torch.zeros_like(targets, dtype=torch.bool)
    for rows, whole in _state_chunks(owner, whole_tokens=greedy is not None):
        weights, mass, losses = _softmax(logits(states[rows], matrix), index[rows])
        state_log_prob[rows] = -losses
        if greedy is not None and whole is not None:
            tokens, inner = whole
            shares = (scores[rows] - prior[owner[rows]]).exp()  # (states,), P_j / sum_j P_j
            weights.mul_(shares[:, None] / mass)  # (n, V), P_j softmax(h_j weight^T) / sum_j P_j
            # sums the states of each token: (states, V) -> (n, V)
            mixed = weights.new_zeros(len(tokens), weights.shape[1]).index_add_(0, inner, weights)
            greedy[tokens] = mixed[:, :vocab_size].argmax(dim=-1) == targets[tokens]
        del weights  # frees the memory before the next chunk's logits are computed
    if wants("logits"):
        log_shares = scores - prior[owner]  # (states,), log of P_j / sum_j P_j
        for rows, whole in _state_chunks(owner, whole_tokens=True):
            assert whole is not None
            log_probs = logits(states[rows], matrix).log_softmax(dim=-1) + log_shares[rows, None]
            tokens, inner = whole  # (n,), and the index in it of each state's token
            log_probs = log_probs.t()  # (V, states)
            mixed = segment_logsumexp(log_probs, inner.expand_as(log_probs), len(tokens))  # (V, n)
            record("logits", logits=mixed.t())
    log_prob = segment_logsumexp(scores + state_log_prob, owner, count) - prior
    return TargetScores(torch.where(targets == IGNORE_INDEX, 0.0, log_prob), greedy)


def _state_chunks(
    owner: Tensor, *, whole_tokens: bool
) -> Iterator[tuple[slice, tuple[Tensor, Tensor] | None]]:
    """Yields chunks of the states that ``owner`` (N,) assigns to tokens.

    With ``whole_tokens`` chunks do not split tokens, which requires a synchronisation with the
    device, and come with their tokens (n,) and the index among them of each state's token.
    """
    if not whole_tokens:
        yield from ((rows, None) for rows in row_chunks(len(owner), owner.device))
        return
    tokens, dense = torch.unique_consecutive(owner, return_inverse=True)
    for rows, first, count in token_chunks(dense):
        yield rows, (tokens[first : first + count], dense[rows] - first)


def _scored_positions(targets: Tensor, count: int | None = None) -> Tensor:
    """Returns the indices (n,) of the positions with a target among flat targets (N,).

    Without ``count`` this synchronises with the device, once per batch, whose scores the host reads
    next anyway. In return most logits of a task are never computed: a chunk of 2,048 rows at 50,257
    entries has 0.4 GB, which five kernels read or write. A method with many calls per batch should
    count on the host.
    """
    predicted = targets != IGNORE_INDEX
    if count is None:
        return predicted.nonzero()[:, 0]
    return predicted.nonzero_static(size=count)[:, 0]


def _spread(values: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Returns zeros of the given shape with ``values`` (n,) at the flat indices ``index`` (n,)."""
    return values.new_zeros(shape.numel()).index_copy_(0, index, values).view(shape)


@torch.no_grad()
def mixture_entropies(
    h: Tensor, weight: Tensor, log_scores: Tensor, owner: Tensor, count: int
) -> Tensor:
    """Returns the entropy in nats of each token's mixed distribution, float32 (count,).

    Args:
        h: Normed states (N, D), grouped by token.
        weight: Output matrix (V, D).
        log_scores: log P of each state (N,).
        owner: int64 (N,), index of the token of each state, non-decreasing.
        count: Number of tokens. Tokens without a state get nan.
    """
    out = torch.full((count,), torch.nan, device=h.device)
    for present, index, mixed in _mixtures(h, weight, log_scores, owner, count):
        out[index[present]] = torch.special.entr(mixed[present]).sum(dim=-1)
    return out


def _mixtures(
    h: Tensor, weight: Tensor, log_scores: Tensor, owner: Tensor, count: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the mixed distributions of chunks of consecutive tokens.

    Yields:
        The mask of tokens that have a state, bool (n,), the indices of the tokens (n,), and their
        distributions (n, V), which are 0 for tokens without a state.
    """
    dtype = product_dtype(h)
    states, matrix, scores = h.to(dtype), weight.to(dtype), log_scores.float()
    prior = segment_logsumexp(scores, owner, count)  # (count,), log sum_j P_j
    shares = (scores - prior[owner]).exp()  # (N,), P_j / sum_j P_j
    for rows, first, tokens in token_chunks(owner):
        weighted = logits(states[rows], matrix).softmax(dim=-1).float() * shares[rows, None]
        token = owner[rows] - first  # index of each state's token in the chunk
        # sums the weighted distributions of the states of each token: (states, V) -> (tokens, V)
        mixed = weighted.new_zeros(tokens, weighted.shape[-1]).index_add_(0, token, weighted)
        index = torch.arange(first, first + tokens, device=h.device)
        present = torch.zeros_like(index, dtype=torch.bool).index_fill_(0, token, True)
        yield present, index, mixed


def token_entropies(h: Tensor, weight: Tensor) -> Tensor:
    """Returns the entropy (...), in nats, of softmax(``h weight^T``) for states ``h`` (..., D)."""
    flat = h.reshape(-1, h.shape[-1])
    owner = torch.arange(len(flat), device=h.device)
    scores = torch.zeros(len(flat), device=h.device)
    return mixture_entropies(flat, weight, scores, owner, len(flat)).view(h.shape[:-1])
