"""Command ``sweep``: perplexity against steps and FLOPs, of several checkpoints.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``points``   command ``known_facts``: what a model knows of the facts behind two-hop questions
``table``    command ``known_facts``: what a model knows of the facts behind two-hop questions
``figure``   command ``known_facts``: what a model knows of the facts behind two-hop questions
===========  =======================================================================================
"""
