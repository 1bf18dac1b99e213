"""Recurrent depth: a core of blocks repeated in latent space, with early exits of tokens.

Covers Huginn (arXiv 2502.05171), Ouro (LoopLM, arXiv 2510.25741) and the looped decoder, which
repeats all blocks.

=============================================  ==================================================
paper                                          code
=============================================  ==================================================
e = P(x), s_0, s_i = R(A [s_(i-1); e]), C(s_r)  ``network.RecurrentNetwork``: ``enter``,
(Huginn, Sec. 3)                               ``first_state``, ``step``, ``read_out``
sandwich norms (both)                          ``network.SandwichBlock``
r ~ Poisson(e^tau) + 1 (Huginn, Sec. 3.3)      ``network.draw_recurrences``
backpropagation through the last k             ``network.RecurrentNetwork.recur``
p_t, S_t (Ouro, Eq. 3)                         ``exits.log_exits``
sum p_t L_t - beta H(p) (Ouro, Eq. 4)          ``exits.expected_loss``
adaptive loss (Ouro, Eq. 5 and 6)              ``exits.gain_loss``
exit at 1 - S_t >= q (Ouro); KL, latent        ``exits.ExitRule``
difference, entropy, argmax (Huginn, Sec. 6)
caches of tokens that exited (Huginn, Sec. 6;  ``decoding.leave_entries``
Ouro, Table 14)
decoding by exits                              ``decoding.read_token``
=============================================  ==================================================
"""

from lightning_models.ponderlm.baselines.recurrent_depth.config import (
    LoopedConfig,
    RecurrentDepthConfig,
)
from lightning_models.ponderlm.baselines.recurrent_depth.module import LoopedLM, RecurrentDepthLM

__all__ = ["LoopedConfig", "LoopedLM", "RecurrentDepthConfig", "RecurrentDepthLM"]
