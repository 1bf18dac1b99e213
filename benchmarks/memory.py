"""Predicted memory of a training step compared with the measured growth, for every method.

    python -m benchmarks.memory
    python -m benchmarks.memory --config configs/ponderlm/tiny.yaml --rows_of_batch 4

A config's model is widened so that its weights take at least 200 MB. The measurement is the growth
of the peak resident set over two float32 steps in a fresh process on the CPU, with weights and
batch already in memory and after a step of a small model of the class. The prediction is
``train.py plan``'s trace of such a step, minus weights and batch.
"""

import argparse
import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Options, Rows, Step
from lightning_models import LanguageModel
from training import LatentCLI
from training.plan import trace_step, training_loss
from training.synthetic import make_batch, without_files

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SIZES = {"num_layers": 8, "dim": 768, "num_heads": 12, "ffn_dim": 3072, "sentence_layer": 3}
WARM = {"num_layers": 4, "dim": 32, "num_heads": 4, "ffn_dim": 128, "sentence_layer": 3}
METHODS = (
    "transformer/tiny",
    "thoughtbubbles/tiny",
    "thoughtbubbles/copy3_tiny",
    "thought_gestalt/tiny",
    "thought_gestalt/gist_85m",
    "latent_thought/tiny",
    "ponderlm/tiny",
    "ponderlm/ponderlm2_tiny",
    "ponderlm/ponderlm1_tiny",
    "ponderlm/looped_tiny",
    "ponderlm/pause_tiny",
    "ponderlm/mor_tiny",
    "thinking_states/tiny_parity",
    "thinking_states/cot_tiny_parity",
    "thinking_states/no_cot_tiny_parity",
    "thinking_states/icot_tiny_parity",
    "thinking_states/coconut_tiny_parity",
)
"""A config of every method."""
SLOTS = {"windows": 128, "sentences": 8 * 27, "reasoning": 160}
MOST, TOLERANCE = 200e6, 0.15


def outline(config: str, sizes: dict[str, int]) -> LanguageModel:
    """Returns a config's model at different sizes, without a network."""
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]
    model = without_files(LatentCLI([f"--config={config}", *options], run=False).model)
    fields = {field.name for field in dataclasses.fields(model.config)}
    changes: dict[str, Any] = {key: size for key, size in sizes.items() if key in fields}
    model.config = dataclasses.replace(model.config, **changes)
    return model


def build_step(options: Options) -> Step:
    """Returns a training step on the CPU, after a small model has warmed up the process."""
    for sizes in (WARM, SIZES):
        model = outline(options.config, sizes)
        torch.manual_seed(0)
        model.configure_model()
        assert model.network is not None
        batch = make_batch(model, options.rows_of_batch, SLOTS[model.reads])
        step = harness.training_step(
            model.network.train(), partial(training_loss, model.train(), batch), bf16=False
        )
        if sizes is WARM:
            step()
    return step


def rows(options: Options) -> Rows:
    """Yields predicted and measured MB of each config's step, beyond weights and batch."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # frees memory to the system immediately
    for config in options.config:
        model = outline(config, SIZES)
        batch = make_batch(model, options.rows_of_batch, SLOTS[model.reads])
        parts = trace_step(model, batch)
        if parts["weights"] < MOST:
            raise ValueError(
                f"config ({config}): weights of {parts['weights']:.0f} bytes are too small"
            )
        predicted = sum(parts.values()) - parts["weights"] - parts["batch"]
        settings = {"config": config, "rows_of_batch": options.rows_of_batch, "device": "cpu"}
        measured = harness.in_a_process("benchmarks.memory", settings)
        ratio = predicted / measured
        yield {
            "config": Path(config).relative_to(CONFIGS).with_suffix(""),
            "weights MB": parts["weights"] / 1e6,
            "predicted MB": predicted / 1e6,
            "measured MB": measured / 1e6,
            "predicted / measured": ratio,
            "within 15 %": "yes" if abs(ratio - 1) <= TOLERANCE else "no",
        }


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = harness.options_parser(__doc__)
    files = [str(CONFIGS / f"{name}.yaml") for name in METHODS]
    parser.add_argument("--config", nargs="+", default=files)
    parser.add_argument("--rows_of_batch", type=int, default=2)
    return parser


def main() -> None:
    """Prints the table."""
    harness.run(build_parser(), rows, build_step)


if __name__ == "__main__":
    main()
