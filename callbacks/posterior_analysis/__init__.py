"""How a model infers its latent vectors, and what these carry (Latent-Thought Language Models).

The paper is *Scalable Language Models with Posterior Inference of Latent Thought Vectors* (Kong et
al.).

===============================================  ===================================================
paper                                            where
===============================================  ===================================================
eq. 5 over the steps of fast learning            ``findings.Findings.inner``
section 2.2, posterior collapse                  ``report.layers``, after Burda et al. 2016
T_fast at test time (Figs. 4 and 5 vary that of  ``findings.Findings.sweep``
training)
===============================================  ===================================================
"""

from callbacks.posterior_analysis.callback import PosteriorAnalysis

__all__ = ["PosteriorAnalysis"]
