"""Thinking States (Latent Reasoning with Supervised Thinking States), and what it is compared with.

=========================================  =====================================================
paper                                      where
=========================================  =====================================================
c, L_in, L_out, loss; special tokens       ``config.ThinkingStatesConfig``
M, backbone; eq. 1 and 2                   ``backbone.Backbone``, ``pretrained``
chunks X_i, state S_i at their tokens      ``chunks.Grid``
T, thinking block; eq. 3                   ``thinking.ThinkingBlock``, ``speaking``
C, compression block; eq. 4                ``thinking.CompressionBlock``
gold thoughts Z*_i of chunks; Sec. 3.4     ``chunks.gold_thoughts``, ``thoughts.ThoughtLayout``
teacher forcing; Sec. 3.2, eq. 5           ``network.ThinkingStatesNetwork``, ``training_rows``
objective; eq. 6                           ``module.ThinkingStatesLM.loss``
reading while thinking, chunk by chunk     ``prefill``, ``reading``, ``blocks``
speculative prefill; Sec. 3.3, App. A.2    ``speculation``
answers, and chunks of theirs              ``answering``, ``decoding``
thoughts as people read them               ``trace``
FLOPs                                      ``thinking_compute``, ``compute``
CoT, no CoT, iCoT, Coconut; Sec. 4.1       ``baselines``
what the five of them share                ``reasoner.ReasoningLM``, ``rows``
=========================================  =====================================================
"""

from lightning_models.thinking_states.baselines import (
    CoconutConfig,
    CoconutLM,
    CoTConfig,
    CoTLM,
    ICoTConfig,
    ICoTLM,
    NoCoTConfig,
    NoCoTLM,
)
from lightning_models.thinking_states.config import ReasoningConfig, ThinkingStatesConfig
from lightning_models.thinking_states.module import ThinkingStatesLM

__all__ = [
    "CoTConfig",
    "CoTLM",
    "CoconutConfig",
    "CoconutLM",
    "ICoTConfig",
    "ICoTLM",
    "NoCoTConfig",
    "NoCoTLM",
    "ReasoningConfig",
    "ThinkingStatesConfig",
    "ThinkingStatesLM",
]
