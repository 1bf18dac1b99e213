"""Command ``answers``: accuracy on questions with one right answer.

=============  =====================================================================================
file           what it holds
=============  =====================================================================================
``command``    options, and what is done
``answering``  command ``known_facts``: what a model knows of the facts behind two-hop questions
=============  =====================================================================================
"""
