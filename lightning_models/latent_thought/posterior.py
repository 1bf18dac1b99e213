"""The inner loop (fast learning, Algorithm 1): three methods for inferring latent vectors.

Each method takes an :class:`InferenceProblem` (the text), :class:`Noise` and an :class:`InnerLoop`
(steps and rates), and returns a :class:`Posterior`. Only the encoder's posterior carries an
autograd graph, through which its weights are trained. Objectives are sums over the batch, so
sequences never interact.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_models.latent_thought.config import LatentThoughtConfig
from lightning_models.layers import record, wants
from lightning_models.runtime import on_device, seeded_generator

# ---- noise that does not depend on the batch


class Purpose(IntEnum):
    """Purpose of a draw; draws for different purposes are independent."""

    START = 0
    """Initial values of inference."""
    INNER = 1
    """Samples during inference, including the one that the decoder is trained on."""
    SCORED = 2
    """Samples for scoring and generation."""


class Noise:
    """Standard normals (B, Z, D) that are a pure function of each row's key, purpose and index.

    Draws are made on the CPU in float32, so that they are the same on every machine.

    Args:
        keys: One key per row.
        shape: Shape (Z, D) of a row.
        device: Device of the results.
        dtype: Dtype of the results.
    """

    def __init__(
        self,
        keys: Sequence[tuple[int, ...]],
        shape: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.keys, self.shape, self.device, self.dtype = keys, shape, device, dtype

    def draw(self, purpose: Purpose, index: int = 0) -> Tensor:
        """Returns the standard normals (B, Z, D) with the given index."""
        return self._draw(purpose, [index])[0]

    def draws(self, purpose: Purpose, count: int) -> Tensor:
        """Returns the standard normals (N, B, Z, D) with indices 0 to N - 1, in one copy."""
        return self._draw(purpose, range(count))

    def _draw(self, purpose: Purpose, indices: Sequence[int]) -> Tensor:
        on_gpu = self.device.type == "cuda"
        # pinned memory: the copy is asynchronous, so the device computes while rows are drawn
        shape = len(indices), len(self.keys), *self.shape  # (N, B, Z, D)
        values = torch.empty(shape, dtype=torch.float32, pin_memory=on_gpu)
        for batch, index in zip(values, indices, strict=True):
            for row, key in zip(batch, self.keys, strict=True):  # (Z, D) each, contiguous
                row.normal_(generator=seeded_generator(*key, int(purpose), index))
        return on_device(values, self.device, self.dtype)


# ---- inference


INIT_NOISE = 0.1
"""Standard deviation of the noise on the initial log-variances."""
ADAM_EPS = 1e-8
"""Constant in the denominator of the inner AdamW."""


class Likelihood(NamedTuple):
    """Negative log-likelihood -log p(x | z) of a batch under latent vectors, in nats."""

    total: Tensor
    """Sum over the batch, differentiable with respect to z."""
    each: Tensor
    """Value of each sequence (B,), detached."""


class InferenceProblem(Protocol):
    """A batch of text from which latent vectors are inferred."""

    @property
    def informed(self) -> Tensor:
        """(B,) bool, whether a row has targets; if not, its posterior is the prior."""

    def likelihood(self, z: Tensor) -> Likelihood:
        """Returns -log p(x | z) for latent vectors (B, Z, D)."""

    def gradients(self, objective: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the gradients of a scalar with respect to ``inputs``."""

    def encode(self) -> tuple[Tensor, Tensor]:
        """Returns the encoder's mean and log-variance (B, Z, D), attached to the graph."""


class VectorAdamW(torch.optim.Optimizer):
    """AdamW with one second moment for each latent vector, the mean over its coordinates.

    If the coordinates are rotated, the steps on the mean rotate with them; the log-variances still
    depend on the axes. AdamW's first steps are about equally long in every coordinate, also in
    those that the text says little about. For the inner loop alone: it cannot be resumed.

    Args:
        params: Tensors (..., Z, D).
        lr: Learning rate.
        betas: Decay rates of the moments.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self, params: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the parameters in place from their gradients; ``closure`` is not called."""
        self.count += 1
        for group in self.param_groups:
            first_beta, second_beta = group["betas"]
            correction = 1 - first_beta**self.count, 1 - second_beta**self.count
            for value in group["params"]:
                square = value.grad.square().mean(dim=-1, keepdim=True)  # (..., Z, 1)
                state = self.state[value]
                if not state:
                    state["first"] = torch.zeros_like(value)
                    state["second"] = torch.zeros_like(square)
                first = state["first"].lerp_(value.grad, 1 - first_beta) / correction[0]
                second = state["second"].lerp_(square, 1 - second_beta) / correction[1]
                value.mul_(1 - group["lr"] * group["weight_decay"])
                value.sub_(group["lr"] * first / (second.sqrt() + ADAM_EPS))


