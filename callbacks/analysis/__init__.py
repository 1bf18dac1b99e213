"""Analyses of trained methods on the first batches of validations.

=================  =================================================================================
file               contents
=================  =================================================================================
``base``           ``Analysis``: selection of batches and validations, and output of reports
``report``         ``AnalysisReport``: scalars, tables and figures, and their files
``token_text``     text of single tokens
``forks``          ``ForkAnalysis`` for Thoughtbubbles
``gates``          ``GateAnalysis`` for Thought Gestalt
``posterior``      ``PosteriorAnalysis`` for Latent-Thought Language Models
``recall``         ``RecallAnalysis`` for models that read sentences or windows
``steps``          ``StepAllocation`` for PonderLM; Jacobi iterations are in ``convergence``, and
                   steps within words in ``words``
``thought_trace``  ``ThoughtTrace`` for Thinking States
=================  =================================================================================

An analysis collects tables from each batch and makes one report for all batches and ranks:
scalars, tables (each a tidy ``DataFrame``) and texts. Its base writes the tables as CSV files, with
the step in their names, to a folder named after the analysis in the run's log folder (without a
logger in trainer.default_root_dir). Figures are functions of the tables, ``FIGURES`` of each file;
they are drawn as PNG files and for the loggers, and can be redrawn from the CSV files. Training is
not affected: metrics, gradients, random states, train/eval modes and the configuration do not
change. The batches of all ranks are analysed; text is written from rank 0. Tables without values
are left out; a model without anything to analyse is reported once and then skipped.

``analyse_text`` does the same for a single text without a trainer, for ``lightning_models.load``:
it returns tables and figures, and writes nothing.

To add an analysis, write a subclass of ``Analysis`` with ``_collect`` and ``_report``, its
``FIGURES``, and ``_text_report`` if a text has more to show than the collected tables; call
``record(...)`` in the network for the statistics that it collects; add its name to
``callbacks/__init__.py`` and ``evaluation.api.ANALYSES``, and a line to
``tests/callbacks/analyses.py``, which adds it to the contract tests of all analyses.
"""
