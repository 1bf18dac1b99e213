"""What an analysis found, as scalars and tables."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from callbacks.analysis.files import as_csv
from callbacks.posterior_analysis.findings import Findings

ACTIVE_VARIANCE = 0.01
"""A coordinate is active if its posterior mean varies more over texts (Burda et al. 2016)."""
ACTIVE_KL = 0.01
"""A latent vector is active if its mean KL divergence is above, in nats per sequence."""
QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
BINS = 40
"""Of the histogram of variances."""

Records = list[dict[str, Any]]


def scalars(findings: Findings) -> dict[str, float]:
    """Returns finite values by tag, all below ``posterior/``.

    ``elbo``, ``nll``, ``kl``: nats per token at the scored sample. ``last_step/mean_gradient`` and
    ``last_step/log_variance_gradient``: see :func:`inner_steps`. ``layer_<l>/kl``,
    ``active_coordinates`` and ``active_vectors``, of a layer or of all: see :func:`layers`.
    ``variance/mean`` and ``variance/<quantile>``: see :func:`variances`. ``sweep/steps_<n>``: nats
    per token with n inner steps, see :func:`sweep`.
    """
    values = {name: float(value) for name, value in findings.scored.per_token().items()}
    if findings.steps:
        last = inner_steps(findings)[findings.steps - 1]
        for name in ("mean_gradient", "log_variance_gradient"):
            values[f"last_step/{name}"] = last[name]
    for record in layers(findings):
        for name in ("kl", "active_coordinates", "active_vectors"):
            values[f"layer_{record['layer']}/{name}"] = record[name]
    for name in ("active_coordinates", "active_vectors") if findings.has_density else ():
        values[name] = math.fsum(record[name] for record in layers(findings))
    values |= {f"variance/{name}": value for name, value in variances(findings).items()}
    values |= {f"sweep/steps_{each['steps']}": each["loss"] for each in sweep(findings)}
    return {f"posterior/{name}": value for name, value in values.items() if math.isfinite(value)}


def tables(findings: Findings) -> dict[str, str]:
    """Returns the CSV files of an analysis, by name; what there is nothing for is left out."""
    found: dict[str, Records] = {
        "scalars.csv": [{"name": tag, "value": value} for tag, value in scalars(findings).items()],
        "inner_steps.csv": inner_steps(findings) if findings.steps else [],
        "layers.csv": layers(findings),
        "variance.csv": variance_histogram(findings),
        "sweep.csv": sweep(findings),
    }
    return {name: as_csv(records) for name, records in found.items() if records}


def inner_steps(findings: Findings) -> Records:
    """Returns a table with one line an inner step, and a last one for the scored sample.

    ``elbo``, ``nll`` and ``kl`` are nats per token. Line t is what inference saw before step t
    (from 0), at its own sample; the last one, ``scored``, is after all steps, at a sample with
    noise that inference has not seen. ``mean_gradient`` and ``log_variance_gradient`` are 2-norms
    of a sequence's gradient of -ELBO in nats with respect to mu and log sigma^2, all of its latent
    vectors together; means over sequences. Of a chain the former is that of -log p(z, x) at z, and
    there is no density, so ``elbo``, ``kl`` and the other gradient are nan.
    """
    inner = findings.inner.per_token()
    gradients = {
        "mean_gradient": findings.mean_gradient / findings.sequences,
        "log_variance_gradient": findings.log_variance_gradient / findings.sequences,
    }
    lines = [
        {"step": step, "sample": "inner"}
        | {name: float(values[step]) for name, values in (inner | gradients).items()}
        for step in range(findings.steps)
    ]
    scored = {name: float(value) for name, value in findings.scored.per_token().items()}
    last = {"step": findings.steps, "sample": "scored", **scored}
    return [*lines, last | dict.fromkeys(gradients, math.nan)]


def layers(findings: Findings) -> Records:
    """Returns a table with one line a layer; empty where posteriors have no density.

    ``kl`` in nats per token adds up to that of the whole posterior. ``active_vectors``: latent
    vectors whose KL divergence, a mean over sequences, is above ``ACTIVE_KL``.
    ``active_coordinates``: coordinates u with Var_x(E_q(u|x)[u]) above ``ACTIVE_VARIANCE`` (Burda
    et al. 2016); nan for fewer than two sequences. A collapsed posterior has neither.
    Layers count from 1; latent vectors that all layers read are one line.
    """
    if not findings.has_density:
        return []
    kl, spread = findings.by_layer(findings.kl), findings.by_layer(findings.spread())
    active = kl / findings.sequences > ACTIVE_KL
    coordinates = np.where(np.isnan(spread), np.nan, spread > ACTIVE_VARIANCE)
    return [
        {
            "layer": layer,
            "kl": float(kl[layer - 1].sum()) / findings.scored.tokens,
            "active_vectors": int(active[layer - 1].sum()),
            "vectors": kl.shape[1],
            "active_coordinates": float(coordinates[layer - 1].sum()),
            "coordinates": coordinates[layer - 1].size,
        }
        for layer in range(1, len(kl) + 1)
    ]


def variance_by_layer(findings: Findings) -> list[np.ndarray]:
    """Returns sigma^2 of each layer's coordinates, means over sequences, where it is above 0."""
    if not findings.has_density:
        return []
    means = findings.by_layer(findings.variances / findings.sequences)
    return [layer[np.isfinite(layer) & (layer > 0)] for layer in means]


def variances(findings: Findings) -> dict[str, float]:
    """Returns mean and quantiles over coordinates of sigma^2, itself a mean over sequences.

    That of the prior is 1.
    """
    found = variance_by_layer(findings)
    values = np.concatenate(found) if found else np.zeros(0)
    if not len(values):
        return {}
    quantiles = np.quantile(values, list(QUANTILES.values()))
    return {"mean": float(values.mean())} | dict(zip(QUANTILES, quantiles.tolist(), strict=True))


def variance_bins(found: Sequence[np.ndarray]) -> np.ndarray:
    """Returns borders of bins, evenly spaced by logarithm, that hold all of these variances."""
    values = np.concatenate(found)
    return np.geomspace(values.min() / 1.01, values.max() * 1.01, BINS + 1)


def variance_histogram(findings: Findings) -> Records:
    """Returns a table with one line a layer and bin: how many coordinates have such a variance."""
    found = variance_by_layer(findings)
    if not any(map(len, found)):
        return []
    borders = variance_bins(found)
    return [
        {"layer": layer, "from": float(low), "to": float(high), "coordinates": int(count)}
        for layer, values in enumerate(found, start=1)
        for low, high, count in zip(
            borders[:-1], borders[1:], np.histogram(values, borders)[0], strict=True
        )
    ]


def sweep(findings: Findings) -> Records:
    """Returns a table with one line a number of inner steps, from the lowest.

    ``loss`` is what ``val/loss`` would be of the same sequences: NLL + KL, a bound, or where there
    is no density NLL alone, which is none; it, ``nll`` and ``kl`` are nats per token at the scored
    sample. ``flops_per_token`` are those of scoring, inference included.
    """
    return [
        {"steps": steps, "flops_per_token": findings.flops[steps], "loss": nats.loss()}
        | {name: float(nats.per_token()[name]) for name in ("nll", "kl")}
        for steps, nats in sorted(findings.sweep.items())
    ]
