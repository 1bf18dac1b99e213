"""Command ``reason``: methods that think, asked the same questions, and timed.

===============  ===================================================================================
file             what it holds
===============  ===================================================================================
``command``      options, and what is done
``data``         the questions: of a checkpoint's data, or of another task
``models``       who is asked
``answers``      what they write, and think meanwhile
``timing``       seconds they take, in turn
``run``          asks and times
``result``       numbers of one model
``compare``      what one solves and another does not
``report``       their numbers side by side
``figure``       their picture
``known_facts``  command ``known_facts``: what a model knows of the facts behind two-hop questions
``journal``      its answers so far, so that it can go on
===============  ===================================================================================
"""
