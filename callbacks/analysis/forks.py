"""Analysis of forks and how they are used (Thoughtbubbles, arXiv 2510.00219).

=============================================  =====================================================
paper                                          code
=============================================  =====================================================
Fig. 4, forks against output entropy           ``windows``, ``fit_parabola``
Fig. 5, attention to forks of the same token   ``ForkRecorder.attention``
Fig. 7, streams of each token by fork layer    ``ForkRecorder.tokens``, ``tokens_figure``
=============================================  =====================================================
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from torch import Tensor

from callbacks.analysis.base import (
    Analysis,
    Findings,
    as_float64,
    nothing_recorded,
    real_tokens,
    rows_of,
)
from callbacks.analysis.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    AnalysisReport,
    Draw,
    Shown,
    Tables,
    draw_bars,
    finish,
    panels,
    scalars_of,
    shades,
)
from callbacks.analysis.token_text import pieces, short_label
from callbacks.hooks import check_minimum
from callbacks.trainer_state import tokenizer_of

MEASURES = {
    "per_token": "forks per token after the fork layer",
    "created": "new forks per token",
    "kept": "older forks kept, per token",
    "deleted": "older forks deleted, per token",
    "survival": "share of older forks that are kept",
    "deletion": "share of older forks that are deleted",
    "orphans": "share of new forks whose parent is deleted",
    "score_originals": "mean P of originals",
    "score_forks": "mean P of forks",
    "budget_use": "streams as a share of kappa",
    "attention_self": "attention of originals of forked tokens to themselves, per key",
    "attention_own_forks": "their attention to forks of the same token, per key",
    "attention_others": "their attention to other tokens' streams, per key",
}
"""Measures reported for each fork layer, in order."""

WINDOW = 4
"""Length of a window in tokens, as in the paper."""
MAX_WEIGHTS = 1 << 26
"""Maximum number of attention weights per layer in memory, which limits the rows per batch."""
STREAMS = 4
"""Number of streams per token that this limit assumes."""
MAX_POINTS = 4000  # in a scatter plot
LINE_TOKENS, LINES = 16, 6  # in the map of tokens
MIN_TOKENS = 10  # minimum width of the map, so that its heading fits
TOKEN_WIDTH, NAME_WIDTH = 0.273, 0.9  # in inches: a token, and the names of fork layers


class ForkAnalysis(Analysis):
    """Analyses where a model forks, and how it uses its forks.

    It scores the first batches of a validation or test again. For each fork layer (numbered from 1)
    it reports the number of streams per token (Fig. 7 of arXiv 2510.00219), the survival and scores
    of forks, the share of the budget in use, and the attention of originals to their forks (Fig.
    5). It also plots forks against output entropy in windows of 4 tokens, with a fitted parabola
    (Fig. 4).

    Scalars are ``forks/...``, see ``fork_report``; files are in ``fork_analysis``.
    ``callbacks.analysis`` describes what all analyses share.

    Args:
        num_batches: Number of validation batches to analyse.
        every_n_validations: Analyse every n-th validation during training. If 0, analyse only under
            the verbs validate and test.
        reference_ckpt: Checkpoint of another model, of any method, trained with the same tokenizer.
            Forks are also plotted against its entropies. Null means no reference.
        shown_rows: Number of rows of text that ``tokens`` lists token by token.
        attention: Whether to analyse attention weights, which needs the slow attention backend.
    """

    of_tests = True
    tag = "fork_analysis"
    image_tag = "forks"
    cards = ("forks/per_token", "forks/budget_use", "forks/entropy/mean")

    def __init__(
        self,
        num_batches: int = 4,
        every_n_validations: int = 1,
        reference_ckpt: str | None = None,
        shown_rows: int = 4,
        attention: bool = True,
    ) -> None:
        super().__init__(every_n_validations, num_batches)
        check_minimum("shown_rows", shown_rows, 0)
        self.reference_ckpt = reference_ckpt
        self.shown_rows = shown_rows
        self.attention = attention
        self._reference: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.reference_ckpt is not None and self._reference is None:
            self._reference = self._load_reference(pl_module)

    def _load_reference(self, pl_module: Any) -> Any:
        reference = pl_module.from_checkpoint(self.reference_ckpt)
        vocab_size, reference_size = pl_module.config.vocab_size, reference.config.vocab_size
        if vocab_size != reference_size:
            raise ValueError(
                f"reference_ckpt ({self.reference_ckpt}) has a vocabulary of {reference_size}, but "
                f"the model has {vocab_size}; use a checkpoint trained with the same tokenizer"
            )
        return reference

    def _collect(
        self, tokenizer: Any, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        step = self._rows_at_once(pl_module, batch["tokens"])
        with self._reference_on(pl_module.device):
            for start in range(0, len(batch["tokens"]), step):
                part = rows_of(batch, start, start + step)
                recorder = ForkRecorder(self.attention)
                pl_module.recorded(part, **recorder.consumers())
                if not recorder.forked:
                    missing = "forks (no method that forks, or no fork layers)"
                    raise nothing_recorded(pl_module, missing)
                tokens = recorder.tokens(part)
                if self._reference is not None:
                    tokens = self._with_reference(part, tokens)
                findings.add("layers", recorder.sums)
                findings.add("tokens", tokens)

    def _rows_at_once(self, pl_module: Any, tokens: Tensor) -> int:
        """Returns the number of rows to score at a time, which is the same on all ranks."""
        if not self.attention:
            return len(tokens)
        weights = pl_module.config.num_heads * (STREAMS * tokens[0].numel()) ** 2
        return max(1, MAX_WEIGHTS // weights)

    @contextmanager
    def _reference_on(self, device: torch.device) -> Iterator[None]:
        """Moves the reference, if there is one, to the device and back."""
        reference = self._reference
        if reference is None:
            yield
            return
        reference.to(device)
        try:
            yield
        finally:
            reference.cpu()

    def _with_reference(self, batch: dict[str, Any], tokens: pd.DataFrame) -> pd.DataFrame:
        """Returns the tokens with the reference's entropies."""
        entropies: list[Tensor] = []
        self._reference.recorded(batch, entropy=lambda entropy: entropies.append(entropy))
        if not entropies:
            self._warn(
                f"{type(self._reference).__name__} of reference_ckpt records no entropies, so "
                "there is nothing to compare with"
            )
            self._reference = None
            return tokens
        return tokens.assign(reference_entropy=as_float64(entropies[-1])[real_tokens(batch)])

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> AnalysisReport:
        return fork_report(findings, tokenizer_of(trainer), self.shown_rows)

    def _text_report(self, tokenizer: Any, pl_module: Any, findings: Findings) -> AnalysisReport:
        tokens = _shown(with_rows(findings["tokens"]), tokenizer, 1).drop(columns="row")
        layers = measures_by_layer(findings["layers"])
        return AnalysisReport(
            tables={"tokens": tokens, "layers": layers, "streams": streams(tokens)},
            figures={"tokens": tokens_figure, "layers": layers_figure},
        )


