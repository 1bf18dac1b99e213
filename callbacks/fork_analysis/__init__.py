"""Where a model forks, and what its forks are good for (Thoughtbubbles, arXiv 2510.00219).

=============================================  =====================================================
paper                                          where
=============================================  =====================================================
Fig. 4, forks against output entropy           ``entropy``
Fig. 5, attention to own forks                 ``statistics.ForkRecorder.attention``
Fig. 7, streams of each token by fork layer    ``statistics.TokenRow.streams``, drawn in ``figures``
=============================================  =====================================================
"""

from callbacks.fork_analysis.callback import ForkAnalysis

__all__ = ["ForkAnalysis"]
