"""Command ``quality``: MAUVE, generative perplexity, entropy and speed of its texts.

============  ======================================================================================
file          what it holds
============  ======================================================================================
``command``   options, and what is done
``texts``     settings, human texts to continue, and what a model writes
``measures``  token entropy, MAUVE, generative perplexity under a judge, and the report
============  ======================================================================================
"""
