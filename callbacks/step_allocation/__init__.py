"""Where a pondering model spends its steps, and what they are good for (PonderLM-3).

The paper is *PonderLM-3: Adaptive Token-Wise Pondering with Differentiable Masking* (arXiv
2603.02023).

=============================================  =====================================================
paper                                          where
=============================================  =====================================================
Fig. 4 (a), utility by difficulty              ``measures.utility``
Fig. 4 (b), step-0 loss by executed steps      ``measures.steps``
Fig. 5, counterfactual alpha                   ``measures.sweep``
Fig. 8, convergence of Jacobi iterations       ``convergence``
Table 3, steps of single tokens                ``measures.tokens``
Table 4, steps within words                    ``words``, ``measures.words``
=============================================  =====================================================
"""

from callbacks.step_allocation.callback import StepAllocation

__all__ = ["StepAllocation"]
