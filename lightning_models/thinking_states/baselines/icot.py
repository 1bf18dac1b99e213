"""iCoT: a chain of thought that is taken away token by token while it is learned."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_models.optim import OptimizerConfig
from lightning_models.thinking_states.baselines.layout import Batch, ChainLayout, Segment
from lightning_models.thinking_states.baselines.staged import StagedConfig, StagedLM
from lightning_models.thinking_states.baselines.stages import Stages, TokenStages


@dataclass(frozen=True, kw_only=True)
class ICoTConfig(StagedConfig):
    """Implicit chain of thought by stepwise internalisation (Deng et al., 2024).

    Raises:
        ValueError: if a value is out of its range, or belongs to the other kind of removal.
    """

    removal: Literal["tokens", "steps"] = "tokens"
    """What goes at a time: tokens, as in iCoT's own code; or steps, as in the mode ``no_thoughts``
    of Coconut's code, which the Thinking States paper seems to have run (its stages are set by
    ``epochs_per_stage``, ``max_latent_stage`` and ``first_stage``)."""
    remove_per_epoch: int = 8
    """Delta, tokens that go in an epoch (8 on GSM8K)."""
    remove_all_beyond: int = 39
    """From this number of removed tokens on all are (39 on GSM8K)."""
    removal_smoothing: float | None = 4.0
    """lambda: in each row o more tokens go, P(o) ~ exp(-lambda o); null: none do."""
    removal_side: Literal["left", "right"] = "left"
    """Which end of the chain goes first."""
    pretrain_epochs: int = 0
    """Epochs with whole chains before the first token goes."""
    reset: Literal["epoch", "stage", "never"] = "stage"
    """When AdamW forgets its moments: in every epoch, whenever more is removed (as in iCoT's own
    code), or never."""

    def __post_init__(self) -> None:
        """Checks ranges, and that only fields of the chosen removal are set."""
        super().__post_init__()
        for key, least in (("remove_per_epoch", 1), ("remove_all_beyond", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least {least}")
        if self.pretrain_epochs < 0:
            raise ValueError(f"pretrain_epochs ({self.pretrain_epochs}) must not be negative")
        if self.removal_smoothing is not None and self.removal_smoothing <= 0:
            raise ValueError(
                f"removal_smoothing ({self.removal_smoothing}) must be above 0, or null for none"
            )
        for key in ("first_stage", "uniform_prob"):
            if self.removal == "tokens" and getattr(self, key):
                raise ValueError(
                    f"{key} ({getattr(self, key)}) is of stages of steps; set removal=steps"
                )

    def curriculum(self) -> Stages:
        """Returns how the chain goes."""
        if self.removal == "steps":
            return self.step_stages()
        return TokenStages(
            self.remove_per_epoch,
            self.remove_all_beyond,
            self.removal_smoothing,
            self.removal_side,
            self.pretrain_epochs,
            self.curriculum_seed,
        )


@dataclass(frozen=True, kw_only=True)
class ShortenedChain(ChainLayout):
    """What a stage leaves of the chain."""

    stages: Stages
    """The curriculum."""

    def chain(self, batch: Batch, stage: int) -> tuple[Segment, Tensor]:
        """Returns what is left, and whether rows learn its end: before the last stage they do."""
        return self.stages.kept(batch, stage, self.step_separator)


class ICoTLM(StagedLM):
    """A chain of thought that is internalised: r tokens of it are gone, and r grows.

    Text: query, what is left of the chain, answer prefix, answer; positions are those of what is
    left. At r = 0 it is CoT, and at the last stage No CoT.
    """

    # NOTE(paper): the public code also skips a reset where the batch before had no chain left by
    # chance, which ranks see differently; here r alone decides. It also trains the answer's fixed
    # beginning to the end; here it is given once no chain can be in front of it.
    config: ICoTConfig

    def __init__(
        self,
        config: ICoTConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: the backbone, and how the chain goes.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    @property
    def stages(self) -> Stages:
        """The curriculum."""
        return self.config.curriculum()

    @property
    def layout(self) -> ShortenedChain:
        """Query, what is left of the chain, prefix, answer."""
        config = self.config
        return ShortenedChain(
            config.answer_prefix,
            config.step_separator,
            config.lm_on_query,
            stages=self.stages,
        )
