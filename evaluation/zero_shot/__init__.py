"""Command ``zero_shot``: score sets of texts of other kinds, detokenised.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``report``   command ``known_facts``: what a model knows of the facts behind two-hop questions
===========  =======================================================================================
"""
