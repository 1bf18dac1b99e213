"""Configurations of PonderLM-3 and PonderLM-2, and the base of all pondering methods."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_models.transformer.network import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class PonderingConfig(TransformerConfig):
    """A LLaMA-style decoder that takes K additional computation steps per token.

    Defaults follow the public code of the PonderLM papers: RMSNorm, SwiGLU, rotary positions, no
    biases, an untied head, and an initialisation with scaled embeddings (``init``).

    Raises:
        ValueError: If a value is out of range.
    """

    dials: ClassVar[Mapping[str, str]] = {"thinking_steps": "K"}

    norm: Literal["layer", "rms"] = "rms"
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "swiglu"
    bias: bool = False
    positions: Literal["rope"] = "rope"
    """Rotary only, since the slots of a token share its position."""
    tie_head: bool = False
    init: Literal["gpt2", "ponderlm"] = "ponderlm"
    thinking_steps: int = 3
    """K, additional steps of a token, or their maximum for PonderLM-3. With 0, a plain decoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thinking_steps < 0:
            raise ValueError(f"thinking_steps ({self.thinking_steps}) must not be negative")
        if self.window is not None:
            raise ValueError(
                f"window ({self.window}) must be null: a window would count steps, not tokens"
            )


@dataclass(frozen=True, kw_only=True)
class PonderLM2Config(PonderingConfig):
    """PonderLM-2: K latent slots after every token, computed in parallel by Jacobi iterations.

    Raises:
        ValueError: If a value is out of range.
    """

    dials: ClassVar[Mapping[str, str]] = {**PonderingConfig.dials, "eval_iterations": "J"}

    latent_positions: Literal["shared", "sequential"] = "shared"
    """Rotary positions of slots: all at the position of their token, or consecutive."""
    jacobi_iterations: tuple[int, int] = (2, 3)
    """J, refinement passes of a training step, drawn uniformly from this closed range."""
    jacobi_seed: int = 0
    """Seed of the draws of J, which depend on it and on the optimiser step alone."""
    eval_iterations: int | None = 3
    """J in scoring and prompt processing. Null means iterating to convergence."""
    grad_last_passes: int | None = None
    """Number of final passes that gradients flow through. Null means all."""
    checkpoint_passes: bool = False
    """Whether the backward pass recomputes each pass, so that the activations of one are held."""
    inference: Literal["jacobi", "sequential"] = "jacobi"
    """Whether texts are scored by parallel iterations, or slot by slot as in generation."""
    prefill: Literal["jacobi", "sequential"] = "jacobi"
    """Whether a prompt is read by parallel iterations or slot by slot."""
    log_depth_losses: bool = False
    """Whether training logs the cross-entropy after each number of steps."""
    depth_losses_every: int = 1
    """Interval of the targets measured for it, each at the cost of K + 1 forward output layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        span: Any = self.jacobi_iterations
        whole = isinstance(span, Sequence) and all(type(end) is int for end in span)
        if not whole or len(span) != 2 or not 0 <= span[0] <= span[1]:
            raise ValueError(
                f"jacobi_iterations ({span}) must be two whole numbers of at least 0, the lower "
                "one first"
            )
        if self.eval_iterations is not None and self.eval_iterations < 0:
            raise ValueError(
                f"eval_iterations ({self.eval_iterations}) must not be negative; null iterates to "
                "convergence"
            )
        if self.grad_last_passes is not None and self.grad_last_passes < 1:
            raise ValueError(
                f"grad_last_passes ({self.grad_last_passes}) must be at least 1, or null for all"
            )
        if self.depth_losses_every < 1:
            raise ValueError(f"depth_losses_every ({self.depth_losses_every}) must be at least 1")

    @property
    def measures_depths(self) -> bool:
        """Whether training needs the losses after each depth."""
        return self.log_depth_losses


@dataclass(frozen=True, kw_only=True)
class PonderConfig(PonderLM2Config):
    """PonderLM-3: a router decides how many of the K steps each token takes (arXiv 2603.02023).

    Raises:
        ValueError: If a value is out of range.
    """

    dials: ClassVar[Mapping[str, str]] = {
        **PonderLM2Config.dials,
        "alpha": r"$\alpha$",
        "tau": r"$\tau$",
    }

    router_init: Literal["deep", "uniform"] = "deep"
    """Initial step distribution s: ``router_bias`` added to the logit of K steps, or uniform."""
    router_bias: float = 2.0
    """Initial bias of the logit of K steps with ``router_init: deep``. With ``penalty:
    expected_steps`` a higher one, e.g. 8, keeps the penalty from removing steps before the model
    has learned to use them."""
    mask_index: Literal["shifted", "literal"] = "shifted"
    """Score that attenuates slot k as a key: w_k = Pr(steps >= k), or w_(k-1) as in the paper's
    Fig. 7."""
    augmentation: Literal["exact", "literal"] = "exact"
    """Scale of the attention scores to which log w is added: 1/sqrt(C), or 1/sqrt(C + 1) as in
    Appendix A."""
    tau: float = 1e-4
    """Threshold on w_k: a token stops before its first step k below it. 0 disables stopping."""
    alpha: float = 0.0
    """Shift of the router outside training, to more steps if positive and fewer if negative."""
    alpha_shape: Literal["ramp", "scalar"] = "ramp"
    """Shape of the shift: alpha k / K on the logit of k steps, or alpha on all logits as printed in
    the paper, which has no effect."""
    penalty: Literal["ours", "paper", "expected_steps"] = "ours"
    """Penalty on w in the objective, see ``router.minimum_ponder_penalty``."""
    penalty_scale: Literal["linear", "log"] = "linear"
    """Penalised quantity: w, or log w scaled by log ``tau``, see ``router.penalised_tail``."""
    penalty_weight: float = 1e-2
    """lambda, weight of the penalty. 0 disables it."""
    penalty_beta: float | None = None
    """Slope of rho. If null, the value of the preset (ours 100, paper 10)."""
    penalty_theta: float | None = None
    """Loss u in nats at which rho is one half. If null, the value of the preset (ours 0.05, paper
    0.5)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("router_bias", "alpha", "penalty_weight", "penalty_beta", "penalty_theta"):
            value = getattr(self, key)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{key} ({value}) must be a finite number")
        if not 0 <= self.tau < 1:
            raise ValueError(f"tau ({self.tau}) must be in [0, 1)")
        if self.penalty_weight < 0:
            raise ValueError(f"penalty_weight ({self.penalty_weight}) must not be negative")
        if self.penalty_beta is not None and self.penalty_beta <= 0:
            raise ValueError(f"penalty_beta ({self.penalty_beta}) must be above 0, or null")

    @property
    def measures_depths(self) -> bool:
        penalised = self.penalty_weight > 0 and self.penalty != "expected_steps"
        return self.log_depth_losses or penalised
