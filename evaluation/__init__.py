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
``perplexity_report``   its numbers
``thinking``            additional steps of a model, and what they cost a generated token
``autoregressive``      targets scored from their prefixes alone
``zero_shot``           command: score sets of texts of other kinds, detokenised
``zero_shot_report``    its numbers
``answers``             command: accuracy on questions with one right answer
``answering``           which answers a model gives: the likeliest of a list, or its own text
``gsm8k``               command: word problems that a model solves in k tries
``gsm8k_prompts``       what it reads: demonstrations and a question
``gsm8k_candidates``    what it writes, with a random stream for each try
``gsm8k_answers``       the number that a text gives as its answer
``gsm8k_report``        its numbers
``reason``              command: methods that think, asked the same questions, and timed
``reason_data``         the questions: of a checkpoint's data, or of another task
``reason_models``       who is asked
``reason_answers``      what they write, and think meanwhile
``reason_timing``       seconds they take, in turn
``reason_run``          asks and times
``reason_result``       numbers of one model
``reason_compare``      what one solves and another does not
``reason_report``       their numbers side by side
``reason_figure``       their picture
``quality``             command: MAUVE, generative perplexity, entropy and speed of its texts
``quality_config``      its settings
``quality_texts``       human texts to continue, and what a model writes
``quality_measures``    from a model to texts, and from texts to numbers
``quality_metrics``     token entropy and MAUVE
``quality_report``      its numbers
``judge``               what another language model makes of texts
``pretrained``          models of ``transformers`` with their tokenizers
``reversal``            command: the father-son probe of the reversal curse
``reversal_probe``      its prompts and its numbers
``reversal_models``     what it asks: checkpoints, and models of ``transformers``
``reversal_names``      its names
``reversal_figure``     its picture
``scaling``             command: power laws through results of several sizes
``scaling_fit``         the fit, and what a model saves against another
``scaling_runs``        result files and the groups they form
``scaling_figure``      its picture
``curves``              command: training curves over tokens and FLOPs
``curve_points``        their points, from the log and the checkpoint of a run
``curves_figure``       their picture
``compute``             command: what the FLOPs of models are spent on
``compute_count``       its numbers
``compute_figure``      its picture
``sweep``               command: perplexity against steps and FLOPs, of several checkpoints
``sweep_points``        its points, and which of them no other one beats
``sweep_table``         its table
``sweep_figure``        its picture
``run_folders``         runs and checkpoints by folder, file or pattern
``run_labels``          what runs are called: by what their models differ in
``event_files``         what a run has logged
``picture``             figures as files, their tables beside them
``table``               command: result files side by side
``prompts``             texts to continue, from the command line or a file
``samples``             command: continue prompts
``importing``           command: a checkpoint from ``transformers`` weights
======================  =========================================================================

A command is a module with ``add_arguments(parser, argv)`` and ``run(settings)`` and one line in
``cli.COMMANDS``. Nothing heavy is imported before the command is known.
"""
