"""What the analyses in the folders next to this one have in common; no callback of its own.

===============  ===================================================================================
file             what it holds
===============  ===================================================================================
``base``         ``Analysis``: which batches are looked at, when, and where the findings go
``batch_parts``  parts of batches: rows, first tokens, real tokens
``token_text``   the text that each token stands for
``files``        tables and pictures as files
``figures``      colours, and axes without a window
``page``         text as HTML, with a shade and a tooltip a token
===============  ===================================================================================
"""

from callbacks.analysis.base import Analysis, SweepingAnalysis, check_least

__all__ = ["Analysis", "SweepingAnalysis", "check_least"]
