"""Command ``reason``: methods that think, asked the same questions, and timed.

===============  ===================================================================================
file             what it holds
===============  ===================================================================================
``command``      options; asks and times
``data``         the questions: of a checkpoint's data, or of another task
``models``       who is asked
``result``       answers, seconds and numbers of one model; overlap of two
``report``       numbers of all models, and their figure
``known_facts``  command ``known_facts``: facts of two-hop questions that a model knows; its journal
===============  ===================================================================================
"""
