"""Draws figures of the documentation from the tables in docs/results.

    python -m docs.figures

These are the figures that neither a study nor ``docs/reproducing.py`` draws. Each is written to
``docs/results/figures``, named after its page.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from callbacks.analysis.report import GREY, as_png, draw_lines, finish, panels, shades

RESULTS = Path(__file__).parent / "results"


def read(name: str) -> pd.DataFrame:
    """Reads a table of docs/results."""
    return pd.read_csv(RESULTS / name)


def bars(
    table: pd.DataFrame, labels: str, columns: Sequence[str], axis: str, *, level: float = 1.0
) -> Any:
    """Draws groups of horizontal bars, one group for each row of a table.

    Args:
        table: The rows.
        labels: The column with the names of the rows.
        columns: The columns to draw.
        axis: Label of the values.
        level: Position of a vertical line, e.g. 1 for ratios.
    """
    height = 0.8 / len(columns)
    figure, (ax,) = panels(6.4, 0.8 + 0.19 * len(table) * max(1.4, len(columns)), 1)
    for i, (name, color) in enumerate(zip(columns, shades(len(columns)), strict=True)):
        positions = [row + height * (i - (len(columns) - 1) / 2) for row in range(len(table))]
        label = name if len(columns) > 1 else None
        ax.barh(positions, table[name], 0.9 * height, color=color, label=label)
    ax.set_yticks(range(len(table)), table[labels])
    ax.invert_yaxis()
    ax.axvline(level, color=GREY, linewidth=0.8)
    finish(ax, axis, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(columns))
    return figure


def speed() -> Any:
    """Draws the time and memory of a training step, relative to the reference."""
    plain, inferring = read("speed/transformer.csv"), read("speed/latent_thought.csv")
    plain = plain.assign(
        model=[
            f"decoder, {row.precision}, vocabulary {row.vocabulary}" for row in plain.itertuples()
        ],
        time=plain["time ratio"],
    )
    inferring = inferring.assign(
        model=[f"Latent-Thought LM, vocabulary {size}" for size in inferring["vocabulary"]],
        time=inferring["ours, s"] / inferring["literal, s"],
    )
    gestalt = read("speed/thought_gestalt.csv")
    gestalt = gestalt.assign(
        model="Thought Gestalt",
        time=1 / gestalt["speed-up"],
        **{"memory ratio": gestalt["ours, MB"] / gestalt["literal, MB"]},
    )
    rows = pd.concat([plain, inferring, gestalt]).rename(columns={"memory ratio": "memory"})
    return bars(rows, "model", ["time", "memory"], "relative to the reference")


def compilation() -> Any:
    """Draws the speed that compilation gives."""
    table = read("throughput/compilation.csv")
    names = table["config"].str.removeprefix("configs/").str.removesuffix(".yaml")
    return bars(table.assign(model=names), "model", ["gain"], "speed, relative to eager")


def scoring() -> Any:
    """Draws the processor time of scoring tasks, relative to lm-eval's ``hf``."""
    table = read("throughput/scoring.csv")
    return bars(table, "model", ["arc_easy", "hellaswag", "piqa"], "processor time, relative to hf")


def memory() -> Any:
    """Draws predicted over measured memory."""
    return bars(read("memory.csv"), "config", ["predicted / measured"], "predicted / measured")


def corpora() -> Any:
    """Draws the speed of preparation, relative to the tokenizer alone."""
    table = read("corpora.csv")
    table = table[table["what"] == "preparation"]
    table = table.assign(
        tokenizer=table["case"].str.removesuffix(", ours / tokenizer alone"),
        value=table["value"].astype(float),
    )
    return bars(table, "tokenizer", ["value"], "speed, relative to the tokenizer")


def latents() -> Any:
    """Draws accuracy on Parity with the latents, with zeros and with another question's."""
    rows = read("thinking_states/evaluations.csv")
    columns = {
        "1 to N operations": "latents",
        "latents zero": "zeros",
        "latents swapped": "another question's",
    }
    rows = rows[rows["latents swapped"].notna()].rename(columns=columns)
    seeds = rows.groupby("title", sort=False)["seed"].nunique()
    rows = rows[rows["title"].map(seeds) > 1]  # variants have one seed
    means = rows.groupby("title", sort=False)[list(columns.values())].mean().reset_index()
    return bars(means, "title", list(columns.values()), "accuracy, 1 to 10 operations", level=0.5)


