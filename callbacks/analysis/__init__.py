"""Analyses of what a method has learned, on the first batches of validations.

===============  ===================================================================================
file             what it holds
===============  ===================================================================================
``base``         ``Analysis``: which batches are analysed, when, and where reports go
``report``       ``AnalysisReport``: scalars, tables, figures and pages, and the files they become
``token_text``   the text that each token stands for
``forks``        ``ForkAnalysis``, of Thoughtbubbles
``gates``        ``GateAnalysis``, of Thought Gestalt
``posterior``    ``PosteriorAnalysis``, of Latent-Thought Language Models
``steps``        ``StepAllocation``, of PonderLM; Jacobi iterations are in ``iterations``
``thoughts``     ``ThoughtTrace``, of Thinking States
===============  ===================================================================================

An analysis collects tables from each batch, makes a report of those of all batches and ranks, and
its base publishes that: CSV, PNG and HTML files, scalars and pictures in the loggers.
"""
