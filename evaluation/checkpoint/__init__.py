"""From a checkpoint to a model with its data and tokenizer.

==============  ====================================================================================
file            what it holds
==============  ====================================================================================
``classes``     command ``known_facts``: what a model knows of the facts behind two-hop questions
``rebuild``     command ``known_facts``: what a model knows of the facts behind two-hop questions
``corpus``      command ``known_facts``: what a model knows of the facts behind two-hop questions
``device``      command ``known_facts``: what a model knows of the facts behind two-hop questions
``provenance``  command ``known_facts``: what a model knows of the facts behind two-hop questions
``pretrained``  command ``known_facts``: what a model knows of the facts behind two-hop questions
==============  ====================================================================================
"""
