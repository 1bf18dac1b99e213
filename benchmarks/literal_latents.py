"""The rival of ``latents``: inference by ``loss.backward()`` through the whole decoder.

What the public code does at every inner step: a forward pass from the embedding on, all logits at
once, and a backward pass that leaves gradients in every weight of the decoder.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.latent_thought.network import LatentAttention, LatentThoughtNetwork
from lightning_models.latent_thought.posterior import INIT_NOISE
from lightning_models.layers import SelfAttention, apply_rope, rope_tables
from lightning_models.layers.blocks import join_heads, split_heads


class LiteralLatents(nn.Module):
    """A network's weights in the literal computation (``layered`` latents at ``index``).

    Rotations and mask are computed once, noise is given: neither counts against it.
    """

    def __init__(self, network: LatentThoughtNetwork, context: int) -> None:
        """Shares the weights of ``network``, for sequences of ``context`` tokens."""
        super().__init__()
        self.network = network
        config, device = network.config, network.embedding.weight.device
        places = torch.arange(context, device=device)
        latents = torch.arange(config.latents_per_layer, device=device)
        self.rope = rope_tables(places, config.head_dim, config.rope_base)
        self.latent_rope = rope_tables(latents, config.head_dim, config.rope_base)
        self.visible = None
        if config.window is not None and config.window < context:
            behind = places[:, None] - places
            self.visible = (behind >= 0) & (behind < config.window)

    def forward(self, tokens: Tensor, targets: Tensor, z: Tensor) -> Tensor:
        """Returns the summed cross-entropy in nats of targets (B, T) under latents (B, Z, D)."""
        x = self.network.embedding(tokens)
        own = z.unflatten(1, (len(self.network.layers), -1)).unbind(1)
        for block, latents in zip(self.network.layers, own, strict=True):
            x = x + self._attend(block.attention, block.attention_norm(x))
            x = x + self._read(block.latent_attention, block.latent_norm(x), latents)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        logits = F.linear(self.network.norm(x), self.network.output_matrix)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def loss(self, batch: dict[str, Any], start: Tensor, draw: Tensor) -> Tensor:
        """Returns the mean cross-entropy at the inferred z.

        Gradients that inference left in the decoder are cleared with ``slow_gradient: final``, and
        stay, as in the public code, with ``trajectory``: there as sums over the batch, here as
        means over its targets, like the rest.

        Args:
            batch: ``tokens`` and ``targets`` (B, T).
            start: normal noise (B, Z, D) of the first log-variances.
            draw: normal noise (B, Z, D) of all samples.
        """
        tokens, targets = batch["tokens"], batch["targets"]
        z = self._infer(tokens, targets, start, draw)
        count = (targets >= 0).sum()
        if self.network.config.slow_gradient == "final":
            self.zero_grad()
        for p in self.parameters():
            if p.grad is not None:
                p.grad /= count
        return self(tokens, targets, z) / count

    def _infer(self, tokens: Tensor, targets: Tensor, start: Tensor, draw: Tensor) -> Tensor:
        config = self.network.config
        mean = torch.zeros_like(start).requires_grad_()
        log_variance = (config.init_log_variance + INIT_NOISE * start).requires_grad_()
        optimizer = torch.optim.AdamW(
            [mean, log_variance],
            lr=config.inner_lr[1],
            betas=config.inner_betas,
            weight_decay=config.inner_weight_decay,
            fused=True,
        )
        for _ in range(config.inner_steps):
            optimizer.zero_grad()
            z = mean + (0.5 * log_variance).exp() * draw
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
            (self(tokens, targets, z) + kl).backward()
            optimizer.step()
        return (mean + (0.5 * log_variance).exp() * draw).detach()

    def _attend(self, attention: SelfAttention, x: Tensor) -> Tensor:
        parts = attention.qkv(x).chunk(3, dim=-1)
        q, k, v = (split_heads(part, attention.num_heads) for part in parts)
        q, k = apply_rope(q, self.rope), apply_rope(k, self.rope)
        causal = self.visible is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible, is_causal=causal)
        return attention.out(join_heads(out))

    def _read(self, attention: LatentAttention, x: Tensor, latents: Tensor) -> Tensor:
        parts = attention.query(x), *attention.key_value(latents).chunk(2, dim=-1)
        q, k, v = (split_heads(part, attention.num_heads) for part in parts)
        q, k = apply_rope(q, self.rope), apply_rope(k, self.latent_rope)
        return attention.out(join_heads(F.scaled_dot_product_attention(q, k, v)))
