"""Thought Gestalt: language modelling sentence by sentence, through a memory of sentence vectors.

=========================================================  ======================================
paper (*Modeling Language as a Sequence of Thoughts*)      where
=========================================================  ======================================
s_t = W_sent H_EOS behind layer l_s                        ``network.SentenceHead``
K_M = [s] + P, V_M = [s]; sinusoidal P on keys only        ``memory.SentenceMemory``
cross-attention behind the gate g_mem                      ``memory.MemoryAttention``
context seeding, X_BOS <- s_{t-1}                          ``network.ThoughtGestaltNetwork``
alternating, serial and parallel layers (Table 1)          ``network.GestaltBlock``
the sentence tensor of 67 slots, its padding left out      ``packing.pack``
=========================================================  ======================================
"""

from lightning_models.thought_gestalt.config import ThoughtGestaltConfig
from lightning_models.thought_gestalt.network import ThoughtGestaltNetwork

__all__ = ["ThoughtGestaltConfig", "ThoughtGestaltNetwork"]
