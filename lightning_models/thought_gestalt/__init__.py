"""Thought Gestalt: language modelling sentence by sentence with a memory of sentence vectors.

=========================================================  ======================================
paper (*Modeling Language as a Sequence of Thoughts*)      code
=========================================================  ======================================
s_t = W_sent H_EOS after layer l_s                         ``network.SentenceHead``
K_M = [s] + P, V_M = [s]; sinusoidal P on keys only        ``memory.SentenceMemory``
cross-attention, scaled by the gate g_mem                  ``memory.MemoryAttention``
gradients through memory, or detached (Table 1)            ``network.ThoughtGestaltNetwork.run``
starts of streams, and so of gradients                     ``datamodules.sentences.streams``
context seeding, X_BOS <- s_{t-1}                          ``network.ThoughtGestaltNetwork``
alternating, serial and parallel layers (Table 1)          ``network.GestaltBlock``
the sentence tensor of 67 slots, its padding left out      ``packing.pack``
weight of EOS targets (2.3)                                ``module.ThoughtGestaltLM.loss``
token and sentence dropout, warmed in (B.2)                ``network.ThoughtGestaltNetwork``,
                                                           ``module.ThoughtGestaltLM``
decoding sentence by sentence (ours)                       ``cache.GestaltCache``, ``cache.Slots``
GPT-2 + gist masking (3.3, E.4)                            ``baselines.GistLM``
=========================================================  ======================================
"""

from lightning_models.thought_gestalt.baselines import GistConfig, GistLM
from lightning_models.thought_gestalt.config import ThoughtGestaltConfig
from lightning_models.thought_gestalt.module import ThoughtGestaltLM
from lightning_models.thought_gestalt.network import ThoughtGestaltNetwork

__all__ = [
    "GistConfig",
    "GistLM",
    "ThoughtGestaltConfig",
    "ThoughtGestaltLM",
    "ThoughtGestaltNetwork",
]
