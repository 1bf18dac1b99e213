"""Analyses of trained methods on the first batches of validations.

=================  =================================================================================
file               what it holds
=================  =================================================================================
``base``           ``Analysis``: which batches are analysed, when, and where reports go
``report``         ``AnalysisReport``: scalars, tables and figures, and the files they become
``token_text``     the text that each token stands for
``forks``          ``ForkAnalysis``, of Thoughtbubbles
``gates``          ``GateAnalysis``, of Thought Gestalt
``posterior``      ``PosteriorAnalysis``, of Latent-Thought Language Models
``recall``         ``RecallAnalysis``, of models that read sentences or windows
``steps``          ``StepAllocation``, of PonderLM; Jacobi iterations are in ``convergence``, and
                   steps within words in ``words``
``thought_trace``  ``ThoughtTrace``, of Thinking States
=================  =================================================================================

An analysis collects tables from each batch and makes one report for all batches and ranks:
scalars, tables (each a tidy ``DataFrame``) and texts. Its base writes the tables as CSV files, with
the step in their names, to a folder named after the analysis in the run's log folder (without a
logger in trainer.default_root_dir). Figures are functions of the tables, ``FIGURES`` of each file:
they are drawn as PNG files and for the loggers, or again from the CSV files. Training is not
touched: metrics, gradients, random states, train/eval modes and the configuration stay as they are.
The batches of all ranks are analysed; text is written out from rank 0. Tables that a model has no
numbers for are left out; a model without anything to analyse is reported once and left alone.

``analyse_text`` is the same for a single text and without a trainer, as ``lightning_models.load``
uses it: it returns tables and figures, and writes nothing.

To add one: a class below ``Analysis`` with ``_collect`` and ``_report``, its ``FIGURES``, and
``_text_report`` where a text has more to show than the collected tables, a ``record(...)`` in the
network where what it collects arises, its name in ``callbacks/__init__.py`` and
``evaluation.api.ANALYSES``, and a line in ``tests/callbacks/analyses.py``, which puts it under the
contract of all analyses.
"""
