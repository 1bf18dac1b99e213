"""The callback that looks at thoughts, at validations."""

from typing import Any

import lightning as L

from callbacks.analysis import Analysis, check_least
from callbacks.hooks import tokenizer_of
from callbacks.reasoning.thinking import Recorded
from callbacks.thought_trace.findings import Findings
from callbacks.thought_trace.page import markdown
from callbacks.thought_trace.report import Report


class ThoughtTrace(Analysis):
    """Shows what a model thinks along queries, next to what the data's steps would have it think.

    After validations it scores the first batches once more, the model thinking for itself, and
    reports: the share of chunks whose thought is the gold one, of all and by chunk; where the first
    wrong thought is; how many chunks have none, with the model and with the gold; how many rounds
    reading a query takes; all that by group of queries. A few queries are written out with their
    thoughts where they are thought (Thinking States, Fig. 4).

    Scalars (``thoughts/...``, defined in ``measures.summary``) go to the loggers, pictures and
    queries to TensorBoard, and CSV, PNG, HTML and text files, with the step in their names, to
    ``thought_trace`` in the run's log folder (without a logger in trainer.default_root_dir).
    Training is not touched: metrics, random states and modes stay as they are. With several ranks
    the analysed batches are those of all; the queries shown are those of rank 0. Queries without
    known steps count for rounds and trivial thoughts only. A model that records no thoughts is told
    of once and left alone.
    """

    tag = "thought_trace"

    def __init__(
        self,
        output: str | None = None,
        num_batches: int = 4,
        every_n_validations: int = 1,
        shown_rows: int = 8,
    ) -> None:
        """Chooses what is looked at, and how often.

        Args:
            output: folder of the files; null: ``thought_trace`` in the run's log folder.
            num_batches: validation batches to look at.
            every_n_validations: look at every n-th validation of a training; 0: none of them, only
                the verb validate.
            shown_rows: queries that are written out.

        Raises:
            ValueError: if a number is too low.
        """
        super().__init__(every_n_validations, num_batches, output)
        check_least("shown_rows", shown_rows, 0)
        self.shown_rows = shown_rows

    def _begin(self) -> Findings:
        return Findings()

    def _look_at(
        self, trainer: L.Trainer, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        """Scores a batch once more, for what it records."""
        own, gold = Recorded(), Recorded()
        pl_module.recorded(batch, thoughts=own.take, gold_thoughts=gold.take)
        if own.rows is None:
            self._give_up(
                f"{type(pl_module).__name__} records no thoughts (no method that thinks while it "
                "reads), so there is nothing to look at"
            )
            return
        findings.add(batch, own.rows, gold.rows, tokenizer_of(trainer), self.shown_rows)

    # ---- reporting, on rank 0

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> None:
        if not findings:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        report = Report(
            title=f"Thoughts of {type(pl_module).__name__}, step {self._step(trainer)}",
            findings=findings,
            shown_rows=self.shown_rows,
            group_name=getattr(data, "group_name", "group"),
        )
        drawn = report.pictures()
        self._write(self._prefix(trainer), report.files(), drawn)
        self._log(trainer, report.scalars(), drawn)
        self._log_text(trainer, report)

    def _log_text(self, trainer: L.Trainer, report: Report) -> None:
        """Hands the written-out queries to loggers that take text (TensorBoard)."""
        if not report.shown:
            return
        for logger in trainer.loggers:
            writer: Any = getattr(logger, "experiment", None)
            if hasattr(writer, "add_text"):
                writer.add_text(self.tag, markdown(report.shown), self._log_step(trainer))
