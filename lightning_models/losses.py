"""The output layer: losses and log-probabilities that never hold a batch of logits.

Logits of a whole batch are the largest tensor of a small language model (16 x 1024 tokens at
V = 50304 take 3.3 GB), so both functions here walk over the tokens in chunks.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""Target value where nothing is predicted."""

CHUNK_ROWS = {"cpu": 256, "cuda": 2048}
"""Tokens whose logits are held at once, by device type; enough of them to feed the matrix units."""


def linear_cross_entropy(
    h: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Returns the summed cross-entropy, in nats, of logits ``h weight^T`` (float32, or float64).

    Gradients are computed chunk by chunk in the forward pass, where the chunk's logits are at
    hand; backward only scales them (so there is no second derivative). Only the gradients that
    are asked for cost anything.

    Args:
        h: normed states (..., D); the matrix products run in its dtype, or in autocast's.
        weight: output matrix (V, D).
        targets: int64 (...), -100 where nothing is predicted.
        weights: float (...), weight of each target's loss; no gradient flows to it. None: ones.
    """
    scale = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights.float()
    scale = scale.masked_fill(targets == IGNORE_INDEX, 0.0)
    dtype = _product_dtype(h)
    if not torch.is_grad_enabled():
        h, weight = h.detach(), weight.detach()  # then nothing asks for gradients
    flat = h.reshape(-1, h.shape[-1]), weight, None, _index(targets), scale.reshape(-1)
    with torch.autocast(h.device.type, enabled=False):
        return _LinearCrossEntropy.apply(*flat, None, dtype)


def linear_mixture_cross_entropy(
    h: Tensor,
    weight: Tensor,
    log_scores: Tensor,
    owner: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Returns the summed cross-entropy, in nats, of mixtures of several states' distributions.

    Token i predicts ``p_i = sum_j P_j softmax(h_j weight^T) / sum_j P_j`` over the states j that
    belong to it (Thoughtbubbles, arXiv 2510.00219, eq. 11, mixed in log space). Only the target's
    probability is ever needed, so no mixture over the vocabulary is held; chunks are cut between
    tokens, gradients computed as in :func:`linear_cross_entropy`.

    Args:
        h: normed states (N, D), those of one token next to each other.
        weight: output matrix (V, D).
        log_scores: log P of each state (N,), with gradient.
        owner: int64 (N,), the token (index into ``targets``) of each state, never decreasing.
        targets: int64 (tokens,), -100 where nothing is predicted.
        weights: float (tokens,), weight of each target's loss, without gradient. None: ones.
    """
    scale = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights.float()
    scale = scale.masked_fill(targets == IGNORE_INDEX, 0.0)
    dtype = _product_dtype(h)
    if not torch.is_grad_enabled():
        h, weight, log_scores = h.detach(), weight.detach(), log_scores.detach()
    flat = h, weight, log_scores, _index(targets)[owner], scale[owner], owner
    with torch.autocast(h.device.type, enabled=False):
        return _LinearCrossEntropy.apply(*flat, dtype)


@torch.no_grad()
def token_log_probs(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns log p(target) in nats for logits ``h weight^T``, float32, the shape of ``targets``.

    Args:
        h: normed states (..., D).
        weight: output matrix (V, D).
        targets: int64 (...), -100 where nothing is predicted; 0.0 is returned there.
    """
    dtype = _product_dtype(h)
    flat = h.reshape(-1, h.shape[-1]).to(dtype)
    index = _index(targets)[:, None]
    weight = weight.to(dtype)
    out = torch.empty(len(flat), dtype=torch.float32, device=h.device)
    for rows in _chunks(len(flat), weight):
        logits = _logits(flat[rows], weight)
        out[rows] = logits.gather(1, index[rows])[:, 0] - logits.logsumexp(dim=-1)
    return out.view(targets.shape).masked_fill(targets == IGNORE_INDEX, 0.0)


def _index(targets: Tensor) -> Tensor:
    """Returns flat targets that can be gathered; ids outside the vocabulary still raise there."""
    return targets.reshape(-1).masked_fill(targets.reshape(-1) == IGNORE_INDEX, 0)


def _product_dtype(h: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(h.device.type):
        return torch.get_autocast_dtype(h.device.type)
    return h.dtype


def _chunks(num_rows: int, weight: Tensor) -> list[slice]:
    """Returns equal slices of the rows, at most CHUNK_ROWS each."""
    limit = CHUNK_ROWS.get(weight.device.type, CHUNK_ROWS["cuda"])
    count = max(1, math.ceil(num_rows / limit))
    size = max(1, math.ceil(num_rows / count))
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _logits(h: Tensor, weight: Tensor) -> Tensor:
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    with torch.autocast(h.device.type, enabled=False):
        return (h @ weight.t()).to(wide)


class _LinearCrossEntropy(torch.autograd.Function):
    """Rows are tokens; with ``log_scores`` and ``owner`` they are the states of mixtures."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        log_scores: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        owner: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        need_h, need_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(weight.dtype, torch.float32)
        states, matrix = h.to(dtype), weight.to(dtype)
        grad_h = torch.empty_like(h) if need_h else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        grad_scores = None if log_scores is None else torch.empty_like(log_scores)
        total = torch.zeros((), dtype=wide, device=h.device)
        for rows in _chunks(len(h), weight) if owner is None else _token_chunks(owner):
            exponentials, mass, losses = _softmax(states[rows], matrix, targets[rows])
            factor = scale[rows].to(losses.dtype)
            if log_scores is None or owner is None or grad_scores is None:
                total += (losses * factor).sum()
            else:
                mixed = _mix(log_scores[rows], -losses, owner[rows], factor)
                factor, grad_scores[rows] = mixed.responsibilities, mixed.score_gradient
                total += mixed.loss
            if not (need_h or need_weight):
                continue
            index, column = targets[rows][:, None], factor[:, None]
            logit_grad = exponentials.mul_(column / mass).scatter_add_(1, index, -column).to(dtype)
            if grad_h is not None:
                grad_h[rows] = logit_grad @ matrix
            if grad_weight is not None:
                _accumulate(grad_weight, logit_grad, states[rows])
        ctx.save_for_backward(grad_h, grad_weight, grad_scores)
        ctx.weight_dtype = weight.dtype
        return total.to(torch.promote_types(h.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_weight, grad_scores = ctx.saved_tensors
        (grad,) = grad_outputs
        if grad_h is not None:
            wide = torch.promote_types(grad_h.dtype, torch.float32)
            grad_h = (grad_h.to(wide) * grad).to(grad_h.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        if grad_scores is not None:
            grad_scores = grad_scores * grad
        return grad_h, grad_weight, grad_scores, None, None, None, None


def _softmax(h: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns exp(logits - maximum) (n, V), its sums (n, 1) and -log p(target) (n,)."""
    logits = _logits(h, weight)
    picked = logits.gather(1, targets[:, None])[:, 0]
    highest = logits.amax(dim=-1, keepdim=True)
    exponentials = logits.sub_(highest).exp_()
    mass = exponentials.sum(dim=-1, keepdim=True)
    return exponentials, mass, mass.log()[:, 0] + highest[:, 0] - picked


class _Mixed(NamedTuple):
    """Of a chunk of mixtures: weighted loss, and per state its share in it and d loss / d log P."""

    loss: Tensor
    responsibilities: Tensor
    score_gradient: Tensor


def _mix(log_scores: Tensor, log_prob: Tensor, owner: Tensor, scale: Tensor) -> _Mixed:
    """Mixes the target's probability over the states of each token."""
    token = owner - owner[0]
    log_scores = log_scores.to(log_prob.dtype)
    joint, prior = _group_lse(log_scores + log_prob, token), _group_lse(log_scores, token)
    posterior = (log_scores + log_prob - joint[token]).exp()
    share = (log_scores - prior[token]).exp()
    loss = -(scale * share * (joint - prior)[token]).sum()  # the shares of a token add up to one
    return _Mixed(loss, scale * posterior, scale * (share - posterior))


def _group_lse(values: Tensor, token: Tensor) -> Tensor:
    """Returns log(sum(exp(values))) over the states of each token."""
    count = int(token[-1]) + 1
    highest = values.new_full((count,), -math.inf).scatter_reduce(0, token, values, "amax")
    sums = values.new_zeros(count).index_add(0, token, (values - highest[token]).exp())
    return highest + sums.log()


def _token_chunks(owner: Tensor) -> list[slice]:
    """Returns slices of about CHUNK_ROWS states, never between two states of one token."""
    limit = CHUNK_ROWS.get(owner.device.type, CHUNK_ROWS["cuda"])
    ends = [*(owner.diff().nonzero()[:, 0] + 1).tolist(), len(owner)] if len(owner) else []
    slices, start = [], 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - start > limit:
            slices.append(slice(start, end))
            start = end
    return slices


def _accumulate(grad_weight: Tensor, logit_grad: Tensor, states: Tensor) -> None:
    if grad_weight.dtype == logit_grad.dtype:
        grad_weight.addmm_(logit_grad.t(), states)
    else:
        grad_weight += logit_grad.t() @ states
