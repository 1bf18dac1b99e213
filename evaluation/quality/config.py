"""Settings of ``evaluate.py quality``."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from evaluation.quality.texts import Sampling

Mode = Literal["conditional", "unconditional", "both"]

_OF_PROMPTS = (
    "prompts",
    "continuations",
    "prompt_tokens",
    "new_tokens",
    "featurizer",
    "mauve_seeds",
)
_OF_SAMPLES = ("samples", "sample_tokens", "judge")
_WORDS = ("mode", "sampling", "top_p", "seed", "featurizer", "judge")


@dataclass(frozen=True, kw_only=True)
class QualityConfig:
    """What is generated, and who judges it; the defaults are the papers' protocols.

    Raises:
        ValueError: if a value is out of its range.
    """

    mode: Mode = "both"
    """conditional: continue prompts (MAUVE); unconditional: samples from nothing (generative
    perplexity, entropy, speed)."""
    sampling: tuple[Sampling, ...] = ("greedy", "multinomial")
    """Ways of sampling, all at temperature 1; each gets its row."""
    top_p: float = 0.95
    """Probability of the nucleus."""
    seed: int = 0
    """Text n is drawn from the stream of (seed, n)."""
    batch_size: int = 8
    """Texts generated at once; decides the speed, not the texts (up to rounding)."""
    prompts: int = 1000
    """Human texts to continue."""
    continuations: int = 5
    """Continuations of each prompt."""
    prompt_tokens: int = 50
    """Length of a prompt."""
    new_tokens: int = 50
    """Length of a continuation."""
    featurizer: str = "gpt2-large"
    """Hub name or folder of the model whose states MAUVE compares."""
    mauve_seeds: int = 5
    """Seeds of the k-means within MAUVE; their mean is reported, and how much they differ."""
    samples: int = 64
    """Samples from the start token alone."""
    sample_tokens: int = 1024
    """Length of a sample; it does not end with a document."""
    judge: str | None = "gpt2-xl"
    """Hub name or folder of the causal language model that scores samples; null: none does, and
    there is no generative perplexity."""
    judge_batch_size: int = 8
    """Texts that judge and featurizer read at once."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key, value in self.used().items():
            if key not in _WORDS and value < 1:
                raise ValueError(f"{key} ({value}) must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) must be in (0, 1]")
        if not self.sampling:
            raise ValueError("sampling () names no way of sampling; give greedy or multinomial")
        if self.conditional and self.prompts < 2:
            raise ValueError(
                f"prompts ({self.prompts}) must be at least 2: MAUVE compares distributions"
            )

    @property
    def conditional(self) -> bool:
        """Whether prompts are continued."""
        return self.mode != "unconditional"

    @property
    def unconditional(self) -> bool:
        """Whether samples start from nothing."""
        return self.mode != "conditional"

    def used(self) -> dict[str, Any]:
        """Returns the settings that decide something here, as plain values."""
        idle = [] if self.conditional else [*_OF_PROMPTS]
        idle += [] if self.unconditional else _OF_SAMPLES
        idle += [] if "nucleus" in self.sampling else ["top_p"]
        values = {**dataclasses.asdict(self), "sampling": list(self.sampling)}
        return {key: value for key, value in values.items() if key not in idle}
