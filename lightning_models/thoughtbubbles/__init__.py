"""Thoughtbubbles (arXiv 2510.00219): residual streams that fork and are pruned under a budget.

=========================================================  =======================================
paper                                                      code
=========================================================  =======================================
x_{i,j}, p_cum: streams of a token, cumulative scores      ``forking.ResidualStreams``
eqs. 1-3, fork and keep scores in log space                ``forking.ForkLayer.log_scores``
eq. 4, originals' keep forced to 1 for selection           ``forking._ranks``
selection by the configured rule                           ``forking.ForkLayer._choose``
P_kappa, top-k over 2 N candidates                         ``forking.global_topk``
eqs. 5-6, keep, fork with v', left of the parent           ``forking.ForkLayer`` (``_assemble``)
eq. 8, attention attenuated by log P and P                 ``network.AttenuatedBlock``
eqs. 9-10, residual writes attenuated by P                 ``network.AttenuatedBlock``
eq. 11, output averaging                                   ``linear_mixture_cross_entropy`` and
                                                           ``mixture_scores`` (output_layer)
eqs. 12-13, rotary positions of forks                      ``forking.ResidualStreams.positions``
App. E.1, budget in proportion to the input                ``forking.row_budgets``
causal allocations (ours)                                  ``forking.by_threshold``,
                                                           ``forking.window_topk``
copy-n baseline                                            ``baselines.CopyLM``
=========================================================  =======================================
"""

from lightning_models.thoughtbubbles.baselines import CopyConfig, CopyLM, CopyNetwork
from lightning_models.thoughtbubbles.config import ThoughtbubblesConfig
from lightning_models.thoughtbubbles.module import ThoughtbubblesLM
from lightning_models.thoughtbubbles.network import ThoughtbubblesNetwork

__all__ = [
    "CopyConfig",
    "CopyLM",
    "CopyNetwork",
    "ThoughtbubblesConfig",
    "ThoughtbubblesLM",
    "ThoughtbubblesNetwork",
]
