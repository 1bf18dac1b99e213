"""Command ``tasks``: scores of lm-evaluation-harness, in process.

===============  ===================================================================================
file             what it holds
===============  ===================================================================================
``command``      options of ``evaluate.py tasks``, and the run
``callback``     ``callbacks.TaskScores``: the same while a model trains
``adapter``      ``HarnessModel``: any model of ours as a model of the harness, and its answers
``readers``      texts as tokens that a model reads, of which some are scored: windows, sentences
``writing``      continuations that end at the harness' stop texts
``harness``      loading tasks, running them, answers kept in a file
``task_scores``       scores with kinds of likelihood and costs: JSON, a table, example by example
``local_data``   data sets of the folder ``DATA``, for ``configs/tasks``
``pass_at_k``    pass@k on GSM8K: numbers in texts, and how many of k tries are right
``paper_rules``  how the Thoughtbubbles paper decides what is right
===============  ===================================================================================
"""
