"""The embedding that a next-token distribution expects, without logits of a whole batch."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_models.output_layer import logits, product_dtype, row_chunks


def expected_embedding(h: Tensor, output_matrix: Tensor, input_matrix: Tensor) -> Tensor:
    """Returns ``softmax(h output_matrix^T) input_matrix`` (..., D).

    Chunks of rows are computed one after the other, and once more in the backward pass, so that
    logits of a chunk are the most that is ever held. Matrix products run in the dtype of ``h`` or
    in autocast's, which is that of the result too; the softmax in float32 or better.

    Rows that fill up the vocabulary take part: they have a share of the probability wherever the
    loss and the scores compute one, and this is the mean under that same distribution. Training
    drives their share to zero, since they never are targets.

    Args:
        h: normed states (..., D).
        output_matrix: (V, D), from states to logits.
        input_matrix: (V, D), an embedding a row.
    """
    flat, dtype = h.reshape(-1, h.shape[-1]), product_dtype(h)
    with torch.autocast(h.device.type, enabled=False):
        out: Tensor = _ExpectedEmbedding.apply(flat, output_matrix, input_matrix, dtype)
    return out.view(*h.shape[:-1], input_matrix.shape[1])


class _ExpectedEmbedding(torch.autograd.Function):
    """With P = softmax(H U^T) and upstream G of P E: dE = P^T G, dS = P (G E^T - sum P G E^T)."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, output_matrix: Tensor, input_matrix: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(h, output_matrix, input_matrix)
        ctx.dtype = dtype
        states, scores, table = (x.to(dtype) for x in (h, output_matrix, input_matrix))
        out = states.new_empty(len(h), input_matrix.shape[1])
        for rows in row_chunks(len(h), h.device):
            odds = logits(states[rows], scores).softmax(dim=-1)
            out[rows] = odds.to(dtype) @ table
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        h, output_matrix, input_matrix = ctx.saved_tensors
        with torch.autocast(h.device.type, enabled=False):
            grads = _gradients(h, output_matrix, input_matrix, grad_outputs[0], ctx.dtype)
        return *grads, None


def _gradients(
    h: Tensor, output_matrix: Tensor, input_matrix: Tensor, grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of states and both matrices, in their dtypes; summed in float32."""
    states, scores, table, grad = (x.to(dtype) for x in (h, output_matrix, input_matrix, grad))
    wide = torch.promote_types(dtype, torch.float32)
    grad_h = torch.empty_like(h)
    grad_scores = torch.zeros_like(output_matrix, dtype=wide)
    grad_table = torch.zeros_like(input_matrix, dtype=wide)
    for rows in row_chunks(len(h), h.device):
        odds = logits(states[rows], scores).softmax(dim=-1)
        grad_table += odds.to(dtype).t() @ grad[rows]
        slope = logits(grad[rows], table)  # by P
        slope = (odds * (slope - (odds * slope).sum(dim=-1, keepdim=True))).to(dtype)  # by logits
        grad_h[rows] = (slope @ scores).to(h.dtype)
        grad_scores += slope.t() @ states[rows]
    return grad_h, grad_scores.to(output_matrix.dtype), grad_table.to(input_matrix.dtype)
