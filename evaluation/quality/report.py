"""What ``evaluate.py quality`` found out, for people and for files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from evaluation.console import format_columns, format_table
from evaluation.cost import Cost
from evaluation.quality.judge import JudgedTexts
from evaluation.quality.texts import Written


@dataclass(frozen=True)
class Continuations:
    """Continuations of human prompts, beside the human texts."""

    written: Written
    mauve: list[float]
    """Of each seed of the k-means within."""
    human_texts: int
    """How many they were compared with."""

    @property
    def mauve_deviation(self) -> float:
        """Standard deviation over those seeds; nan of one."""
        return stdev(self.mauve) if len(self.mauve) > 1 else math.nan

    def headline(self) -> dict[str, float]:
        """Returns the number to compare, by its name."""
        return {"mauve": mean(self.mauve)}

    def details(self) -> dict[str, Any]:
        """Returns what else there is to know."""
        return {
            "mauve_by_seed": self.mauve,
            "mauve_deviation": self.mauve_deviation,
            "human_texts": self.human_texts,
            **_details(self.written),
        }


@dataclass(frozen=True)
class Samples:
    """Samples from the start token alone, and what a judge made of them."""

    written: Written
    judged: JudgedTexts | None
    """None without a judge."""
    token_entropy: float
    """In nats."""

    def headline(self) -> dict[str, float]:
        """Returns the numbers to compare, by their names."""
        judged = self.judged
        found = {} if judged is None else {"generative_perplexity": judged.totals.perplexity}
        return {
            **found,
            "token_entropy": self.token_entropy,
            "samples_per_second": self.written.texts_per_second,
        }

    def details(self) -> dict[str, Any]:
        """Returns what else there is to know."""
        if self.judged is None:
            return _details(self.written)
        return {
            "nats_per_token": self.judged.totals.nats_per_token,
            "judged_tokens": self.judged.totals.tokens,
            "cut_texts": self.judged.cut,
            "mean_of_perplexities": self.judged.mean_of_perplexities,
            **_details(self.written),
        }


def _details(written: Written) -> dict[str, Any]:
    return {
        "texts": len(written.new),
        "distinct_texts": written.distinct,
        "seconds": written.seconds,
        "texts_per_second": written.texts_per_second,
    }


@dataclass(frozen=True)
class QualityReport:
    """The numbers of one model, and everything needed to repeat them."""

    continuations: dict[str, Continuations]
    """By way of sampling; empty where they were not asked for."""
    samples: dict[str, Samples]
    """By way of sampling; empty where they were not asked for."""
    model: str
    """Name of the model's class."""
    checkpoint: str
    data: dict[str, Any] | None
    """Where the prompts are from; None without prompts."""
    settings: dict[str, Any]
    cost: Cost
    """Of writing all texts, at the length of the longest."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file.

        What ``evaluate.py table`` compares is on top, under ``<sampling>_<name>``.
        """
        return {
            **_headlines(self.continuations),
            **_headlines(self.samples),
            **self.cost.as_dict(),
            "conditional": {way: found.details() for way, found in self.continuations.items()},
            "unconditional": {way: found.details() for way, found in self.samples.items()},
            "model": self.model,
            "checkpoint": self.checkpoint,
            "data": self.data,
            "settings": self.settings,
        }

    def as_table(self) -> str:
        """Returns the result for people."""
        parts = []
        if self.continuations:
            header = ["continuations", "MAUVE", "texts", "different", "per second"]
            rows = [
                [name, _mauve(r), *_counts(r.written)] for name, r in self.continuations.items()
            ]
            parts.append(format_columns([header, *rows]))
        if self.samples:
            header = ["samples", "gen. perplexity", "entropy (nats)", "texts", "different"]
            rows = [
                [
                    name,
                    "-" if result.judged is None else f"{result.judged.totals.perplexity:.5g}",
                    f"{result.token_entropy:.4f}",
                    *_counts(result.written),
                ]
                for name, result in self.samples.items()
            ]
            parts.append(format_columns([[*header, "per second"], *rows]))
        shown = ("featurizer", "judge", "split", "batch_size", "precision", "device")
        facts = {**(self.data or {}), **self.settings}
        named = {key.replace("_", " "): str(facts[key]) for key in shown if key in facts}
        named |= {f"cut {name} texts": _cut(result) for name, result in self.samples.items()}
        named = {key: value for key, value in named.items() if value}
        facts = {**named, **self.cost.as_cells(), "checkpoint": self.checkpoint}
        parts.append(format_table(facts))
        return "\n\n".join(parts)


def _headlines(results: Mapping[str, Continuations | Samples]) -> dict[str, float]:
    return {
        f"{way}_{name}": value
        for way, found in results.items()
        for name, value in found.headline().items()
    }


def _cut(result: Samples) -> str:
    """Returns how many texts were judged in part; nothing where none was."""
    cut = 0 if result.judged is None else result.judged.cut
    return f"{cut} of {len(result.written.new)}, to the judge's context" if cut else ""


def _mauve(result: Continuations) -> str:
    deviation = result.mauve_deviation
    spread = "" if math.isnan(deviation) else f" +- {deviation:.4f}"
    return f"{mean(result.mauve):.4f}{spread}"


def _counts(written: Written) -> list[str]:
    return [str(len(written.new)), str(written.distinct), f"{written.texts_per_second:.4g}"]
