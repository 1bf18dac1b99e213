"""What ``evaluate.py`` calls: a checkpoint goes in, numbers and text come out.

================  ================================================================================
place             what it holds
================  ================================================================================
``cli``           the commands and how the command line becomes settings
``console``       errors as one line, tables
``output``        files that are whole or not there
``arguments``     options that commands share
``cost``          what a score costs: FLOPs, steps and wall time
``picture``       figures as files, their tables beside them
``table``         command: result files side by side
``prompts``       texts to continue, from the command line or a file
``samples``       command: continue prompts
``importing``     command: a checkpoint from ``transformers`` weights
``checkpoint/``   from a checkpoint to a model with its data and tokenizer
``perplexity/``   command ``perplexity``: score a corpus
``zero_shot/``    command ``zero_shot``: score sets of texts of other kinds, detokenised
``tasks/``        command ``tasks``: scores of lm-evaluation-harness, in process
``answers/``      command ``answers``: accuracy on questions with one right answer
``gsm8k/``        command ``gsm8k``: word problems that a model solves in k tries
``reason/``       command ``reason``: methods that think, asked the same questions, and timed
``quality/``      command ``quality``: MAUVE, generative perplexity, entropy and speed of its texts
``reversal/``     command ``reversal``: the father-son probe of the reversal curse
``scaling/``      command ``scaling``: power laws through results of several sizes
``curves/``       command ``curves``: training curves over tokens and FLOPs
``compute/``      command ``compute``: what the FLOPs of models are spent on
``sweep/``        command ``sweep``: perplexity against steps and FLOPs, of several checkpoints
``compare/``      command ``compare``: any runs as one table, with plots and a report
``runs/``         runs and checkpoints: where they are, what they are called, what they have logged
================  ================================================================================

A command is a module with ``add_arguments(parser, argv)`` and ``run(settings)``, ``command.py`` of
its folder, and one line in ``cli.COMMANDS``; nothing heavy is imported before it is known.
"""
