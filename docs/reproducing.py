"""Adds the costs of the papers' runs to docs/reproducing.csv; writes the page and its figure.

    pip install -e '.[lora]'  # rows with LoRA need it
    python docs/reproducing.py

``epoch_tokens`` and ``val_tokens`` of the CSV stand for texts that must be prepared before they can
be counted: rows times mean tokens of a row, by GPT-2's tokenizer.
"""

import contextlib
import csv
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from callbacks.analysis.report import as_png, finish, panels, shades
from callbacks.overview import quantity
from callbacks.throughput import PEAK_BF16
from training.listing import answered_share, validation_tokens
from training.plan import Planner, count_flops, count_steps

DOCS = Path(__file__).parent
MFU, GPU = 0.4, "H100"
COSTS = ("batch_unit", "tokens", "validation_share", "gpu_hours")
"""Columns of the CSV that this program fills; empty if they depend on an unprepared text."""
HEAD = f"""\
# Reproducing the papers

**A run of the papers' tables and figures takes {{hours}} hours on an {GPU}**, planned at
{MFU:.0%} of its bf16 peak (float32 takes longer). The project can train {{runs}} of them, including
some controls that the papers lack. For each, [reproducing.csv](reproducing.csv) has the table or
figure, the options of `python train.py fit`, **deviations from the paper**, the global batch and
its source (public code or ours, where a paper gives none), tokens, validation's share of the FLOPs,
and hours.

```bash
python docs/reproducing.py
```

![Tokens and hours of each run, by paper](results/figures/reproducing.png)

The command rewrites this page, its figure and the cost columns of the CSV. `python train.py plan`
plans a run with options of your own. For texts that are not prepared, tokens are rows times their
mean length; some are known only once the text is prepared.
"""
COLUMNS = ("paper", "runs", "tokens", "GPU-hours per run", "in total")
RULE = "|---" * len(COLUMNS) + "|"


class _Described(Planner):
    """Keeps the run that a command line describes."""

    def _run_subcommand(self, subcommand: str) -> None:
        self.run = self.planned_run()


def plan(row: dict[str, str]) -> dict[str, str]:
    """Returns the values of ``COSTS`` for a row's command.

    Args:
        row: A row of the CSV.

    Raises:
        ValueError: If the command's global batch is not the row's.
    """
    run = _Described(shlex.split(row["command"])).run
    if run.batch.size != int(row["paper_batch"]):
        raise ValueError(
            f"{row['result']}: the command has {run.batch.size} {run.batch.unit} per step, "
            f"paper_batch is {row['paper_batch']}; correct the one that is not the paper's"
        )
    epochs = run.trainer["max_epochs"]
    if run.data.rows == "reasoning" and row["epoch_tokens"]:
        tokens: float | None = float(row["epoch_tokens"]) * epochs
    elif run.data.rows == "reasoning":
        tokens = None
    else:
        per_step = run.batch.size * (run.slots if run.batch.unit == "rows" else 1)
        tokens = count_steps(run, per_step)[1]
    if tokens is None:
        return dict(zip(COSTS, (run.batch.unit, "", "", ""), strict=True))
    if row["val_tokens"]:  # after each epoch
        texts = float(row["val_tokens"]) * epochs
        answered = answered_share(run.data, run.trainer, texts, row=run.slots, devices=1)
        scored: float | None = texts * (1 + answered)
    else:
        scored = validation_tokens(run.data, run.trainer, tokens, row=run.slots, batch=run.batch)
    training, validation = count_flops(run, tokens, scored or 0.0)
    share = "" if scored is None else f"{validation / (training + validation):.2g}"
    hours = (training + validation) / (MFU * PEAK_BF16[GPU]) / 3600
    values = (run.batch.unit, f"{tokens:.0f}", share, f"{hours:.3g}")
    return dict(zip(COSTS, values, strict=True))


def page(rows: Sequence[dict[str, str]]) -> str:
    """Returns the text of the page.

    Args:
        rows: The rows of the CSV with their costs.
    """
    lines = [line(paper, list(runs)) for paper, runs in groupby(rows, itemgetter("paper"))]
    hours = sorted(float(row["gpu_hours"]) for row in rows if row["gpu_hours"])
    head = HEAD.replace("{runs}", str(len(rows)))
    head = head.replace("{hours}", interval([digits(value) for value in hours]))
    return "\n".join([head, f"| {' | '.join(COLUMNS)} |", RULE, *lines]) + "\n"


def line(paper: str, runs: list[dict[str, str]]) -> str:
    """Returns a row of the page's table.

    Args:
        paper: Name of the paper.
        runs: Its rows of the CSV.
    """
    tokens, hours = (
        sorted(float(run[column]) for run in runs if run[column])
        for column in ("tokens", "gpu_hours")
    )
    unknown = len(runs) - len(hours)
    cells = (
        paper,
        str(len(runs)),
        interval([quantity(value) for value in tokens]),
        interval([digits(value) for value in hours]),
        digits(sum(hours)) + (f" without {unknown} runs" if unknown else "") if hours else "-",
    )
    return "| " + " | ".join(cells) + " |"


def draw(rows: Iterable[dict[str, str]]) -> Any:
    """Draws the hours of each run over its tokens, if both are known.

    Args:
        rows: The rows of the CSV with their costs.
    """
    figure, (ax,) = panels(6.4, 3.8, 1)
    known = [row for row in rows if row["gpu_hours"]]
    papers = list(dict.fromkeys(row["paper"] for row in known))
    for paper, color, marker in zip(papers, shades(len(papers)), "os^vD<>*", strict=True):
        runs = [row for row in known if row["paper"] == paper]
        tokens, hours = ([float(run[name]) for run in runs] for name in ("tokens", "gpu_hours"))
        ax.loglog(tokens, hours, marker, color=color, markersize=4, label=paper)
    finish(ax, "training tokens", f"{GPU} hours")
    return figure


def interval(values: list[str]) -> str:
    """Returns the first and the last of sorted values, one of equal ones, or a dash for none."""
    return " to ".join(dict.fromkeys(values[:1] + values[-1:])) or "-"


def digits(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,.10g}"


@contextlib.contextmanager
def other_files() -> Iterator[None]:
    """Enters a folder with the configs and a file that one command writes for another."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("configs").symlink_to(DOCS.parent / "configs")
        Path("known.jsonl").touch()
        yield


def main() -> None:
    """Plans all rows, and writes their costs, the page and its figure."""
    path = DOCS / "reproducing.csv"
    with path.open(newline="") as file, other_files():
        rows = [{**row, **plan(row)} for row in csv.DictReader(file)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (DOCS / "reproducing.md").write_text(page(rows))
    (DOCS / "results/figures/reproducing.png").write_bytes(as_png(draw(rows)))


if __name__ == "__main__":
    main()
