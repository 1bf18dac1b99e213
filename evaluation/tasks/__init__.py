"""Command ``tasks``: scores of lm-evaluation-harness, in process.

===============  ===================================================================================
file             contents
===============  ===================================================================================
``command``      options of ``evaluate.py tasks``, and the run
``callback``     ``callbacks.TaskScores``: the same scores during training
``adapter``      ``HarnessModel``: any model of this project as a model of the harness
``readers``      tokenisation of contexts and continuations for each type of model
``writing``      continuations that end at the harness' stop texts
``harness``      loading and running tasks, and the file of cached answers
``task_scores``  scores with kinds of likelihood and costs: JSON, a table, per example
``local_data``   datasets of the folder ``DATA``, for ``configs/tasks``
``pass_at_k``    pass@k on GSM8K: extraction of answers, and metrics
``paper_rules``  metrics of the Thoughtbubbles paper
===============  ===================================================================================
"""