# ---- collecting


class ForkRecorder:
    """Reduces the records of one pass to sums per fork layer and values per token.

    Args:
        attention: Whether to record attention, for which the network runs on the slow backend.
    """

    def __init__(self, attention: bool = True) -> None:
        self.sums: list[dict[str, Any]] = []
        """Rows with ``layer`` (1-based), ``measure``, ``total`` and ``count``."""
        self._attention = attention
        self._latest: Any = None
        self._layer = 0
        self._streams: list[Tensor] = []
        self._fates: dict[str, Tensor] = {}
        self._entropy: Tensor | None = None

    @property
    def forked(self) -> bool:
        """Whether the network has recorded a fork layer."""
        return self._latest is not None

    def consumers(self) -> dict[str, Callable[..., None]]:
        """Returns the recording functions by name of the statistic."""
        consumers: dict[str, Callable[..., None]] = {"fork": self.fork, "entropy": self.entropy}
        return consumers | ({"attention": self.attention} if self._attention else {})

    def fork(
        self,
        *,
        ordinal: int,
        before: Any,
        after: Any,
        parent: Tensor,
        is_fork: Tensor,
        budgets: Tensor | None = None,
    ) -> None:
        """Records the decisions of a fork layer.

        Args:
            ordinal: Index of the fork layer, from 0.
            before: Streams before the layer, with ``token``, ``original``, ``real`` (B, N).
            after: Streams after the layer, also with ``log_p``, ``token``, ``count``,
                ``num_tokens``.
            parent: int64 (B, N'), indices into ``before``.
            is_fork: bool (B, N'), whether a stream is new.
            budgets: int64 (B,), kappa of each row. None if there is no budget.
        """
        self._latest, self._layer = after, ordinal + 1
        self._streams.append(_by_token(after, after.count, after.original))
        alive = _kept(before, after, parent, is_fork)  # (B, N), over the streams before
        older = before.real & ~before.original
        forks = after.real & ~after.original
        p = after.log_p.detach().double().exp()
        for name, streams, chosen in (
            ("created", after, is_fork),
            ("kept", before, older & alive),
            ("deleted", before, older & ~alive),
        ):
            self._fates[f"{name}_layer{self._layer}"] = _by_token(streams, chosen.long(), chosen)
        tokens, num_older = float(after.original.sum()), float(older.sum())
        created, kept = float(is_fork.sum()), float((older & alive).sum())
        for measure, total, count in (
            ("per_token", forks.sum(), tokens),
            ("created", created, tokens),
            ("kept", kept, tokens),
            ("deleted", num_older - kept, tokens),
            ("survival", kept, num_older),
            ("deletion", num_older - kept, num_older),
            ("orphans", (is_fork & ~alive.gather(1, parent)).sum(), created),
            ("score_originals", (p * after.original).sum(), tokens),
            ("score_forks", (p * forks).sum(), forks.sum()),
        ):
            self._add(measure, total, count)
        if budgets is not None:
            self._add("budget_use", after.lengths.sum(), budgets[after.lengths > 0].sum())

    def attention(self, *, weights: Tensor) -> None:
        """Accumulates means of attention weights (B, H, N, N) (Fig. 5).

        The queries are the originals of forked tokens, after the first fork layer. Means are also
        taken over heads, over the layers up to the next fork layer, and over the keys of a query.
        """
        streams = self._latest
        if streams is None or weights.shape[2:] != 2 * streams.token.shape[1:]:
            return
        row, query = (streams.original & (streams.count > 1)).nonzero(as_tuple=True)
        token, own_forks = streams.token[row, query], streams.count[row, query] - 1
        seen = weights.detach()[row, :, query].double().mean(dim=1)  # (queries, N)
        of_self = seen.gather(1, query[:, None])[:, 0]
        of_token = (seen * (streams.token[row] == token[:, None])).sum(dim=1)
        others = query - own_forks  # number of streams of other tokens, all further left
        for measure, total, keys in (
            ("attention_self", of_self, torch.ones_like(query)),
            ("attention_own_forks", of_token - of_self, own_forks),
            ("attention_others", seen.sum(dim=1) - of_token, others),
        ):
            is_visible = keys > 0
            self._add(measure, (total[is_visible] / keys[is_visible]).sum(), is_visible.sum())

    def entropy(self, *, entropy: Tensor) -> None:
        """Records output entropies (B, T) in nats."""
        self._entropy = entropy.detach()

    def tokens(self, batch: dict[str, Any]) -> pd.DataFrame:
        """Returns a table with one row per real token of the scored batch.

        The columns are ``place``, the index within the row; ``id``; ``streams_layer<l>``, the
        number of streams after fork layer l, at least 1; ``score_original``, P of the original, and
        ``score_forks``, the mean P of its forks (nan if it has none), both after the last fork
        layer; and ``entropy`` of the output in nats.

        The batch has ``tokens`` (B, T), and ``mask`` if rows are padded.
        """
        real, streams = real_tokens(batch), self._latest
        p = streams.log_p.detach().double().exp()
        forks = _by_token(streams, p, streams.real & ~streams.original) / (self._streams[-1] - 1)
        columns = {f"streams_layer{i}": part for i, part in enumerate(self._streams, start=1)}
        columns |= {
            "score_original": _by_token(streams, p, streams.original),
            "score_forks": forks,
            "entropy": torch.full_like(forks, torch.nan)
            if self._entropy is None
            else self._entropy.double(),
        }
        chosen = {name: values.cpu().numpy()[real] for name, values in columns.items()}
        position, ids = real.cumsum(axis=1)[real] - 1, batch["tokens"].cpu().numpy()[real]
        return pd.DataFrame({"place": position, "id": ids, **chosen})

    def fates(self, batch: dict[str, Any]) -> pd.DataFrame:
        """Returns a table of the forks of each real token at each fork layer l.

        The columns count new forks, ``created_layer<l>``, and older forks that survive the layer,
        ``kept_layer<l>``, or do not, ``deleted_layer<l>``.

        The batch has ``tokens`` (B, T), and ``mask`` if rows are padded.
        """
        real = real_tokens(batch)
        return pd.DataFrame({name: n.cpu().numpy()[real] for name, n in self._fates.items()})

    def _add(self, measure: str, total: Any, count: Any) -> None:
        row = {"measure": measure, "total": float(total), "count": float(count)}
        self.sums.append({"layer": self._layer, **row})


