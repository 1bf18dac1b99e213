"""What PonderLM-3 is compared with: other ways to spend K more steps on a token.

=========================================  =====================================================
what                                       where
=========================================  =====================================================
looped decoder                             ``looped.LoopedLM``
pause tokens                               ``pause.PauseLM``
PonderLM-1                                 ``ponderlm1.PonderLM1``, ``expectation``
Mixture-of-Recursions                      ``mixture_of_recursions.MoRLM``, ``recursions``,
                                           ``recursion_routing``
what they share                            ``repeated`` (networks), ``depth`` (LightningModules)
=========================================  =====================================================

PonderLM-2 is in ``ponderlm.module``: PonderLM-3 is built on it. The plain decoder, as deep or
deeper, is ``transformer.TransformerLM``.
"""

from lightning_models.ponderlm.baselines.looped import LoopedConfig, LoopedLM
from lightning_models.ponderlm.baselines.mixture_of_recursions import MoRConfig, MoRLM
from lightning_models.ponderlm.baselines.pause import PauseConfig, PauseLM
from lightning_models.ponderlm.baselines.ponderlm1 import PonderLM1, PonderLM1Config

__all__ = [
    "LoopedConfig",
    "LoopedLM",
    "MoRConfig",
    "MoRLM",
    "PauseConfig",
    "PauseLM",
    "PonderLM1",
    "PonderLM1Config",
]