@dataclass(frozen=True)
class InnerLoop:
    """Steps and step sizes of inference."""

    config: LatentThoughtConfig
    lr: float
    """eta_fast, the learning rate of the first step."""

    @property
    def steps(self) -> int:
        """T_fast, the number of steps."""
        return self.config.inner_steps

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step (0-based)."""
        if self.config.inner_schedule == "constant":
            return self.lr
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * step / self.steps)))

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """Returns the inner AdamW."""
        betas, decay = self.config.inner_betas, self.config.inner_weight_decay
        if self.config.inner_scaling == "vector":
            return VectorAdamW(parameters, self.lr, betas, decay)
        return torch.optim.AdamW(
            parameters, lr=self.lr, betas=betas, weight_decay=decay, eps=ADAM_EPS, fused=True
        )

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Sets the optimizer to the learning rate of a step (0-based)."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)


class Posterior(NamedTuple):
    """q(z|x) of a batch, either a diagonal normal or a sample without a density."""

    mean: Tensor
    """mu (B, Z, D), or the last sample of a Langevin chain."""
    log_variance: Tensor | None
    """log sigma^2 (B, Z, D), or None for a sample."""
    inner: Tensor
    """Sample (B, Z, D) that the decoder is trained on."""

    def sample(self, noise: Tensor) -> Tensor:
        """Returns mu + sigma * noise (B, Z, D), or the chain's sample if there is no density."""
        if self.log_variance is None:
            return self.mean
        return _sample(self.mean, self.log_variance, noise)

    def divergence(self) -> Tensor:
        """Returns KL(q || N(0, I)) of each latent vector (B, Z) in nats, 0 without a density."""
        if self.log_variance is None:
            return self.mean.new_zeros(self.mean.shape[:2])
        return divergence(self.mean, self.log_variance)


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Returns KL(N(mean, variance) || N(0, I)) summed over the last dimension, in nats."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1)


