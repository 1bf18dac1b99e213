"""Command ``curves``: training curves over tokens and FLOPs.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``points``   command ``known_facts``: what a model knows of the facts behind two-hop questions
``figure``   command ``known_facts``: what a model knows of the facts behind two-hop questions
===========  =======================================================================================
"""
