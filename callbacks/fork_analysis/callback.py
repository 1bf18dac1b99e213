"""The callback that analyses forks behind validations and tests."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from callbacks.analysis import Analysis
from callbacks.analysis_files import write_files
from callbacks.fork_analysis.report import Report, log
from callbacks.fork_analysis.statistics import ForkRecorder, real_tokens
from callbacks.samples import undisturbed

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
        for name, value, least in (
            ("num_batches", num_batches, 1),
            ("every_n_validations", every_n_validations, 0),
            ("html_rows", html_rows, 0),
        ):
            if value < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")
        super().__init__(every_n_validations)
        self.num_batches = num_batches
        self.reference_ckpt = reference_ckpt
        self.html_rows = html_rows
        self.attention = attention
        self._reference: Any = None
        self._recorder: ForkRecorder | None = None
        self._unable = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Finds the folder and loads the reference.

        Raises:
            ValueError: if the reference cannot be read or has another vocabulary.
        """
        self._folder = self._find_folder(trainer, "fork_analysis")
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

    # ---- hooks

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins an analysis if this validation's turn has come."""
        self._begin(self._is_due(trainer))

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins an analysis."""
        self._begin(True)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Analyses the first batches."""
        if batch_idx < self.num_batches and dataloader_idx == 0:
            self._analyse(trainer, pl_module, batch)

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Analyses the first batches."""
        if batch_idx < self.num_batches and dataloader_idx == 0:
            self._analyse(trainer, pl_module, batch)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reports, on rank 0."""
        self._count(trainer)
        self._report(trainer, pl_module, "val")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reports, on rank 0."""
        self._report(trainer, pl_module, "test")

    # ---- work

    def _begin(self, wanted: bool) -> None:
        self._recorder = ForkRecorder(self.attention) if wanted and not self._unable else None

    def _analyse(self, trainer: L.Trainer, pl_module: Any, batch: dict[str, Any]) -> None:
        """Scores the batch once more; on all ranks, as sharded models need all."""
        recorder = self._recorder
        if recorder is None:
            return
        step = self._rows_at_once(pl_module, batch["tokens"])
        with undisturbed(pl_module):
            for start in range(0, len(batch["tokens"]), step):
                part = rows_of(batch, start, start + step)
                recorder.begin()
                pl_module.recorded(part, **recorder.consumers())
                if not recorder.end(part):
                    self._give_up(pl_module)
                    return
            if self._reference is not None and trainer.is_global_zero:
                self._add_reference(pl_module.device, batch)

    def _rows_at_once(self, pl_module: Any, tokens: Tensor) -> int:
        """Returns how many rows to score at a time; the same on all ranks."""
        if not self.attention:
            return len(tokens)
        weights = pl_module.config.num_heads * (STREAMS * tokens[0].numel()) ** 2
        return max(1, MOST_WEIGHTS // weights)

    def _give_up(self, pl_module: L.LightningModule) -> None:
        self._unable, self._recorder = True, None
        rank_zero_warn(
            f"fork analysis: {type(pl_module).__name__} records no forks (no method that forks, or "
            "no fork layers), so there is nothing to analyse"
        )

    def _add_reference(self, device: torch.device, batch: dict[str, Any]) -> None:
        """Adds the reference's entropies to the rows of the batch, the latest that were added."""
        found: list[Tensor] = []
        self._reference.to(device)
        self._reference.recorded(batch, entropy=lambda entropy: found.append(entropy))
        self._reference.cpu()
        if not found:
            rank_zero_warn(
                f"fork analysis: {type(self._reference).__name__} of reference_ckpt records no "
                "entropies, so there is nothing to compare with"
            )
            self._reference = None
            return
        assert self._recorder is not None
        mask, entropy = real_tokens(batch), found[-1].double().cpu().numpy()
        new = [values[real] for values, real in zip(entropy, mask, strict=True) if real.any()]
        rows = self._recorder.rows
        first = len(rows) - len(new)
        for i, values in enumerate(new, start=first):
            rows[i] = rows[i].with_reference(values)

    def _report(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None or not recorder.rows or not trainer.is_global_zero:
            return
        step = self._step(trainer)
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        report = Report(
            title=f"Forks of {type(pl_module).__name__}, step {step} ({stage})",
            measures=recorder.measures,
            rows=recorder.rows,
            tokenizer=tokenizer,
            shown_rows=0 if tokenizer is None else self.html_rows,
        )
        try:
            write_files(self._folder, f"{stage}-step={step}-", report.files(), report.pictures)
        except OSError as error:  # a full disk must not end the training
            rank_zero_warn(f"fork analysis: {self._folder} cannot be written to: {error}")
        for logger in trainer.loggers:
            writer = getattr(logger, "experiment", None)
            if hasattr(writer, "add_histogram"):
                # the step of the scalars logged with this validation, counted from 0
                log(report, writer, max(0, step - 1))


def rows_of(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Returns the rows from ``start`` up to ``stop`` of everything in a batch that has rows."""
    rows = len(batch["tokens"])

    def part(value: Any) -> Any:
        has_rows = isinstance(value, Tensor | list) and len(value) == rows
        return value[start:stop] if has_rows else value

    return {key: part(value) for key, value in batch.items()}
