"""Command ``reason``: the same questions, with known right answers, for any models, and timed.

===============  ===================================================================================
file             what it holds
===============  ===================================================================================
``command``      options; what is measured
``contestants``  who is asked, and what: checkpoints, questions, labels
``asking``       replies, written or ranked by likelihood; seconds in turn
``scores``       numbers of answers, the printed table, the figure
===============  ===================================================================================
"""
