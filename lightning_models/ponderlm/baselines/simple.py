"""Pause tokens and PonderLM-1, in which every token takes the same additional steps."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_models.flops import head_flops
from lightning_models.layers import KVCache, initialise
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import logits, product_dtype, row_chunks
from lightning_models.ponderlm.baselines.shared import DepthLM, RepeatedNetwork, positions_and_mask
from lightning_models.ponderlm.config import PonderingConfig
from lightning_models.transformer.network import TransformerNetwork

# ---- pause tokens


@dataclass(frozen=True, kw_only=True)
class PauseConfig(PonderingConfig):
    """A plain decoder with ``thinking_steps`` n pauses after every token.

    Raises:
        ValueError: If a value is out of range.
    """


class PauseNetwork(TransformerNetwork):
    """One causal sequence of n + 1 slots per token at its position; the last one predicts.

    These are PonderLM-2's slots with a learned constant instead of fed-back states, in one pass.
    The pause is a separate parameter, initialised and scaled like a token embedding: an additional
    row of the vocabulary that is never an output.
    """

    # NOTE(paper): the public code uses an unused row of the vocabulary, and scales embeddings by
    # sqrt(D) here but by sqrt(2.5 D) elsewhere. One scale for all methods makes them comparable.
    config: PauseConfig

    def __init__(self, config: PauseConfig) -> None:
        super().__init__(config)
        self.pause = nn.Embedding(1, config.dim) if config.thinking_steps else None
        if self.pause is not None:
            initialise(self.pause, config)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, every_depth: bool = False
    ) -> Tensor:
        """Returns the normed states (B, T, D) of the last pauses of ``tokens`` (B, T).

        Args:
            tokens: int64 (B, T), padded on the right.
            cache: Cache of earlier slots, which the caller then advances by n + 1 per token.
            every_depth: Whether to return the states of all slots (B, T, n+1, D).
        """
        slots = self.config.thinking_steps + 1
        index, mask = positions_and_mask(tokens.shape[1] * slots, cache, tokens.device)
        x = self.embed_slots(tokens).flatten(1, 2)  # (B, T (n+1), D)
        # all slots of a token have its position
        h = self.run(x, index // slots, cache=cache, mask=mask)
        h = h.unflatten(1, (-1, slots))  # (B, T, n+1, D)
        return h if every_depth else h[:, :, -1]

    def embed_slots(self, tokens: Tensor) -> Tensor:
        """Returns the inputs (B, T, n+1, D) of the slots of ``tokens`` (B, T)."""
        x = self.embed(tokens, tokens)[:, :, None]
        if self.pause is None:
            return x
        pauses = self.pause(tokens.new_zeros(*tokens.shape, self.config.thinking_steps))
        return torch.cat((x, self.dropout(pauses * self.embedding_scale)), dim=2)


class PauseLM(DepthLM):
    """A decoder that reads n learned pauses after every token (arXiv 2310.02226).

    Args:
        config: Shape of the network and number of pauses.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: PauseConfig
    network: PauseNetwork

    def __init__(
        self,
        config: PauseConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def slots_per_token(self) -> int:
        """Number of slots of a token, including its pauses."""
        return self.config.thinking_steps + 1

    def build_network(self) -> PauseNetwork:
        return PauseNetwork(self.config)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part, with ``steps`` pauses after each token.

        Attention is quadratic in the number of slots.
        """
        slots = 1 + steps
        parts = self.plain_flops(max(1, round(slots * context)))
        return {name: flops * (1 if name == "output" else slots) for name, flops in parts.items()}


# ---- PonderLM-1


@dataclass(frozen=True, kw_only=True)
class PonderLM1Config(PonderingConfig):
    """PonderLM-1 with S = ``thinking_steps`` pondering passes before the one that predicts.

    Raises:
        ValueError: If a value is out of range.
    """

    accumulate: bool = True
    """Whether X_(s+1) = X_s + I_s, as in PonderLM-1, or X_0 + I_s, as in the authors' later
    comparisons with PonderLM-2."""
    multiply_embedding: bool = False
    """Whether X_0 is S times the embedding, as in the authors' runs of 410m and more parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multiply_embedding and self.thinking_steps == 0:
            raise ValueError(
                "multiply_embedding (True) multiplies embeddings by thinking_steps (0), which "
                "leaves zeros; set multiply_embedding=false"
            )


class PonderLM1Network(RepeatedNetwork):
    """S passes that each add their expected embedding to the input, and one that predicts."""

    config: PonderLM1Config

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, every_depth: bool = False
    ) -> Tensor:
        """Returns the normed states (B, T, D) of ``tokens`` (B, T), padded on the right.

        Args:
            tokens: int64 (B, T).
            cache: Earlier keys and values of every pass, read by the same pass only. The caller
                then advances it.
            every_depth: Whether to return the states of all passes (B, T, S+1, D).
        """
        config = self.config
        positions, mask = positions_and_mask(tokens.shape[1], cache, tokens.device)
        rope, first = self.rope(positions), self.embed(tokens, positions)
        if config.multiply_embedding:
            first = first * config.thinking_steps
        x, states = first, []
        for step in range(config.thinking_steps + 1):
            h = self.norm(self.apply_blocks(x, rope, cache=cache, mask=mask, application=step))
            states.append(h)
            if step < config.thinking_steps:
                x = (x if config.accumulate else first) + self.expected(h)
        return torch.stack(states, dim=2) if every_depth else states[-1]

    def expected(self, h: Tensor) -> Tensor:
        """Returns I = softmax(head(H)) E (B, T, D), with scaled E, for normed states H."""
        # NOTE(paper): the public code scales by sqrt(D) here; ours is the scale of the input
        # embeddings, the same for all methods
        mean = expected_embedding(h, self.output_matrix, self.embedding.weight)
        scaled: Tensor = self.dropout(mean * self.embedding_scale)
        return scaled


