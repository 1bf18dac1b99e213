"""The callback that follows memory gates through training and analyses memory at validations."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from callbacks.analysis import Analysis, check_least
from callbacks.gate_analysis import history, report
from callbacks.gate_analysis.ages import Findings, add_reach, cut
from callbacks.gate_analysis.figures import pictures, run_pictures
from callbacks.gate_analysis.history import History, Place
from callbacks.hooks import log_interval

USUAL_MEMORY = 40
"""Sentences that a memory of unknown size is taken to hold."""


class GateAnalysis(Analysis):
    """Shows how a model learns to use its memory of sentences (Thought Gestalt).

    Every few optimiser steps: the gate g_mem of every layer that reads memory, after the step
    (``gate/layer_<l>``, Fig. 7 of *Modeling Language as a Sequence of Thoughts*), and the share of
    the gradient, before clipping, of self-attention, memory cross-attention and feed-forward layers
    (``gradient_share/<component>``, Fig. 8; defined at ``history.shares``).

    After validations, on the first batches of sentences, cut to a few long streams: how strongly
    the loss of a sentence depends on the vectors of earlier ones, by age and beyond what memory
    still holds (``gradient_reach/...``, Fig. 6 as numbers), and at which ages each layer looks
    (``memory_attention/...``).

    All goes to the loggers, pictures to TensorBoard, CSV and PNG files to ``gate_analysis`` in the
    run's log folder (without a logger in trainer.default_root_dir); rows of the training so far are
    part of checkpoints, so ``validate --ckpt_path best.ckpt`` draws Figs. 7 and 8 up to there.
    Training is not touched: gradients, random states and train/eval modes stay as they are. With
    several ranks the analysed batches are those of all. A model without gates is told of once;
    what it has nothing for is left out.
    """

    tag = "gate_analysis"

    def __init__(
        self,
        output: str | None = None,
        every_n_steps: int | None = None,
        num_batches: int = 2,
        every_n_validations: int = 1,
        max_sentences: int | None = None,
        max_streams: int = 4,
        probes: int = 4,
    ) -> None:
        """Chooses what is looked at, and how often.

        Args:
            output: folder of the files; null: ``gate_analysis`` in the run's log folder.
            every_n_steps: optimiser steps between two values of gates and gradient shares; null:
                trainer.log_every_n_steps, 0: none.
            num_batches: validation batches to analyse.
            every_n_validations: analyse every n-th validation of a training; 0: none of them, only
                the verb validate.
            max_sentences: sentences of a document to analyse at most, from its first; their graphs
                are held at once. null: one more than twice the memory size, for ages up to 2 M.
            max_streams: documents of a batch to analyse at most, the longest.
            probes: sentences, evenly spread over the second half of the longest document, from
                whose loss gradients go back; each costs a backward pass.
        """
        super().__init__(every_n_validations, num_batches, output)
        for name, value, least in (
            ("every_n_steps", every_n_steps, 0),
            ("max_sentences", max_sentences, 2),
            ("max_streams", max_streams, 1),
            ("probes", probes, 1),
        ):
            check_least(name, value, least)
        self.every_n_steps = every_n_steps
        self.max_sentences = max_sentences
        self.max_streams = max_streams
        self.probes = probes
        self._gates, self._norms = History(), History()
        self._has_gates: bool | None = None
        self._pending: dict[Place, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows so far, and how many validations have passed."""
        rows = {"gates": self._gates.state(), "gradient_norms": self._norms.state()}
        return {**super().state_dict(), **rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from the checkpoint."""
        super().load_state_dict(state_dict)
        self._gates = History.from_state(state_dict["gates"])
        self._norms = History.from_state(state_dict["gradient_norms"])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Finds the folder.

        Raises:
            ValueError: if ``output`` cannot be written to.
        """
        super().setup(trainer, pl_module, stage)
        self._has_gates = None

    # ---- gates and gradients, in training

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forgets rows that this training will write itself, and notes where gates begin."""
        step = trainer.global_step
        for rows in (self._gates, self._norms):
            rows.forget_from(step + 1 if step else 0)
        if self._follows(trainer, pl_module) and not self._gates.rows:
            self._gates.add(step, _sentence_steps(pl_module), history.gates(pl_module))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Measures the gradient, accumulated and averaged over ranks; clipping comes later."""
        interval = self._interval(trainer)
        if interval and (trainer.global_step + 1) % interval == 0 and self._has_gates:
            self._pending = history.gradient_norms(pl_module)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Adds a row of gates, and one of gradient norms, after a step that was measured."""
        norms, self._pending = self._pending, None
        if norms is None:
            return
        step, sentence_steps = trainer.global_step, _sentence_steps(pl_module)
        found, shares = history.gates(pl_module), history.shares(norms)
        self._gates.add(step, sentence_steps, found)
        values = {f"gate/layer_{layer}": value for (layer, _), value in found.items()}
        if shares is not None:  # none of a step that is dropped as its gradient is not finite
            self._norms.add(step, sentence_steps, norms)
            values |= {f"gradient_share/{part}": share for part, share in shares.items()}
        self._log(trainer, values, {})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the rows up to the end."""
        if trainer.is_global_zero:
            self._report_run(trainer)

    def _interval(self, trainer: L.Trainer) -> int:
        return log_interval(trainer) if self.every_n_steps is None else self.every_n_steps

    def _follows(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        return self._looks_for_gates(pl_module) and self._interval(trainer) > 0

    def _looks_for_gates(self, pl_module: L.LightningModule) -> bool:
        """Returns whether there are gates; says so once if there are none."""
        if self._has_gates is None:
            self._has_gates = bool(history.gates(pl_module))
            if not self._has_gates:
                self._warn(
                    f"{type(pl_module).__name__} has no memory gates (no method with a memory of "
                    "sentences, or none that is read by cross-attention): gates, gradient shares "
                    "and attention to memory are left out, and the reach of gradients too unless "
                    "sentence vectors are recorded"
                )
        return self._has_gates

    # ---- reach and attention, at validations

    def _begin(self) -> Findings:
        return Findings()

    def _look_at(
        self, trainer: L.Trainer, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        """Analyses a batch; if that cannot be, this and later ones are left out."""
        gates, problem = self._looks_for_gates(pl_module), ""
        try:
            self._unable = not self._analyse(pl_module, batch, findings)
            if self._unable and gates:
                problem = f"{type(pl_module).__name__} records nothing about its memory"
        except torch.OutOfMemoryError:
            problem = (
                "the graph of the analysed sentences does not fit the device; lower max_streams "
                f"({self.max_streams}) or max_sentences ({self._sentences(pl_module)})"
            )
        if problem:
            self._give_up(f"no reach and no attention any more: {problem}")

    def _analyse(self, pl_module: Any, batch: dict[str, Any], findings: Findings) -> bool:
        """Runs the batch once more, with graph; returns whether this model is worth another one."""
        if "lengths" not in batch:
            return False
        found: list[tuple[list[Tensor], list[Tensor]]] = []

        def take(*, vectors: list[Tensor], nll: list[Tensor], **_: Any) -> None:
            found.append((list(vectors), list(nll)))

        with torch.inference_mode(False):
            part = cut(batch, self.max_streams, self._sentences(pl_module))
            if not part["lengths"].any():
                return True
            consumers = {"sentences": take, "memory_attention": findings.consumer()}
            pl_module.recorded_loss(part, **consumers)
            vectors, losses = found[-1] if found else ([], [])
            add_reach(findings.reach, vectors, losses, self.probes)
        return bool(vectors) or bool(findings)

    def _sentences(self, pl_module: L.LightningModule) -> int:
        """Returns how many sentences of a document are analysed at most."""
        return self.max_sentences or 2 * (_memory_size(pl_module) or USUAL_MEMORY) + 1

    # ---- reporting, on rank 0

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> None:
        self._report_run(trainer)
        if findings:
            memory_size = _memory_size(pl_module)
            drawn = pictures(findings, memory_size)
            self._write(self._prefix(trainer), report.tables(findings, memory_size), drawn)
            self._log(trainer, report.scalars(findings, memory_size), drawn)

    def _report_run(self, trainer: L.Trainer) -> None:
        """Writes the rows of the training so far; those of a checkpoint, where one is validated."""
        drawn = run_pictures(self._gates, self._norms)
        if drawn:
            self._write("", report.run_tables(self._gates, self._norms), drawn)
            self._log(trainer, {}, drawn)


def _sentence_steps(pl_module: L.LightningModule) -> int:
    """Returns the model's count of sentence steps, 0 if it has none."""
    return int(getattr(pl_module, "sentence_steps", 0))


def _memory_size(pl_module: L.LightningModule) -> int | None:
    """Returns how many sentences the model's memory holds; None if its configuration is silent."""
    return getattr(getattr(pl_module, "config", None), "memory_size", None)
