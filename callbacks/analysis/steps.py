"""Steps of a pondering model by token, and the gain of each step (PonderLM-3).

The paper is *PonderLM-3: Adaptive Token-Wise Pondering with Differentiable Masking* (arXiv
2603.02023).

=============================================  =====================================================
paper                                          code
=============================================  =====================================================
Fig. 4 (a), utility by difficulty              ``utility``
Fig. 4 (b), step-0 loss by executed steps      ``steps``
Fig. 5, counterfactual alpha                   ``sweep``
Fig. 8, convergence of Jacobi iterations       ``convergence`` in ``convergence.py``
Table 3, steps of single tokens                ``tokens``
Table 4, steps within words                    ``words`` in ``words.py``
=============================================  =====================================================
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
from torch import Tensor

from callbacks.analysis.base import (
    Analysis,
    Findings,
    Recorder,
    as_float64,
    first_tokens,
    nothing_recorded,
    real_tokens,
    rows_of,
)
from callbacks.analysis.convergence import (
    IterationFit,
    collect_iterations,
    convergence,
    convergence_figure,
    fit_iterations,
    rmse_by_iteration,
)
from callbacks.analysis.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    AnalysisReport,
    Draw,
    Tables,
    draw_bars,
    draw_lines,
    finish,
    panels,
    scalars_of,
)
from callbacks.analysis.token_text import PART, pieces, short_label
from callbacks.analysis.words import by_place, word_places, words, words_figure
from callbacks.dials import dialled, has_dial
from callbacks.hooks import check_minimum
from callbacks.trainer_state import tokenizer_of

DIAL = "alpha"
"""Field of a configuration that the sweep changes."""
BUCKETS = {"easy": GREEN, "medium": BLUE, "hard": ORANGE}
"""Thirds of the tokens by difficulty, with their colours."""
ALL = "all"

TEXT_TOKENS = 96  # of the figure of a single text


class StepAllocation(Analysis):
    """Analyses where a pondering model spends its steps, and their utility (PonderLM-3).

    After validations it scores the first batches again and reports, over all tokens with a
    target, the number of executed steps, also of single tokens (Table 3) and of tokens within and
    at the end of words (Table 4); the difficulty of tokens by their steps, and the marginal utility
    of each step by difficulty (Fig. 4). In the verb validate, or in training as often as
    configured, it also scores the batches with other alphas (Fig. 5), and follows Jacobi iterations
    to the fixed point (Fig. 8).

    Scalars are ``steps/...``, see ``step_report``; files are in ``step_allocation``. Tables for
    which a model lacks alpha, iterations or a router are left out. ``callbacks.analysis`` describes
    what all analyses share.

    Args:
        output: Folder of the files. If null, ``step_allocation`` in the run's log folder.
        num_batches: Number of validation batches to analyse.
        every_n_validations: Analyse every n-th validation during training. If 0, analyse only under
            the verb validate.
        tokens: Texts to list with their steps if they are a single token.
        top_tokens: Number of the most frequent tokens to list as well.
        alphas: Shifts of the router at which to score the same batches in addition to 0, or none.
            Each costs as much as a validation of the batches.
        sweep_every_n_validations: Score with the alphas and follow iterations at every n-th
            analysed validation during training. If 0, only under the verb validate.
        convergence_rows: Number of rows of the first batch whose iterations are followed.
        convergence_tokens: Number of leading tokens of each of these rows. The fixed point
            takes K + 1 forward steps for each.
        convergence_iterations: Number of iterations to follow.
    """

    tag = "step_allocation"
    image_tag = "steps"
    cards = ("steps/mean",)

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
    ) -> None:
        super().__init__(every_n_validations, num_batches, output, sweep_every_n_validations)
        check_minimum("top_tokens", top_tokens, 0)
        check_minimum("convergence_rows", convergence_rows, 0)
        check_minimum("convergence_tokens", convergence_tokens, 1)
        check_minimum("convergence_iterations", convergence_iterations, 1)
        self.tokens = tuple(tokens)
        self.top_tokens = top_tokens
        self.alphas = tuple(alphas)
        self.convergence_rows = convergence_rows
        self.convergence_tokens = convergence_tokens
        self.convergence_iterations = convergence_iterations

    def _collect(
        self, tokenizer: Any, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        recorder = StepRecorder()
        pl_module.recorded(batch, **recorder.consumers())
        if recorder.executed is None or recorder.losses is None:
            raise nothing_recorded(pl_module, "thinking steps (no method that ponders)")
        is_first = "tokens" not in findings
        collect_tokens(findings, batch, recorder, tokenizer)
        if self._sweeps:
            self._sweep(pl_module, batch, findings)
            if is_first and self.convergence_rows:
                part = first_tokens(
                    rows_of(batch, 0, self.convergence_rows), self.convergence_tokens
                )
                rows = collect_iterations(pl_module, part, self.convergence_iterations)
                findings.add("iterations", rows)

    def _sweep(self, pl_module: Any, batch: dict[str, Any], findings: Findings) -> None:
        if not self.alphas or self._unable_to_sweep:
            return
        if not has_dial(pl_module, DIAL):
            self._give_up_sweeps(
                f"{type(pl_module).__name__} has no setting {DIAL!r} to shift its steps with, so "
                "there is no sweep over it"
            )
            return
        for alpha in sorted({0.0, *map(float, self.alphas)}):
            recorder = StepRecorder()
            consumers = recorder.consumers()
            if alpha:
                del consumers["depth_losses"]  # which is expensive
            with dialled(pl_module, DIAL, alpha):
                scores = pl_module.recorded(batch, **consumers)
            collect_sweep(findings, alpha, batch, recorder, scores.log_prob)

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> AnalysisReport:
        return step_report(findings, self._listed(findings, tokenizer_of(trainer)))

    def _text_report(self, tokenizer: Any, pl_module: Any, findings: Findings) -> AnalysisReport:
        """Returns ``tokens`` in the text's order, and ``steps``, see :func:`steps`.

        The columns of ``tokens`` are ``place`` from 0, ``id``, ``text``, ``executed`` steps, the
        ``first`` and ``last`` loss in nats (nan without a target) and, with a router, ``w_0`` to
        ``w_K``, the probabilities of at least that many steps.
        """
        return AnalysisReport(
            tables={"tokens": findings["shown"], "steps": steps(findings["tokens"])},
            figures={"tokens": text_figure, "steps": steps_figure},
        )

    def _listed(self, findings: Findings, tokenizer: Any) -> dict[int, str]:
        """Returns the texts of the named tokens, followed by the most frequent ones, by id."""
        texts = self.tokens if tokenizer is not None else ()
        encoded = [(tokenizer.encode(text), text) for text in texts]
        token_texts = {int(ids[0]): text for ids, text in encoded if len(ids) == 1}
        seen = texts_by_id(findings)
        return token_texts | {
            i: seen.get(i, "") for i in frequent(findings, self.top_tokens) if i not in token_texts
        }


# ---- collecting


class StepRecorder(Recorder):
    """Records the steps of one pass through a batch; the last record of a statistic counts."""

    def __init__(self) -> None:
        super().__init__("thinking_steps", "depth_losses", "router")

    @property
    def executed(self) -> np.ndarray | None:
        """Additional steps of tokens, int64 (B, T), or None if the model records none."""
        executed = self.latest("thinking_steps").get("executed")
        return None if executed is None else executed.cpu().numpy()

    @property
    def losses(self) -> np.ndarray | None:
        """Cross-entropy in nats if a token stopped after i steps, float64 (B, T, K+1)."""
        losses = self.latest("depth_losses").get("losses")
        return None if losses is None else as_float64(losses)

    @property
    def tail(self) -> np.ndarray | None:
        """Probabilities w of the router, float64 (B, T, K+1), or None without a router."""
        log_tail = self.latest("router").get("log_tail")
        return None if log_tail is None else np.exp(as_float64(log_tail))


def targets_of(batch: dict[str, Any]) -> np.ndarray:
    """Returns bool (B, T), true for positions with a target."""
    targets: Tensor = batch["targets"]
    return (targets >= 0).cpu().numpy()


def collect_tokens(
    findings: Findings, batch: dict[str, Any], recorder: StepRecorder, tokenizer: Any
) -> None:
    """Adds the tokens of a batch.

    ``tokens`` has one row per token with a target, so that tokens of overlapping windows count
    once: ``id``, ``executed``, ``loss_0`` to ``loss_K`` in nats, with a router ``expected`` steps
    (the sum of w), and with a tokenizer the ``place`` in a word. ``texts`` has the text of each
    ``id``, ``shown`` the real tokens of the first row.

    The batch has ``tokens`` and ``targets`` (B, T), and ``mask`` if rows are padded. Without a
    tokenizer there are no texts.
    """
    assert recorder.executed is not None
    assert recorder.losses is not None
    has_target, ids = targets_of(batch), batch["tokens"].cpu().numpy()
    losses = recorder.losses[has_target].astype(np.float32)
    columns = {"id": ids[has_target], "executed": recorder.executed[has_target].astype(np.int16)}
    columns |= {f"loss_{i}": losses[:, i] for i in range(losses.shape[-1])}
    if recorder.tail is not None:
        columns["expected"] = recorder.tail[has_target][:, 1:].sum(1).astype(np.float32)
    if tokenizer is not None:
        columns["place"] = _collect_texts(findings, batch, recorder, tokenizer)[has_target]
    findings.add("tokens", columns)


def _collect_texts(
    findings: Findings, batch: dict[str, Any], recorder: StepRecorder, tokenizer: Any
) -> np.ndarray:
    """Adds ``texts`` and ``shown``; returns the positions of tokens in words, int8 (B, T)."""
    ids, has_target = batch["tokens"].cpu().numpy(), targets_of(batch)
    positions = np.zeros(ids.shape, dtype=np.int8)
    special = set(getattr(tokenizer, "special_ids", ()))
    known_texts = texts_by_id(findings)
    new: dict[int, str] = {}
    for row, real in enumerate(real_tokens(batch)):
        row_ids = ids[row, real].tolist()
        texts = pieces(tokenizer, row_ids)
        letters = ["" if i in special else t for i, t in zip(row_ids, texts, strict=True)]
        positions[row, real] = word_places(letters)
        for i, before, text in zip(row_ids, ["", *texts], texts, strict=False):
            # the last token of a character that spans several is shown as a part, too
            new.setdefault(i, PART if before == PART else text)
        if real.any() and "shown" not in findings:
            findings.add("shown", _shown_row(row, real, has_target[row], ids, texts, recorder))
    unseen = {i: text for i, text in new.items() if i not in known_texts}
    findings.add("texts", {"id": list(unseen), "text": list(unseen.values())})
    return positions


def _shown_row(
    row: int,
    real: np.ndarray,
    has_target: np.ndarray,
    ids: np.ndarray,
    texts: Sequence[str],
    recorder: StepRecorder,
) -> pd.DataFrame:
    """Returns ``place``, ``id``, ``text``, ``executed``, ``first``, ``last`` and w of a row."""
    assert recorder.executed is not None
    assert recorder.losses is not None
    losses = np.where(has_target[:, None], recorder.losses[row], np.nan)[real]
    columns = {"place": np.arange(len(texts)), "id": ids[row, real], "text": texts}
    columns |= {
        "executed": recorder.executed[row, real],
        "first": losses[:, 0],
        "last": losses[:, -1],
    }
    if recorder.tail is not None:
        tail = recorder.tail[row, real]
        columns |= {f"w_{i}": tail[:, i] for i in range(tail.shape[1])}
    return pd.DataFrame(columns)


def collect_sweep(
    findings: Findings,
    alpha: float,
    batch: dict[str, Any],
    recorder: StepRecorder,
    log_prob: Tensor,
) -> None:
    """Adds ``alpha``, ``executed`` and ``loss`` in nats of the tokens with a target to ``sweep``.

    At alpha 0 it also adds their ``step0_loss`` to ``difficulty``. ``log_prob`` (B, T) has the
    log-probabilities of the targets in nats. The recorder needs losses at alpha 0.
    """
    assert recorder.executed is not None
    has_target = targets_of(batch)
    executed = recorder.executed[has_target].astype(np.int16)
    loss = -as_float64(log_prob)[has_target].astype(np.float32)
    findings.add("sweep", {"alpha": np.float32(alpha), "executed": executed, "loss": loss})
    if alpha == 0:
        assert recorder.losses is not None
        findings.add(
            "difficulty", {"step0_loss": recorder.losses[has_target][:, 0].astype(np.float32)}
        )


# ---- tables


def mean(values: Any) -> float:
    """Returns the float64 mean of numbers or booleans; nan if there are none."""
    return float(np.mean(np.asarray(values), dtype=np.float64)) if len(values) else math.nan


def _most(table: pd.DataFrame) -> int:
    """Returns K, the maximum number of additional steps of a token."""
    return len(table.filter(regex=r"^loss_\d+$").columns) - 1


def steps(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with one row per number of executed steps, 0..K.

    The columns are the number of ``tokens`` and their ``share``, ``step0_loss``, the mean l_t of
    these tokens (Fig. 4 b), and ``loss`` after all their steps, in nats; nan without tokens.

    ``table`` comes from ``collect_tokens``.
    """
    max_steps = _most(table)
    losses = table[["loss_0", f"loss_{max_steps}"]].astype(np.float64).set_axis([0, 1], axis=1)
    grouped = losses.groupby(table["executed"].to_numpy())
    result = grouped.mean().set_axis(["step0_loss", "loss"], axis=1)
    result.insert(0, "tokens", grouped.size())
    result = result.reindex(range(max_steps + 1)).rename_axis("steps").reset_index()
    result["tokens"] = result["tokens"].fillna(0).astype(int)
    result.insert(2, "share", result["tokens"] / len(table))
    return result


