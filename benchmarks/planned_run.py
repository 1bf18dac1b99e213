"""A run as its config describes it: model, rows of a micro-batch, micro-batches, length in tokens.

``read_run`` reads the arguments of ``train.py`` without data, weights or a network.
"""

import contextlib
import dataclasses
import io
import logging
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import harness, sentences, thinking
from benchmarks.harness import Options
from callbacks.overview import batch_line
from lightning_models import LanguageModel
from lightning_models.thinking_states.backbone import KNOWN
from training.listing import SENTENCE_SLOTS

ANSWER = 16
STEPS = 8
"""Tokens of an answer and steps of a question's reasoning."""
MARKERS = 2
"""BOS and EOS, of the SENTENCE_SLOTS of a sentence."""


@dataclass(frozen=True)
class PlannedRun:
    """A run by its config.

    Attributes:
        model: Without a network.
        rows: Of a micro-batch.
        accumulate: Micro-batches of an optimiser step, on one GPU.
        row_tokens: Of a row.
        sentences: Of a row of sentences, else 0.
        tokens: Of the whole run; None: not known.
        steps: Optimiser steps of the whole run, or None where it counts epochs.
    """

    model: LanguageModel
    rows: int
    accumulate: int
    row_tokens: int
    sentences: int
    tokens: float | None
    steps: int | None = None

    def __str__(self) -> str:
        """Returns what the heading shows."""
        return f"{type(self.model).__name__} {self.rows} rows x {self.accumulate}"

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimiser step."""
        return self.rows * self.accumulate

    @property
    def inner_steps(self) -> int:
        """Gradient steps of inference within a training step (Latent-Thought LMs); else 0."""
        config: Any = self.model.config
        if getattr(config, "inference", "amortised") == "amortised":
            return 0
        return getattr(config, "inner_steps", 0)

    def batch_line(self, rows: int, accumulate: int, devices: int) -> str:
        """Returns the batch of a step on several devices, as ``fit`` prints it.

        Args:
            rows: Of a device's micro-batch.
            accumulate: Micro-batches of an optimiser step.
            devices: How many.
        """
        size, unit, tokens, share = rows, "rows", rows * self.row_tokens, 1.0
        if self.sentences:  # lexical tokens, without the markers that row_tokens counts
            share = 1 - MARKERS / SENTENCE_SLOTS
            size = tokens = round(tokens * share)
            unit = "lexical tokens"
        planned = self.tokens
        if self.steps is not None:
            planned = self.steps * accumulate * devices * rows * self.row_tokens
        total = None if planned is None else planned * share
        bound = "" if self.model.reads == "windows" else "about "
        return batch_line(
            size, unit, accumulate, devices, tokens, steps=self.steps, total=total, bound=bound
        )

    def build(self, inner_steps: int | None = None) -> LanguageModel:
        """Returns another model with its network, in training mode.

        Where steps draw their number of iterations (PonderLM), each takes the most.

        Args:
            inner_steps: instead of the config's, of a method that has them.
        """
        config: Any = self.model.config
        if inner_steps is not None:
            config = dataclasses.replace(config, inner_steps=inner_steps)
        drawn = getattr(config, "jacobi_iterations", None)
        if drawn is not None:
            config = dataclasses.replace(config, jacobi_iterations=(drawn[1], drawn[1]))
        return self._built(config)

    def _built(self, config: Any) -> LanguageModel:
        model = type(self.model)(config, self.model.optimizer_config)
        model.configure_model()
        return model.train()

    def batch(self, rows: int) -> dict[str, Any]:
        """Returns a batch of random tokens."""
        vocab = self.model.config.vocab_size
        options = Options(batch=rows, streams=rows, vocab=vocab, device="cpu", seed=0)
        if self.model.reads == "sentences":
            options.lengths = [SENTENCE_SLOTS]
            return sentences.build_batch(options, self.sentences)
        if self.model.reads == "windows":
            batch = harness.random_windows(options, vocab, self.row_tokens)
            return {**batch, "lexical": batch["mask"]}
        reasoning = (self.row_tokens - ANSWER) // 2 // STEPS * STEPS
        options.length, options.thoughts, options.thought = reasoning, reasoning, 1
        options.answer = ANSWER
        return thinking.training_batch(STEPS, options)

    def flops(self) -> float:
        """Returns the training FLOPs of a row, as the method counts them."""
        with torch.device("meta"):
            model = self._built(self.model.config)
        return model.flops_per_token(self.row_tokens, training=True) * self.row_tokens


def read_run(words: list[str], row_tokens: int | None, tokens: float | None) -> PlannedRun:
    """Returns the run of some arguments of ``train.py``.

    Raises:
        ValueError: if they are not understood.
    """
    from training import LatentCLI
    from training.errors import UserError

    here = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:  # devices and seeds of no run
        logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            program = LatentCLI([*words, *here], run=False)
        except UserError as error:
            raise ValueError(str(error)) from error
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
    model, data, trainer = program.model, program.datamodule, program.trainer
    if getattr(model.config, "backbone", None) in KNOWN:  # no weights from the hub
        shape = KNOWN[model.config.backbone]
        model.config = dataclasses.replace(model.config, architecture=dict(shape))
    if model.reads == "reasoning":  # what the prepared questions would say
        wording = {"answer_prefix": thinking.PREFIX, "step_separator": thinking.SEPARATOR}
        known = {field.name for field in dataclasses.fields(model.config)}
        own = {key: value for key, value in wording.items() if key in known}
        model.config = dataclasses.replace(model.config, **own)
    count, rows = 0, data.batch_size
    length = row_tokens or data.block_size
    if model.reads == "sentences":
        count = data.max_sentences
        length = count * SENTENCE_SLOTS
        rows = min(rows, max(1, data.batch_tokens // (count * (SENTENCE_SLOTS - MARKERS))))
    steps = trainer.max_steps
    accumulate = trainer.accumulate_grad_batches
    if tokens is None and steps > 0:
        tokens = float(steps * rows * accumulate * length)
    return PlannedRun(model, rows, accumulate, length, count, tokens, steps if steps > 0 else None)