def _kept(before: Any, after: Any, parent: Tensor, is_fork: Tensor) -> Tensor:
    """Returns a mask (B, N) of the streams before a fork layer that survive it."""
    # a surviving stream is the parent of a stream after the layer that is not a new fork
    kept = (after.real & ~is_fork).long()
    return torch.zeros_like(before.token).scatter_add(1, parent, kept) > 0


def _by_token(streams: Any, values: Tensor, chosen: Tensor) -> Tensor:
    """Sums the values (B, N) of each token's chosen streams into (B, T)."""
    out = values.new_zeros(len(values), streams.num_tokens + 1)  # the last column is for padding
    return out.scatter_add(1, streams.token, values * chosen)[:, :-1]


# ---- measures


def measures_by_layer(sums: pd.DataFrame) -> pd.DataFrame:
    """Returns the means named in ``MEASURES``, one row per fork layer; nan if the count is 0.

    ``sums`` comes from ``ForkRecorder``.
    """
    grouped = sums.groupby(["layer", "measure"])[["total", "count"]].sum()
    means = (grouped["total"] / grouped["count"].where(grouped["count"] != 0)).unstack("measure")
    return means.reindex(columns=list(MEASURES)).reset_index()


def streams(tokens: pd.DataFrame) -> pd.DataFrame:
    """Returns the ``share`` of tokens with each number of ``streams`` after each fork ``layer``."""
    counts = tokens.filter(like="streams_layer")
    counts = counts.set_axis(range(1, counts.shape[1] + 1), axis=1)
    shares = [part.value_counts(normalize=True).sort_index() for _, part in counts.items()]
    table = pd.concat(shares, keys=counts.columns, names=["layer", "streams"])
    return table.rename("share").reset_index()


