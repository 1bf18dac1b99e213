"""Command ``quality``: MAUVE, generative perplexity, entropy and speed of its texts.

============  ======================================================================================
file          what it holds
============  ======================================================================================
``command``   options, and what is done
``config``    its settings
``texts``     human texts to continue, and what a model writes
``measures``  from a model to texts, and from texts to numbers
``metrics``   token entropy and MAUVE
``report``    its numbers
``judge``     what another language model makes of texts
============  ======================================================================================
"""
