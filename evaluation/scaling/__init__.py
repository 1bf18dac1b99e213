"""Command ``scaling``: power laws through results of several sizes.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``fit``      command ``known_facts``: what a model knows of the facts behind two-hop questions
``runs``     command ``known_facts``: what a model knows of the facts behind two-hop questions
``figure``   command ``known_facts``: what a model knows of the facts behind two-hop questions
===========  =======================================================================================
"""
