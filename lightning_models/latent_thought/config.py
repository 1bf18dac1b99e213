"""Configuration of the Latent-Thought Language Model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lightning_models.layers import DecoderConfig

Inference = Literal["variational", "langevin", "amortised"]


@dataclass(frozen=True, kw_only=True)
class LatentThoughtConfig(DecoderConfig):
    """Decoder, latent vectors, prior and posterior inference (App. A.1, A.2).

    The defaults are LTM-Large, except for its 64 inner steps. The options of inference can be
    changed for a trained model.

    Raises:
        ValueError: If a value is out of range.
    """

    dials: ClassVar[Mapping[str, str]] = {"inner_steps": "T_fast"}

    num_layers: int = 12
    """L: 3, 6 and 12 for LTM-Small, -Medium and -Large."""
    dim: int = 512
    """D, the width of the residual stream and the latent vectors."""
    num_heads: int = 8
    """H, attention heads; must divide dim."""
    norm: Literal["layer", "rms"] = "rms"
    """RMSNorm before each sub-layer and at the end."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "swiglu"
    """Feed-forward non-linearity."""
    bias: bool = False
    """Whether linear layers have biases."""
    positions: Literal["learned", "rope"] = "rope"
    """Rotary positions of tokens and latent vectors, the only choice."""
    window: int | None = 256
    """k, sliding attention window in tokens, including the query. If null, full causal
    attention."""

    latents: Literal["layered", "shared"] = "layered"
    """Whether every layer reads separate latent vectors (layered) or all layers read the same
    (shared, which the paper rejects)."""
    latents_per_layer: int = 2
    """Number of latent vectors that a layer reads. The paper's N_z = 24 layered vectors are 8, 4
    and 2 per layer."""
    latent_positions: Literal["index", "spread", "public"] = "index"
    """Rotary positions of a layer's latent keys: 0, 1, ... (index), evenly spread over block_size
    (spread), or multiples of block_size // num_latents as in the public code (public)."""
    prior: Literal["normal", "transport"] = "normal"
    """p(z): N(0, I) (normal), or z = f(z0) of normal z0 by a learned transformer f (transport)."""
    prior_layers: int = 2
    """Number of layers of f."""

    inference: Inference = "variational"
    """Inference of q(z|x): gradient steps on mean and variance (variational, Algorithm 1), a chain
    of samples (langevin, eq. 4), or an encoder as in a VAE (amortised)."""
    inner_steps: int = 16
    """T_fast, the number of gradient steps of inference. With 0, q is the prior. Unused by an
    encoder."""
    inner_lr: tuple[float, float] = (0.3, 0.34)
    """eta_fast at the beginning and at the end of training, linear in between. Evaluation uses the
    latter."""
    inner_schedule: Literal["constant", "cosine"] = "constant"
    """Step size within the T_fast steps: constant, or a cosine down to a tenth as in the public
    code, which leaves variances near their initial values unless T_fast is large."""
    inner_betas: tuple[float, float] = (0.9, 0.95)
    """Betas of the inner AdamW."""
    inner_scaling: Literal["coordinate", "vector"] = "coordinate"
    """Whether the inner AdamW has a second moment for each coordinate (coordinate, Algorithm 1), or
    one for each latent vector, the mean over its coordinates (vector). Per coordinate, all
    coordinates move about equally far. Per vector, those with small gradients move less, which
    costs slightly more KL if ``init_log_variance`` is far below 0 and there are few inner steps."""
    inner_weight_decay: float = 0.0
    """Weight decay of the inner AdamW."""
    init_mean_std: float = 0.0
    """Standard deviation of the initial means of q. The public code trains with 0.01."""
    init_log_variance: float = -5.0
    """Initial log-variance of q, plus normal noise with standard deviation 0.1."""
    noise: Literal["fixed", "resampled"] = "resampled"
    """Noise of the samples in the inner steps: one draw for each step (Algorithm 1), or one for
    all, to which q adapts (the public code, which also scores with it: ``bound_noise: inner``)."""
    bound_noise: Literal["fresh", "inner"] = "fresh"
    """Noise of the scored sample: fresh, for which the score is a bound, or the last noise of the
    inner steps, to which q has adapted (inner, the public code), for which it is not."""
    inference_seed: int = 0
    """Seed of the draws, which depend on it, on the sequence's index and, in training, on the
    step."""
    slow_gradient: Literal["final", "trajectory"] = "final"
    """Gradient of the decoder: at the inferred z (Algorithm 1), or with the sum of the inner steps'
    gradients added (the public code, but as means over tokens)."""
    langevin_step_size: float = 1e-3
    """s in eq. 4."""
    encoder_layers: int = 12
    """Number of layers of the amortised encoder, with full attention."""
    kl_annealing: float = 0.0
    """Fraction of the run over which the weight of an encoder's KL term grows from 0 to 1."""
    resample_every: int | None = None
    """Number of new tokens after which generation infers z again from all tokens so far. If null,
    it never does."""

    def __post_init__(self) -> None:
        for key in ("inner_lr", "inner_betas"):
            value = getattr(self, key)
            object.__setattr__(self, key, tuple(value) if isinstance(value, list) else value)
        super().__post_init__()
        if self.positions != "rope":
            raise ValueError(
                f"positions ({self.positions}) must be rope, as latent vectors need rotary ones"
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
        """Z, the number of latent vectors of a sequence."""
        return self.latents_per_layer * (self.num_layers if self.latents == "layered" else 1)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
