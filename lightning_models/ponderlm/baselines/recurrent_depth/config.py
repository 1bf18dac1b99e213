"""Configuration of recurrent depth: a prelude, a repeated core and a coda."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_models.ponderlm.config import PonderingConfig

EXIT_THRESHOLDS = {"gate": 1.0, "kl": 5e-4, "latent": 0.03, "entropy": 1e-3, "argmax": 5.0}
"""Published thresholds of the exit rules: Ouro's gate (1 never exits) and Huginn's criteria."""
# NOTE(paper): the KL threshold is the paper's; Huginn's code has 1e-3. Latent is the code's.


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Options of the repeated core. The defaults give the looped decoder, H <- blocks(H)."""

    prelude_layers: int = 0
    """Number of blocks before the core, which compute the input e of every recurrence."""
    coda_layers: int = 0
    """Number of blocks after the core, which read its last state."""
    injection: Literal["none", "add", "concat"] = "none"
    """Injection of e into each recurrence: none, s + e, or A [s; e] with a learned A (Huginn)."""
    state: Literal["embedding", "zero", "noise"] = "embedding"
    """Initial state s_0: e, zeros, or N(0, state_std^2) (Huginn)."""
    state_std: float = math.sqrt(2 / 5)
    """Standard deviation of an initial state of noise."""
    norms: Literal["pre", "huginn", "ouro"] = "pre"
    """Norms: before each sub-layer (pre); also after the residual sum (huginn); or also on the
    sub-layer's output, with the final norm after every recurrence (ouro)."""
    post_norm_gain: float = 1.0
    """Initial gain of Ouro's norms on the outputs of sub-layers."""
    training_recurrences: Literal["fixed", "sampled"] = "fixed"
    """Recurrences per training step: thinking_steps + 1, or sampled around that mean (Huginn)."""
    backprop_recurrences: int | None = None
    """k, the number of final recurrences that gradients flow through. Null means all."""
    seed: int = 0
    """Seed for sampled recurrences and for noise, which also depends on row and position."""
    gate: Literal["none", "joint", "alone"] = "none"
    """Ouro's exit gate: none, trained with the network (joint, stage I), or trained alone on a
    frozen network (alone, stage II)."""
    entropy_weight: float = 0.1
    """beta, the weight of the entropy of the gate's distribution in stage I."""
    exit: Literal["none", "gate", "kl", "latent", "entropy", "argmax"] = "none"
    """Exit rule for tokens outside training: Ouro's gate or one of Huginn's criteria."""
    exit_threshold: float | None = None
    """Threshold of the exit rule. Null means the published one (gate 1, kl 5e-4, latent 0.03,
    entropy 1e-3, argmax 5)."""
    prompt_exits: bool = True
    """Whether prompt tokens may exit early too, instead of taking every recurrence. Only generation
    has prompts; scoring treats every token as generated."""
    cache_lookup: Literal["latest", "skip", "last", "mean", "first"] = "latest"
    """Cache entry that later tokens read in a recurrence: the entry of the same recurrence, or else
    the deepest before it (latest, Huginn); only the entry of the same recurrence (skip); or always
    the deepest, mean or first entry (last, mean, first; Ouro)."""
    cache_slots: int | None = None
    """m, the number of recurrences cached per token; recurrence i uses slot i mod m, with
    cache_lookup=latest. Null means all."""
    log_states: bool = False
    """Whether training logs the similarity between tokens' states, their change in the last
    recurrence, and the loss after one recurrence. Costs a second pass through the coda and the
    output layer per step."""

    @property
    def exits_early(self) -> bool:
        """Whether tokens may take fewer recurrences outside training."""
        return self.exit != "none"

    @property
    def reads_logits(self) -> bool:
        """Whether the exit rule needs the next-token distribution after every recurrence."""
        return self.exit in ("kl", "entropy", "argmax")

    @property
    def threshold(self) -> float:
        """Threshold of the exit rule, with null resolved."""
        default = EXIT_THRESHOLDS.get(self.exit, 0.0)
        return default if self.exit_threshold is None else self.exit_threshold

    @property
    def decoding_differs(self) -> bool:
        """Whether decoding differs from one parallel pass over the text."""
        shares = self.cache_lookup in ("last", "mean", "first") or self.cache_slots is not None
        return self.exits_early or shares


