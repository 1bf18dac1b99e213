"""Command ``answers``: accuracy on questions with one right answer.

=============  =====================================================================================
file           what it holds
=============  =====================================================================================
``command``    options, and what is done
``answering``  which answers a model gives: the likeliest of a list, or its own text
=============  =====================================================================================
"""
