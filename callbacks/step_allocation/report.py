"""What an analysis found, as scalars, files and pictures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from callbacks.analysis.files import as_csv
from callbacks.step_allocation import figures, measures
from callbacks.step_allocation.findings import Findings, TextRow
from callbacks.step_allocation.measures import ALL, Records
from callbacks.step_allocation.page import page


@dataclass(frozen=True)
class Report:
    """One analysis: of one model, at one step, on one part of the data."""

    title: str
    findings: Findings
    """Of at least one token."""
    listed: Mapping[int, str]
    """Token ids to list, in their order, and what they stand for."""
    shown_rows: int
    """How many rows are written out token by token."""

    @cached_property
    def steps(self) -> Records:
        """See ``measures.steps``."""
        return measures.steps(self.findings)

    @cached_property
    def tokens(self) -> Records:
        """See ``measures.tokens``."""
        return measures.tokens(self.findings, self.listed)

    @cached_property
    def words(self) -> Records:
        """See ``measures.words``."""
        return measures.words(self.findings)

    @cached_property
    def utility(self) -> Records:
        """See ``measures.utility``; empty if no steps may be taken."""
        return measures.utility(self.findings) if self.findings.most else []

    @cached_property
    def sweep(self) -> Records:
        """See ``measures.sweep``."""
        return measures.sweep(self.findings)

    @cached_property
    def convergence(self) -> Records:
        """See ``measures.convergence``."""
        return measures.convergence(self.findings)

    @property
    def rows(self) -> list[TextRow]:
        """The rows that are written out."""
        return self.findings.rows[: self.shown_rows]

    def scalars(self) -> dict[str, float]:
        """Returns finite values by tag, all below ``steps/``.

        ``mean`` and ``below_most``, of all tokens and ``words/internal/...``, ``words/final/...``;
        ``share_<i>`` and ``step0_loss_<i>`` by executed steps; ``utility/<bucket>/step_<i>``;
        ``sweep/alpha_<a>/<bucket>/mean_steps`` and ``.../loss_change``; ``convergence/rate`` (L)
        and ``convergence/r2``. All are defined in ``measures``.
        """
        values = measures.summary(self.findings)
        for line in self.steps:
            for name in ("share", "step0_loss"):
                values[f"{name}_{line['steps']}"] = line[name]
        for place, executed in measures.steps_by_place(self.findings).items():
            values[f"words/{place}/mean"] = measures.mean(executed)
            values[f"words/{place}/below_most"] = measures.mean(executed < self.findings.most)
        for line in self.utility:
            names = [name for name in line if name.startswith("step_")]
            values |= {f"utility/{line['bucket']}/{name}": line[name] for name in names}
        values |= self._sweep_scalars()
        fit = self.findings.convergence.fit()
        if fit is not None:
            values |= {"convergence/rate": fit.rate, "convergence/r2": fit.r2}
        return {f"steps/{tag}": value for tag, value in values.items() if math.isfinite(value)}

    def _sweep_scalars(self) -> dict[str, float]:
        return {
            f"sweep/alpha_{line['alpha']:g}/{line['bucket']}/{name}": line[name]
            for line in self.sweep
            if line["bucket"] != ALL
            for name in ("mean_steps", "loss_change")
        }

    def files(self) -> dict[str, str]:
        """Returns CSV files and the page, by name; what there is nothing for is left out."""
        scalars = [{"name": tag, "value": value} for tag, value in self.scalars().items()]
        found = {
            "scalars.csv": scalars,
            "steps.csv": self.steps,
            "tokens.csv": self.tokens,
            "words.csv": self.words,
            "utility.csv": self.utility,
            "sweep.csv": self.sweep,
            "convergence.csv": self.convergence,
        }
        texts = {name: as_csv(records) for name, records in found.items() if records}
        if self.rows:
            texts["text.html"] = page(self.title, self.steps, self.rows)
        return texts

    def pictures(self) -> dict[str, Any]:
        """Returns matplotlib figures by name; what there is nothing for is left out."""
        drawn = {"steps": figures.steps_figure(self.steps)}
        if self.tokens:
            drawn["tokens"] = figures.tokens_figure(self.tokens, self.findings.most)
        if self.words:
            drawn["words"] = figures.words_figure(self.words)
        if self.utility:
            drawn["utility"] = figures.utility_figure(self.utility, self.findings.most)
        if self.sweep:
            drawn["sweep"] = figures.sweep_figure(self.sweep)
        if self.convergence:
            fit, noise = self.findings.convergence.fit(), self.findings.convergence.noise()
            drawn["convergence"] = figures.convergence_figure(self.convergence, fit, noise)
        return drawn
