"""PonderLM-3, on the backbone of PonderLM-2, and its baselines (arXiv 2603.02023).

=================================================  ===============================================
paper                                              code
=================================================  ===============================================
interleaved slots, shared positions, feedback      ``network.SlotNetwork``
Jacobi iterations (Sec. 3.4.1, App. B)             ``network.iterate``
s, w of the router (Sec. 3.2.1)                    ``router.Router``, ``router.step_distribution``
log w on keys (Sec. 3.2.2, Fig. 7)                 ``router.slot_bias``, ``layers.attend``
h_hat = sum s_k h_k (Sec. 3.2.3)                   ``router.integrate``
hard stopping at tau (Sec. 3.3)                    ``sequential.advance``, ``sequential.SlotCache``
minimum-ponder penalty (Sec. 3.4.2)                ``router.minimum_ponder_penalty``
FLOPs (Table 2)                                    ``network.generation_flops``
PonderLM-3, PonderLM-2                             ``module.PonderLM``, ``module.PonderLM2``
PonderLM-1, Pause, MoR                             ``baselines.simple``,
                                                   ``baselines.mixture_of_recursions``
LoopedLM, and its general form                     ``baselines.recurrent_depth``
=================================================  ===============================================
"""

from lightning_models.ponderlm.baselines.mixture_of_recursions import MoRConfig, MoRLM
from lightning_models.ponderlm.baselines.recurrent_depth import (
    LoopedConfig,
    LoopedLM,
    RecurrentDepthConfig,
    RecurrentDepthLM,
)
from lightning_models.ponderlm.baselines.simple import (
    PauseConfig,
    PauseLM,
    PonderLM1,
    PonderLM1Config,
)
from lightning_models.ponderlm.config import PonderConfig, PonderingConfig, PonderLM2Config
from lightning_models.ponderlm.module import PonderLM, PonderLM2

__all__ = [
    "LoopedConfig",
    "LoopedLM",
    "MoRConfig",
    "MoRLM",
    "PauseConfig",
    "PauseLM",
    "PonderConfig",
    "PonderLM",
    "PonderLM1",
    "PonderLM1Config",
    "PonderLM2",
    "PonderLM2Config",
    "PonderingConfig",
    "RecurrentDepthConfig",
    "RecurrentDepthLM",
]