@dataclass(frozen=True, kw_only=True)
class LoopedConfig(PonderingConfig):
    """A looped decoder with ``thinking_steps`` + 1 loops.

    Raises:
        ValueError: If a value is out of range.
    """

    @property
    def recurrence(self) -> Recurrence:
        """Repetition of the blocks."""
        return Recurrence()


@dataclass(frozen=True, kw_only=True)
class RecurrentDepthConfig(Recurrence, LoopedConfig):
    """Prelude, ``num_layers`` core blocks with ``thinking_steps`` + 1 recurrences, and coda.

    Raises:
        ValueError: If a value is out of range, or options contradict each other.
    """

    dials: ClassVar[Mapping[str, str]] = {**PonderingConfig.dials, "exit_threshold": "q"}

    log_states: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, minimum in (("prelude_layers", 0), ("coda_layers", 0), ("seed", 0)):
            if getattr(self, key) < minimum:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least {minimum}")
        for key in ("backprop_recurrences", "cache_slots"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} ({value}) must be at least 1, or null for all recurrences")
        for key in ("state_std", "entropy_weight", "exit_threshold", "post_norm_gain"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"{key} ({value}) must not be negative")
        if self.injection == "none" and self.state != "embedding":
            raise ValueError(
                f"state ({self.state}) hides the input from the core without injection; set "
                "state=embedding, or injection=concat"
            )
        if self.backprop_recurrences is not None and self.injection == "none":
            raise ValueError(
                f"backprop_recurrences ({self.backprop_recurrences}) leaves embeddings without a "
                "gradient if injection is none; set injection=concat, or backprop_recurrences=null"
            )
        if self.backprop_recurrences is not None and self.gate == "joint":
            raise ValueError(
                f"backprop_recurrences ({self.backprop_recurrences}) contradicts gate=joint, which "
                "learns from the loss after every recurrence; set backprop_recurrences=null"
            )
        for key, idle, typed in (("exit_threshold", None, "null"), ("prompt_exits", True, "true")):
            value = getattr(self, key)
            if not self.exits_early and value != idle:
                raise ValueError(
                    f"{key} ({value}) does nothing with exit=none; choose an exit rule, or set "
                    f"{key}={typed}"
                )
        if self.cache_slots is not None and self.cache_lookup != "latest":
            raise ValueError(
                f"cache_slots ({self.cache_slots}) overwrites entries that cache_lookup="
                f"{self.cache_lookup} reads; set cache_lookup=latest, or cache_slots=null"
            )
        if self.post_norm_gain != 1.0 and self.norms != "ouro":
            raise ValueError(
                f"post_norm_gain ({self.post_norm_gain}) does nothing with norms={self.norms}; set "
                "norms=ouro, or post_norm_gain=1"
            )
        if self.exit == "gate" and self.gate == "none":
            raise ValueError(
                "exit (gate) needs a gate; train one with gate=joint, or choose another rule"
            )
        if self.parallel_residual and self.norms != "pre":
            raise ValueError(
                f"norms ({self.norms}) between attention and feed-forward contradict "
                "parallel_residual, which runs them side by side; set parallel_residual=false"
            )

    @property
    def recurrence(self) -> Recurrence:
        return self

    @property
    def residual_depth(self) -> int:
        recurrences = self.thinking_steps + 1
        effective = self.prelude_layers + recurrences * self.num_layers + self.coda_layers
        return effective if self.norms == "huginn" else self.num_layers
