"""-log p(x | z) of a batch as a function of latent vectors, the objective of inference."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_models.latent_thought.network import LatentThoughtNetwork, Start
from lightning_models.latent_thought.posterior import Likelihood
from lightning_models.output_layer import linear_cross_entropy_each


class Reading:
    """-log p(x | z) of a batch under frozen weights.

    Weights are detached, so neither their gradients nor the inputs for them cost anything. The part
    that does not depend on z is computed once.

    Args:
        network: The decoder.
        tokens: (B, T) int64.
        targets: (B, T) int64, -100 at positions without a target.
        known: (B, T) bool, tokens that an encoder may read.
        start: Result of ``network.begin(tokens)``. Computed if not given.
        selects: Whether to pass only states with a target to the output layer, which synchronises
            with the device. Training does not, as nearly all positions have targets.
    """

    def __init__(
        self,
        network: LatentThoughtNetwork,
        tokens: Tensor,
        targets: Tensor,
        known: Tensor,
        start: Start | None = None,
        *,
        selects: bool = False,
    ) -> None:
        self.selects = selects
        self.network, self.tokens, self.targets, self.known = network, tokens, targets, known
        self.informed = (targets >= 0).any(dim=1)  # (B,)
        if start is None:
            # ordinary tensors, since inference by gradient saves them for backward
            with torch.inference_mode(False), torch.no_grad():
                start = network.begin(tokens)
        self.start = start.detached()

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        """The frozen weights by their names."""
        with torch.inference_mode(False), torch.no_grad():
            return {name: _ready(p) for name, p in self.network.named_parameters()}

    @property
    def matrix(self) -> Tensor:
        """The frozen output matrix."""
        return self.weights["embedding.weight" if self.network.head is None else "head.weight"]

    def likelihood(self, z: Tensor) -> Likelihood:
        """Returns -log p(x | z) for latent vectors (B, Z, D)."""
        # (B, T, D); the graph leads to z alone, since weights and start are detached
        h = functional_call(self.network, self.weights, (self.start, z), tie_weights=False)
        if not self.selects:
            return _likelihood(h, self.matrix, self.targets)
        states, targets = h.flatten(0, 1)[self.index], self.targets.flatten()[self.index]
        total, per_token = linear_cross_entropy_each(states, self.matrix, targets)  # (), (n,)
        by_row = per_token.new_zeros(len(h))  # (B,)
        return Likelihood(total, by_row.index_add_(0, self.index // h.shape[1], per_token))

    @functools.cached_property
    def index(self) -> Tensor:
        """The flat indices (n,) of the positions with a target."""
        with torch.inference_mode(False):  # an ordinary tensor, which backward may save
            return (self.targets.flatten() >= 0).nonzero()[:, 0]

    def gradients(self, objective: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the gradients of a scalar with respect to ``inputs``; leaves ``.grad`` unset."""
        return torch.autograd.grad(objective, inputs)

    def encode(self) -> tuple[Tensor, Tensor]:
        """Returns the encoder's mean and log-variance (B, Z, D), attached to the graph."""
        encoder = self.network.encoder
        assert encoder is not None
        return encoder(self.network.embedding(self.tokens), self.known)


class LearningReading(Reading):
    """-log p(x | z) under trainable weights, whose gradients are summed over all inner steps.

    The public code does so unintentionally, since it never clears the gradients that the inner
    backward passes leave in the decoder.
    """

    def __init__(
        self,
        network: LatentThoughtNetwork,
        tokens: Tensor,
        targets: Tensor,
        known: Tensor,
        start: Start | None = None,
    ) -> None:
        super().__init__(network, tokens, targets, known, start)
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.sums = [torch.zeros_like(p) for p in self.parameters]

    def likelihood(self, z: Tensor) -> Likelihood:
        """Returns -log p(x | z), whose graph reaches the weights too."""
        h = self.network(self.network.begin(self.tokens), z)  # (B, T, D)
        return _likelihood(h, self.network.output_matrix, self.targets)

    def gradients(self, objective: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the gradients with respect to ``inputs``, and accumulates those by weights."""
        result = torch.autograd.grad(objective, [*inputs, *self.parameters], allow_unused=True)
        for total, gradient in zip(self.sums, result[len(inputs) :], strict=True):
            if gradient is not None:
                total += gradient
        return tuple(result[: len(inputs)])

    def surrogate(self) -> Tensor:
        """Returns a scalar of value 0 whose gradients are the accumulated ones."""
        products = [(p * g).sum() for p, g in zip(self.parameters, self.sums, strict=True)]
        total = torch.stack(products).sum()
        # the sum of p * g has gradient g by p; its value is subtracted
        return total - total.detach()


def _ready(weight: Tensor) -> Tensor:
    """Returns a detached weight, with matrices in the dtype of autocast.

    Autocast caches the casts of parameters only, and would cast detached ones in every inner step.
    """
    device, weight = weight.device.type, weight.detach()
    if weight.dim() < 2 or weight.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return weight
    return weight.to(torch.get_autocast_dtype(device))


def _likelihood(h: Tensor, matrix: Tensor, targets: Tensor) -> Likelihood:
    total, per_token = linear_cross_entropy_each(h, matrix, targets)  # (), (B, T)
    return Likelihood(total, per_token.sum(dim=1))