def _sample(mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
    return mean + (0.5 * log_variance).exp() * noise


def infer(problem: InferenceProblem, noise: Noise, loop: InnerLoop) -> Posterior:
    """Infers the posterior of a batch with the configured method.

    Gradients must be enabled. Records ``inner_step`` before each step: ``step`` (0-based), ``nll``
    (B,) at the inner sample, ``kl`` (B, Z), and the norms ``mean_gradient`` and
    ``log_variance_gradient`` (B, Z). For a Langevin chain ``kl`` and ``log_variance_gradient`` are
    None.

    Args:
        problem: The text to infer from.
        noise: Noise for the rows of the batch.
        loop: Steps and step sizes.
    """
    if loop.config.inference == "amortised":
        return _amortised(problem, noise)
    if loop.config.inference == "langevin":
        return _langevin(problem, noise, loop)
    return _variational(problem, noise, loop)


def _variational(problem: InferenceProblem, noise: Noise, loop: InnerLoop) -> Posterior:
    """Takes gradient steps on mu and log sigma^2 of each sequence (Algorithm 1, lines 6 to 11)."""
    config = loop.config
    # (T_fast + 1, B, Z, D): noise for the sample of each step and the one after the last step
    resampled = config.noise == "resampled"
    draws = noise.draws(Purpose.INNER, loop.steps + 1 if resampled else 1)
    draws = draws.expand(loop.steps + 1, -1, -1, -1)
    start = noise.draw(Purpose.START)  # (B, Z, D)
    if loop.steps == 0:
        mean, log_variance = torch.zeros_like(start), torch.zeros_like(start)
        return Posterior(mean, log_variance, draws[0])
    mean = _initial_mean(config, noise, start).requires_grad_()
    log_variance = (config.init_log_variance + INIT_NOISE * start).requires_grad_()
    optimizer = loop.optimizer([mean, log_variance])
    for step in range(loop.steps):
        nll = problem.likelihood(_sample(mean, log_variance, draws[step]))
        kl = divergence(mean, log_variance)  # (B, Z)
        # minus the ELBO, summed over sequences, so that their gradients are independent
        objective = nll.total + kl.sum()
        mean.grad, log_variance.grad = problem.gradients(objective, (mean, log_variance))
        _record(step, nll, kl, mean.grad, log_variance.grad)
        loop.set_rate(optimizer, step)
        optimizer.step()
    informed = problem.informed[:, None, None]
    # rows without targets keep the prior: mean 0, log-variance 0
    mean, log_variance = (x.detach().masked_fill(~informed, 0.0) for x in (mean, log_variance))
    return Posterior(mean, log_variance, _sample(mean, log_variance, draws[loop.steps]))


def _initial_mean(config: LatentThoughtConfig, noise: Noise, reference: Tensor) -> Tensor:
    """Returns the initial mu (B, Z, D)."""
    if not config.init_mean_std:
        return torch.zeros_like(reference)
    return config.init_mean_std * noise.draw(Purpose.START, 1)


def _langevin(problem: InferenceProblem, noise: Noise, loop: InnerLoop) -> Posterior:
    """Runs Langevin dynamics, z <- z + s grad log p(z, x) + sqrt(2 s) N(0, I) noise (eq. 4)."""
    size = loop.config.langevin_step_size
    z = noise.draw(Purpose.START)  # (B, Z, D)
    draws = noise.draws(Purpose.INNER, loop.steps)  # (T_fast, B, Z, D)
    for step in range(loop.steps):
        z.requires_grad_()
        nll = problem.likelihood(z)
        # -d log p(z, x) / dz, (B, Z, D); z^2 / 2 is -log N(z; 0, I) up to a constant
        (gradient,) = problem.gradients(nll.total + 0.5 * z.square().sum(), (z,))
        _record(step, nll, None, gradient, None)
        z = z.detach() - size * gradient + math.sqrt(2 * size) * draws[step]
    return Posterior(z, None, z)


def _amortised(problem: InferenceProblem, noise: Noise) -> Posterior:
    """Returns the encoder's posterior (Kingma & Welling 2013), or the prior without targets."""
    informed = problem.informed[:, None, None]
    mean, log_variance = (x.masked_fill(~informed, 0.0) for x in problem.encode())
    draw = noise.draw(Purpose.INNER)  # (B, Z, D)
    return Posterior(mean, log_variance, _sample(mean, log_variance, draw))


def _record(
    step: int, nll: Likelihood, kl: Tensor | None, mean: Tensor, log_variance: Tensor | None
) -> None:
    if not wants("inner_step"):
        return
    record(
        "inner_step",
        step=step,
        nll=nll.each.detach(),
        kl=None if kl is None else kl.detach(),
        mean_gradient=mean.norm(dim=-1),
        log_variance_gradient=None if log_variance is None else log_variance.norm(dim=-1),
    )


@functools.lru_cache(maxsize=64)
def divergence_floor(loop: InnerLoop) -> float:
    """Returns an approximate lower bound on the KL divergence, in nats per latent coordinate.

    This is the divergence that remains after the inner steps in a coordinate that the decoder
    ignores: log-variances start low, and Adam moves them by about one learning rate per step. A
    mean that does not start at 0 is assumed to start at one standard deviation. Without steps the
    bound is 0. With ``inner_scaling: vector`` it is the value for a vector that the decoder ignores
    entirely; ignored coordinates of a used vector keep more.
    """
    if loop.config.inference != "variational" or loop.steps == 0:
        return 0.0
    with torch.inference_mode(False), torch.enable_grad():
        starts = [loop.config.init_mean_std], [loop.config.init_log_variance]
        mean, log_variance = (torch.tensor(x, dtype=torch.float64).requires_grad_() for x in starts)
        optimizer = loop.optimizer([mean, log_variance])
        for step in range(loop.steps):
            # gradients of the KL divergence alone: mu, and (sigma^2 - 1) / 2 for log sigma^2
            mean.grad = mean.detach().clone()
            log_variance.grad = 0.5 * (log_variance.detach().exp() - 1)
            loop.set_rate(optimizer, step)
            optimizer.step()
    return divergence(mean.detach(), log_variance.detach()).item()
