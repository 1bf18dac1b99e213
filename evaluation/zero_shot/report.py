"""The numbers of ``evaluate.py zero_shot``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datamodules.zero_shot import zero_shot_set
from evaluation.console import format_columns, format_table
from evaluation.cost import Cost, mean_cost
from evaluation.perplexity.report import PerplexityReport
from evaluation.perplexity.scoring import PERPLEXITY_KEYS


@dataclass(frozen=True)
class ZeroShotReport:
    """The numbers of one model on some sets, and everything needed to repeat them."""

    reports: Mapping[str, PerplexityReport]
    """What was measured on each set, by its name; at least one."""

    @property
    def _any(self) -> PerplexityReport:
        return next(iter(self.reports.values()))

    @property
    def cost(self) -> Cost:
        """That of all sets together: FLOPs and steps are means over their tokens."""
        costs = [report.cost for report in self.reports.values()]
        counts = [report.totals.tokens for report in self.reports.values()]
        return mean_cost(costs, counts)

    @property
    def perplexity_key(self) -> str:
        """What the perplexities are, by the kind of the model's likelihood."""
        return PERPLEXITY_KEYS[self._any.likelihood]

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file.

        On top, for ``evaluate.py table``, what all sets have in common and a perplexity of each;
        under ``sets`` the whole result of each, as of ``evaluate.py perplexity``.
        """
        report, key = self._any, self.perplexity_key
        return {
            **{f"{name}_{key}": r.totals.perplexity for name, r in self.reports.items()},
            "likelihood": report.likelihood,
            "causal": report.causal,
            **self.cost.as_dict(),
            "model": report.model,
            "parameters": report.parameters,
            "train_tokens": report.train_tokens,
            "checkpoint": report.checkpoint,
            "sets": {name: r.as_dict() for name, r in self.reports.items()},
        }

    def as_table(self) -> str:
        """Returns a row for each set, and what holds for all of them."""
        header = ["set", "split", self.perplexity_key.replace("_", " "), "bits per byte", "tokens"]
        rows = [[name, *_row(name, report)] for name, report in self.reports.items()]
        report = self._any
        common = {
            "likelihood": report.likelihood,
            "causal": "yes" if report.causal else "no",
            **self.cost.as_cells(),
            "checkpoint": report.checkpoint,
        }
        return f"{format_columns([header, *rows])}\n\n{format_table(common)}"


def _row(name: str, report: PerplexityReport) -> list[str]:
    """Returns split, perplexity, bits per byte and tokens of a set; less than all is told."""
    totals, how = report.totals, report.settings
    limited = how["batches"] < how["of_batches"]
    part = f" ({how['batches']} of {how['of_batches']} batches)" if limited else ""
    bits = "unknown" if totals.bits_per_byte is None else f"{totals.bits_per_byte:.4f}"
    return [_split(name, report), f"{totals.perplexity:.2f}", bits, f"{totals.tokens:,}{part}"]


def _split(name: str, report: PerplexityReport) -> str:
    """Returns the hub's split, or that the text is of files that may be anything."""
    arguments = report.data["recipe"]["init_args"]
    inner = arguments.get("corpus")
    if isinstance(inner, Mapping):  # cut into sentences
        arguments = inner["init_args"]
    return zero_shot_set(name).split if arguments.get("data_files") is None else "own file"
