"""What the pages of ``docs/results`` say about a GPU: measured, and written to them.

    make bench-gpu                                       # all lines, docs/results rewritten
    python -m benchmarks.gpu --only throughput latent_thought
    python -m benchmarks.gpu --device cpu --tiny         # a trial, on copies of the pages

Every line is a benchmark's command; its tables go to the marked section of its page, with the
device's name. The tests of ``make test-gpu`` that compile nothing come first, then tokens per
second and MFU of each method, then memory: half an hour. What compiles comes last. A page is
written as soon as one of its lines is measured. Each line is ended at its limit and all at
``--minutes``; what was not measured then stays as it was in the page. Exit code 1: a test or a line
failed.
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
BLOCK = re.compile(r"^(?=\*\*|Not measured)", re.MULTILINE)
"""Begins what a section has of a line."""
TESTS = ("-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py")
TEST_MINUTES = 5.0
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
THROUGHPUT = "--vocab 50304 --most_layers 96"
WINDOWS = (
    "configs/transformer/thoughtbubbles_150m.yaml",
    "configs/thoughtbubbles/150m.yaml",
    "configs/ponderlm/70m.yaml",
    "configs/latent_thought/ltm_small.yaml",
)
PLANNED = "--vocab 300 --tiny --rounds 1"
TINY_WINDOWS = f"--config configs/thoughtbubbles/tiny.yaml {PLANNED}"
TINY_SENTENCES = f"--config configs/thought_gestalt/tiny.yaml {PLANNED}"
OF_WINDOWS = f"--config {' '.join(WINDOWS)} {THROUGHPUT}"
OF_GESTALT = f"--config configs/thought_gestalt/85m.yaml {THROUGHPUT}"
FAST = "--no_memory --rounds 5"
LINES = (
    Line(
        "throughput",
        "throughput",
        f"{OF_WINDOWS} {FAST}",
        TINY_WINDOWS,
        5,
        "Windows",
        TRAINING,
    ),
    Line(
        "throughput",
        "throughput",
        f"{OF_GESTALT} {FAST}",
        TINY_SENTENCES,
        3,
        "Sentences",
        OF_SENTENCES,
    ),
    Line(
        "thinking_states",
        "thinking",
        "--bf16 --shape Qwen/Qwen2.5-0.5B --rounds 3",
        f"{SMALL} --layers 4 --vocab 64 --length 16 --counts 2 4 --thoughts 8 --chunks 4 --every 2",
        3,
        "Qwen2.5-0.5B",
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
        "thought_gestalt",
        "sentences",
        "--only speed --layers 12 --dim 768 --heads 12 --sentence_layer 7 --vocab 50304 --bf16 yes "
        "--streams 64",
        f"{SMALL} --sentence_layer 1 --vocab 64 --streams 2 --sentences 3",
        2,
        "The 85M model",
    ),
    Line(
        "throughput",
        "throughput",
        f"{OF_WINDOWS} --rounds 1",
        TINY_WINDOWS,
        6,
        "Windows, with memory",
        TRAINING,
    ),
    Line(
        "throughput",
        "throughput",
        f"{OF_GESTALT} --rounds 1",
        TINY_SENTENCES,
        3,
        "Sentences, with memory",
        OF_SENTENCES,
    ),
    Line(
        "throughput",
        "throughput",
        f"--only compile --config {WINDOWS[1]} {WINDOWS[3]} --vocab 50304",
        TINY_WINDOWS,
        9,
        "Compiled",
        TRAINING,
    ),
    Line(
        "thoughtbubbles",
        "forking",
        "--only overhead --layers 16 --dim 768 --heads 12 --context 512 --batch 64 --vocab 50304 "
        "--fork_layers 3 7 11 --kappa 2 --bf16 yes --rounds 3 --compile",
        f"{SMALL} --context 16 --batch 2 --vocab 64 --fork_layers 0",
        7,
        "Forking at the paper's 150M",
    ),
    Line(
        "latent_thought",
        "latents",
        "--only speed --dim 512 --context 1024 --batch 16 --vocab 50304 --bf16 --compile",
        f"{SMALL} --context 16 --batch 2 --vocab 64 --window 8 --steps 1",
        7,
        "Inference in training, ltm_small",
    ),
    Line(
        "ponderlm",
        "pondering",
        "--only training --layers 24 --dim 1024 --heads 16 --context 2048 --batch 4 --vocab 50304 "
        "--rounds 3 --compile",
        f"{SMALL} --context 16 --batch 2 --vocab 64",
        7,
        "Training at the paper's 410M",
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


def block(line: Line, result: dict[str, Any] | str, device: str, *, tiny: bool = False) -> str:
    """Returns what a section has of a line.

    Args:
        line: the command.
        result: its JSON, or why there is none.
        device: it ran on.
        tiny: whether it was a trial.
    """
    command = f"`python {' '.join(line.command(device, tiny=tiny))}`"
    if isinstance(result, str):
        return f"{NOT_MEASURED} ({result}): {command}"
    tables = result["tables"].items()
    parts = [f"**{line.heading}**: {command}, {result['place']}:"]
    parts += ["\n".join(table_lines(name, iter(rows))).strip() for name, rows in tables if rows]
    return "\n\n".join(parts)


def blocks_of(page: Path, device: str, *, tiny: bool = False) -> list[str]:
    """Returns what a page's section has of each of its lines, in their order.

    Raises:
        ValueError: if the page has no section, or several.
    """
    old = page.read_text(encoding="utf-8")
    if len(MARKS.findall(old)) != 1:
        raise ValueError(f"pages ({page}) must have one section between {BEGIN} and {END}")
    text = MARKS.findall(old)[0].removeprefix(BEGIN).removesuffix(END)
    there = [part.strip() for part in BLOCK.split(text) if part.strip()]
    found = []
    for line in (line for line in LINES if line.page == page.stem):
        command = f"`python {' '.join(line.command(device, tiny=tiny))}`"
        known = [part for part in there if command in part]
        found.append(known[0] if known else block(line, "not run yet", device, tiny=tiny))
    return found


def write_section(page: Path, blocks: Sequence[str]) -> None:
    """Replaces the marked section of a page by these blocks."""
    text = "\n\n".join([BEGIN, *blocks, END])
    write_text(page, MARKS.sub(lambda _: text, page.read_text(encoding="utf-8")))


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
    parser.add_argument("--minutes", type=float, default=60.0, help="of all lines together")
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
    failed = not options.tiny and options.device == "cuda" and not _tests_pass()
    measured: dict[str, int] = {}
    for line in (line for line in LINES if line.page in options.only):
        page, number = folder / f"{line.page}.md", measured.get(line.page, 0)
        measured[line.page] = number + 1
        blocks = blocks_of(page, options.device, tiny=options.tiny)
        left = end - time.monotonic()
        result = run_line(line, options.device, tiny=options.tiny, left=left)
        if isinstance(result, str):
            failed = True
            print(f"{line.page}, {line.module}: {result}", file=sys.stderr)
        if not isinstance(result, str) or blocks[number].startswith(NOT_MEASURED):
            blocks[number] = block(line, result, options.device, tiny=options.tiny)
        write_section(page, blocks)
    return int(failed)


def _tests_pass() -> bool:
    """Runs the tests that guard what is measured; says so where they fail or take too long."""
    code = exit_code([sys.executable, *TESTS], 60 * TEST_MINUTES)
    if code:
        print(f"tests: exit code {code}; what follows may be wrong", file=sys.stderr)
    elif code is None:
        print(f"tests: ended after {TEST_MINUTES:g} minutes", file=sys.stderr)
    return code == 0


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
