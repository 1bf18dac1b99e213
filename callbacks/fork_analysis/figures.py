"""Pictures of an analysis. They are drawn without pyplot, so that no global state is touched."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callbacks.analysis.figures import BLUE, GREEN, GREY, ORANGE, panels
from callbacks.analysis.token_text import short_label
from callbacks.fork_analysis.entropy import WINDOW, Parabola, Windows
from callbacks.fork_analysis.statistics import TokenRow

MOST_POINTS = 4000  # of a scatter plot
LINE_TOKENS, LINES = 48, 3  # of the map of tokens


def entropy_figure(found: Mapping[str, tuple[Windows, Parabola | None]]) -> Any:
    """Returns Fig. 4: forks in windows of tokens against the entropy of the output there.

    Args:
        found: windows and their parabola, by whose entropy it is.
    """
    figure, axes = panels(5.6 * len(found), 4.2, len(found), sharey=True)
    for place, (ax, (name, (windows, parabola))) in enumerate(
        zip(axes, found.items(), strict=True)
    ):
        _scatter(ax, windows)
        if parabola is not None:
            _draw_parabola(ax, windows.entropy, parabola)
        ax.set_title(f"entropy of {name}", fontsize=10)
        ax.set_xlabel(f"mean entropy of {WINDOW} tokens (nats)")
        if place == 0:
            ax.set_ylabel(f"forks of these {WINDOW} tokens / mean over all windows")
            ax.legend(frameon=False, fontsize=8)
        elif parabola is not None:
            ax.legend(*_last(ax), frameon=False, fontsize=8)
    return figure


def _scatter(ax: Any, windows: Windows) -> None:
    """Draws every window (or evenly many of them) and means over tenths of the windows."""
    x, y = windows.entropy, windows.normalised
    step = -(-len(x) // MOST_POINTS) or 1
    ax.scatter(x[::step], y[::step], s=7, alpha=0.35, color=GREY, linewidths=0, label="windows")
    tenths = [part for part in np.array_split(np.argsort(x), 10) if len(part)]
    ax.errorbar(
        [x[part].mean() for part in tenths],
        [y[part].mean() for part in tenths],
        yerr=[y[part].std() / len(part) ** 0.5 for part in tenths],
        fmt="o",
        markersize=4.5,
        color=BLUE,
        label="means of tenths, with standard error",
        zorder=3,
    )


def _draw_parabola(ax: Any, x: np.ndarray, parabola: Parabola) -> None:
    line = np.linspace(x.min(), x.max(), 100)
    shape = "concave" if parabola.concave else "convex"
    place = f"vertex at {parabola.vertex:.2f} nats"
    if not x.min() <= parabola.vertex <= x.max():
        place += ", outside"
    label = f"parabola: {shape}, {place}, R² {parabola.r2:.3f}"
    ax.plot(line, parabola(line), color=ORANGE, linewidth=2, label=label, zorder=4)


def _last(ax: Any) -> tuple[list[Any], list[str]]:
    handles, labels = ax.get_legend_handles_labels()
    chosen = [place for place, label in enumerate(labels) if label.startswith("parabola")]
    return [handles[place] for place in chosen], [labels[place] for place in chosen]


def tokens_figure(row: TokenRow, texts: Sequence[str]) -> Any:
    """Returns Fig. 7: streams of the first tokens of a row after each fork layer.

    Args:
        row: one analysed row.
        texts: what each token stands for.
    """
    shown = min(len(row.ids), LINE_TOKENS * LINES)
    starts = range(0, shown, LINE_TOKENS)
    layers, most = len(row.streams), int(row.streams.max())
    figure, axes = panels(14, (0.9 + 0.3 * layers) * len(starts) + 0.4, 1, len(starts))
    for ax, start in zip(axes, starts, strict=True):
        stop = min(start + LINE_TOKENS, shown)
        ax.imshow(
            row.streams[:, start:stop], cmap="Blues", vmin=0.4, vmax=most + 0.8, aspect="auto"
        )
        _write_counts(ax, row.streams[:, start:stop], most)
        labels = [short_label(text) for text in texts[start:stop]]
        ax.set_xticks(range(stop - start), labels, rotation=90, fontsize=7, parse_math=False)
        ax.set_yticks(range(layers), [f"fork layer {i + 1}" for i in range(layers)], fontsize=8)
        ax.set_xlim(-0.5, LINE_TOKENS - 0.5)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    figure.suptitle("streams of each token after each fork layer", fontsize=10)
    return figure


def _write_counts(ax: Any, streams: np.ndarray, most: int) -> None:
    for (layer, token), count in np.ndenumerate(streams):
        color = "white" if count > 0.6 * most else "#203040"
        ax.text(token, layer, str(count), ha="center", va="center", fontsize=6.5, color=color)


def layers_figure(measures: Sequence[Mapping[str, float]], rows: Sequence[TokenRow]) -> Any:
    """Returns, by fork layer: streams per token, what became of forks, scores, attention (Fig. 5).

    Args:
        measures: of each fork layer, see ``statistics.MEASURES``.
        rows: all analysed rows.
    """
    attention = any(np.isfinite(layer["attention_self"]) for layer in measures)
    figure, parts = panels(14 if attention else 11, 3.6, 4 if attention else 3)
    _draw_histogram(parts[0], np.concatenate([row.streams for row in rows], axis=1))
    fate = {"created": GREEN, "older, kept": BLUE, "older, deleted": ORANGE}
    _bars(parts[1], measures, dict(zip(("created", "kept", "deleted"), fate.items(), strict=True)))
    parts[1].set_title("forks per token", fontsize=10)
    scores = {"score_originals": ("originals", GREY), "score_forks": ("forks", BLUE)}
    _points(parts[2], measures, scores)
    parts[2].set_title("mean score P", fontsize=10)
    if attention:
        shown = {
            "attention_self": ("to itself", GREY),
            "attention_own_forks": ("to own forks", BLUE),
            "attention_others": ("to other tokens", ORANGE),
        }
        _points(parts[3], measures, shown)
        parts[3].set_title("attention of forked originals, per key", fontsize=10)
    return figure


def _draw_histogram(ax: Any, streams: np.ndarray) -> None:
    layers, most = len(streams), int(streams.max())
    width = 0.8 / layers
    for layer, counts in enumerate(streams):
        share = np.bincount(counts, minlength=most + 1)[1:] / len(counts)
        place = np.arange(1, most + 1) + width * (layer - (layers - 1) / 2)
        shade = 0.35 + 0.65 * (layer + 1) / layers
        ax.bar(place, share, width, color=BLUE, alpha=shade, label=f"fork layer {layer + 1}")
    ax.set_xticks(range(1, most + 1))
    ax.set_xlabel("streams of a token")
    ax.set_title("share of tokens", fontsize=10)
    ax.legend(frameon=False, fontsize=8)


def _bars(
    ax: Any, measures: Sequence[Mapping[str, float]], shown: Mapping[str, tuple[str, str]]
) -> None:
    """Draws grouped bars: a group a fork layer; ``shown`` has label and colour of each measure."""
    width = 0.8 / len(shown)
    for i, (name, (label, color)) in enumerate(shown.items()):
        place = np.arange(len(measures)) + width * (i - (len(shown) - 1) / 2)
        heights = np.nan_to_num([layer[name] for layer in measures])
        ax.bar(place, heights, width * 0.94, color=color, label=label)
    highest = max(bar.get_height() for bar in ax.patches)
    ax.set_ylim(0, 1.45 * highest or 1)  # room for the legend
    _name_layers(ax, len(measures))


def _points(
    ax: Any, measures: Sequence[Mapping[str, float]], shown: Mapping[str, tuple[str, str]]
) -> None:
    """Draws a line a measure on a logarithmic scale, as scores and attention span decades."""
    values = []
    for name, (label, color) in shown.items():
        heights = [layer[name] for layer in measures]
        ax.plot(heights, "o-", color=color, label=label)
        values += [height for height in heights if height > 0]
    ax.set_yscale("log")
    if values:
        ax.set_ylim(min(values) / 2, max(values) * 4)  # room for the legend
    ax.set_xlim(-0.5, len(measures) - 0.5)
    _name_layers(ax, len(measures))


def _name_layers(ax: Any, layers: int) -> None:
    ax.set_xticks(range(layers), [str(i + 1) for i in range(layers)])
    ax.set_xlabel("fork layer")
    ax.tick_params(which="both", labelsize=8)
    ax.legend(frameon=False, fontsize=8, loc="upper left")
