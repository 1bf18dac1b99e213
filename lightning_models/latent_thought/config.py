"""What can be chosen about a Latent-Thought Language Model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_models.layers import DecoderConfig

Inference = Literal["variational", "langevin", "amortised"]


@dataclass(frozen=True, kw_only=True)
class LatentThoughtConfig(DecoderConfig):
    """Decoder, latent vectors, prior and posterior inference (App. A.1, A.2).

    The defaults are those of LTM-Large but for its 64 inner steps; what inference does can be set
    again for a trained model.

    Raises:
        ValueError: If a value is out of its range.
    """

    dials: ClassVar[Mapping[str, str]] = {"inner_steps": "T_fast"}

    num_layers: int = 12
    """L: 3, 6 and 12 for LTM-Small, -Medium and -Large."""
    dim: int = 512
    """D, width of the residual stream and of a latent vector."""
    num_heads: int = 8
    """H, attention heads; must divide dim."""
    norm: Literal["layer", "rms"] = "rms"
    """RMSNorm before each sub-layer and at the end."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "swiglu"
    """Feed-forward non-linearity."""
    bias: bool = False
    """Whether linear layers have biases."""
    positions: Literal["learned", "rope"] = "rope"
    """rope: rotary positions of tokens and of latent vectors; there is no other choice."""
    window: int | None = 256
    """k, sliding attention window in tokens, the query included; null: full causal attention."""

    latents: Literal["layered", "shared"] = "layered"
    """layered: every layer reads latent vectors of its own; shared: all layers read the same (the
    design that the paper rejects)."""
    latents_per_layer: int = 2
    """Latent vectors that a layer reads; layered, the paper's N_z = 24 are 8, 4 and 2 per layer."""
    latent_positions: Literal["index", "spread", "public"] = "index"
    """Rotary positions of a layer's latent keys: index: 0, 1, ...; spread: evenly over block_size;
    public: multiples of block_size // num_latents, a whole number, as in the public code."""
    prior: Literal["normal", "transport"] = "normal"
    """p(z): normal: N(0, I); transport: z = f(z0) of normal z0 with a learned transformer f."""
    prior_layers: int = 2
    """Layers of f."""

    inference: Inference = "variational"
    """How q(z|x) is found: variational: gradient steps on mean and variance (Algorithm 1);
    langevin: a chain of samples (eq. 4); amortised: an encoder (VAE)."""
    inner_steps: int = 16
    """T_fast, gradient steps of inference; 0: q is the prior. An encoder has none."""
    inner_lr: tuple[float, float] = (0.3, 0.34)
    """eta_fast at the beginning and at the end of training, linear between; evaluation has the
    latter."""
    inner_schedule: Literal["constant", "cosine"] = "constant"
    """Step size within the T_fast steps: constant, or by a cosine down to a tenth (the public code,
    which leaves variances near where they start unless T_fast is large)."""
    inner_betas: tuple[float, float] = (0.9, 0.95)
    """Moments of the inner AdamW."""
    inner_weight_decay: float = 0.0
    """Weight decay of the inner AdamW."""
    init_mean_std: float = 0.0
    """Deviation of the normal noise that means of q start from; 0: they start at 0. The public code
    trains with 0.01."""
    init_log_variance: float = -5.0
    """Log-variance of q before the first step, up to normal noise of deviation 0.1."""
    noise: Literal["fixed", "resampled"] = "resampled"
    """Noise of the inner steps' samples: one draw for each step (Algorithm 1), or one for all, to
    which q adapts (the public code, which also scores under it: ``bound_noise: inner``)."""
    bound_noise: Literal["fresh", "inner"] = "fresh"
    """Noise of the sample that is scored: fresh, which makes the score a bound; inner: the last of
    the inner steps, to which q has adapted (the public code): lower, and no bound."""
    inference_seed: int = 0
    """Draws are a function of this and of the sequence's number, in training of the step too."""
    slow_gradient: Literal["final", "trajectory"] = "final"
    """Gradient of the decoder: of the loss at the inferred z (Algorithm 1), or the sum of the inner
    steps' gradients added to it (the public code, but as means over tokens)."""
    langevin_step_size: float = 1e-3
    """s in eq. 4."""
    encoder_layers: int = 12
    """Layers of the amortised encoder, with full attention."""
    kl_annealing: float = 0.0
    """Part of the run over which an encoder's KL term grows from weight 0 to 1."""
    resample_every: int | None = None
    """After how many new tokens generation infers z again, from all tokens so far; null: never."""

    def __post_init__(self) -> None:
        """Checks the dials besides what every decoder checks."""
        for key in ("inner_lr", "inner_betas"):
            value = getattr(self, key)
            object.__setattr__(self, key, tuple(value) if isinstance(value, list) else value)
        super().__post_init__()
        if self.positions != "rope":
            raise ValueError(
                f"positions ({self.positions}) must be rope: latent vectors have those"
            )
        if self.init != "gpt2":
            raise ValueError(f"init ({self.init}) must be gpt2: embeddings are not scaled here")
        for key in ("latents_per_layer", "prior_layers", "encoder_layers"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least 1")
        if self.inner_steps < 0:
            raise ValueError(f"inner_steps ({self.inner_steps}) must be 0 (prior) or above")
        if self.resample_every is not None and self.resample_every < 1:
            raise ValueError(f"resample_every ({self.resample_every}) must be at least 1, or null")
        self._check_rates()
        self._check_combinations()

    def _check_rates(self) -> None:
        if not (_is_pair(self.inner_lr) and all(rate > 0 for rate in self.inner_lr)):
            raise ValueError(f"inner_lr ({_shown(self.inner_lr)}) must be two numbers above 0")
        if not (_is_pair(self.inner_betas) and all(0 <= beta < 1 for beta in self.inner_betas)):
            raise ValueError(
                f"inner_betas ({_shown(self.inner_betas)}) must be two numbers in [0, 1)"
            )
        if self.inner_weight_decay < 0:
            raise ValueError(f"inner_weight_decay ({self.inner_weight_decay}) must be 0 or above")
        if self.init_mean_std < 0:
            raise ValueError(f"init_mean_std ({self.init_mean_std}) must be 0 or above")
        if self.langevin_step_size <= 0:
            raise ValueError(f"langevin_step_size ({self.langevin_step_size}) must be above 0")
        if not 0 <= self.kl_annealing <= 1:
            raise ValueError(f"kl_annealing ({self.kl_annealing}) must be in [0, 1] (of the run)")

    def _check_combinations(self) -> None:
        if self.latent_positions == "public" and self.block_size < self.num_latents:
            raise ValueError(
                f"latent_positions (public) are multiples of block_size // {self.num_latents} "
                f"latents, which needs a block_size of at least {self.num_latents}, not "
                f"{self.block_size}; set latent_positions=index"
            )
        if self.slow_gradient == "trajectory" and self.inference != "variational":
            raise ValueError(
                f"slow_gradient (trajectory) sums over the inner steps of variational inference, "
                f"which {self.inference} does not have; set slow_gradient=final"
            )
        if self.kl_annealing and self.inference != "amortised":
            raise ValueError(
                f"kl_annealing ({self.kl_annealing}) weighs an encoder's loss; set it to 0, or "
                "inference=amortised"
            )

    @property
    def num_latents(self) -> int:
        """Z, latent vectors of a sequence."""
        return self.latents_per_layer * (self.num_layers if self.latents == "layered" else 1)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
