"""Configurations of PonderLM-3, PonderLM-2, and what the family of methods has in common."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_models.transformer.network import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class PonderingConfig(TransformerConfig):
    """A LLaMA-style decoder that takes K additional computation steps a token.

    Defaults of the shape's style are those of the PonderLM papers' public code: RMSNorm, SwiGLU,
    rotary positions, no biases, an untied head, and an initialisation to which the scale of the
    embeddings is tied (``init``).

    Raises:
        ValueError: If a value is out of its range.
    """

    dials: ClassVar[Mapping[str, str]] = {"thinking_steps": "K"}

    norm: Literal["layer", "rms"] = "rms"
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "swiglu"
    bias: bool = False
    positions: Literal["rope"] = "rope"
    """Rotary only: the slots of a token share its position."""
    tie_head: bool = False
    init: Literal["gpt2", "ponderlm"] = "ponderlm"
    thinking_steps: int = 3
    """K, additional steps of a token (PonderLM-3: the most it may take); 0: a plain decoder."""

    def __post_init__(self) -> None:
        """Checks the number of steps, and what every decoder checks."""
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
        ValueError: If a value is out of its range.
    """

    dials: ClassVar[Mapping[str, str]] = {**PonderingConfig.dials, "eval_iterations": "J"}

    latent_positions: Literal["shared", "sequential"] = "shared"
    """Rotary positions of slots: all at that of their token, or one after the other."""
    jacobi_iterations: tuple[int, int] = (2, 3)
    """J, refinement passes of a training step: drawn evenly from this range, ends included."""
    jacobi_seed: int = 0
    """The draws of J are a function of this and of the optimiser step."""
    eval_iterations: int | None = 3
    """J in scoring and in reading a prompt; null: until nothing changes any more."""
    grad_last_passes: int | None = None
    """Gradients flow through that many of the last passes; null: through all."""
    checkpoint_passes: bool = False
    """Whether the backward pass computes each pass again, and holds the activations of one only."""
    inference: Literal["jacobi", "sequential"] = "jacobi"
    """How texts are scored: by parallel iterations, or slot by slot as they are generated."""
    prefill: Literal["jacobi", "sequential"] = "jacobi"
    """How a prompt is read before generation."""
    log_depth_losses: bool = False
    """Whether training logs the cross-entropy after each number of steps."""
    depth_losses_every: int = 1
    """Interval of the targets at which that is measured; each costs K + 1 forward output layers."""

    def __post_init__(self) -> None:
        """Checks the iterations, and what the family checks."""
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
        ValueError: If a value is out of its range.
    """

    dials: ClassVar[Mapping[str, str]] = {
        **PonderLM2Config.dials,
        "alpha": r"$\alpha$",
        "tau": r"$\tau$",
    }

    router_init: Literal["deep", "uniform"] = "deep"
    """First step distribution s: ``router_bias`` more on the logit of K steps, or all equal."""
    router_bias: float = 2.0
    """What K steps have above the others in ``router_init: deep``."""
    mask_index: Literal["shifted", "literal"] = "shifted"
    """Which score damps slot k as a key: w_k = Pr(steps >= k), or w_(k-1) as the paper's Fig. 7."""
    augmentation: Literal["exact", "literal"] = "exact"
    """Scale of the attention scores that log w is added to: 1/sqrt(C), or 1/sqrt(C + 1) as in
    Appendix A."""
    tau: float = 1e-4
    """A token stops before its first step k with w_k below this; 0: never."""
    alpha: float = 0.0
    """Shifts the router outside training: above 0 to more steps, below to fewer."""
    alpha_shape: Literal["ramp", "scalar"] = "ramp"
    """alpha k / K on the logit of k steps, or, as printed, alpha on all, which changes nothing."""
    penalty: Literal["ours", "paper", "expected_steps"] = "ours"
    """Which penalty on w is in the objective, see ``router.py``."""
    penalty_scale: Literal["linear", "log"] = "linear"
    """What is penalised: w, or its logarithm down to that of ``tau``, see ``penalised_tail``."""
    penalty_weight: float = 1e-2
    """lambda; 0: no penalty."""
    penalty_beta: float | None = None
    """Slope of rho; null: that of the preset (ours 100, paper 10)."""
    penalty_theta: float | None = None
    """Where rho is one half, in nats; null: that of the preset (ours 0.05, paper 0.5)."""

    def __post_init__(self) -> None:
        """Checks router and penalty, and what PonderLM-2 checks."""
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