class PonderLM1(DepthLM):
    """Pondering language model (arXiv 2505.20674): S + 1 passes over the text.

    Args:
        config: Shape of the network, passes and feedback.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: PonderLM1Config
    network: PonderLM1Network

    def __init__(
        self,
        config: PonderLM1Config,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    def build_network(self) -> PonderLM1Network:
        return PonderLM1Network(self.config)

    def flops_per_token(self, context: int, training: bool = False) -> float:
        flops = super().flops_per_token(context, training)
        # the backward pass recomputes the logits of each feedback
        recomputed = self.config.thinking_steps * head_flops(self.config)
        return flops + (recomputed if training else 0.0)

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part if tokens take ``steps`` additional steps.

        ``feedback`` counts the logits and the expected embedding of every step.
        """
        parts = super().flops_of_steps(context, steps)
        return {**parts, "feedback": 2 * steps * head_flops(self.config)}


# ---- expected embeddings


def expected_embedding(h: Tensor, output_matrix: Tensor, input_matrix: Tensor) -> Tensor:
    """Returns ``softmax(h output_matrix^T) input_matrix`` (..., D).

    Rows are computed in chunks, and again in the backward pass, so that only the logits of one
    chunk are in memory. Matrix products run in the dtype of ``h`` or of autocast, which is also the
    dtype of the result; the softmax runs in float32 or better.

    The padding rows of the vocabulary take part: they have a share of the probability in the loss
    and in scores, and this is the mean under the same distribution. Training drives their share to
    zero, since they are never targets.

    Args:
        h: Normed states (..., D).
        output_matrix: Output matrix (V, D).
        input_matrix: Embedding matrix (V, D).
    """
    flat, dtype = h.reshape(-1, h.shape[-1]), product_dtype(h)  # (rows, D)
    with torch.autocast(h.device.type, enabled=False):
        out: Tensor = _ExpectedEmbedding.apply(flat, output_matrix, input_matrix, dtype)
    return out.view(*h.shape[:-1], input_matrix.shape[1])


class _ExpectedEmbedding(torch.autograd.Function):
    """Expected embedding P E with P = softmax(S), S = H U^T, recomputed in the backward pass.

    For the gradient G of P E: dE = P^T G and dS = P * (G E^T - sum_v P G E^T), elementwise.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, output_matrix: Tensor, input_matrix: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Returns the expected embeddings (rows, D) of states (rows, D)."""
        ctx.save_for_backward(h, output_matrix, input_matrix)
        ctx.dtype = dtype
        states, scores, table = (x.to(dtype) for x in (h, output_matrix, input_matrix))
        out = states.new_empty(len(h), input_matrix.shape[1])
        for rows in row_chunks(len(h), h.device):
            probs = logits(states[rows], scores).softmax(dim=-1)  # (rows, V)
            out[rows] = probs.to(dtype) @ table
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
    """Returns the gradients of states and both matrices in their dtypes, summed in float32."""
    states, scores, table, grad = (x.to(dtype) for x in (h, output_matrix, input_matrix, grad))
    acc_dtype = torch.promote_types(dtype, torch.float32)
    grad_h = torch.empty_like(h)
    grad_scores = torch.zeros_like(output_matrix, dtype=acc_dtype)
    grad_table = torch.zeros_like(input_matrix, dtype=acc_dtype)
    for rows in row_chunks(len(h), h.device):
        probs = logits(states[rows], scores).softmax(dim=-1)  # (rows, V)
        grad_table += probs.to(dtype).t() @ grad[rows]  # (V, rows) (rows, D)
        grad_probs = logits(grad[rows], table)  # (rows, V), G E^T
        centred = grad_probs - (probs * grad_probs).sum(dim=-1, keepdim=True)
        grad_logits = (probs * centred).to(dtype)  # (rows, V), backward of the softmax
        grad_h[rows] = (grad_logits @ scores).to(h.dtype)
        grad_scores += grad_logits.t() @ states[rows]
    return grad_h, grad_scores.to(output_matrix.dtype), grad_table.to(input_matrix.dtype)
