"""The numbers of ``evaluate.py perplexity``."""

from dataclasses import dataclass
from typing import Any, Literal

from evaluation.console import format_table
from evaluation.cost import Cost
from evaluation.perplexity.autoregressive import PairedScores
from evaluation.perplexity.scoring import Totals

Mode = Literal["blockwise", "autoregressive"]

NO_BLOCKWISE = "none (a part belongs to whole windows)"
"""What the table has where the likelihood of a window is not that of its targets alone."""


@dataclass(frozen=True)
class PerplexityReport:
    """The numbers of one model on one corpus, and everything needed to repeat them."""

    totals: Totals
    pairs: PairedScores | None
    """What autoregressive mode measured; None in blockwise mode."""
    likelihood: str
    """Kind of the likelihood: exact, lower_bound, estimate or noncausal."""
    causal: bool
    cost: Cost
    """Of scoring in one pass: of a window, or of a document of average length."""
    model: str
    """Name of the model's class."""
    parameters: int
    """N, trainable numbers without embeddings and output matrix."""
    train_tokens: int | None
    """D, lexical tokens of the text the model was trained on; None where that is not known."""
    checkpoint: str
    data: dict[str, Any]
    settings: dict[str, Any]

    @property
    def mode(self) -> Mode:
        """How targets were scored: windows in one pass, or each behind its own prefix."""
        return "blockwise" if self.pairs is None else "autoregressive"

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file."""
        return {
            "mode": self.mode,
            **self.totals.as_dict(self.likelihood),
            "likelihood": self.likelihood,
            "causal": self.causal,
            **({} if self.pairs is None else self.pairs.as_dict()),
            **self.cost.as_dict(),
            "model": self.model,
            "parameters": self.parameters,
            "train_tokens": self.train_tokens,
            "checkpoint": self.checkpoint,
            "data": self.data,
            "settings": self.settings,
        }

    def as_table(self) -> str:
        """Returns the result for people."""
        values = {**self.as_dict(), **self.data}
        values |= {key: f"{values[key]:.4g}" for key in values if "flops_per_token" in key}
        if values.get("trained_on") in (None, values["fingerprint"]):
            values.pop("trained_on", None)
        if self.pairs is not None and self.pairs.blockwise is None:
            values |= dict.fromkeys(("blockwise", "difference"), NO_BLOCKWISE)
        values |= {key: self.settings[key] for key in ("budget", "seed") if key in self.settings}
        hidden = ("data", "settings", "recipe", "model", "parameters", "train_tokens")
        shown = _flat({key: value for key, value in values.items() if key not in hidden})
        return format_table({k.replace("_", " "): _readable(v) for k, v in shown.items()})


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a dict without dicts in it: their keys behind their name."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = value if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else {f"{key}_{k}": v for k, v in inner.items()}
    return flat


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