def tokens(table: pd.DataFrame, texts: Mapping[int, str]) -> pd.DataFrame:
    """Returns a table with one row per token id (Table 3).

    The columns are ``count``, ``mean_steps`` and ``pruned``, the share that executes fewer than K
    steps; nan for ids that do not occur.

    ``table`` comes from ``collect_tokens``; ``texts`` maps ids to their texts, in order.
    """
    pruned = table["executed"] < _most(table)
    grouped = table.assign(pruned=pruned, executed=table["executed"].astype(np.float64)).groupby(
        "id"
    )
    means = grouped[["executed", "pruned"]].mean().reindex(list(texts))
    counts = grouped.size().reindex(list(texts), fill_value=0).astype(int)
    columns = {"id": list(texts), "text": list(texts.values()), "count": counts.to_numpy()}
    values = {"mean_steps": means["executed"].to_numpy(), "pruned": means["pruned"].to_numpy(float)}
    return pd.DataFrame({**columns, **values})


def frequent(findings: Findings, count: int) -> list[int]:
    """Returns the ``count`` most frequent ids, the most frequent first."""
    ids, counts = np.unique(findings["tokens"]["id"], return_counts=True)
    order = np.lexsort((ids, -counts))[:count]
    return [int(i) for i in ids[order]]


def texts_by_id(findings: Findings) -> dict[int, str]:
    """Returns the first text of each token id."""
    texts = findings["texts"]
    first = texts.drop_duplicates("id") if len(texts) else texts
    return dict(zip(first["id"], first["text"], strict=True)) if len(first) else {}


