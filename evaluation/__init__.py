"""What ``evaluate.py`` calls: a checkpoint goes in, numbers and text come out.

==================  ================================================================================
place               what it holds
==================  ================================================================================
``cli``             the commands, their parser, and errors as one line
``arguments``       options that commands share, and what they name
``api``             ``lightning_models.load``: a checkpoint from Python, without a command
``load``            models, data and tokenizers of checkpoints
``devices``         where models run, and the precision of their products
``pretrained``      models of ``transformers`` that probes compare with
``provenance``      what a result says of its checkpoint, data and settings
``output``          files that are whole or not there, and the folders they go to
``cost``            what a score costs: FLOPs, steps and wall time
``runs``            runs and checkpoints: places, names, labels, logs
``run_metrics``     the table of runs: sizes, training cost, likelihood, tasks
``compare_report``  report of ``compare``: checks, columns, tables; ``report.html`` is its page
``results``         results in the folder of a run: the same key is the same result
``tables``          frames as tables for people: text, Markdown
``figures``         figures from frames, and pictures and CSV as whole files
``generate``        command: continuations of prompts
``think``           command: what models do at each token of a text
``thoughts``        what a model does at each token, as a table; ``thoughts_page`` is its HTML page
``importing``       command: a checkpoint from ``transformers`` weights
``exporting``       command: a checkpoint as a model of ``transformers``, a folder, or one file
``scoring``         nats, tokens and bytes summed over a corpus, and the quotients: perplexity
``autoregressive``  scores of targets from their prefixes alone
``perplexity``      command: likelihood of a corpus
``zero_shot``       command: likelihood of sets of texts of other kinds, detokenised
``tasks/``          command ``tasks``: scores of lm-evaluation-harness, in process
``reason/``         command ``reason``: questions with known answers, the same for any models
``quality``         command ``quality``: MAUVE, generative perplexity, entropy, speed of texts
``reversal``        command: the father-son probe of the reversal curse
``scaling``         command: power laws through results of several sizes
``sweep``           command: perplexity against steps and FLOPs, of several checkpoints
``compare``         command: any runs as one table, with plots and a report
==================  ================================================================================

A command is a module with ``add_arguments(parser)`` and ``run(settings)``, the file of its
name or ``command.py`` of its folder, one line in ``cli.COMMANDS``, and one in ``tests/verbs.py``,
which puts it under the contract of all commands; nothing heavy is imported before it is known.
"""
