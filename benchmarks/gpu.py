"""What the pages of ``docs/results`` say about a GPU: measured, and written to them.

    make bench-gpu                                       # all lines, docs/results rewritten
    python -m benchmarks.gpu --only throughput latent_thought
    python -m benchmarks.gpu --device cpu --tiny         # a trial, on copies of the pages

Every line is a benchmark's command; its tables go to the marked section of its page, with the
device's name. The lines run one after the other, those worth most first. Each is ended at its limit
and all at ``--minutes``; what was not measured then keeps its command in the page. Exit code 1: a
line failed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import table_lines
from evaluation.output import write_text

PAGES = Path(__file__).parents[1] / "docs" / "results"
BEGIN = "<!-- gpu: begin (written by `make bench-gpu`) -->"
END = "<!-- gpu: end -->"
MARKS = re.compile(r"<!-- gpu: begin\b.*?<!-- gpu: end -->", re.DOTALL)
NOT_MEASURED = "Not measured"
TRIAL_PAGES = Path("runs/bench_gpu")


class Line(NamedTuple):
    """A command whose tables a page has.

    Attributes:
        page: of ``docs/results``, without its ending.
        module: of ``benchmarks``.
        arguments: of the command, ``--device`` left out.
        tiny: what is added for a trial.
        minutes: after which it is ended.
        heading: in the page.
        rest: arguments of ``train.py`` after ``--``.
    """

    page: str
    module: str
    arguments: str
    tiny: str
    minutes: float
    heading: str
    rest: str = ""

    def command(self, device: str, *, tiny: bool = False) -> list[str]:
        """Returns the words after ``python``."""
        words = [*self.arguments.split(), "--device", device]
        if tiny:  # compiling takes longer than all else, and a known shape is not tiny
            left_out = {"--compile", "--shape", "Qwen/Qwen2.5-0.5B"}
            words = [word for word in words if word not in left_out] + self.tiny.split()
        rest = self.rest.split()
        return ["-m", f"benchmarks.{self.module}", *words, *(["--", *rest] if rest else [])]


SMALL = "--layers 1 --dim 32 --heads 2 --rounds 1"
TRAINING = "-c configs/trainer/gpu.yaml --data.tokenizer bytes"
OF_SENTENCES = "-c configs/trainer/gpu.yaml --data.corpus.tokenizer bytes"
THROUGHPUT = "--vocab 50304 --rounds 5 --most_layers 96"
WINDOWS = (
    "configs/transformer/thoughtbubbles_150m.yaml",
    "configs/thoughtbubbles/150m.yaml",
    "configs/ponderlm/70m.yaml",
    "configs/latent_thought/ltm_small.yaml",
)
LINES = (
    Line(
        "throughput",
        "throughput",
        f"--config {' '.join(WINDOWS)} {THROUGHPUT}",
        "--config configs/thoughtbubbles/tiny.yaml --tiny --rounds 1 --vocab 300",
        4,
        "Windows",
        TRAINING,
    ),
    Line(
        "throughput",
        "throughput",
        f"--config configs/thought_gestalt/85m.yaml {THROUGHPUT}",
        "--config configs/thought_gestalt/tiny.yaml --tiny --rounds 1 --vocab 300",
        2,
        "Sentences",
        OF_SENTENCES,
    ),
    Line(
        "throughput",
        "throughput",
        f"--only compile --config {WINDOWS[1]} {WINDOWS[3]} --vocab 50304",
        "--config configs/thoughtbubbles/tiny.yaml --tiny --rounds 1 --vocab 300",
        3,
        "Compiled",
        TRAINING,
    ),
    Line(
        "foundation",
        "training_step",
        "--layers 12 --dim 768 --heads 12 --context 1024 --batch 16 --vocab 50257 --rounds 5",
        f"{SMALL} --context 16 --batch 2 --vocab 64",
        2,
        "Training step",
    ),
    Line(
        "foundation",
        "decoding",
        "--layers 12 --dim 768 --heads 12 --vocab 50257 --rounds 3",
        f"{SMALL} --vocab 64 --prompt 4 --new 4",
        1,
        "Cached greedy decoding",
    ),
    Line(
        "thoughtbubbles",
        "forking",
        "--only overhead --layers 16 --dim 768 --heads 12 --context 512 --batch 64 --vocab 50304 "
        "--fork_layers 3 7 11 --kappa 2 --bf16 yes --rounds 3 --compile",
        f"{SMALL} --context 16 --batch 2 --vocab 64 --fork_layers 0",
        3,
        "Forking at the paper's 150M",
    ),
    Line(
        "latent_thought",
        "latents",
        "--only speed --dim 512 --context 1024 --batch 16 --vocab 50304 --bf16 --compile",
        f"{SMALL} --context 16 --batch 2 --vocab 64 --window 8 --steps 1",
        2,
        "Inference in training, ltm_small",
    ),
    Line(
        "ponderlm",
        "pondering",
        "--only training --layers 24 --dim 1024 --heads 16 --context 2048 --batch 4 --vocab 50304 "
        "--rounds 3 --compile",
        f"{SMALL} --context 16 --batch 2 --vocab 64",
        3,
        "Training at the paper's 410M",
    ),
    Line(
        "thought_gestalt",
        "sentences",
        "--only speed --layers 12 --dim 768 --heads 12 --sentence_layer 7 --vocab 50304 --bf16 yes "
        "--streams 64",
        f"{SMALL} --sentence_layer 1 --vocab 64 --streams 2 --sentences 3",
        2,
        "The 85M model",
    ),
    Line(
        "thinking_states",
        "thinking",
        "--bf16 --shape Qwen/Qwen2.5-0.5B --rounds 3",
        f"{SMALL} --layers 4 --vocab 64 --length 16 --counts 2 4 --thoughts 8 --chunks 4 --every 2",
        3,
        "Qwen2.5-0.5B",
    ),
)
"""In the order in which they run."""


def run_line(line: Line, device: str, *, tiny: bool, left: float) -> dict[str, Any] | str:
    """Returns a line's JSON (``benchmarks.harness.run``), or why there is none.

    Args:
        line: the command.
        device: ``cuda`` or ``cpu``.
        tiny: whether its sizes are those of a trial.
        left: seconds until all lines must have ended.
    """
    seconds = left if tiny else min(60 * line.minutes, left)
    if seconds <= 0:
        return "no time was left"
    command = line.command(device, tiny=tiny)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        at = command.index("--") if "--" in command else len(command)
        command[at:at] = ["--output", str(file)]
        code = exit_code([sys.executable, *command], seconds)
        if code is None:
            return f"ended after {seconds / 60:.1f} minutes"
        if code:
            return f"exit code {code}"
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def exit_code(command: Sequence[str], seconds: float) -> int | None:
    """Returns the exit code of a command; None: it was ended, with what it had started."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def section(
    lines: Sequence[Line],
    results: Sequence[dict[str, Any] | str],
    device: str,
    *,
    tiny: bool = False,
) -> str:
    """Returns the marked section of a page, its marks included.

    Args:
        lines: of the page.
        results: JSON of each, or why there is none.
        device: they ran on.
        tiny: whether they were a trial.
    """
    parts = [BEGIN]
    for line, result in zip(lines, results, strict=True):
        command = f"`python {' '.join(line.command(device, tiny=tiny))}`"
        if isinstance(result, str):
            parts.append(f"{NOT_MEASURED} ({result}): {command}")
            continue
        parts.append(f"**{line.heading}**: {command}, {result['place']}:")
        tables = result["tables"].items()
        parts += ["\n".join(table_lines(name, iter(rows))).strip() for name, rows in tables if rows]
    return "\n\n".join([*parts, END])


