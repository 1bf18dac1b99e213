"""What the output layer says of tokens: log-probabilities, greedy choices, entropies, in chunks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_models.layers import segment_logsumexp
from lightning_models.vocabulary import (
    IGNORE_INDEX,
    logits,
    product_dtype,
    row_chunks,
    target_index,
    token_chunks,
)


@torch.no_grad()
def token_log_probs(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns log p(target) in nats for logits ``h weight^T``, float32, the shape of ``targets``.

    Args:
        h: normed states (..., D).
        weight: output matrix (V, D).
        targets: int64 (...), -100 where nothing is predicted; 0.0 is returned there.
    """
    dtype = product_dtype(h)
    flat, weight = h.reshape(-1, h.shape[-1]).to(dtype), weight.to(dtype)
    index = target_index(targets)[:, None]
    out = torch.empty(len(flat), dtype=torch.float32, device=h.device)
    for rows in row_chunks(len(flat), weight.device):
        chunk = logits(flat[rows], weight)
        out[rows] = chunk.gather(1, index[rows])[:, 0] - chunk.logsumexp(dim=-1)
    return out.view(targets.shape).masked_fill(targets == IGNORE_INDEX, 0.0)


@torch.no_grad()
def mixture_log_probs(
    h: Tensor, weight: Tensor, log_scores: Tensor, owner: Tensor, targets: Tensor
) -> Tensor:
    """Returns log p(target) (tokens,), float32, of mixtures of several states' distributions.

    The mixture is that of ``losses.linear_mixture_cross_entropy``, and so are the arguments; 0.0
    is returned where nothing is predicted.
    """
    own = token_log_probs(h, weight, target_index(targets)[owner])
    count, scores = len(targets), log_scores.float()
    joint = segment_logsumexp(scores + own, owner, count)
    prior = segment_logsumexp(scores, owner, count)
    return torch.where(targets == IGNORE_INDEX, 0.0, joint - prior)


@torch.no_grad()
def greedy_targets(h: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Returns whether greedy decoding would choose each target, bool, the shape of ``targets``.

    False where nothing is predicted: those states cost nothing.

    Args:
        h: normed states (..., D).
        weight: output matrix (V, D).
        targets: int64 (...), -100 where nothing is predicted.
        vocab_size: ids from here on (padding of the vocabulary) are never chosen.
    """
    flat, wanted = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    places = (wanted != IGNORE_INDEX).nonzero()[:, 0]
    dtype = product_dtype(h)
    states, matrix = flat[places].to(dtype), weight[:vocab_size].to(dtype)
    greedy = torch.zeros_like(wanted, dtype=torch.bool)
    for rows in row_chunks(len(places), weight.device):
        chosen = logits(states[rows], matrix).argmax(dim=-1)
        greedy[places[rows]] = chosen == wanted[places[rows]]
    return greedy.view(targets.shape)


@torch.no_grad()
def mixture_greedy_targets(
    h: Tensor,
    weight: Tensor,
    log_scores: Tensor,
    owner: Tensor,
    targets: Tensor,
    vocab_size: int,
) -> Tensor:
    """Returns ``greedy_targets`` (tokens,) of mixtures of several states' distributions.

    Args:
        h: normed states (N, D), those of one token next to each other.
        weight: output matrix (V, D).
        log_scores: log P of each state (N,).
        owner: int64 (N,), the token of each state, never decreasing.
        targets: int64 (tokens,), -100 where nothing is predicted.
        vocab_size: ids from here on are never chosen.
    """
    kept = (targets != IGNORE_INDEX)[owner]
    tokens, place = torch.unique_consecutive(owner[kept], return_inverse=True)
    chosen = torch.empty_like(tokens)
    for _, index, mixed in _mixtures(h[kept], weight, log_scores[kept], place, len(tokens)):
        chosen[index] = mixed[:, :vocab_size].argmax(dim=-1)
    greedy = torch.zeros_like(targets, dtype=torch.bool)
    greedy[tokens] = chosen == targets[tokens]
    return greedy


@torch.no_grad()
def mixture_entropies(
    h: Tensor, weight: Tensor, log_scores: Tensor, owner: Tensor, count: int
) -> Tensor:
    """Returns the entropy in nats of each token's mixed distribution, float32 (count,).

    Args:
        h: normed states (N, D), those of one token next to each other.
        weight: output matrix (V, D).
        log_scores: log P of each state (N,).
        owner: int64 (N,), the token of each state, never decreasing.
        count: number of tokens; those without a state get nan.
    """
    out = torch.full((count,), torch.nan, device=h.device)
    for present, index, mixed in _mixtures(h, weight, log_scores, owner, count):
        out[index[present]] = torch.special.entr(mixed[present]).sum(dim=-1)
    return out


def _mixtures(
    h: Tensor, weight: Tensor, log_scores: Tensor, owner: Tensor, count: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields, in chunks, consecutive tokens (n,) and their mixed distributions (n, V).

    Before them, which of those tokens have any state, bool (n,); the rows of others are 0.
    """
    dtype = product_dtype(h)
    states, matrix, scores = h.to(dtype), weight.to(dtype), log_scores.float()
    prior = segment_logsumexp(scores, owner, count)
    shares = (scores - prior[owner]).exp()
    for rows, first, tokens in token_chunks(owner):
        own = logits(states[rows], matrix).softmax(dim=-1).float() * shares[rows, None]
        place = owner[rows] - first
        mixed = own.new_zeros(tokens, own.shape[-1]).index_add_(0, place, own)
        index = torch.arange(first, first + tokens, device=h.device)
        present = torch.zeros_like(index, dtype=torch.bool).index_fill_(0, place, True)
        yield present, index, mixed


def token_entropies(h: Tensor, weight: Tensor) -> Tensor:
    """Returns the entropy (...) in nats of softmax(``h weight^T``) for states ``h`` (..., D)."""
    flat = h.reshape(-1, h.shape[-1])
    owner = torch.arange(len(flat), device=h.device)
    scores = torch.zeros(len(flat), device=h.device)
    return mixture_entropies(flat, weight, scores, owner, len(flat)).view(h.shape[:-1])