def buckets(difficulty: Any) -> pd.Categorical:
    """Returns the bucket of each token (N,) by its difficulty, the step-0 loss (N,).

    Borders are the quantiles 1/3 and 2/3; a token at a border is in the easier bucket.
    """
    values = np.asarray(difficulty, dtype=np.float64)
    low, high = np.quantile(values, [1 / 3, 2 / 3]) if len(values) else (0.0, 0.0)
    codes = (values > low).astype(int) + (values > high)
    return pd.Categorical.from_codes(codes, list(BUCKETS))


def utility(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a table with one row per bucket of difficulty l_t (Fig. 4 a); empty if K is 0.

    ``step_<i>`` is the marginal utility of step i, the mean of CE_(i-1) - CE_i in nats. The loss of
    a token does not change after its last executed step, so further steps count as 0. ``from`` and
    ``to`` are the smallest and the largest l_t, ``step0_loss`` is the mean l_t, ``loss`` the mean
    loss after all steps, ``mean_steps`` the mean number of executed steps; nan for empty buckets.

    ``table`` comes from ``collect_tokens``.
    """
    max_steps = _most(table)
    if not max_steps:
        return pd.DataFrame()
    names = [f"loss_{i}" for i in range(max_steps + 1)]
    values = table[[*names, "executed"]].astype(np.float64)
    grouped = values.groupby(buckets(values["loss_0"]), observed=False)
    means, losses = grouped.mean(), grouped["loss_0"]
    columns = {"tokens": grouped.size(), "from": losses.min(), "to": losses.max()}
    columns |= {
        "step0_loss": means["loss_0"],
        "loss": means[names[-1]],
        "mean_steps": means["executed"],
    }
    columns |= {
        f"step_{i}": means[before] - means[after]
        for i, (before, after) in enumerate(pairwise(names), start=1)
    }
    return pd.DataFrame(columns).rename_axis("bucket").reset_index()


def sweep(findings: Findings) -> pd.DataFrame:
    """Returns a table with one row per alpha and bucket (Fig. 5); empty without a sweep.

    Buckets, and ``all``, are by difficulty at alpha 0. ``mean_steps`` is the mean number of steps
    executed at this alpha, ``loss`` the mean in nats, ``loss_change`` its difference to alpha 0.
    """
    rows = findings["sweep"]
    if not len(rows):
        return rows
    bucket = buckets(findings["difficulty"]["step0_loss"])
    tables = []
    for alpha, part in rows.groupby("alpha"):  # the same tokens in the same order
        values = part[["executed", "loss"]].astype(np.float64)
        grouped = values.groupby(bucket, observed=False)
        means = grouped.mean().assign(tokens=grouped.size())
        means.index = means.index.astype(str)
        means.loc[ALL] = [*values.mean(), len(values)]
        tables.append(means.rename_axis("bucket").reset_index().assign(alpha=alpha))
    table = pd.concat(tables, ignore_index=True).rename(columns={"executed": "mean_steps"})
    base = table[table["alpha"] == 0].set_index("bucket")["loss"]
    table["loss_change"] = table["loss"] - table["bucket"].map(base)
    columns = ["alpha", "bucket", "tokens", "mean_steps", "loss", "loss_change"]
    return table.astype({"tokens": int})[columns]


# ---- the report


def step_report(findings: Findings, listed: Mapping[int, str]) -> AnalysisReport:
    """Returns the report of an analysis.

    Scalars are under ``steps/``: ``mean`` of executed steps and ``below_most``, the share of tokens
    that execute fewer than K, over all tokens and as ``words/internal/...``, ``words/final/...``;
    with a router ``expected`` steps, the mean over tokens of the sum of w;
    ``share_<i>`` and ``step0_loss_<i>`` by executed steps, see :func:`steps`;
    ``utility/<bucket>/step_<i>``; ``sweep/alpha_<a>/<bucket>/mean_steps`` and ``.../loss_change``;
    ``convergence/rate`` (L) and ``convergence/r2``.

    ``listed`` has the token ids of Table 3 in their order, with their texts.
    """
    table = findings["tokens"]
    rmse, noise = rmse_by_iteration(findings["iterations"])
    fit, max_steps = fit_iterations(rmse, noise), _most(table)
    tables = {
        "steps": steps(table),
        "tokens": tokens(table, listed),
        "words": words(table, max_steps),
        "utility": utility(table),
        "sweep": sweep(findings),
        "convergence": convergence(rmse, fit),
    }
    scalars = _scalars(table, tables, fit)
    return AnalysisReport(
        scalars={f"steps/{tag}": value for tag, value in scalars.items()},
        tables=tables,
        figures=FIGURES | {"convergence": partial(convergence_figure, noise=noise)},
    )


def _scalars(
    table: pd.DataFrame, tables: Mapping[str, pd.DataFrame], fit: IterationFit | None
) -> dict[str, float]:
    max_steps = _most(table)
    values = {"mean": mean(table["executed"]), "below_most": mean(table["executed"] < max_steps)}
    if "expected" in table:
        values["expected"] = mean(table["expected"])
    values |= scalars_of(tables["steps"], "{name}_{steps}", ("share", "step0_loss"))
    for position, executed in by_place(table).items():
        values[f"words/{position}/mean"] = mean(executed)
        values[f"words/{position}/below_most"] = mean(executed < max_steps)
    gains = [name for name in tables["utility"] if name.startswith("step_")]
    values |= scalars_of(tables["utility"], "utility/{bucket}/{name}", gains)
    swept = tables["sweep"]
    swept = swept[swept["bucket"] != ALL] if len(swept) else swept
    tag = "sweep/alpha_{alpha:g}/{bucket}/{name}"
    values |= scalars_of(swept, tag, ("mean_steps", "loss_change"))
    if fit is not None:
        values |= {"convergence/rate": fit.rate, "convergence/r2": fit.r2}
    return values


# ---- figures of the tables


def steps_figure(tables: Tables) -> Any:
    """Draws the distribution of executed steps and the difficulty of their tokens (Fig. 4 b)."""
    table = tables["steps"]
    figure, (shares, losses) = panels(9, 3.6, 2, sharex=True)  # bars without tokens have no loss
    draw_bars(shares, table, "steps", {"share": (None, BLUE)})
    columns = {"step0_loss": ("step-0 loss", ORANGE), "loss": ("loss after all steps", BLUE)}
    draw_lines(losses, table, "steps", columns)
    finish(shares, "executed additional steps", "share of tokens", whole=True)
    finish(losses, "executed additional steps", "nats per token", whole=True)
    return figure


def text_figure(tables: Tables) -> Any:
    """Draws executed and expected steps of each token of a text, and its losses."""
    tokens, max_steps = tables["tokens"].iloc[:TEXT_TOKENS], tables["steps"]["steps"].max()
    figure, (ax, losses) = panels(2 + 0.22 * len(tokens), 4.6, 1, 2, sharex=True)
    ax.bar(tokens["place"], tokens["executed"], 0.8, color=BLUE, label="executed")
    tails = tokens.filter(regex=r"^w_[1-9]\d*$")
    if len(tails.columns):
        ax.plot(tokens["place"], tails.sum(axis=1), "o", color=ORANGE, label="expected, sum of w")
    ax.set_ylim(0, 1.4 * max(max_steps, 1))  # room for the legend
    labels = {"first": ("step-0 loss", ORANGE), "last": ("loss after all steps", BLUE)}
    draw_lines(losses, tokens, "place", labels, ".-")
    finish(ax, "", "additional steps", ncols=2)
    finish(losses, "", "nats")
    names = [short_label(text) for text in tokens["text"]]
    losses.set_xticks(tokens["place"], names, rotation=90, fontsize=7, parse_math=False)
    return figure


def tokens_figure(tables: Tables) -> Any:
    """Draws the mean steps of single tokens, and their share with fewer than K (Table 3)."""
    table, max_steps = tables["tokens"], tables["steps"]["steps"].max()
    figure, (number_of_steps, pruned) = panels(9, 1.2 + 0.22 * len(table), 2, sharey=True)
    rows = np.arange(len(table))
    for ax, name, color in ((number_of_steps, "mean_steps", BLUE), (pruned, "pruned", ORANGE)):
        ax.barh(rows, table[name].fillna(0), 0.7, color=color)
    labels = []
    for row in table.to_dict("records"):  # visible spaces, or the id without a text
        text = short_label(row["text"].replace(" ", "\N{OPEN BOX}"))
        labels.append(f"{text or row['id']} ({row['count']})")
    number_of_steps.set_yticks(rows, labels, parse_math=False)
    number_of_steps.invert_yaxis()
    number_of_steps.set_xlim(0, max(max_steps, 1))
    pruned.set_xlim(0, 1)
    finish(number_of_steps, "mean executed steps")
    finish(pruned, f"share with fewer than {max_steps}")
    return figure


def utility_figure(tables: Tables) -> Any:
    """Draws the marginal utility of each step by difficulty (Fig. 4 a)."""
    table = tables["utility"]
    figure, (ax,) = panels(6.4, 3.8, 1)
    gains = table.set_index("bucket").filter(regex=r"^step_\d+$").T.set_axis(list(BUCKETS), axis=1)
    columns = {
        row["bucket"]: (
            f"{row['bucket']}: step-0 loss {row['from']:.3g} to {row['to']:.3g}",
            BUCKETS[row["bucket"]],
        )
        for row in table.to_dict("records")
    }
    draw_bars(ax, gains.assign(step=range(1, len(gains) + 1)), "step", columns)
    ax.axhline(0, color=GREY, linewidth=0.8)
    finish(ax, "step i", "CE$_{i-1}$ - CE$_i$ (nats per token)", whole=True)
    return figure


def sweep_figure(tables: Tables) -> Any:
    """Draws the change of the loss against executed steps, for easy and hard tokens (Fig. 5)."""
    table = tables["sweep"]
    figure, axes = panels(10, 3.8, 2, sharey=True)
    for ax, name in zip(axes, ("easy", "hard"), strict=True):
        rows = table[table["bucket"] == name]
        draw_lines(ax, rows, "mean_steps", {"loss_change": (None, BUCKETS[name])})
        for row in rows.to_dict("records"):
            point = row["mean_steps"], row["loss_change"]
            ax.annotate(f"{row['alpha']:g}", point, (3, 3), textcoords="offset points", size=7)
        ax.axhline(0, color=GREY, linewidth=0.8)
        ax.set_title(f"{name} tokens; numbers are alpha", fontsize=10)
        finish(ax, "mean executed steps of these tokens")
    axes[0].set_ylabel("loss minus loss at alpha 0 (nats per token)")
    return figure


FIGURES: dict[str, Draw] = {
    "steps": steps_figure,
    "tokens": tokens_figure,
    "words": words_figure,
    "utility": utility_figure,
    "sweep": sweep_figure,
}
