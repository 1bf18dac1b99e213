"""Thinking States (Latent Reasoning with Supervised Thinking States), and its baselines.

=========================================  =====================================================
paper                                      where
=========================================  =====================================================
c, L_in, L_out, loss; special tokens       ``config.ThinkingStatesConfig``
M, backbone; eq. 1 and 2                   ``backbone.Backbone``, ``architectures.KNOWN``
chunks X_i, state S_i at their tokens      ``rows.Grid``, ``rows.in_blocks``
T, thinking block; eq. 3                   ``network.ThinkingBlock``, ``reading.open_thoughts``
C, compression block; eq. 4                ``network.CompressionBlock``
gold thoughts Z*_i of chunks; Sec. 3.4     ``thoughts.gold_thoughts``
teacher forcing; Sec. 3.2, eq. 5           ``thoughts.ThoughtLayout``,
                                           ``network.ThinkingStatesNetwork``
objective; eq. 6                           ``module.ThinkingStatesLM.loss``
reading while thinking, chunk by chunk     ``reading.SequentialReader``
speculative prefill; Sec. 3.3, App. A.2    ``reading.SpeculativeReader``
decoding of answers, and their chunks      ``reading.ThinkingCache``
recorded thoughts                          ``thoughts.Trace``
FLOPs                                      ``backbone.backbone_flops``,
                                           ``network.reading_flops``
CoT, no CoT, iCoT, Coconut; Sec. 4.1       ``baselines``, with CODI, PCCoT and SIM-CoT
LoRA on a backbone                         ``adapters.add_adapters``
base of all these methods                  ``module.ReasoningLM``
=========================================  =====================================================
"""

from lightning_models.thinking_states.baselines.coconut import CoconutConfig, CoconutLM
from lightning_models.thinking_states.baselines.codi import CodiConfig, CodiLM
from lightning_models.thinking_states.baselines.curricula import ICoTConfig, ICoTLM
from lightning_models.thinking_states.baselines.text import CoTConfig, CoTLM, NoCoTConfig, NoCoTLM
from lightning_models.thinking_states.config import ReasoningConfig, ThinkingStatesConfig
from lightning_models.thinking_states.module import ThinkingStatesLM

__all__ = [
    "CoTConfig",
    "CoTLM",
    "CoconutConfig",
    "CoconutLM",
    "CodiConfig",
    "CodiLM",
    "ICoTConfig",
    "ICoTLM",
    "NoCoTConfig",
    "NoCoTLM",
    "ReasoningConfig",
    "ThinkingStatesConfig",
    "ThinkingStatesLM",
]
