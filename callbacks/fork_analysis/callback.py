"""The callback that analyses forks after validations and tests."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from callbacks.analysis import Analysis, check_least
from callbacks.analysis.batch_parts import real_tokens, rows_of
from callbacks.fork_analysis.report import Report, log
from callbacks.fork_analysis.statistics import ForkRecorder, TokenRow
from callbacks.hooks import tokenizer_of

MOST_WEIGHTS = 1 << 26
"""Attention weights of one layer to be held at once; rows are scored so many at a time."""
STREAMS = 4
"""Streams of a token to reckon with there."""


class ForkAnalysis(Analysis):
    """Shows where a model forks, and what its forks are good for.

    On the first batches of a validation or test it scores the text once more and reports, by fork
    layer (numbered from 1 in the order of the network), how many streams tokens have (Fig. 7 of
    arXiv 2510.00219), which forks survive and at which scores, how much of the budget is used,
    and how strongly originals attend to their own forks (Fig. 5); and forks against the entropy of
    the output in windows of 4 tokens, with the best parabola (Fig. 4).

    Written to TensorBoard (``forks/...``) and, as CSV, PNG and HTML with the step in their names,
    to ``fork_analysis`` in the run's log folder (without a logger in trainer.default_root_dir).
    Training is not touched: metrics, random states and train/eval modes stay as they are. With
    several ranks the text is that of rank 0. A model without forks is told of once and left alone.
    """

    of_tests = True
    tag = "fork_analysis"

    def __init__(
        self,
        num_batches: int = 4,
        every_n_validations: int = 1,
        reference_ckpt: str | None = None,
        html_rows: int = 4,
        attention: bool = True,
    ) -> None:
        """Chooses what is analysed, and how often.

        Args:
            num_batches: validation batches to analyse.
            every_n_validations: analyse every n-th validation of a training; 0: none of them, only
                the verbs validate and test.
            reference_ckpt: checkpoint of another model, of any method, trained with the same
                tokenizer; forks are shown against its entropies too. null: none.
            html_rows: rows that are written out token by token.
            attention: whether to look at attention weights; that runs the slow attention backend.
        """
        super().__init__(every_n_validations, num_batches)
        check_least("html_rows", html_rows, 0)
        self.reference_ckpt = reference_ckpt
        self.html_rows = html_rows
        self.attention = attention
        self._reference: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Finds the folder and loads the reference.

        Raises:
            ValueError: if the reference cannot be read or has another vocabulary.
        """
        super().setup(trainer, pl_module, stage)
        if self.reference_ckpt is not None and self._reference is None:
            self._reference = self._load_reference(pl_module)

    def _load_reference(self, pl_module: Any) -> Any:
        reference = pl_module.from_checkpoint(self.reference_ckpt)
        ours, theirs = pl_module.config.vocab_size, reference.config.vocab_size
        if ours != theirs:
            raise ValueError(
                f"reference_ckpt ({self.reference_ckpt}) has a vocabulary of {theirs}, the model "
                f"one of {ours}; take a checkpoint that was trained with the same tokenizer"
            )
        return reference

    # ---- work

    def _begin(self) -> ForkRecorder:
        return ForkRecorder(self.attention)

    def _look_at(
        self, trainer: L.Trainer, pl_module: Any, batch: dict[str, Any], findings: ForkRecorder
    ) -> None:
        """Scores the batch once more; on all ranks, as sharded models need all."""
        step = self._rows_at_once(pl_module, batch["tokens"])
        for start in range(0, len(batch["tokens"]), step):
            part = rows_of(batch, start, start + step)
            findings.begin()
            pl_module.recorded(part, **findings.consumers())
            if not findings.end(part):
                self._give_up(
                    f"{type(pl_module).__name__} records no forks (no method that forks, or no "
                    "fork layers), so there is nothing to analyse"
                )
                return
        if self._reference is not None and trainer.is_global_zero:
            self._add_reference(pl_module.device, batch, findings.rows)

    def _rows_at_once(self, pl_module: Any, tokens: Tensor) -> int:
        """Returns how many rows to score at a time; the same on all ranks."""
        if not self.attention:
            return len(tokens)
        weights = pl_module.config.num_heads * (STREAMS * tokens[0].numel()) ** 2
        return max(1, MOST_WEIGHTS // weights)

    def _add_reference(
        self, device: torch.device, batch: dict[str, Any], rows: list[TokenRow]
    ) -> None:
        """Adds the reference's entropies to the rows of the batch, the latest that were added."""
        found: list[Tensor] = []
        self._reference.to(device)
        self._reference.recorded(batch, entropy=lambda entropy: found.append(entropy))
        self._reference.cpu()
        if not found:
            self._warn(
                f"{type(self._reference).__name__} of reference_ckpt records no entropies, so "
                "there is nothing to compare with"
            )
            self._reference = None
            return
        mask, entropy = real_tokens(batch), found[-1].double().cpu().numpy()
        new = [values[real] for values, real in zip(entropy, mask, strict=True) if real.any()]
        first = len(rows) - len(new)
        for i, values in enumerate(new, start=first):
            rows[i] = rows[i].with_reference(values)

    def _merged(self, own: ForkRecorder) -> ForkRecorder:
        """Returns what this rank has found: the text is that of rank 0."""
        return own

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: ForkRecorder) -> None:
        if not findings.rows:
            return
        step, stage = self._step(trainer), "test" if trainer.state.fn == "test" else "val"
        tokenizer = tokenizer_of(trainer)
        report = Report(
            title=f"Forks of {type(pl_module).__name__}, step {step} ({stage})",
            measures=findings.measures,
            rows=findings.rows,
            tokenizer=tokenizer,
            shown_rows=0 if tokenizer is None else self.html_rows,
        )
        self._write(self._prefix(trainer), report.files(), report.pictures)
        for logger in trainer.loggers:
            writer = getattr(logger, "experiment", None)
            if hasattr(writer, "add_histogram"):
                log(report, writer, self._log_step(trainer))
