"""Language models that think in latent space, one package per paper, and the control.

The classes exported here are the public paths that configs and checkpoints name; ``load`` opens
a checkpoint: ``load("runs/first").generate("The function")``, see ``evaluation.api``.

| file | content |
|---|---|
| `base` | `LanguageModel`: steps, scores and decoding shared by all methods |
| `outputs` | results of losses and scores; `StageMetrics`: sums of an epoch, its perplexity |
| `layers/` | attention, blocks, KV cache, decoder configs, recordings for analyses |
| `output_layer` | losses and log-probabilities over the vocabulary, in chunks; mixtures |
| `generation` | the decode loop, with a cache or without |
| `optim` | AdamW, its groups and schedules |
| `checkpoint/` | checkpoints that run no code, in one file or sharded; how they are found |
| `recipe` | class path and arguments that rebuild a model, and the classes that it may name |
| `recipe_options` | command-line options that replace values of a recipe |
| `atomic_files` | atomic writing of files, for all packages |
| `flops` | FLOPs of layers and decoders |
| `memory` | size of networks and batches in bytes, before they are allocated |
| `runtime` | random state, gradients, sharded parameters |
| `transformer/` | the plain decoder, and weights from `transformers` |
| `thoughtbubbles/` ... `thinking_states/` | one paper each, with a table from equations to code |
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evaluation.api import load as load
    from lightning_models.base import LanguageModel as LanguageModel
    from lightning_models.latent_thought import LatentThoughtConfig as LatentThoughtConfig
    from lightning_models.latent_thought import LatentThoughtLM as LatentThoughtLM
    from lightning_models.optim import OptimizerConfig as OptimizerConfig
    from lightning_models.outputs import LossOutput as LossOutput
    from lightning_models.outputs import Mean as Mean
    from lightning_models.outputs import Scores as Scores
    from lightning_models.outputs import Term as Term
    from lightning_models.ponderlm import LoopedConfig as LoopedConfig
    from lightning_models.ponderlm import LoopedLM as LoopedLM
    from lightning_models.ponderlm import MoRConfig as MoRConfig
    from lightning_models.ponderlm import MoRLM as MoRLM
    from lightning_models.ponderlm import PauseConfig as PauseConfig
    from lightning_models.ponderlm import PauseLM as PauseLM
    from lightning_models.ponderlm import PonderConfig as PonderConfig
    from lightning_models.ponderlm import PonderLM as PonderLM
    from lightning_models.ponderlm import PonderLM1 as PonderLM1
    from lightning_models.ponderlm import PonderLM1Config as PonderLM1Config
    from lightning_models.ponderlm import PonderLM2 as PonderLM2
    from lightning_models.ponderlm import PonderLM2Config as PonderLM2Config
    from lightning_models.ponderlm import RecurrentDepthConfig as RecurrentDepthConfig
    from lightning_models.ponderlm import RecurrentDepthLM as RecurrentDepthLM
    from lightning_models.thinking_states import CoconutConfig as CoconutConfig
    from lightning_models.thinking_states import CoconutLM as CoconutLM
    from lightning_models.thinking_states import CodiConfig as CodiConfig
    from lightning_models.thinking_states import CodiLM as CodiLM
    from lightning_models.thinking_states import CoTConfig as CoTConfig
    from lightning_models.thinking_states import CoTLM as CoTLM
    from lightning_models.thinking_states import ICoTConfig as ICoTConfig
    from lightning_models.thinking_states import ICoTLM as ICoTLM
    from lightning_models.thinking_states import NoCoTConfig as NoCoTConfig
    from lightning_models.thinking_states import NoCoTLM as NoCoTLM
    from lightning_models.thinking_states import ReasoningConfig as ReasoningConfig
    from lightning_models.thinking_states import ThinkingStatesConfig as ThinkingStatesConfig
    from lightning_models.thinking_states import ThinkingStatesLM as ThinkingStatesLM
    from lightning_models.thought_gestalt import GistConfig as GistConfig
    from lightning_models.thought_gestalt import GistLM as GistLM
    from lightning_models.thought_gestalt import ThoughtGestaltConfig as ThoughtGestaltConfig
    from lightning_models.thought_gestalt import ThoughtGestaltLM as ThoughtGestaltLM
    from lightning_models.thoughtbubbles import CopyConfig as CopyConfig
    from lightning_models.thoughtbubbles import CopyLM as CopyLM
    from lightning_models.thoughtbubbles import ThoughtbubblesConfig as ThoughtbubblesConfig
    from lightning_models.thoughtbubbles import ThoughtbubblesLM as ThoughtbubblesLM
    from lightning_models.transformer import TransformerConfig as TransformerConfig
    from lightning_models.transformer import TransformerLM as TransformerLM

_NAMES = {
    "evaluation.api": "load",
    "lightning_models.base": "LanguageModel",
    "lightning_models.latent_thought": "LatentThoughtConfig LatentThoughtLM",
    "lightning_models.optim": "OptimizerConfig",
    "lightning_models.outputs": "LossOutput Mean Scores Term",
    "lightning_models.ponderlm": "LoopedConfig LoopedLM MoRConfig MoRLM PauseConfig PauseLM "
    "PonderConfig PonderLM PonderLM1 PonderLM1Config PonderLM2 PonderLM2Config "
    "RecurrentDepthConfig RecurrentDepthLM",
    "lightning_models.thinking_states": "CoTConfig CoTLM CoconutConfig CoconutLM CodiConfig "
    "CodiLM ICoTConfig ICoTLM NoCoTConfig NoCoTLM ReasoningConfig ThinkingStatesConfig "
    "ThinkingStatesLM",
    "lightning_models.thought_gestalt": "GistConfig GistLM ThoughtGestaltConfig ThoughtGestaltLM",
    "lightning_models.thoughtbubbles": "CopyConfig CopyLM ThoughtbubblesConfig ThoughtbubblesLM",
    "lightning_models.transformer": "TransformerConfig TransformerLM",
}
"""Public names by module; a module is imported on the first use of one of its names."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