NATS, PERPLEXITY = "nats/token", "perplexity, lexical"
BPB = "bpb, autoregressive, dynamic"  # without a look ahead
SHORT, LONG = "1 to N operations", "N + 1 to 4 N"
COMPARISONS = [
    ("Thoughtbubbles, plain decoder", "thoughtbubbles", "bubbles2", "plain", BPB),
    ("..., copy-3", "thoughtbubbles", "bubbles2", "copy3", BPB),
    ("..., without forks", "thoughtbubbles", "bubbles2", "bubbles1", BPB),
    ("..., plain decoder of equal FLOPs", "thoughtbubbles", "bubbles2", "wide4", BPB),
    ("Thought Gestalt, no memory", "thought_gestalt", "gestalt", "none", PERPLEXITY),
    ("..., detached memory", "thought_gestalt", "gestalt", "detached", PERPLEXITY),
    ("..., context seeding only", "thought_gestalt", "gestalt", "seeding", PERPLEXITY),
    ("..., GPT-2", "thought_gestalt", "gestalt", "rope", PERPLEXITY),
    ("Latent-Thought LM, same window", "latent_thought", "steps16", "ar_window", NATS),
    ("..., full attention", "latent_thought", "steps16", "ar", NATS),
    ("..., plain decoder of equal FLOPs", "latent_thought", "steps16", "ar_compute", NATS),
    ("PonderLM-3, PonderLM-2", "ponderlm", "ponderlm3", "ponderlm2", NATS),
    ("..., PonderLM-2 with one step", "ponderlm", "ponderlm3", "ponderlm2_k1", NATS),
    ("..., plain decoder", "ponderlm", "ponderlm3", "vanilla", NATS),
    ("..., plain decoder of equal FLOPs", "ponderlm", "ponderlm3", "wide_slow", NATS),
    (
        "Thinking States on Parity, no CoT",
        "thinking_states",
        "thinking_states_equal",
        "no_cot",
        LONG,
    ),
    ("... on Vars, no CoT", "thinking_states_vars", "thinking_states", "no_cot", LONG),
    ("Loops on look-ups, the block once", "hops", "looped", "plain", "right"),
    ("... on prose, 4 times the depth", "ponderlm", "looped", "deep", NATS),
    ("PCCoT on Parity, no CoT", "thinking_states", "pccot", "no_cot", SHORT),
    ("CODI on Parity, no CoT", "thinking_states", "codi", "no_cot", SHORT),
]
"""Method and control, study, their runs, and the measure that is compared."""


