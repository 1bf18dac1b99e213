"""Training throughput of a config: tokens per second, MFU, data waits, memory, compilation.

    python -m benchmarks.throughput -c configs/ponderlm/tiny.yaml
    python -m benchmarks.throughput -c configs/ponderlm/70m.yaml -c configs/trainer/gpu.yaml \
        --device cuda --compile --vocab 50304 --data.tokenizer bytes

It takes the options of ``fit``. Weights are random; batches come from the data, loaded during
training. MFU is the counted FLOP/s over the dense bf16 peak of a known GPU
(``callbacks.throughput``); CPUs have none. ``--peak`` measures memory in a fresh process, and
``--compile`` the gain of ``compile: true``, alternating with eager steps, once no new batch shapes
compile. For a baseline of equal FLOPs: ``python -m benchmarks.step --equal_flops``.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Options, Rows, Step
from callbacks.throughput import context_length, known_rate, real_tokens
from training import LatentCLI
from training.plan import training_loss
from training.signals import silence
from training.synthetic import without_files

MODULE = "benchmarks.throughput"
WARM_UP = 4
"""Untimed steps of compiled and eager networks at first, because batch shapes differ."""


class Training:
    """A config's model with its network on the device, and its endless training batches.

    Attributes:
        model: The model.
        precision: Precision of the trainer.
        flops: Training FLOPs per token.
        tokens: Real tokens of each batch so far.
        waited: Seconds that training waited for each batch.
    """

    def __init__(self, options: Options, *, compiled: bool = False) -> None:
        silence()
        accelerator = "gpu" if options.device == "cuda" else "cpu"
        here = {"accelerator": accelerator, "devices": 1, "strategy": "auto", "logger": "false"}
        arguments = [f"--config={path}" for path in options.config] + options.others
        cli = LatentCLI([*arguments, *(f"--trainer.{k}={v}" for k, v in here.items())], run=False)
        self.data: Any = cli.datamodule
        self.data.prepare_data()
        self.data.setup("fit")
        self.model = without_files(cli.model)
        if hasattr(self.data, "wording"):
            cli.model.take_wording(asdict(self.data.wording()))
            self.model.config = cli.model.config
        vocab = max(options.vocab, self.model.config.vocab_size)
        self.model.config = replace(self.model.config, vocab_size=vocab)
        torch.manual_seed(0)
        self.model.configure_model()
        assert self.model.network is not None
        if compiled:
            self.model.network.compile()
        self.model.to(options.device).train()
        self.precision, self.device = str(cli.trainer.precision), torch.device(options.device)
        first = next(iter(self.data.train_dataloader()))
        self.flops = self.model.flops_per_token(context_length(first), training=True)
        self.tokens: list[int] = []
        self.waited: list[float] = []
        self._batches = self._endless()

    def _endless(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.data.train_dataloader()

    def next_batch(self) -> dict[str, Any]:
        """Returns the next batch, on the device."""
        start = time.perf_counter()
        batch = next(self._batches)
        self.waited.append(time.perf_counter() - start)
        self.tokens.append(int(real_tokens(batch)))
        return self.model.transfer_batch_to_device(batch, self.device, 0)

    def step(self) -> Step:
        """Returns a training step on the next batch."""

        def loss() -> Tensor:
            """Returns the training objective."""
            return training_loss(self.model, self.next_batch())

        bf16 = self.precision.startswith("bf16")
        assert self.model.network is not None
        return harness.training_step(self.model.network, loss, bf16=bf16)


def rows(options: Options) -> Rows:
    """Yields one row with the throughput of a config."""
    training = Training(options)
    (times,) = harness.in_turn([training.step()], options.rounds)
    rates = [n / s for n, s in zip(training.tokens[-len(times) :], times, strict=True)]
    speed = statistics.median(rates)
    on_gpu = training.device.type == "cuda"
    peak = known_rate(torch.cuda.get_device_name(training.device)) if on_gpu else None
    row: dict[str, Any] = {
        "config": options.config[0].removeprefix("configs/").removesuffix(".yaml"),
        "tokens/s": speed,
        "MFLOP/token": training.flops / 1e6,
        "GFLOP/s": training.flops * speed / 1e9,
        "MFU": None if peak is None else training.flops * speed / peak,
        "waits for data": sum(training.waited[-len(times) :]) / sum(times),
    }
    if options.peak:
        row["peak MB"] = harness.in_a_process(MODULE, vars(options)) / 1e6
    if options.compile:
        row |= gain(options)
    yield row


def gain(options: Options) -> dict[str, float]:
    """Returns the gain of compiling the network and the extra seconds of the first steps."""
    steps = [Training(options, compiled=compiled).step() for compiled in (False, True)]
    first = [sum(map(harness.seconds, [step] * WARM_UP)) for step in steps]
    ratio = harness.compare(steps[0], steps[1], options.rounds).ratio
    return {"gain of compiling": ratio, "compile s": first[1] - first[0]}


def build_step(options: Options) -> Step:
    """Returns a whole training step, for the measurement of memory."""
    return Training(options).step()


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = harness.options_parser(__doc__)
    parser.add_argument(
        "-c", "--config", action="append", default=[], help="Config of fit; repeatable."
    )
    parser.add_argument("--vocab", type=int, default=0, help="Minimum vocabulary size.")
    parser.add_argument("--peak", action="store_true", help="Measure memory in a fresh process.")
    parser.add_argument("--compile", action="store_true", help="Measure the gain of compile: true.")
    return parser


def main() -> None:
    """Prints the table."""
    harness.run(build_parser(), rows, build_step, others=True)


if __name__ == "__main__":
    main()
