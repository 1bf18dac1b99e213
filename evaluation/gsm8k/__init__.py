"""Command ``gsm8k``: word problems that a model solves in k tries.

==============  ====================================================================================
file            what it holds
==============  ====================================================================================
``command``     options, and what is done
``prompts``     command ``known_facts``: what a model knows of the facts behind two-hop questions
``candidates``  command ``known_facts``: what a model knows of the facts behind two-hop questions
``answers``     command ``known_facts``: what a model knows of the facts behind two-hop questions
``report``      command ``known_facts``: what a model knows of the facts behind two-hop questions
==============  ====================================================================================
"""
