"""Writes docs/reproducing.md, the runs of the papers with their cost, from docs/reproducing.csv.

    pip install -e '.[lora]'  # rows with LoRA need it
    python docs/reproducing.py

``epoch_tokens`` and ``val_tokens`` of the CSV stand for texts that must be prepared before they can
be counted: rows times mean tokens of a row, by GPT-2's tokenizer.
"""

import contextlib
import csv
import shlex
import tempfile
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from callbacks.overview import quantity
from callbacks.throughput import PEAK_BF16
from training.listing import answered_share, validation_tokens
from training.plan import Planner, count_flops, count_steps

DOCS = Path(__file__).parent
MFU, GPU = 0.4, "H100"
HEAD = f"""\
# Reproducing the papers

Every run of the papers' tables and figures that this project can train, at the papers' scale: the
command, the global batch and who states it, and what the run takes on {GPU}s at {MFU:.0%} of
their peak. The pages of the methods say how the tables are made of these runs;
`python train.py plan` plans a run with options of your own, its memory included.
Written by `python docs/reproducing.py` from [reproducing.csv](reproducing.csv).

A command is `python train.py fit` with the options of its row; `--trainer.devices N` shares the
same batch. *Validation* is its share of all FLOPs. Texts that are not prepared yet count with the
mean length of their rows; a dash stands where only the text can tell. The bracketed
numbers under *stated by* and the numbers under *deviates in* refer to the notes below each table.
"""
COLUMNS = (
    "paper's result",
    "options of `fit`",
    "global batch",
    "stated by",
    "tokens",
    "validation",
    "GPU-hours",
    "deviates in",
)
RULE = "|---" * len(COLUMNS) + "|"


class _Described(Planner):
    """Keeps the run that a command line describes."""

    def _run_subcommand(self, subcommand: str) -> None:
        self.run = self.planned_run()


def plan(row: dict[str, str]) -> dict[str, Any]:
    """Returns the batch and costs of a row's command.

    Args:
        row: A row of the CSV.

    Returns:
        ``batch`` and its ``unit``, and ``tokens``, ``validation`` and ``hours``, None where only
        the text can tell.
    """
    run = _Described(shlex.split(row["command"])).run
    batch = {"batch": run.batch.size, "unit": run.batch.unit}
    epochs = run.trainer["max_epochs"]
    if run.data.rows == "reasoning" and row["epoch_tokens"]:
        tokens: float | None = float(row["epoch_tokens"]) * epochs
    elif run.data.rows == "reasoning":
        tokens = None
    else:
        per_step = run.batch.size * (run.slots if run.batch.unit == "rows" else 1)
        tokens = count_steps(run, per_step)[1]
    if tokens is None:
        return {**batch, "tokens": None, "validation": None, "hours": None}
    if row["val_tokens"]:  # after each epoch
        scored: float | None = float(row["val_tokens"]) * epochs
        scored *= 1 + answered_share(run.data, run.trainer, scored, row=run.slots, devices=1)
    else:
        scored = validation_tokens(run.data, run.trainer, tokens, row=run.slots, batch=run.batch)
    training, validation = count_flops(run, tokens, scored or 0.0)
    return {
        **batch,
        "tokens": tokens,
        "validation": None if scored is None else validation / (training + validation),
        "hours": (training + validation) / (MFU * PEAK_BF16[GPU]) / 3600,
    }


def line(row: dict[str, str], costs: dict[str, Any], notes: dict[str, int]) -> str:
    """Returns a row of the page's table, and adds its texts to the section's notes.

    Args:
        row: A row of the CSV.
        costs: See ``plan``.
        notes: Number of each note.
    """
    unit = "" if costs["unit"] == "rows" else f" {costs['unit']}"
    tokens, share, hours = costs["tokens"], costs["validation"], costs["hours"]
    cells = (
        row["result"],
        f"`{row['command']}`",
        f"{costs['batch']:,}{unit}",
        f"{int(row['paper_batch']):,} ({note(row['batch_source'], notes)})",
        "-" if tokens is None else quantity(tokens),
        "-" if share is None else f"{share:.1%}",
        "-" if hours is None else f"{float(f'{hours:.3g}'):,.10g}",
        ", ".join(note(text, notes) for text in row["deviation"].split("; ") if text),
    )
    return "| " + " | ".join(cells) + " |"


def note(text: str, notes: dict[str, int]) -> str:
    """Returns the number of a note, a new one for a new text."""
    return str(notes.setdefault(text, len(notes) + 1))


@contextlib.contextmanager
def other_files() -> Iterator[None]:
    """Enters a folder with the configs, and the file that one command leaves to another."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("configs").symlink_to(DOCS.parent / "configs")
        Path("known.jsonl").touch()
        yield


def main() -> None:
    """Plans all rows and writes the page."""
    parts = [HEAD]
    with (DOCS / "reproducing.csv").open(newline="") as file, other_files():
        for paper, rows in groupby(csv.DictReader(file), itemgetter("paper")):
            notes: dict[str, int] = {}
            parts += [f"\n## {paper}\n", f"| {' | '.join(COLUMNS)} |", RULE]
            parts += [line(row, plan(row), notes) for row in rows]
            parts += ["", *(f"{number}. {text}" for text, number in notes.items())]
    (DOCS / "reproducing.md").write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
