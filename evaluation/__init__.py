"""What ``evaluate.py`` calls: a checkpoint goes in, numbers and text come out.

======================  =========================================================================
file                    what it holds
======================  =========================================================================
``cli``                 the commands and how the command line becomes settings
``console``             errors as one line, tables
``output``              files that are whole or not there
``arguments``           options that commands share
``classes``             which classes a checkpoint may name
``rebuild``             the model from a checkpoint's recipe and weights
``corpus``              data and tokenizer from a checkpoint's recipe
``device``              where and in which precision the model runs
``provenance``          what a result says about where it comes from
``scoring``             sums over a corpus, and the numbers that follow from them
``perplexity``          command: score a corpus
``autoregressive``      targets scored from their prefixes alone
``answers``             command: accuracy on questions with one right answer
``answering``           which answers a model gives: the likeliest of a list, or its own text
``reversal``            command: the father-son probe of the reversal curse
``reversal_probe``      its prompts and its numbers
``reversal_models``     what it asks: checkpoints, and models of ``transformers``
``reversal_names``      its names
``reversal_figure``     its picture
``scaling``             command: power laws through results of several sizes
``scaling_fit``         the fit, and what a model saves against another
``scaling_runs``        result files and the groups they form
``scaling_figure``      its picture
``table``               command: result files side by side
``prompts``             texts to continue, from the command line or a file
``samples``             command: continue prompts
``importing``           command: a checkpoint from ``transformers`` weights
======================  =========================================================================

A command is a module with ``add_arguments(parser, argv)`` and ``run(settings)`` and one line in
``cli.COMMANDS``. Nothing heavy is imported before the command is known.
"""
