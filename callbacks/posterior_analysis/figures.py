"""Pictures of an analysis. They are drawn without pyplot, so that no global state is touched."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callbacks.analysis.figures import BLUE, GREEN, GREY, ORANGE, panels
from callbacks.posterior_analysis import report
from callbacks.posterior_analysis.findings import Findings

PARTS = {"nll": ("NLL", BLUE), "kl": ("KL", ORANGE)}
GRADIENTS = {
    "mean_gradient": ("mean", BLUE),
    "log_variance_gradient": ("log-variance", ORANGE),
}


def pictures(findings: Findings) -> Mapping[str, Any]:
    """Returns the figures of an analysis, by name; what there is nothing for is left out."""
    drawn = {}
    if findings.steps:
        drawn["inner_steps"] = inner_steps_figure(report.inner_steps(findings))
    if findings.has_density:
        drawn["layers"] = layers_figure(report.layers(findings))
    found = report.variance_by_layer(findings)
    if any(map(len, found)):
        drawn["variance"] = variance_figure(found, report.variances(findings)["median"])
    if findings.sweep:
        drawn["sweep"] = sweep_figure(report.sweep(findings), findings.steps, findings.has_density)
    return drawn


def inner_steps_figure(records: Sequence[Mapping[str, Any]]) -> Any:
    """Returns -ELBO and its parts against the inner step, and the norms of gradients.

    Args:
        records: see ``report.inner_steps``; stars mark the last, the scored sample.
    """
    figure, (nats, norms) = panels(11, 3.8, 2)
    columns = {name: np.array([line[name] for line in records]) for name in records[0]}
    columns["loss"] = -columns["elbo"]
    for name, (label, color) in ({"loss": ("NLL + KL = -ELBO", GREEN)} | PARTS).items():
        values = columns[name]
        if np.isfinite(values).any():
            nats.plot(values[:-1], ".-", color=color, label=label)
            nats.plot(len(values) - 1, values[-1], "*", color=color, markersize=11)
    nats.plot([], [], "*", color=GREY, markersize=11, label="scored sample")
    nats.set_ylabel("nats per token")
    for name, (label, color) in GRADIENTS.items():
        values = columns[name]
        if (values > 0).any():
            norms.plot(values[:-1], ".-", color=color, label=label)
            norms.set_yscale("log")
    norms.set_ylabel("norm of a sequence's gradient")
    for ax in (nats, norms):
        ax.set_xlabel("inner step")
        ax.legend(frameon=False, fontsize=8)
    return figure


def layers_figure(records: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the KL divergence of each layer, and which share of its latents is active.

    Args:
        records: see ``report.layers``.
    """
    figure, (kl, active) = panels(10, 3.6, 2)
    place = np.arange(1, len(records) + 1)
    kl.bar(place, [line["kl"] for line in records], 0.7, color=BLUE)
    kl.set_ylabel("KL (nats per token)")
    shown = {"vectors": (-0.2, BLUE, "latent vectors"), "coordinates": (0.2, ORANGE, "coordinates")}
    for name, (shift, color, label) in shown.items():
        share = np.array([line[f"active_{name}"] / line[name] for line in records])
        active.bar(place + shift, np.nan_to_num(share), 0.38, color=color, label=label)
    active.set_ylim(0, 1.25)  # room for the legend
    active.set_ylabel("share that is active")
    active.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    for ax in (kl, active):
        ax.set_xticks(place)
        ax.set_xlabel("layer")
    return figure


def variance_figure(found: Sequence[np.ndarray], median: float) -> Any:
    """Returns the histogram of the coordinates' variances, stacked by layer.

    Args:
        found: see ``report.variance_by_layer``; at least one variance.
        median: of all coordinates.
    """
    from matplotlib import colormaps

    figure, (ax,) = panels(6.4, 4.0, 1)
    colors = [colormaps["viridis"](0.9 * i / max(1, len(found) - 1)) for i in range(len(found))]
    labels = [f"layer {layer}" for layer in range(1, len(found) + 1)]
    bins = report.variance_bins(found)
    ax.hist(list(found), bins.tolist(), stacked=True, color=colors, label=labels)
    ax.set_xscale("log")
    ax.axvline(median, color=ORANGE, label=f"median {median:.3g} (prior: 1)")
    if bins[0] <= 1 <= bins[-1]:  # elsewhere the line would squeeze the rest
        ax.axvline(1.0, color=GREY, linestyle=":", label="prior")
    ax.set_xlabel("posterior variance of a coordinate, mean over sequences")
    ax.set_ylabel("coordinates")
    ax.legend(frameon=False, fontsize=8)
    return figure


def sweep_figure(records: Sequence[Mapping[str, Any]], in_use: int, bound: bool) -> Any:
    """Returns the loss, with its parts, against inner steps and against FLOPs per token.

    Args:
        records: see ``report.sweep``.
        in_use: T_fast of the configuration, which is marked.
        bound: whether the loss is a bound.
    """
    figure, axes = panels(11, 3.8, 2)
    label = "NLL + KL, a bound" if bound else "NLL at the last sample, no bound"
    shown = {"loss": (label, GREEN)} | (PARTS if bound else {})
    for ax, key in zip(axes, ("steps", "flops_per_token"), strict=True):
        for name, (text, color) in shown.items():
            values = [line[name] for line in records]
            ax.plot([line[key] for line in records], values, "o-", color=color, label=text)
        ax.set_ylabel("nats per token")
    axes[0].axvline(in_use, color=GREY, linestyle=":", label="as configured")
    axes[0].set_xlabel("inner steps (T_fast) at validation")
    axes[0].legend(frameon=False, fontsize=8)
    axes[1].set_xscale("log")
    axes[1].set_xlabel("FLOPs per token")
    return figure
