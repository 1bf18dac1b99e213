"""What was read, as a function of latent vectors: the problem that inference solves."""

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

    Weights have no graph: no gradient of theirs is computed, nor are the inputs kept that it would
    need. What does not depend on z is computed once.

    Args:
        network: The decoder.
        tokens: (B, T) int64.
        targets: (B, T) int64, -100 where nothing is predicted.
        known: (B, T) bool, tokens that an encoder may read.
        start: What ``network.begin(tokens)`` returned; None: it is computed here.
        selects: Whether only the states that have a target reach the output layer, for which the
            host waits for the device; training reads windows that are full of targets.
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
            with torch.inference_mode(False), torch.no_grad():  # inference builds upon it
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
        # (B, T, D); the graph leads to z alone: weights and start are detached
        h = functional_call(self.network, self.weights, (self.start, z), tie_weights=False)
        if not self.selects:
            return _likelihood(h, self.matrix, self.targets)
        states, targets = h.flatten(0, 1)[self.places], self.targets.flatten()[self.places]
        total, each = linear_cross_entropy_each(states, self.matrix, targets)  # a scalar, and (n,)
        of_rows = each.new_zeros(len(h))
        return Likelihood(total, of_rows.index_add_(0, self.places // h.shape[1], each))

    @functools.cached_property
    def places(self) -> Tensor:
        """The flat indices (n,) of the positions that have a target."""
        with torch.inference_mode(False):  # gradients are taken through them
            return (self.targets.flatten() >= 0).nonzero()[:, 0]

    def gradients(self, objective: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the gradients of a scalar with respect to ``inputs``; ``.grad`` stays empty."""
        return torch.autograd.grad(objective, inputs)

    def encode(self) -> tuple[Tensor, Tensor]:
        """Returns the encoder's mean and log-variance (B, Z, D), with their graph."""
        encoder = self.network.encoder
        assert encoder is not None
        return encoder(self.network.embedding(self.tokens), self.known)


class LearningReading(Reading):
    """The same under live weights, whose gradients are summed over all inner steps.

    What the public code does without meaning to: it never clears the gradients that the inner
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
        """Returns the gradients with respect to ``inputs``; adds those of the weights up."""
        found = torch.autograd.grad(objective, [*inputs, *self.parameters], allow_unused=True)
        for total, gradient in zip(self.sums, found[len(inputs) :], strict=True):
            if gradient is not None:
                total += gradient
        return tuple(found[: len(inputs)])  # what is left was that of the weights

    def surrogate(self) -> Tensor:
        """Returns 0 as a scalar whose gradient is what was summed up."""
        products = [(p * g).sum() for p, g in zip(self.parameters, self.sums, strict=True)]
        total = torch.stack(products).sum()
        # sum of p * g has gradient g in p; its value is taken away again
        return total - total.detach()


def _ready(weight: Tensor) -> Tensor:
    """Returns a weight without graph, and a matrix in the dtype that autocast would give it.

    Autocast would do so at every inner step: it remembers copies of parameters only.
    """
    device, weight = weight.device.type, weight.detach()
    if weight.dim() < 2 or weight.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return weight
    return weight.to(torch.get_autocast_dtype(device))


def _likelihood(h: Tensor, matrix: Tensor, targets: Tensor) -> Likelihood:
    total, each = linear_cross_entropy_each(h, matrix, targets)  # a scalar, and (B, T)
    return Likelihood(total, each.sum(dim=1))
