"""Thinking States: training against Coconut, speculative prefill, answering against CoT.

    python -m benchmarks.thinking                            # all tables, on a CPU
    python -m benchmarks.thinking --only training --batch 8
    python -m benchmarks.thinking --only prefill --every 8 4 1
    python -m benchmarks.thinking --device cuda --bf16 --shape Qwen/Qwen2.5-0.5B

Training (Fig. 6 of the paper): forward, backward and AdamW on a query of 128 tokens (``--length``)
in 2, 4, 8 and 16 chunks (``--counts``), with as many thought tokens in all (``--thoughts``, ends
counted), against 2 chunks; and of Coconut with as many latents, against 2 latents. Prefill and
answering: ``benchmarks.thinking_queries``. Networks have random weights; trained ones are timed by
``python evaluate.py reason --ckpt A B``. Ratios are medians over rounds of rivals in turn; the
first row of a training table is a size against itself, and shows the noise.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import compare
from benchmarks.steps import training_step
from benchmarks.thinking_models import PREFIX, build, latents, random_tokens
from benchmarks.thinking_queries import report_answering, report_prefill
from lightning_models import LanguageModel
from lightning_models.thinking_states.backbone import KNOWN


class Timed(NamedTuple):
    """What is timed of a model in training.

    Attributes:
        step: A whole training step.
        forward: The loss alone, its graph included.
    """

    step: Callable[[], float]
    forward: Callable[[], Tensor]


def report_training(options: argparse.Namespace) -> None:
    """Prints how a step grows with chunks, and with latents."""
    for method, unit in (("Thinking States", "chunks"), ("Coconut", "latents")):
        least = build_timed(method, options.counts[0], options)
        to = f"to {options.counts[0]}"
        print(f"{method}\n{unit:>7s}   step s {to:>6s}   forward s {to:>6s}")
        for number in options.counts:
            timed = build_timed(method, number, options)
            step = compare(timed.step, least.step, options.rounds)
            forward = compare(timed.forward, least.forward, options.rounds)
            row = f"{number:7d} {step.ours:8.4f} {step.ratio:6.2f}"
            print(f"{row} {forward.ours:11.4f} {forward.ratio:6.2f}", flush=True)


def build_timed(method: str, number: int, options: argparse.Namespace) -> Timed:
    """Returns what is timed of a model with so many chunks or latents."""
    sizes = {"chunk_size": options.length // number}
    config = latents(number) if method == "Coconut" else sizes
    model = build(method, options, **config).train()
    batch = training_batch(number, options)

    def loss() -> Tensor:
        """The training objective of the batch."""
        return total(model, batch)

    def forward() -> Tensor:
        """The same without its gradient."""
        with torch.autocast(kind, torch.bfloat16, enabled=options.bf16):
            return loss().detach()

    kind = torch.device(options.device).type
    return Timed(training_step(model, loss, options.device, bf16=options.bf16), forward)


def total(model: LanguageModel, batch: dict[str, Any]) -> Tensor:
    """Returns the objective of a batch."""
    terms = model.loss(batch).terms.values()
    return torch.stack([term.sum / term.normaliser for term in terms]).sum()


def training_batch(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns queries of ``number`` chunks with a step at the end of each.

    Steps and the ends of their thoughts are ``options.thoughts`` tokens in all.
    """
    rows, length, device = options.batch, options.length, options.device
    each, chunk = options.thoughts // number - 1, options.length // number
    places = torch.arange(1, number + 1, device=device) * chunk - 1
    answers = random_tokens(options, rows, options.answer)
    return {
        "query": random_tokens(options, rows, length),
        "query_lengths": torch.full((rows,), length, device=device),
        "steps": random_tokens(options, rows, number, each),
        "step_lengths": torch.full((rows, number), each, device=device),
        "step_places": places.expand(rows, -1),
        "targets": torch.cat((answers, torch.zeros_like(answers[:, :1])), dim=1),
        "sequence_id": torch.arange(rows, device=device),
        "epochs": 0.0,
    }


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("training", "prefill", "answering"), default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=(*KNOWN,), default=None, help="instead of sizes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--length", type=int, default=128, help="training: tokens of the query")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--thoughts", type=int, default=64, help="training: tokens of all thoughts")
    parser.add_argument("--chunks", type=int, default=32, help="prefill, answering")
    parser.add_argument("--chunk_size", type=int, default=8, help="prefill, answering")
    parser.add_argument(
        "--every",
        type=int,
        nargs="+",
        default=[8, 4, 1],
        help="k: chunks k, 2k, ... of a query think; answering takes the first number",
    )
    parser.add_argument("--thought", type=int, default=4, help="prefill, answering: tokens of one")
    parser.add_argument("--answer", type=int, default=4, help="tokens of the answer")
    return parser


def check(options: argparse.Namespace) -> None:
    """Checks that sizes fit together.

    Raises:
        ValueError: if they do not; the message says which.
    """
    for number in options.counts:
        if number < 1 or options.length % number or options.thoughts % number:
            raise ValueError(
                f"counts ({number}) must divide length ({options.length}) and thoughts "
                f"({options.thoughts})"
            )
        if options.thoughts < 2 * number:
            raise ValueError(
                f"thoughts ({options.thoughts}) must be two tokens a chunk or more, of which one "
                f"is the end; counts has {number}"
            )
    for every in options.every:
        if not 1 <= every <= options.chunks:
            raise ValueError(f"every ({every}) must be from 1 to chunks ({options.chunks})")
    if options.thought < 1:
        raise ValueError(f"thought ({options.thought}) must be at least 1")


def main() -> None:
    """Parses the command line and prints the tables that are asked for."""
    command = parser()
    options = command.parse_args()
    try:
        check(options)
    except ValueError as error:
        command.error(str(error))
    place = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    sizes = options.shape or f"{options.layers} layers x {options.dim}, V {options.vocab}"
    print(
        f"{sizes}, batch {options.batch}, {'bf16' if options.bf16 else 'float32'}, {place}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    if options.only in (None, "training"):
        print(
            f"training: {options.length} tokens, {options.thoughts} of thoughts, {len(PREFIX)}"
            f" of prefix, {options.answer + 1} of answer"
        )
        report_training(options)
    if options.only in (None, "prefill"):
        report_prefill(options)
    if options.only in (None, "answering"):
        report_answering(options)


if __name__ == "__main__":
    main()
