"""The tables of an analysis: sums over all analysed tokens, in float64."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from callbacks.step_allocation.findings import Findings
from callbacks.step_allocation.words import FINAL, INTERNAL

BUCKETS = ("easy", "medium", "hard")
"""Thirds of the tokens by their difficulty."""
ALL = "all"
PLACES = {"internal": INTERNAL, "final": FINAL}

Records = list[dict[str, Any]]


def steps(findings: Findings) -> Records:
    """Returns a table with one line a number of executed steps, 0..K.

    ``share`` of all tokens; ``step0_loss`` is the mean l_t of those tokens (Fig. 4 b) and ``loss``
    that after all their steps, in nats; nan where there are none.
    """
    executed, losses = findings.tokens["executed"], findings.tokens["losses"]
    records = []
    for number in range(findings.most + 1):
        chosen = executed == number
        record = {"steps": number, "tokens": int(chosen.sum()), "share": mean(chosen)}
        means = {"step0_loss": mean(losses[chosen, 0]), "loss": mean(losses[chosen, -1])}
        records.append(record | means)
    return records


def summary(findings: Findings) -> dict[str, float]:
    """Returns the mean of executed steps, and the share of tokens that execute fewer than K."""
    executed = findings.tokens["executed"]
    return {"mean": mean(executed), "below_most": mean(executed < findings.most)}


def tokens(findings: Findings, texts: Mapping[int, str]) -> Records:
    """Returns a table with one line a token id (Table 3).

    ``count``, ``mean_steps`` and ``pruned``, the share that executes fewer than K steps; nan where
    it does not occur.

    Args:
        findings: of an analysis.
        texts: what the ids stand for, in their order.
    """
    all_ids, executed = findings.tokens["ids"], findings.tokens["executed"]
    records = []
    for i, text in texts.items():
        found = executed[all_ids == i]
        numbers = {"mean_steps": mean(found), "pruned": mean(found < findings.most)}
        records.append({"id": i, "text": text, "count": len(found), **numbers})
    return records


def frequent(findings: Findings, number: int) -> list[int]:
    """Returns the ids that occur most often, so many, the most frequent first."""
    ids, counts = np.unique(findings.tokens["ids"], return_counts=True)
    order = np.lexsort((ids, -counts))[:number]
    return [int(i) for i in ids[order]]


def words(findings: Findings) -> Records:
    """Returns a table with one line a number of executed steps (Table 4); empty without words.

    ``internal`` and ``final`` are tokens of words that consist of several: those within a word and
    those that end one, see ``words``; ``..._share`` of all such tokens.
    """
    by_place = steps_by_place(findings)
    if not any(map(len, by_place.values())):
        return []
    records: Records = []
    for number in range(findings.most + 1):
        records.append({"steps": number})
        for name, executed in by_place.items():
            chosen = executed == number
            records[-1] |= {name: int(chosen.sum()), f"{name}_share": mean(chosen)}
    return records


def steps_by_place(findings: Findings) -> dict[str, np.ndarray]:
    """Returns executed steps of tokens within words, and of those that end words."""
    executed, place = findings.tokens["executed"], findings.tokens["place"]
    if not len(place):
        return dict.fromkeys(PLACES, executed[:0])
    return {name: executed[place == code] for name, code in PLACES.items()}


def buckets(difficulty: np.ndarray) -> dict[str, np.ndarray]:
    """Returns bool (N,) by bucket: which tokens are in it.

    Borders are the quantiles 1/3 and 2/3; a token at a border is in the easier bucket.

    Args:
        difficulty: step-0 losses (N,).
    """
    if not len(difficulty):
        return {}
    low, high = np.quantile(difficulty.astype(np.float64), [1 / 3, 2 / 3])
    bucket = (difficulty > low).astype(int) + (difficulty > high)
    return {name: bucket == place for place, name in enumerate(BUCKETS)}


def utility(findings: Findings) -> Records:
    """Returns a table with one line a bucket of difficulty l_t (Fig. 4 a).

    ``step_<i>`` is the marginal utility of step i, the mean of CE_(i-1) - CE_i in nats. After the
    last step that a token executes its loss does not change any more, so steps that are not
    executed count as 0. ``from`` and ``to`` are the least and the greatest l_t; ``step0_loss`` the
    mean l_t, ``loss`` that after all steps, ``mean_steps`` of those executed; nan where the bucket
    is empty.
    """
    losses, executed = findings.tokens["losses"], findings.tokens["executed"]
    records = []
    for name, chosen in buckets(losses[:, 0]).items():
        part = losses[chosen]
        means = [mean(part[:, i]) for i in range(findings.most + 1)]
        low, high = (part[:, 0].min(), part[:, 0].max()) if len(part) else (math.nan, math.nan)
        record = {"bucket": name, "tokens": len(part), "from": float(low), "to": float(high)}
        record |= {"step0_loss": means[0], "loss": means[-1], "mean_steps": mean(executed[chosen])}
        gains = {f"step_{i}": means[i - 1] - means[i] for i in range(1, findings.most + 1)}
        records.append(record | gains)
    return records


def sweep(findings: Findings) -> Records:
    """Returns a table with one line an alpha and bucket (Fig. 5); empty without a sweep.

    Buckets, and ``all``, are by difficulty at alpha 0. ``mean_steps``: executed at this alpha;
    ``loss``: mean, in nats; ``loss_change``: that minus the loss at alpha 0.
    """
    if 0.0 not in findings.sweep:
        return []
    base = findings.sweep[0.0]
    chosen = buckets(base["difficulty"])
    chosen[ALL] = np.ones(len(base["difficulty"]), dtype=bool)
    return [
        {
            "alpha": alpha,
            "bucket": name,
            "tokens": int(part.sum()),
            "mean_steps": mean(columns["executed"][part]),
            "loss": mean(columns["loss"][part]),
            "loss_change": mean(columns["loss"][part]) - mean(base["loss"][part]),
        }
        for alpha, columns in sorted(findings.sweep.items())
        for name, part in chosen.items()
    ]


def convergence(findings: Findings) -> Records:
    """Returns a table with one line a Jacobi iteration (Fig. 8); empty where none was looked at.

    ``rmse`` to the fixed point; ``fit``: what the exponential has there; ``fitted``: 1 where it was
    fitted to.
    """
    fit = findings.convergence.fit()
    return [
        {
            "iteration": n,
            "rmse": rmse,
            "fit": math.nan if fit is None else fit(n),
            "fitted": int(fit is not None and n < fit.points),
        }
        for n, rmse in enumerate(findings.convergence.rmse())
    ]


def mean(values: np.ndarray) -> float:
    """Returns the float64 mean of numbers or truth values; nan of none."""
    return float(np.mean(values, dtype=np.float64)) if len(values) else math.nan
