"""Language models that think in latent space, one package a paper, and the control.

The names exported here are the public paths that configs and checkpoints carry.
"""

from lightning_models.base import LanguageModel
from lightning_models.latent_thought import LatentThoughtConfig, LatentThoughtLM
from lightning_models.optim import OptimizerConfig
from lightning_models.outputs import LossOutput, Mean, Scores, Term
from lightning_models.ponderlm import (
    LoopedConfig,
    LoopedLM,
    MoRConfig,
    MoRLM,
    PauseConfig,
    PauseLM,
    PonderConfig,
    PonderLM,
    PonderLM1,
    PonderLM1Config,
    PonderLM2,
    PonderLM2Config,
)
from lightning_models.thinking_states import (
    CoconutConfig,
    CoconutLM,
    CoTConfig,
    CoTLM,
    ICoTConfig,
    ICoTLM,
    NoCoTConfig,
    NoCoTLM,
    ReasoningConfig,
    ThinkingStatesConfig,
    ThinkingStatesLM,
)
from lightning_models.thought_gestalt import (
    GistConfig,
    GistLM,
    ThoughtGestaltConfig,
    ThoughtGestaltLM,
)
from lightning_models.thoughtbubbles import (
    CopyConfig,
    CopyLM,
    ThoughtbubblesConfig,
    ThoughtbubblesLM,
)
from lightning_models.transformer import TransformerConfig, TransformerLM

__all__ = [
    "CoTConfig",
    "CoTLM",
    "CoconutConfig",
    "CoconutLM",
    "CopyConfig",
    "CopyLM",
    "GistConfig",
    "GistLM",
    "ICoTConfig",
    "ICoTLM",
    "LanguageModel",
    "LatentThoughtConfig",
    "LatentThoughtLM",
    "LoopedConfig",
    "LoopedLM",
    "LossOutput",
    "Mean",
    "MoRConfig",
    "MoRLM",
    "NoCoTConfig",
    "NoCoTLM",
    "OptimizerConfig",
    "PauseConfig",
    "PauseLM",
    "PonderConfig",
    "PonderLM",
    "PonderLM1",
    "PonderLM1Config",
    "PonderLM2",
    "PonderLM2Config",
    "ReasoningConfig",
    "Scores",
    "Term",
    "ThinkingStatesConfig",
    "ThinkingStatesLM",
    "ThoughtGestaltConfig",
    "ThoughtGestaltLM",
    "ThoughtbubblesConfig",
    "ThoughtbubblesLM",
    "TransformerConfig",
    "TransformerLM",
]
