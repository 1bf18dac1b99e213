"""The callback that analyses where steps are spent, at validations."""

from typing import Any

import lightning as L

from callbacks.analysis import SweepingAnalysis, check_least
from callbacks.analysis.batch_parts import first_tokens, rows_of
from callbacks.hooks import dialled, has_dial, tokenizer_of
from callbacks.step_allocation import measures
from callbacks.step_allocation.convergence import measure
from callbacks.step_allocation.findings import Findings, Pass
from callbacks.step_allocation.report import Report

DIAL = "alpha"
"""Field of a configuration that the sweep turns."""


class StepAllocation(SweepingAnalysis):
    """Shows where a pondering model spends its steps, and what they are good for (PonderLM-3).

    After validations it scores the first batches once more and reports, over all tokens with a
    target: how many steps they execute, single tokens (Table 3) and tokens within and at the end of
    words (Table 4) too; how difficult tokens are by their steps, and the marginal utility of each
    step by difficulty (Fig. 4). At the verb validate, or in training as often as asked, it also
    scores the batches with other alphas (Fig. 5), and follows Jacobi iterations to the fixed point
    (Fig. 8).

    Scalars (``steps/...``, listed at ``report.Report.scalars``, defined in ``measures``) go to the
    loggers, pictures to TensorBoard, and CSV, PNG and HTML files, with the step in their names, to
    ``step_allocation`` in the run's log folder (without a logger in trainer.default_root_dir).
    Training is not touched: metrics, random states, modes and the configuration stay as they are.
    With several ranks the analysed batches are those of all; the text shown is that of rank 0. What
    a model has not is left out: alpha, iterations, a router. One that records no steps is told of
    once and left alone.
    """

    tag = "step_allocation"

    def __init__(
        self,
        output: str | None = None,
        num_batches: int = 4,
        every_n_validations: int = 1,
        tokens: tuple[str, ...] = (" a", " the", " of"),
        top_tokens: int = 20,
        alphas: tuple[float, ...] = (-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0),
        sweep_every_n_validations: int = 0,
        convergence_rows: int = 4,
        convergence_tokens: int = 128,
        convergence_iterations: int = 8,
        html_rows: int = 4,
    ) -> None:
        """Chooses what is analysed, and how often.

        Args:
            output: folder of the files; null: ``step_allocation`` in the run's log folder.
            num_batches: validation batches to analyse.
            every_n_validations: analyse every n-th validation of a training; 0: none of them, only
                the verb validate.
            tokens: texts whose steps are listed, each where the tokenizer has one token for it.
            top_tokens: so many tokens are listed too, those that occur most often.
            alphas: shifts of the router to score the same batches with, besides 0; each costs as
                much as a validation of them. Empty: none.
            sweep_every_n_validations: do so, and follow iterations, at every n-th validation of a
                training, where that is analysed; 0: at none of them, only at the verb validate.
            convergence_rows: rows of the first batch whose iterations are followed; 0: none.
            convergence_tokens: of each of these rows, from its first; the fixed point takes K + 1
                forward steps for each.
            convergence_iterations: iterations to follow.
            html_rows: rows that are written out token by token.
        """
        super().__init__(every_n_validations, num_batches, output, sweep_every_n_validations)
        for name, value, least in (
            ("top_tokens", top_tokens, 0),
            ("convergence_rows", convergence_rows, 0),
            ("convergence_tokens", convergence_tokens, 1),
            ("convergence_iterations", convergence_iterations, 1),
            ("html_rows", html_rows, 0),
        ):
            check_least(name, value, least)
        self.tokens = tuple(tokens)
        self.top_tokens = top_tokens
        self.alphas = tuple(alphas)
        self.convergence_rows = convergence_rows
        self.convergence_tokens = convergence_tokens
        self.convergence_iterations = convergence_iterations
        self.html_rows = html_rows

    # ---- work

    def _begin(self) -> Findings:
        return Findings()

    def _look_at(
        self, trainer: L.Trainer, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        """Scores a batch once more, and where it is the sweep's turn, several times."""
        seen = Pass()
        pl_module.recorded(batch, **seen.consumers())
        if seen.executed is None or seen.losses is None:
            self._give_up(
                f"{type(pl_module).__name__} records no thinking steps (no method that ponders), "
                "so there is nothing to analyse"
            )
            return
        findings.add(batch, seen, tokenizer_of(trainer), self.html_rows)
        if self._sweeps:
            self._sweep(pl_module, batch, findings)
            if findings.batches == 1 and self.convergence_rows:
                self._follow(pl_module, batch, findings)

    def _sweep(self, pl_module: Any, batch: dict[str, Any], findings: Findings) -> None:
        """Scores a batch with each alpha, and with 0, which the others are compared with."""
        if not self.alphas or self._fixed:
            return
        if not has_dial(pl_module, DIAL):
            self._give_up_sweeps(
                f"{type(pl_module).__name__} has no setting {DIAL!r} to shift its steps with, so "
                "there is no sweep over it"
            )
            return
        for alpha in sorted({0.0, *map(float, self.alphas)}):
            seen = Pass()
            consumers = seen.consumers() if alpha == 0 else {"thinking_steps": seen.take_steps}
            with dialled(pl_module, DIAL, alpha):
                scores = pl_module.recorded(batch, **consumers)
            findings.add_point(alpha, batch, seen, scores.log_prob)

    def _follow(self, pl_module: Any, batch: dict[str, Any], findings: Findings) -> None:
        """Follows the iterations of a few short rows to the fixed point."""
        part = first_tokens(rows_of(batch, 0, self.convergence_rows), self.convergence_tokens)
        found = measure(pl_module, part, self.convergence_iterations)
        if found is not None:
            findings.convergence.merge(found)

    # ---- reporting, on rank 0

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> None:
        if not findings:
            return
        report = Report(
            title=f"Steps of {type(pl_module).__name__}, step {self._step(trainer)}",
            findings=findings,
            listed=self._listed(findings, tokenizer_of(trainer)),
            shown_rows=self.html_rows,
        )
        drawn = report.pictures()
        self._write(self._prefix(trainer), report.files(), drawn)
        self._log(trainer, report.scalars(), drawn)

    def _listed(self, findings: Findings, tokenizer: Any) -> dict[int, str]:
        """Returns the texts of the named tokens, then of the most frequent ones, by id."""
        texts = self.tokens if tokenizer is not None else ()
        encoded = [(tokenizer.encode(text), text) for text in texts]
        named = {int(ids[0]): text for ids, text in encoded if len(ids) == 1}
        frequent = measures.frequent(findings, self.top_tokens)
        return named | {i: findings.texts.get(i, "") for i in frequent if i not in named}
