"""Evaluation of checkpoints: the commands of ``evaluate.py`` and their shared modules.

==================  ================================================================================
module              contents
==================  ================================================================================
``cli``             the commands, their parser, and errors as one line
``arguments``       options that commands share, and the models and data they select
``api``             ``lightning_models.load``: a checkpoint from Python, without a command
``load``            models, data and tokenizers of checkpoints
``devices``         device of a model, and precision of its matrix products
``pretrained``      models of ``transformers`` that probes compare with
``provenance``      checkpoint, data and settings of a result, for its JSON file
``output``          atomic output files, and checks of their folders
``cost``            cost of a score: FLOPs, steps and wall time
``runs``            runs and checkpoints: paths, names, labels, logs
``run_metrics``     the table of runs: sizes, training cost, likelihood, tasks
``compare_report``  report of ``compare``: checks, columns, tables; ``report.html`` is its page
``results``         cache of results in the folder of a run, by a digest of their settings
``tables``          frames as readable tables: text, Markdown
``figures``         figures from frames, written atomically with their CSV files
``generate``        command: continuations of prompts
``think``           command: per-token traces of models reading a text
``thoughts``        per-token trace of a model as a table; ``thoughts_page`` is its HTML page
``importing``       command: a checkpoint from ``transformers`` weights
``exporting``       command: a checkpoint as a model of ``transformers``, a folder, or one file
``scoring``         nats, tokens and bytes summed over a corpus, and the quotients: perplexity
``autoregressive``  scores of sampled targets given their prefixes only
``perplexity``      command: likelihood of a corpus
``zero_shot``       command: likelihood of out-of-domain texts, detokenised
``tasks/``          command ``tasks``: scores of lm-evaluation-harness, in process
``reason/``         command ``reason``: the same questions with known answers for several models
``quality``         command ``quality``: MAUVE, generative perplexity, entropy, speed of texts
``reversal``        command: the father-son probe of the reversal curse
``scaling``         command: power laws fitted to results of several sizes
``sweep``           command: perplexity of several checkpoints against steps and FLOPs
``compare``         command: any runs as one table, with plots and a report
==================  ================================================================================

A command is a module with ``add_arguments(parser)`` and ``run(settings)``: the file with its
name, or ``command.py`` in its folder. It has a line in ``cli.COMMANDS`` and one in
``tests/verbs.py``, which adds it to the contract tests of all commands. Only the module of the
command that was typed is imported.
"""
