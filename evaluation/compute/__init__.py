"""Command ``compute``: what the FLOPs of models are spent on.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``count``    command ``known_facts``: what a model knows of the facts behind two-hop questions
``figure``   command ``known_facts``: what a model knows of the facts behind two-hop questions
===========  =======================================================================================
"""