def with_rows(tokens: pd.DataFrame) -> pd.DataFrame:
    """Returns the tokens with the index of their ``row`` as the first column."""
    numbered = tokens.copy()
    numbered.insert(0, "row", (tokens["place"] == 0).cumsum() - 1)
    return numbered


def windows(tokens: pd.DataFrame) -> pd.DataFrame:
    """Returns means over complete windows of ``WINDOW`` tokens.

    The columns are ``entropy`` of the output in nats; ``reference_entropy`` if there is a
    reference; ``forks``, the number per token after the last fork layer; and ``normalised``, forks
    divided by their mean over all windows, or 0 if there are none.

    NOTE(paper): Fig. 4 does not define the normalisation of its forks.

    ``tokens`` comes from ``with_rows``.
    """
    entropies = [name for name in ("entropy", "reference_entropy") if name in tokens]
    forks = tokens.filter(like="streams_layer").iloc[:, -1] - 1
    grouped = tokens.assign(forks=forks).groupby(["row", tokens["place"] // WINDOW])
    means = grouped[[*entropies, "forks"]].mean()[grouped.size() == WINDOW]
    mean = means["forks"].mean() if len(means) else 0.0
    means["normalised"] = means["forks"] / mean if mean else means["forks"]
    return means[["entropy", "forks", "normalised", *entropies[1:]]].reset_index(drop=True)


def fit_parabola(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Fits ``curvature x^2 + slope x + constant`` by least squares.

    Returns:
        The three coefficients, ``r2`` (coefficient of determination, at most 1) and ``vertex`` (x
        of the extremum, nan for a line). Empty for fewer than three distinct x, or constant y.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(np.unique(x)) < 3 or np.ptp(y) == 0:
        return {}
    curvature, slope, constant = map(float, np.polyfit(x, y, 2))
    rest = y - np.polyval([curvature, slope, constant], x)
    return {
        "curvature": curvature,
        "slope": slope,
        "constant": constant,
        "r2": float(1 - rest.var() / y.var()),
        "vertex": -slope / (2 * curvature) if curvature else math.nan,
    }


def fits_of(means: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Fits a parabola of forks against each entropy column of ``windows``."""
    names = [name for name in ("entropy", "reference_entropy") if name in means]
    forks = means["normalised"].to_numpy()
    return {name: fit_parabola(means[name].to_numpy(), forks) for name in names}


def fork_report(findings: Findings, tokenizer: Any, shown_rows: int) -> AnalysisReport:
    """Returns the report of an analysis.

    Scalars are ``forks/per_token`` and ``forks/budget_use`` after the last fork layer,
    ``forks/layer<l>/<measure>``, and the mean and the parabola of ``entropy`` and
    ``reference_entropy``, such as ``forks/entropy/curvature``.

    ``findings`` has ``layers`` and ``tokens``. Without a tokenizer, no text is shown.
    """
    measures, tokens = measures_by_layer(findings["layers"]), with_rows(findings["tokens"])
    means = windows(tokens)
    fits = fits_of(means)
    shown_tokens = _shown(tokens, tokenizer, shown_rows)
    return AnalysisReport(
        scalars=_scalars(measures, means, fits),
        tables={
            "windows": means,
            "tokens": shown_tokens,
            "layers": measures,
            "streams": streams(tokens),
        },
        figures=FIGURES,
    )


def _scalars(
    measures: pd.DataFrame, means: pd.DataFrame, fits: dict[str, dict[str, float]]
) -> dict[str, float]:
    last = measures.iloc[-1]
    values = {f"forks/{name}": last[name] for name in ("per_token", "budget_use")}
    values |= scalars_of(measures, "forks/layer{layer}/{name}", MEASURES)
    for name, fit in fits.items():
        values[f"forks/{name}/mean"] = means[name].mean()
        values |= {f"forks/{name}/{key}": value for key, value in fit.items()}
    return values


def _shown(tokens: pd.DataFrame, tokenizer: Any, rows: int) -> pd.DataFrame:
    table = tokens[tokens["row"] < (0 if tokenizer is None else rows)].copy()
    texts = [text for _, row in table.groupby("row") for text in pieces(tokenizer, row["id"])]
    table.insert(3, "text", texts)
    return table


# ---- figures of the tables


def entropy_figure(tables: Tables) -> Any:
    """Draws forks in windows of tokens against the entropy of the output (Fig. 4)."""
    means = tables["windows"]
    fits = fits_of(means)
    names = {"entropy": "this model", "reference_entropy": "the reference"}
    figure, axes = panels(5.6 * len(fits), 4.2, len(fits), sharey=True)
    for ax, (name, fit) in zip(axes, fits.items(), strict=True):
        x = means[name].to_numpy()
        _scatter(ax, x, means["normalised"].to_numpy())
        if fit:
            line = np.linspace(x.min(), x.max(), 100)
            shape = "concave" if fit["curvature"] < 0 else "convex"
            outside = "" if x.min() <= fit["vertex"] <= x.max() else ", outside"
            label = f"parabola: {shape}, vertex at {fit['vertex']:.2f} nats{outside}"
            curve = np.polyval([fit["curvature"], fit["slope"], fit["constant"]], line)
            label += f", R² {fit['r2']:.3f}"
            ax.plot(line, curve, color=ORANGE, linewidth=2, label=label, zorder=4)
        ax.set_title(f"entropy of {names[name]}", fontsize=10)
        finish(ax, f"mean entropy of {WINDOW} tokens (nats)")
    axes[0].set_ylabel(f"forks of these {WINDOW} tokens / mean over all windows")
    return figure


def _scatter(ax: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Draws the windows (or an evenly spaced subset) and their means by decile of x."""
    step = -(-len(x) // MAX_POINTS) or 1
    ax.scatter(x[::step], y[::step], s=7, alpha=0.35, color=GREY, linewidths=0, label="windows")
    deciles = [part for part in np.array_split(np.argsort(x), 10) if len(part)]
    ax.errorbar(
        [x[part].mean() for part in deciles],
        [y[part].mean() for part in deciles],
        yerr=[y[part].std() / len(part) ** 0.5 for part in deciles],
        fmt="o",
        markersize=4.5,
        color=BLUE,
        label="decile means with standard error",
        zorder=3,
    )


def tokens_figure(tables: Tables) -> Any:
    """Draws the streams of the first tokens of the first row after each fork layer (Fig. 7)."""
    row = tables["tokens"]
    row = row[row["row"] == 0] if "row" in row else row
    row = row.iloc[: LINE_TOKENS * LINES]
    streams = row.filter(like="streams_layer").to_numpy().T  # (fork layers, T)
    labels = [short_label(text) for text in row["text"]]
    layers, max_streams = len(streams), int(streams.max())
    starts = range(0, len(row), LINE_TOKENS)
    columns = max(MIN_TOKENS, min(len(row), LINE_TOKENS))
    width = NAME_WIDTH + TOKEN_WIDTH * columns
    figure, axes = panels(width, (0.9 + 0.3 * layers) * len(starts) + 0.4, 1, len(starts))
    for ax, start in zip(axes, starts, strict=True):
        part, names = streams[:, start : start + LINE_TOKENS], labels[start : start + LINE_TOKENS]
        ax.imshow(part, cmap="Blues", vmin=0.4, vmax=max_streams + 0.8, aspect="auto")
        for (layer, column), count in np.ndenumerate(part):
            color = "white" if count > 0.6 * max_streams else "#203040"
            ax.text(column, layer, f"{count}", ha="center", va="center", fontsize=6.5, color=color)
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=7, parse_math=False)
        ax.set_yticks(range(layers), [f"fork layer {i + 1}" for i in range(layers)], fontsize=8)
        ax.set_xlim(-0.5, columns - 0.5)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    figure.suptitle("streams of each token after each fork layer", fontsize=10)
    return figure


def layers_figure(tables: Tables) -> Any:
    """Draws streams per token, fate of forks, scores and attention (Fig. 5) by fork layer."""
    measures = tables["layers"]
    attention = measures["attention_self"].notna().any()
    figure, parts = panels(14 if attention else 11, 3.6, 4 if attention else 3)
    shares = tables["streams"].pivot(index="streams", columns="layer", values="share").fillna(0)
    colors = zip(shares, shades(len(shares.columns)), strict=True)
    forks = {layer: (f"fork layer {layer}", color) for layer, color in colors}
    if forks:  # empty if rows contain only padding
        draw_bars(parts[0], shares.reset_index(), "streams", forks)
    parts[0].set_title("share of tokens", fontsize=10)
    finish(parts[0], "streams of a token", whole=True)
    fates = {
        "created": ("created", GREEN),
        "kept": ("older, kept", BLUE),
        "deleted": ("older, deleted", ORANGE),
    }
    draw_bars(parts[1], measures, "layer", fates)
    parts[1].set_title("forks per token", fontsize=10)
    parts[1].margins(y=0.4)  # room for the legend
    finish(parts[1], "fork layer", whole=True, loc="upper left")
    scores = {"score_originals": ("originals", GREY), "score_forks": ("forks", BLUE)}
    _log_points(parts[2], measures, scores, "mean score P")
    if attention:
        columns = {
            "attention_self": ("to itself", GREY),
            "attention_own_forks": ("to own forks", BLUE),
            "attention_others": ("to other tokens", ORANGE),
        }
        _log_points(parts[3], measures, columns, "attention of forked originals, per key")
    return figure


def _log_points(ax: Any, measures: pd.DataFrame, columns: Shown, title: str) -> None:
    """Draws each measure on a logarithmic scale, as scores and attention span many decades."""
    values = measures[list(columns)].where(lambda table: table > 0)
    for name, (label, color) in columns.items():
        ax.plot(measures["layer"], values[name], "o-", color=color, label=label)
    ax.set_yscale("log")
    if values.notna().any(axis=None):
        ax.set_ylim(values.min(axis=None) / 2, values.max(axis=None) * 4)  # room for the legend
    ax.set_title(title, fontsize=10)
    finish(ax, "fork layer", whole=True, loc="upper left")


FIGURES: dict[str, Draw] = {
    "layers": layers_figure,
    "entropy": entropy_figure,
    "tokens": tokens_figure,
}
