"""Thought Gestalt's training step against the paper's literal computation: time and memory.

    python -m benchmarks.sentences                                # against 67 slots, and growth
    python -m benchmarks.sentences --device cuda --layers 12 --dim 768 --heads 12 --vocab 50304 \
        --bf16 yes --streams 64 --only speed                      # the 85M model: sentences/s

Sentences have the lengths of those in Python's documentation (``datamodules.Sentences``, a BPE of
``--bpe`` entries); their tokens are random, so that any vocabulary can be asked for. Dropout is off
on both sides. Time: rivals in turn, median ratio. Memory: each side alone in a fresh process, the
peak above what it held before its first step.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.literal_gestalt import LiteralGestalt, tensorize
from benchmarks.measure import compare, in_turn, seconds
from benchmarks.memory import extra_peak, in_a_process
from benchmarks.steps import training_step
from lightning_models import ThoughtGestaltConfig, ThoughtGestaltLM

SLOTS = 67


def sentence_lengths(options: argparse.Namespace) -> list[int]:
    """Returns the slots of the sentences of some streams, in the order of the text."""
    from datamodules import PythonDocs, Sentences

    corpus = PythonDocs(tokenizer=f"bpe:{options.bpe}", cache_dir=options.cache_dir)
    data = Sentences(corpus=corpus)
    data.prepare_data()
    data.setup()
    batches = data.training_source()
    rows = [row for n in range(8) for row in batches.batch(n)["lengths"].tolist()]
    return [length for row in rows for length in row if length]


def build_batch(options: argparse.Namespace, sentences: int) -> dict[str, Any]:
    """Returns streams of ``sentences`` sentences with real lengths and random words."""
    lengths = torch.tensor(options.lengths)
    need = options.streams * sentences
    lengths = lengths.repeat(-(-need // len(lengths)))[:need].view(options.streams, sentences)
    width = int(lengths.max())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, options.vocab - 3, (*lengths.shape, width), generator=generator)
    tokens[..., 0] = options.vocab - 3
    tokens.scatter_(2, lengths[..., None] - 1, options.vocab - 2)
    place = torch.arange(width)
    following = torch.cat((tokens[..., 1:], torch.zeros_like(tokens[..., :1])), dim=-1)
    targets = torch.where(place < lengths[..., None] - 1, following, -100)
    batch = {"tokens": tokens, "lengths": lengths, "targets": targets}
    batch["is_last"] = torch.zeros_like(lengths, dtype=torch.bool)
    return {key: value.to(options.device) for key, value in batch.items()}


def build_model(options: argparse.Namespace, **changes: Any) -> ThoughtGestaltLM:
    """Returns the model without dropout."""
    config = ThoughtGestaltConfig(
        vocab_size=options.vocab,
        block_size=SLOTS,
        num_layers=options.layers,
        dim=options.dim,
        num_heads=options.heads,
        sentence_layer=options.sentence_layer,
        attention_dropout=0.0,
        token_dropout=0.0,
        sentence_dropout=0.0,
        **changes,
    )
    torch.manual_seed(0)
    model = ThoughtGestaltLM(config)
    model.configure_model()
    return model.to(options.device).train()


def build_step(
    side: str, options: argparse.Namespace, sentences: int, **changes: Any
) -> Callable[[], float]:
    """Returns a function that does one whole training step and returns nats per target."""
    model, batch = build_model(options, **changes), build_batch(options, sentences)
    assert model.network is not None
    literal, padded = LiteralGestalt(model.network), None
    if side == "literal":
        padded = tensorize(batch, SLOTS)
    count = int((batch["targets"] >= 0).sum())

    def loss() -> Tensor:
        """Nats per target of the streams."""
        nats = model.loss(batch).terms["nll"].sum if padded is None else literal.loss(padded)
        return nats / count

    return training_step(model, loss, options.device, bf16=options.bf16)


def report(options: argparse.Namespace) -> None:
    """Prints the tables that were asked for."""
    place = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    slots = sum(options.lengths) / len(options.lengths)
    print(
        f"{options.layers} layers x {options.dim}, V {options.vocab}, {options.streams} streams, "
        f"{slots:.1f} of {SLOTS} slots used, {'bf16' if options.bf16 else 'float32'}, {place}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    tables = {"rival": _against_literal, "sentences": _by_sentences, "memory": _by_memory}
    tables["speed"] = _speed
    for name in options.only:
        tables[name](options)


def _against_literal(options: argparse.Namespace) -> None:
    steps = [build_step(side, options, options.sentences) for side in ("ours", "literal")]
    first = [step() for step in steps]
    time = compare(steps[0], steps[1], options.rounds)
    ours, literal = (_memory(options, side, options.sentences) for side in ("ours", "literal"))
    print(f"S = {options.sentences}: loss {first[0]:.6f} and {first[1]:.6f} nats per target")
    print(f"time   {time.ours:.3f} s and {time.theirs:.3f} s: {1 / time.ratio:.2f}x faster")
    print(f"memory {ours:.0f} MB and {literal:.0f} MB: {ours / literal:.2f}x", flush=True)


def _by_sentences(options: argparse.Namespace) -> None:
    print("sentences  s/step  ms/sentence step  MB  MB checkpointed")
    steps = [build_step("ours", options, sentences) for sentences in options.growth]
    times = in_turn(steps, options.rounds)
    del steps
    for sentences, taken in zip(options.growth, map(statistics.median, times), strict=True):
        plain = _memory(options, "ours", sentences)
        checkpointed = _memory(options, "ours", sentences, checkpoint_sentences=True)
        each = 1e3 * taken / sentences
        print(
            f"{sentences:9d} {taken:7.3f} {each:17.1f} {plain:5.0f} {checkpointed:8.0f}", flush=True
        )


def _by_memory(options: argparse.Namespace) -> None:
    print("M  s/step relative to M = 1")
    base = build_step("ours", options, options.sentences, memory_size=1)
    for size in (10, 20, 40):
        step = build_step("ours", options, options.sentences, memory_size=size)
        print(f"{size:2d} {compare(step, base, options.rounds).ratio:6.2f}", flush=True)


def _speed(options: argparse.Namespace) -> None:
    step = build_step("ours", options, options.sentences)
    step()
    taken = statistics.median(seconds(step) for _ in range(options.rounds))
    count = options.sentences * options.streams
    print(f"{count / taken:.0f} sentences/s, {options.sentences / taken:.1f} sentence steps/s")


def _memory(options: argparse.Namespace, side: str, sentences: int, **changes: Any) -> float:
    """Returns the megabytes of a step."""
    settings = {**vars(options), "side": side, "sentences": sentences, "changes": changes}
    return in_a_process("benchmarks.sentences", settings) / 1e6


def main() -> None:
    """Parses the command line and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--sentence_layer", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=2048 + 3)
    parser.add_argument("--bpe", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--sentences", type=int, default=30)
    parser.add_argument("--growth", type=int, nargs="+", default=[10, 30, 50, 70, 90])
    parser.add_argument("--bf16", type=lambda s: s == "yes", default=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache_dir", default="data_cache")
    parser.add_argument(
        "--only", nargs="+", default=["rival", "sentences", "memory"], metavar="TABLE"
    )
    parser.add_argument("--memory", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is None:
        options.lengths = sentence_lengths(options)
        report(options)
        return
    asked = argparse.Namespace(**json.loads(options.memory))
    step = build_step(asked.side, asked, asked.sentences, **asked.changes)
    print(extra_peak(step, asked.device))


if __name__ == "__main__":
    main()
