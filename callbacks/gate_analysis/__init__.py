"""How a model uses its memory of sentences (Thought Gestalt).

The paper is *Modeling Language as a Sequence of Thoughts* (Borazjanizadeh and McClelland).

=============================================  =====================================================
paper                                          where
=============================================  =====================================================
Fig. 6, gradients through working memory       ``ages.add_reach``
Fig. 7, g_mem over training                    ``history.gates``
Fig. 8, gradient share of each component       ``history.gradient_norms``, ``history.shares``
=============================================  =====================================================
"""

from callbacks.gate_analysis.callback import GateAnalysis

__all__ = ["GateAnalysis"]
