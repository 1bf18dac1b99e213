"""What Thinking States is compared with, on the same backbone, data and evaluation.

=========================================  =====================================================
what                                       where
=========================================  =====================================================
No CoT                                     ``no_cot.NoCoTLM``
CoT                                        ``cot.CoTLM``
iCoT, stepwise internalisation             ``icot.ICoTLM``
Coconut, continuous thoughts               ``coconut.CoconutLM``, ``coconut_layout``,
                                           ``coconut_network``
text of a row, and what is predicted       ``layout``
the answer's prefix in a text written      ``text_cache``
curricula (n and r by epoch), draws        ``stages``, ``coconut_layout.num_latents`` (m)
resets of the optimiser, stage of a        ``staged``
checkpoint
a backbone from another checkpoint         ``starting``
what all of them share                     ``text.TextLM``
=========================================  =====================================================
"""

from lightning_models.thinking_states.baselines.coconut import CoconutConfig, CoconutLM
from lightning_models.thinking_states.baselines.cot import CoTConfig, CoTLM
from lightning_models.thinking_states.baselines.icot import ICoTConfig, ICoTLM
from lightning_models.thinking_states.baselines.no_cot import NoCoTConfig, NoCoTLM

__all__ = [
    "CoTConfig",
    "CoTLM",
    "CoconutConfig",
    "CoconutLM",
    "ICoTConfig",
    "ICoTLM",
    "NoCoTConfig",
    "NoCoTLM",
]
