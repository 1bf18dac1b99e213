"""PonderLM-3 against the plain transformer in training, and against full depth in generation.

    python -m benchmarks.pondering                           # all three tables, on a CPU
    python -m benchmarks.pondering --only generation --steps 3
    python -m benchmarks.pondering --device cuda --layers 24 --dim 1024 --heads 16 --context 2048 \
        --batch 4 --vocab 50304 --steps 3 --bf16 --compile --checkpoint

Training: overhead = (our step time / our FLOPs) / (plain step time / plain FLOPs), against the
plain transformer of the same widths on (K + 1) L positions; J is ``--iterations``. Memory: each
side's peak above what it held before its first step, in a process of its own; plain is one pass
over the interleaved sequence. Generation: see ``benchmarks.pondering_depth``.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import compare
from benchmarks.memory import extra_peak, in_a_process
from benchmarks.pondering_depth import report_generation
from benchmarks.steps import training_step
from lightning_models import (
    LanguageModel,
    PonderConfig,
    PonderLM,
    TransformerConfig,
    TransformerLM,
)

LLAMA = {"norm": "rms", "activation": "swiglu", "bias": False, "tie_head": False}


def build(side: str, options: argparse.Namespace) -> LanguageModel:
    """Returns ``ours`` or ``plain``, on the device, in training mode."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": options.vocab,
        "block_size": options.context,
        "num_layers": options.layers,
        "dim": options.dim,
        "num_heads": options.heads,
        "init": "ponderlm",
        "positions": "rope",
        **LLAMA,
    }
    model: LanguageModel
    if side == "plain":
        model = TransformerLM(TransformerConfig(**shape))
    else:
        config = PonderConfig(
            **shape,
            thinking_steps=options.steps,
            jacobi_iterations=(options.iterations, options.iterations),
            checkpoint_passes=options.checkpoint,
        )
        model = PonderLM(config)
    model.configure_model()
    return model.to(options.device).train()


def build_step(side: str, options: argparse.Namespace) -> Callable[[], float]:
    """Returns a function that does one whole training step."""
    model, length = build(side, options), length_of(side, options)
    stream = torch.randint(0, options.vocab, (options.batch, length + 1), device=options.device)
    batch = {"tokens": stream[:, :-1].contiguous(), "targets": stream[:, 1:].contiguous()}
    if options.compile:
        assert model.network is not None
        model.network.compile()

    def loss() -> Tensor:
        """The training objective of the batch."""
        terms = model.loss(batch).terms.values()
        return torch.stack([term.sum / term.normaliser for term in terms]).sum()

    return training_step(model, loss, options.device, bf16=options.bf16)


def length_of(side: str, options: argparse.Namespace) -> int:
    """Returns the tokens of a row: those of the plain transformer fill all slots."""
    context: int = options.context
    return context * (options.steps + 1) if side == "plain" else context


def report_training(options: argparse.Namespace) -> None:
    """Prints times, FLOPs and their quotient in both precisions."""
    print("precision  ours s  plain s  FLOP ratio  overhead")
    for bf16 in (False, True):
        asked = argparse.Namespace(**{**vars(options), "bf16": bf16, "checkpoint": False})
        flops = []
        for side in ("ours", "plain"):
            length = length_of(side, asked)
            flops.append(build(side, asked).flops_per_token(length, training=True) * length)
        time = compare(build_step("ours", asked), build_step("plain", asked), asked.rounds)
        ratio = flops[0] / flops[1]
        row = f"{'bf16' if bf16 else 'float32':9s} {time.ours:7.3f} {time.theirs:8.3f}"
        print(f"{row} {ratio:11.2f} {time.ratio / ratio:9.2f}", flush=True)


def report_memory(options: argparse.Namespace) -> None:
    """Prints peak memory of a step, with the passes' activations held and computed again."""
    print("passes        ours MB  one plain pass MB  ratio")
    plain = _peak("plain", options)
    for checkpointed in (False, True):
        asked = argparse.Namespace(**{**vars(options), "checkpoint": checkpointed})
        ours = _peak("ours", asked)
        name = "computed again" if checkpointed else "held"
        print(f"{name:13s} {ours:7.0f} {plain:18.0f} {ours / plain:6.2f}", flush=True)


def _peak(side: str, options: argparse.Namespace) -> float:
    return in_a_process("benchmarks.pondering", {**vars(options), "side": side}) / 1e6


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("training", "memory", "generation"), default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3, help="K")
    parser.add_argument("--iterations", type=int, default=2, help="J")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--memory", default=None, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Parses the command line and prints the tables that are asked for."""
    options = parser().parse_args()
    if options.memory is not None:
        asked = argparse.Namespace(**json.loads(options.memory))
        print(extra_peak(build_step(asked.side, asked), asked.device))
        return
    place = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(
        f"{options.layers} layers x {options.dim}, K {options.steps}, J {options.iterations}, "
        f"{options.context} tokens, batch {options.batch}, V {options.vocab}, {place}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    if options.only in (None, "training"):
        report_training(options)
    if options.only in (None, "memory"):
        report_memory(options)
    if options.only in (None, "generation"):
        model = build("ours", options).eval()
        assert isinstance(model, PonderLM)
        report_generation(model, options)


if __name__ == "__main__":
    main()
