"""Command ``perplexity``: score a corpus.

==================  ================================================================================
file                what it holds
==================  ================================================================================
``command``         options, and what is done
``report``          command ``known_facts``: what a model knows of the facts behind two-hop questions
``scoring``         command ``known_facts``: what a model knows of the facts behind two-hop questions
``thinking``        command ``known_facts``: what a model knows of the facts behind two-hop questions
``autoregressive``  command ``known_facts``: what a model knows of the facts behind two-hop questions
==================  ================================================================================
"""