def write_section(page: Path, text: str) -> None:
    """Replaces the marked section of a page.

    Raises:
        ValueError: if the page has none, or several.
    """
    old = page.read_text(encoding="utf-8")
    if len(MARKS.findall(old)) != 1:
        raise ValueError(f"pages ({page}) must have one section between {BEGIN} and {END}")
    write_text(page, MARKS.sub(lambda _: text, old))


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    pages = list(dict.fromkeys(line.page for line in LINES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, not compiled, a trial")
    parser.add_argument("--only", nargs="+", choices=pages, default=pages, help="pages")
    parser.add_argument("--minutes", type=float, default=25.0, help="of all lines together")
    parser.add_argument(
        "--folder", type=Path, help="of the pages; default: docs/results, under --tiny copies of it"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the lines and rewrites the pages; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("device (cuda) is not available here; try --device cpu --tiny")
    folder = options.folder or (_copies() if options.tiny else PAGES)
    end = time.monotonic() + 60 * options.minutes
    failed = False
    for page in options.only:
        lines = [line for line in LINES if line.page == page]
        results = [
            run_line(line, options.device, tiny=options.tiny, left=end - time.monotonic())
            for line in lines
        ]
        for line, result in zip(lines, results, strict=True):
            if isinstance(result, str):
                failed = True
                print(f"{page}, {line.module}: {result}", file=sys.stderr)
        text = section(lines, results, options.device, tiny=options.tiny)
        write_section(folder / f"{page}.md", text)
    return int(failed)


def _copies() -> Path:
    """Returns a folder with copies of the pages."""
    TRIAL_PAGES.mkdir(parents=True, exist_ok=True)
    for page in {line.page for line in LINES}:
        text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
        write_text(TRIAL_PAGES / f"{page}.md", text)
    return TRIAL_PAGES


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the line that runs is ended, too
    sys.exit(main())
