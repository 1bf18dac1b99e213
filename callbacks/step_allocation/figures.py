"""Pictures of an analysis. They are drawn without pyplot, so that no global state is touched."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callbacks.analysis.figures import BLUE, GREEN, GREY, ORANGE, panels
from callbacks.analysis.token_text import short_label
from callbacks.step_allocation.convergence import Fit

COLORS = {"easy": GREEN, "medium": BLUE, "hard": ORANGE}

Lines = Sequence[Mapping[str, Any]]


def steps_figure(lines: Lines) -> Any:
    """Returns how many steps tokens execute, and how difficult those tokens are (Fig. 4 b).

    Args:
        lines: see ``measures.steps``.
    """
    figure, (shares, losses) = panels(9, 3.6, 2)
    place = [line["steps"] for line in lines]
    shares.bar(place, [line["share"] for line in lines], 0.7, color=BLUE)
    shares.set_ylabel("share of tokens")
    shown = {"step0_loss": ("step-0 loss", ORANGE), "loss": ("loss after all steps", BLUE)}
    for name, (label, color) in shown.items():
        losses.plot(place, [line[name] for line in lines], "o-", color=color, label=label)
    losses.set_ylabel("nats per token")
    losses.legend(frameon=False, fontsize=8)
    for ax in (shares, losses):
        ax.set_xticks(place)
        ax.set_xlabel("executed additional steps")
    return figure


def tokens_figure(lines: Lines, most: int) -> Any:
    """Returns the mean steps of single tokens, and how often they take fewer than K (Table 3).

    Args:
        lines: see ``measures.tokens``, at least one.
        most: K.
    """
    figure, (steps, pruned) = panels(9, 1.2 + 0.22 * len(lines), 2, sharey=True)
    place = np.arange(len(lines))
    for ax, name, color in ((steps, "mean_steps", BLUE), (pruned, "pruned", ORANGE)):
        ax.barh(place, np.nan_to_num([line[name] for line in lines]), 0.7, color=color)
    steps.set_yticks(place, [_name(line) for line in lines], parse_math=False)
    steps.invert_yaxis()
    steps.set_xlim(0, max(most, 1))
    steps.set_xlabel("mean executed steps")
    pruned.set_xlim(0, 1)
    pruned.set_xlabel(f"share with fewer than {most}")
    return figure


def _name(line: Mapping[str, Any]) -> str:
    """Returns a token's text, in which spaces can be seen, or else its id, and its count."""
    text = short_label(line["text"].replace(" ", "\N{OPEN BOX}"))
    return f"{text or line['id']} ({line['count']})"


def words_figure(lines: Lines) -> Any:
    """Returns the steps of tokens within words and of those that end words (Table 4).

    Args:
        lines: see ``measures.words``.
    """
    figure, (ax,) = panels(5.6, 3.6, 1)
    place = np.array([line["steps"] for line in lines])
    shown = {"internal": (-0.2, GREY, "within a word"), "final": (0.2, BLUE, "end of a word")}
    for name, (shift, color, label) in shown.items():
        total = sum(line[name] for line in lines)
        heights = np.nan_to_num([line[f"{name}_share"] for line in lines])
        ax.bar(place + shift, heights, 0.38, color=color, label=f"{label} ({total} tokens)")
    ax.set_xticks(place)
    ax.set_ylim(0, 1.25)  # room for the legend
    ax.set_xlabel("executed additional steps")
    ax.set_ylabel("share of such tokens")
    ax.legend(frameon=False, fontsize=8)
    return figure


def utility_figure(lines: Lines, most: int) -> Any:
    """Returns the marginal utility of each step by difficulty (Fig. 4 a).

    Args:
        lines: see ``measures.utility``.
        most: K, at least 1.
    """
    figure, (ax,) = panels(6.4, 3.8, 1)
    place = np.arange(1, most + 1)
    for i, line in enumerate(lines):
        heights = [line[f"step_{step}"] for step in place]
        name = line["bucket"]
        label = f"{name}: step-0 loss {line['from']:.3g} to {line['to']:.3g}"
        shift = 0.27 * (i - (len(lines) - 1) / 2)
        ax.bar(place + shift, np.nan_to_num(heights), 0.25, color=COLORS[name], label=label)
    ax.axhline(0, color=GREY, linewidth=0.8)
    ax.set_xticks(place)
    ax.set_xlabel("step i")
    ax.set_ylabel("CE$_{i-1}$ - CE$_i$ (nats per token)")
    ax.legend(frameon=False, fontsize=8)
    return figure


def sweep_figure(lines: Lines) -> Any:
    """Returns the change of the loss against executed steps, for easy and hard tokens (Fig. 5).

    Args:
        lines: see ``measures.sweep``.
    """
    figure, axes = panels(10, 3.8, 2, sharey=True)
    for ax, name in zip(axes, ("easy", "hard"), strict=True):
        chosen = [line for line in lines if line["bucket"] == name]
        x = [line["mean_steps"] for line in chosen]
        y = [line["loss_change"] for line in chosen]
        ax.plot(x, y, "o-", color=COLORS[name])
        for line, a, b in zip(chosen, x, y, strict=True):
            ax.annotate(f"{line['alpha']:g}", (a, b), (3, 3), textcoords="offset points", size=7)
        ax.axhline(0, color=GREY, linewidth=0.8)
        ax.set_title(f"{name} tokens; numbers are alpha", fontsize=10)
        ax.set_xlabel("mean executed steps of these tokens")
    axes[0].set_ylabel("loss minus that at alpha 0 (nats per token)")
    return figure


def convergence_figure(lines: Lines, fit: Fit | None, noise: float) -> Any:
    """Returns the distance of Jacobi iterations to the fixed point (Fig. 8).

    Args:
        lines: see ``measures.convergence``.
        fit: the exponential, where there is one.
        noise: what may be rounding.
    """
    figure, (ax,) = panels(6, 3.8, 1)
    place = [line["iteration"] for line in lines]
    values = [line["rmse"] for line in lines]
    if max(values) > 0:
        ax.set_yscale("log")
        ax.axhline(noise, color=GREY, linestyle=":", label="rounding")
    ax.plot(place, [value or np.nan for value in values], "o", color=BLUE, label="RMSE")
    if fit is not None:
        label = f"fit: L = {fit.rate:.3g}, R² = {fit.r2:.4f}"
        ax.plot(
            place[: fit.points], [fit(n) for n in place[: fit.points]], color=ORANGE, label=label
        )
    ax.set_xticks(place)
    ax.set_xlabel("Jacobi iteration n")
    ax.set_ylabel("RMSE to sequential inference")
    ax.legend(frameon=False, fontsize=8)
    return figure