def comparisons() -> Any:
    """Draws training FLOPs relative to a control, and whether each seed is better than it."""
    figure, (ax,) = panels(7.2, 0.8 + 0.23 * len(COMPARISONS), 1)
    kinds = ("better on each seed", "differs by seed", "worse on each seed")
    markers = dict(zip(kinds, zip("o^X", shades(3)[::-1], strict=True), strict=True))
    for row, (_, study, run, control, measure) in enumerate(COMPARISONS):
        table = read(f"{study}/evaluations.csv")
        names = table["run"].str.rsplit("-", n=1).str[0]
        ours, theirs = (table[names == name].set_index("seed") for name in (run, control))
        seeds = ours.index.intersection(theirs.index)
        ours, theirs = ours.loc[seeds], theirs.loc[seeds]
        sign = 1 if measure in (SHORT, LONG, "right") else -1
        better = sign * (ours[measure] - theirs[measure]) > 0
        kind = kinds[0] if better.all() else kinds[1] if better.any() else kinds[2]
        marker, color = markers[kind]
        cost = (ours["training TFLOPs"] / theirs["training TFLOPs"]).mean()
        ax.plot(cost, row, marker, color=color)
        values = f"{ours[measure].mean():.4g}; {theirs[measure].mean():.4g}"
        ax.annotate(values, (1, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    for kind, (marker, color) in markers.items():
        ax.plot([], [], marker, color=color, label=kind)
    ax.set_yticks(range(len(COMPARISONS)), [label for label, *_ in COMPARISONS], fontsize=8)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    ax.minorticks_off()
    ax.axvline(1, color=GREY, linewidth=0.8)
    finish(
        ax,
        "training FLOPs, relative to the control",
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
    )
    return figure


def logits() -> Any:
    """Draws the largest difference of logits between an imported model and transformers."""
    columns = ["largest difference, float32"]
    return bars(read("hub/logits.csv"), "family", columns, "largest difference of logits", level=0)


def window() -> Any:
    """Draws accuracy against the number of keys that a query sees in the test."""
    table = read("thinking_states/window.csv")
    names = ["11 to 40 operations", "100 operations"]
    figure, (ax,) = panels(6.4, 3.2, 1)
    shown = dict(zip(names, zip(names, shades(2), strict=True), strict=True))
    draw_lines(ax, table.assign(position=range(len(table))), "position", shown)
    ax.set_xticks(range(len(table)), table["keys in the test"])
    ax.axhline(0.5, color=GREY, linewidth=0.8)
    finish(ax, "keys that a query sees in the test", "accuracy")
    return figure


def devices() -> Any:
    """Draws the predicted memory of a device against the number of devices."""
    figure, (ax,) = panels(6.4, 3.2, 1)
    shown = {
        "ddp": ("replicas (ddp.yaml)", shades(2)[0]),
        "fsdp": ("sharded (fsdp.yaml)", shades(2)[1]),
    }
    table = read("scale.csv")
    draw_lines(ax, table, "devices", shown)
    ax.set_xscale("log", base=2)
    ax.set_xticks(table["devices"], table["devices"])
    ax.set_ylim(bottom=0)
    finish(ax, "devices", "predicted GB of a device")
    return figure


def resumption() -> Any:
    """Draws the loss of an uninterrupted run and of a run that was stopped and resumed."""
    figure, (ax,) = panels(6.4, 3.2, 1)
    table = read("resumption.csv")
    colors = shades(3)
    ax.plot(table["step"], table["uninterrupted"], color=GREY, linewidth=4, label="uninterrupted")
    for name, color in (("stopped", colors[0]), ("resumed", colors[1])):
        ax.plot(table["step"], table[name], color=color, linewidth=1.2, label=name)
    finish(ax, "step", "training loss, nats per token")
    return figure


def search() -> Any:
    """Draws the validation loss of a search's trials against the learning rate."""
    table = read("suite_cpu/search.csv")
    figure, (ax,) = panels(6.4, 3.2, 1)
    runs = list(dict.fromkeys(table["run"]))
    for run, color in zip(runs, shades(len(runs)), strict=True):
        trials = table[table["run"] == run]
        for state, marker in (("complete", "o"), ("pruned", "x")):
            rows = trials[trials["state"] == state]
            label = run if state == "complete" else None
            rate = rows["model.init_args.optimizer.lr"]
            ax.plot(rate, rows["val/loss"], marker, color=color, label=label)
    ax.set_xscale("log")
    finish(ax, "learning rate (crosses: pruned)", "validation loss, nats per token", ncols=2)
    return figure


FIGURES: dict[str, Callable[[], Any]] = {
    "index": comparisons,
    "speed": speed,
    "throughput": compilation,
    "tasks": scoring,
    "memory": memory,
    "corpora": corpora,
    "codi": latents,
    "hub": logits,
    "thinking_states_lengths": window,
    "scale": devices,
    "training": resumption,
    "tuning": search,
}
"""Functions that draw the figures, by page."""


def main() -> None:
    """Writes all figures."""
    folder = RESULTS / "figures"
    folder.mkdir(exist_ok=True)
    for page, draw in FIGURES.items():
        (folder / f"{page}.png").write_bytes(as_png(draw()))


if __name__ == "__main__":
    main()
