"""Latent-Thought Language Models (Kong et al.): fast inference of latent vectors, slow learning.

=========================================================  =======================================
paper                                                      code
=========================================================  =======================================
p(x | z), eq. 1: decoder under latent vectors              ``network.LatentThoughtNetwork``
z_l read by every layer, rotary positions on both sides    ``network.LatentAttention``
short context window k                                     ``layers.SelfAttention`` (``window``)
prior N(0, I); z = f(z0)                                   ``network.TransportPrior``
Algorithm 1, lines 6 to 11 (fast learning): inner loop     ``posterior.infer``, ``_variational``
eq. 4, Langevin sampling                                   ``posterior.infer`` (langevin)
VAE, amortised inference                                   ``network.LatentEncoder``,
                                                           ``posterior.infer`` (amortised)
eq. 5, the ELBO                                            ``module.LatentThoughtLM.score``
Algorithm 1, lines 14 and 15 (slow learning)               ``module.LatentThoughtLM.loss``
log p(x | z) under frozen weights                          ``reading.Reading``
eqs. 6 to 8, generation                                    ``module.LatentThoughtLM.init_cache``
section 2.4, trFLOPs/tok                                   ``network``
=========================================================  =======================================
"""

from lightning_models.latent_thought.config import LatentThoughtConfig
from lightning_models.latent_thought.module import LatentThoughtLM
from lightning_models.latent_thought.network import LatentThoughtNetwork

__all__ = ["LatentThoughtConfig", "LatentThoughtLM", "LatentThoughtNetwork"]
