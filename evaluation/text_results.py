"""Results of a loaded model for a text: likelihood and logits, and their display in notebooks."""

import base64
import html
import io
from dataclasses import dataclass
from typing import Any

import pandas as pd
from torch import Tensor

from evaluation.scoring import Totals
from lightning_models.outputs import Likelihood

MAX_ROWS = 20
"""Maximum number of rows of a table in a notebook."""
DARKEST = 8.0
"""Nats of a token in full colour."""


def _describe(likelihood: Likelihood, causal: bool) -> str:
    return f"{likelihood}, {'causal' if causal else 'not causal'}"


@dataclass(frozen=True, repr=False)
class TextScore:
    """Log-likelihood of a text; a notebook shows its tokens, the less expected the darker."""

    nats_per_token: float
    """Mean negative log-likelihood of a scored token, including terms of the whole text."""
    likelihood: Likelihood
    """Kind: 'exact', 'lower_bound' (of the likelihood), 'estimate' or 'noncausal'."""
    causal: bool
    """Whether the prediction of a token never depends on later tokens."""
    totals: Totals
    """Sums in nats."""
    tokens: pd.DataFrame
    """One row a scored token: ``place`` (its index), ``id``, ``text``, ``nats``. The nats sum to
    the total without ``totals.sequence_nats``, the KL divergence of the whole text."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the numbers under the keys of ``evaluate.py perplexity --output``."""
        facts = {"likelihood": self.likelihood, "causal": self.causal}
        return {**self.totals.as_dict(self.likelihood), **facts}

    def __repr__(self) -> str:
        facts = _describe(self.likelihood, self.causal)
        return (
            f"TextScore: {self.nats_per_token:.4f} nats/token ({facts}), {len(self.tokens)} tokens"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p><pre>{self._coloured()}</pre>"

    def _coloured(self) -> str:
        spans = []
        for text, nats in zip(self.tokens["text"], self.tokens["nats"], strict=True):
            share = min(max(nats / DARKEST, 0.0), 1.0)
            spans.append(
                f'<span title="{nats:.3f} nats" style="background: rgba(220, 60, 40, {share:.2f})">'
                f"{html.escape(text)}</span>"
            )
        return "".join(spans)


@dataclass(frozen=True, repr=False)
class TokenLogits:
    """Logits of the next token after each token that a model has read."""

    logits: Tensor
    """(B, T, V), float32 or float64: row t is the distribution of the token after the first t + 1.
    V is ``config.padded_vocab_size``; ids from ``config.vocab_size`` on are never sampled."""
    likelihood: Likelihood
    """Kind of the log-likelihood ``logits.log_softmax(-1)``, see ``TextScore``."""
    causal: bool
    """Whether row t never depends on later tokens. If false, only the last row is a prediction:
    the others have seen the tokens that they predict."""

    def __repr__(self) -> str:
        return (
            f"TokenLogits: {tuple(self.logits.shape)} ({_describe(self.likelihood, self.causal)})"
        )


def figure_page(title: str, figure: Any, table: pd.DataFrame) -> str:
    """Returns HTML for notebooks with a Matplotlib figure and the first rows of a table."""
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    data = base64.b64encode(file.getvalue()).decode()
    rows = table.to_html(max_rows=MAX_ROWS, index=False)
    title = html.escape(title)
    return f'<p>{title}</p><img alt="{title}" src="data:image/png;base64,{data}">{rows}'
