"""The callback that analyses how latent vectors are inferred, at validations."""

from typing import Any

import lightning as L

from callbacks.analysis import SweepingAnalysis, check_least
from callbacks.hooks import dialled, has_dial
from callbacks.posterior_analysis import report
from callbacks.posterior_analysis.figures import pictures
from callbacks.posterior_analysis.findings import Findings
from callbacks.posterior_analysis.passes import Pass

DIAL = "inner_steps"
"""Field of a configuration that the sweep turns."""


class PosteriorAnalysis(SweepingAnalysis):
    """Shows how a model infers its latent vectors, and what these carry (Latent-Thought LM).

    After validations it scores the first batches once more and reports ELBO, KL and NLL over the
    inner steps, with the norms of their gradients; the KL divergence of each layer and which of its
    latents are active; the posterior's variances (``posterior/...``; all are defined in
    ``report``). At the verb validate, or in training as often as asked, it also scores the batches
    with other numbers of inner steps: the bound against T_fast and against FLOPs per token.

    All goes to the loggers, pictures to TensorBoard, CSV and PNG files, with the step in their
    names, to ``posterior_analysis`` in the run's log folder (without a logger in
    trainer.default_root_dir). Training is not touched: metrics, gradients, random states, modes and
    the configuration stay as they are. With several ranks the analysed batches are those of all.
    What a way of inference has not is left out: a chain's KL and variances, an encoder's steps. A
    model without posteriors is told of once and left alone.
    """

    tag = "posterior_analysis"

    def __init__(
        self,
        output: str | None = None,
        num_batches: int = 2,
        every_n_validations: int = 1,
        steps: tuple[int, ...] = (0, 4, 16, 32),
        sweep_every_n_validations: int = 0,
    ) -> None:
        """Chooses what is analysed, and how often.

        Args:
            output: folder of the files; null: ``posterior_analysis`` in the run's log folder.
            num_batches: validation batches to analyse.
            every_n_validations: analyse every n-th validation of a training; 0: none of them, only
                the verb validate.
            steps: numbers of inner steps to score the same batches with; each costs as much as a
                validation of them with that T_fast. Empty: none.
            sweep_every_n_validations: do so at every n-th validation of a training, where that is
                analysed; 0: at none of them, only at the verb validate.
        """
        super().__init__(every_n_validations, num_batches, output, sweep_every_n_validations)
        check_least("steps", min(steps, default=None), 0)
        self.steps = tuple(steps)

    # ---- work

    def _begin(self) -> Findings:
        return Findings()

    def _look_at(
        self, trainer: L.Trainer, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        """Scores a batch once more, and where it is the sweep's turn, several times."""
        seen = Pass()
        pl_module.recorded(batch, **seen.consumers())
        if seen.posterior is None:
            self._give_up(
                f"{type(pl_module).__name__} records no posterior (no method that infers latent "
                "vectors), so there is nothing to analyse"
            )
            return
        findings.add(seen)
        if self._sweeps and not self._fixed:
            self._sweep(pl_module, batch, findings)

    def _sweep(self, pl_module: Any, batch: dict[str, Any], findings: Findings) -> None:
        """Scores a batch with each number of inner steps, the highest first."""
        for steps in sorted(set(self.steps), reverse=True):
            seen = self._score_with(pl_module, batch, steps)
            if seen is None:
                self._give_up_sweeps(
                    f"{type(pl_module).__name__} takes no inner steps with this configuration, so "
                    "there is no sweep over their number"
                )
                return
            findings.add_point(steps, *seen)

    def _score_with(
        self, pl_module: Any, batch: dict[str, Any], steps: int
    ) -> tuple[Pass, float] | None:
        """Returns a pass with so many inner steps, and its FLOPs per token; None if not so many."""
        if not has_dial(pl_module, DIAL):
            return None
        seen = Pass()
        with dialled(pl_module, DIAL, steps):
            pl_module.recorded(batch, **seen.consumers())
            flops = pl_module.flops_per_token(pl_module.config.block_size)
        return (seen, flops) if len(seen.steps) == steps else None

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> None:
        if findings:
            drawn = pictures(findings)
            self._write(self._prefix(trainer), report.tables(findings), drawn)
            self._log(trainer, report.scalars(findings), drawn)
