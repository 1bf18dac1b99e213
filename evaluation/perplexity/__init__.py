"""Command ``perplexity``: score a corpus.

==================  ================================================================================
file                what it holds
==================  ================================================================================
``command``         options, and what is done
``report``          its numbers
``scoring``         sums over a corpus, and the numbers that follow from them
``autoregressive``  targets scored from their prefixes alone
==================  ================================================================================
"""
