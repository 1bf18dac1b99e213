"""Command ``reason``: the same questions, with known right answers, for any models, and timed.

===============  ===================================================================================
file             what it holds
===============  ===================================================================================
``command``      options; what is measured
``contestants``  who is asked, and what: checkpoints, tasks, data, labels
``asking``       replies, written or ranked by likelihood; seconds in turn
``report``       answers as a table: numbers, overlaps, JSON, text, figure
``known_facts``  command ``known_facts``: facts of two-hop questions that a model knows; its journal
===============  ===================================================================================
"""
