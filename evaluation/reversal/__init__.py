"""Command ``reversal``: the father-son probe of the reversal curse.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``probe``    command ``known_facts``: what a model knows of the facts behind two-hop questions
``models``   command ``known_facts``: what a model knows of the facts behind two-hop questions
``names``    command ``known_facts``: what a model knows of the facts behind two-hop questions
``figure``   command ``known_facts``: what a model knows of the facts behind two-hop questions
===========  =======================================================================================
"""
