"""What was found about thoughts, as scalars, files and pictures."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from callbacks.analysis.files import as_csv
from callbacks.thought_trace import figures, measures
from callbacks.thought_trace.findings import Findings, ShownRow
from callbacks.thought_trace.measures import Records
from callbacks.thought_trace.page import page, plain_text


@dataclass(frozen=True)
class Report:
    """One analysis: of one model, at one step, on one part of the data."""

    title: str
    findings: Findings
    """Of at least one query."""
    shown_rows: int
    """How many queries are written out."""
    group_name: str = "group"
    """What a group counts."""

    @cached_property
    def chunks(self) -> Records:
        """See ``measures.chunks``."""
        return measures.chunks(self.findings.rows)

    @cached_property
    def thoughts(self) -> Records:
        """See ``measures.thoughts``."""
        return measures.thoughts(self.findings.rows)

    @cached_property
    def rounds(self) -> Records:
        """See ``measures.rounds``."""
        return measures.rounds(self.findings.rows)

    @cached_property
    def groups(self) -> Records:
        """See ``measures.groups``; empty if there is one only."""
        found = measures.groups(self.findings.rows)
        return found if len(found) > 1 else []

    @property
    def shown(self) -> list[ShownRow]:
        """The queries that are written out."""
        return self.findings.shown[: self.shown_rows]

    def scalars(self) -> dict[str, float]:
        """Returns finite values by tag, all below ``thoughts/``; see ``measures.summary``."""
        values = measures.summary(self.findings.rows)
        return {f"thoughts/{name}": value for name, value in values.items() if math.isfinite(value)}

    def files(self) -> dict[str, str]:
        """Returns CSV files and written-out queries, by name; what there is nothing for is left."""
        scalars = [{"name": tag, "value": value} for tag, value in self.scalars().items()]
        found = {
            "scalars.csv": scalars,
            "chunks.csv": self.chunks,
            "thoughts.csv": self.thoughts,
            "rounds.csv": self.rounds,
            "groups.csv": self.groups,
        }
        texts = {name: as_csv(records) for name, records in found.items() if records}
        if self.shown:
            texts["text.html"] = page(self.title, self.chunks, self.shown)
            texts["text.txt"] = plain_text(self.shown)
        return texts

    def pictures(self) -> dict[str, Any]:
        """Returns matplotlib figures by name; what there is nothing for is left out."""
        drawn = {"rounds": figures.rounds_figure(self.rounds)}
        if self.chunks:
            drawn["chunks"] = figures.chunks_figure(self.chunks)
        if self.thoughts:
            drawn["thoughts"] = figures.thoughts_figure(self.thoughts)
        if self.groups:
            drawn["groups"] = figures.groups_figure(self.groups, self.group_name)
        return drawn
