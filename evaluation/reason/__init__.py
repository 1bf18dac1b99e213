"""Command ``reason``: methods that think, asked the same questions, and timed.

===============  ===================================================================================
file             what it holds
===============  ===================================================================================
``command``      options, and what is done
``data``         command ``known_facts``: what a model knows of the facts behind two-hop questions
``models``       command ``known_facts``: what a model knows of the facts behind two-hop questions
``answers``      command ``known_facts``: what a model knows of the facts behind two-hop questions
``timing``       command ``known_facts``: what a model knows of the facts behind two-hop questions
``run``          command ``known_facts``: what a model knows of the facts behind two-hop questions
``result``       command ``known_facts``: what a model knows of the facts behind two-hop questions
``compare``      command ``known_facts``: what a model knows of the facts behind two-hop questions
``report``       command ``known_facts``: what a model knows of the facts behind two-hop questions
``figure``       command ``known_facts``: what a model knows of the facts behind two-hop questions
``known_facts``  command ``known_facts``: what a model knows of the facts behind two-hop questions
===============  ===================================================================================
"""
