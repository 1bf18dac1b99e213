"""The output layer: losses and log-probabilities that never hold a batch of logits.

Logits of a whole batch are the largest tensor of a small language model (16 x 1024 tokens at
V = 50304 take 3.3 GB), so both functions here walk over the tokens in chunks.
"""

import math
from typing import Any

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
    flat = h.reshape(-1, h.shape[-1]), weight, _index(targets), scale.reshape(-1)
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
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        need_h, need_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(weight.dtype, torch.float32)
        states, matrix = h.to(dtype), weight.to(dtype)
        grad_h = torch.empty_like(h) if need_h else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        total = torch.zeros((), dtype=wide, device=h.device)
        for rows in _chunks(len(h), weight):
            loss, logit_grad = _chunk(states[rows], matrix, targets[rows], scale[rows])
            total += loss
            logit_grad = logit_grad.to(dtype)
            if grad_h is not None:
                grad_h[rows] = logit_grad @ matrix
            if grad_weight is not None:
                _accumulate(grad_weight, logit_grad, states[rows])
        ctx.save_for_backward(grad_h, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total.to(torch.promote_types(h.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_weight = ctx.saved_tensors
        (grad,) = grad_outputs
        if grad_h is not None:
            wide = torch.promote_types(grad_h.dtype, torch.float32)
            grad_h = (grad_h.to(wide) * grad).to(grad_h.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_h, grad_weight, None, None, None


def _chunk(h: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the chunk's weighted loss and its gradient for the logits, in their memory."""
    logits = _logits(h, weight)
    index = targets[:, None]
    picked = logits.gather(1, index)[:, 0]
    highest = logits.amax(dim=-1, keepdim=True)
    exponentials = logits.sub_(highest).exp_()
    mass = exponentials.sum(dim=-1, keepdim=True)
    losses = mass.log()[:, 0] + highest[:, 0] - picked
    scale = scale.to(logits.dtype)[:, None]
    gradient = exponentials.mul_(scale / mass).scatter_add_(1, index, -scale)
    return (losses * scale[:, 0]).sum(), gradient


def _accumulate(grad_weight: Tensor, logit_grad: Tensor, states: Tensor) -> None:
    if grad_weight.dtype == logit_grad.dtype:
        grad_weight.addmm_(logit_grad.t(), states)
    else:
        grad_weight += logit_grad.t() @ states
