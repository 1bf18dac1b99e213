"""What an analysis found, as scalars, tables, pictures and text, and where that is written."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from callbacks.analysis.files import as_csv, as_pixels
from callbacks.analysis.token_text import pieces
from callbacks.fork_analysis import figures
from callbacks.fork_analysis.entropy import Parabola, Windows, fit_parabola, windows
from callbacks.fork_analysis.page import page
from callbacks.fork_analysis.statistics import TokenRow

OWN, REFERENCE = "this model", "the reference"
TAGS = {OWN: "entropy", REFERENCE: "reference_entropy"}


@dataclass(frozen=True)
class Report:
    """One analysis: of one model, at one step, on one part of the data."""

    title: str
    measures: list[dict[str, float]]
    """Of each fork layer, see ``statistics.MEASURES``."""
    rows: list[TokenRow]
    """All analysed rows."""
    tokenizer: Any
    """The data's."""
    shown_rows: int
    """How many of the rows are written out token by token."""
    _texts: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        """Decodes the rows that are shown."""
        shown = [pieces(self.tokenizer, row.ids) for row in self.rows[: self.shown_rows]]
        object.__setattr__(self, "_texts", shown)

    @cached_property
    def fits(self) -> dict[str, tuple[Windows, Parabola | None]]:
        """Windows and their parabola, by whose entropies these are."""
        found = {OWN: windows(self.rows)}
        if any(row.reference_entropy is not None for row in self.rows):
            found[REFERENCE] = windows(self.rows, reference=True)
        return {
            name: (part, fit_parabola(part.entropy, part.normalised))
            for name, part in found.items()
        }

    def scalars(self) -> dict[str, float]:
        """Returns finite values by tag: ``forks/layer1/survival``, ``forks/entropy/curvature``."""
        values = {f"forks/{name}": self.measures[-1][name] for name in ("per_token", "budget_use")}
        for number, layer in enumerate(self.measures, start=1):
            values |= {f"forks/layer{number}/{name}": value for name, value in layer.items()}
        for name, (part, parabola) in self.fits.items():
            values[f"forks/{TAGS[name]}/mean"] = _mean(part.entropy)
            if parabola is not None:
                values |= {f"forks/{TAGS[name]}/{k}": v for k, v in asdict(parabola).items()}
                values[f"forks/{TAGS[name]}/vertex"] = parabola.vertex
        return {tag: value for tag, value in values.items() if math.isfinite(value)}

    @cached_property
    def pictures(self) -> dict[str, Any]:
        """Matplotlib figures by name."""
        drawn = {"layers": figures.layers_figure(self.measures, self.rows)}
        drawn["entropy"] = figures.entropy_figure(self.fits)
        if self._texts:
            drawn["tokens"] = figures.tokens_figure(self.rows[0], self._texts[0])
        return drawn

    def files(self) -> dict[str, str]:
        """Returns the texts of the CSV files and the page, by the end of their name."""
        shown = self.rows[: self.shown_rows]
        scalars = [{"name": tag, "value": value} for tag, value in self.scalars().items()]
        return {
            "scalars.csv": as_csv(scalars),
            "windows.csv": as_csv(self._window_records()),
            "tokens.csv": as_csv(self._token_records()),
            "text.html": page(self.title, self.measures, shown, self._texts),
        }

    def _window_records(self) -> list[dict[str, Any]]:
        own = self.fits[OWN][0]
        columns = {"entropy": own.entropy, "forks": own.forks, "normalised": own.normalised}
        if REFERENCE in self.fits:
            columns["reference_entropy"] = self.fits[REFERENCE][0].entropy
        return _records(columns)

    def _token_records(self) -> list[dict[str, Any]]:
        records = []
        for number, (row, texts) in enumerate(zip(self.rows, self._texts, strict=False)):
            columns: dict[str, Any] = {
                "row": [number] * len(row.ids),
                "place": range(len(row.ids)),
                "id": row.ids,
                "text": texts,
                **{f"streams_layer{i}": part for i, part in enumerate(row.streams, start=1)},
                "score_original": row.original_score,
                "score_forks": row.fork_score,
                "entropy": row.entropy,
            }
            if row.reference_entropy is not None:
                columns["reference_entropy"] = row.reference_entropy
            records += _records(columns)
        return records


def log(report: Report, writer: Any, step: int) -> None:
    """Hands scalars, histograms and pictures to a TensorBoard writer, all below ``forks/``."""
    for tag, value in report.scalars().items():
        writer.add_scalar(tag, value, step)
    streams = np.concatenate([row.streams for row in report.rows], axis=1)
    for number, counts in enumerate(streams, start=1):
        writer.add_histogram(f"forks/layer{number}/streams", counts, step)
    for name, figure in report.pictures.items():
        writer.add_image(f"forks/{name}", as_pixels(figure), step, dataformats="HWC")


def _records(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns one dict a line of a table that is given by columns of the same length."""
    lines = zip(*columns.values(), strict=True)
    return [dict(zip(columns, line, strict=True)) for line in lines]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan
