"""Command ``quality``: MAUVE, generative perplexity, entropy and speed of its texts.

============  ======================================================================================
file          what it holds
============  ======================================================================================
``command``   options, and what is done
``config``    command ``known_facts``: what a model knows of the facts behind two-hop questions
``texts``     command ``known_facts``: what a model knows of the facts behind two-hop questions
``measures``  command ``known_facts``: what a model knows of the facts behind two-hop questions
``metrics``   command ``known_facts``: what a model knows of the facts behind two-hop questions
``report``    command ``known_facts``: what a model knows of the facts behind two-hop questions
``judge``     command ``known_facts``: what a model knows of the facts behind two-hop questions
============  ======================================================================================
"""
