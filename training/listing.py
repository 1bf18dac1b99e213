"""``train.py list``: the configs that are runs, with parameters, tokens and estimated time."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tabulate import tabulate

from callbacks.overview import quantity
from datamodules import LanguageDataModule
from datamodules.store import Split
from datamodules.tokenizers import TokenizerUnavailableError
from lightning_models import LanguageModel
from lightning_models.recipe import resolve_class
from training.errors import PROJECT, UserError
from training.synthetic import SENTENCE_SLOTS

CPU_TFLOPS = 0.1
"""Two cores of a server in float32: `configs/transformer/tiny.yaml` in about two minutes."""
GPU_TFLOPS = 400.0
"""Of one H100 in bfloat16: 0.4 of its dense matmul rate."""
SENTENCES = 30
"""Sentences of a document of unknown length: Thought Gestalt, section 2.2."""
DESCRIPTION = """\
Shows the configs that are runs. Parameters and FLOPs per token are those of the model, built on the
meta device. Time is training FLOPs over a rate, of one device and without validation. Tokens of
runs that end by epochs are known once their text is prepared (in data_cache)."""


@dataclass(frozen=True)
class Listed:
    """A config that is a run.

    Attributes:
        config: its path.
        model: the class.
        parameters: of the network.
        flops_per_token: of training, by the model's count.
        tokens: that a run trains on, at most; None: not known before the text is prepared.
        epochs: None: the run ends by its steps.
        cpu_seconds: estimated; None: tokens are not known.
        gpu_seconds: estimated.
    """

    config: str
    model: str
    parameters: int
    flops_per_token: float
    tokens: int | None
    epochs: int | None
    cpu_seconds: float | None
    gpu_seconds: float | None


def run_configs(folder: Path) -> list[Path]:
    """Returns the YAML files below a folder that have a model, data and a trainer."""
    found = []
    for path in sorted(folder.rglob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if {"model:", "data:", "trainer:"} <= {line.rstrip() for line in lines}:
            found.append(path)
    return found


def look_up(path: Path, cpu_rate: float, gpu_rate: float) -> Listed:
    """Returns what a config trains and how long that takes.

    Args:
        path: of the config.
        cpu_rate: FLOP/s.
        gpu_rate: FLOP/s.

    Raises:
        UserError: if the config names what this project does not have.
    """
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        data = _build(content["data"], LanguageDataModule)
        arguments = content["model"].get("init_args", {})
        links = {"vocab_size": data.vocab_size, "block_size": data.block_size}
        config = {**arguments.get("config", {}), **links}
        recipe = {**content["model"], "init_args": {**arguments, "config": config}}
        model = _build(recipe, LanguageModel)
        with torch.device("meta"):
            model.configure_model()
    except KeyError as error:
        raise UserError(f"{path}: there is no {error.args[0]} to build a class of") from error
    except (TypeError, ValueError, AttributeError, ImportError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    context = row_tokens(data) or model.config.block_size
    flops = model.flops_per_token(context, training=True)
    trainer = content["trainer"]
    tokens = planned_tokens(data, trainer, row_tokens(data))
    seconds = [None if tokens is None else tokens * flops / rate for rate in (cpu_rate, gpu_rate)]
    return Listed(
        config=str(path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path),
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.network.parameters()),
        flops_per_token=flops,
        tokens=tokens,
        epochs=None if trainer.get("max_steps", -1) > 0 else trainer.get("max_epochs"),
        cpu_seconds=seconds[0],
        gpu_seconds=seconds[1],
    )


def _build(recipe: Any, base: type) -> Any:
    """Returns an object of a class of this project, and what its arguments name, built.

    Raises:
        ValueError: if it is no class of this project, or does not derive from ``base``.
    """
    kind = resolve_class(recipe["class_path"], base)
    arguments = {
        key: _build(value, object)
        if isinstance(value, Mapping) and "class_path" in value
        else value
        for key, value in recipe.get("init_args", {}).items()
    }
    return kind(**arguments)


def is_prepared(data: Any) -> bool:
    """Whether a data module's text is tokenised already."""
    try:
        return hasattr(data, "store_dir") and bool(data.store_dir.exists())
    except TokenizerUnavailableError:  # its files are needed to find the text
        return False


def row_tokens(data: Any) -> int | None:
    """Returns the tokens of a row of training; None: those of a window."""
    if data.rows == "windows":
        return None
    if is_prepared(data):
        data.prepare_data()
        return int(data.row_tokens("train"))
    if data.rows == "sentences":
        return (getattr(data, "max_sentences", None) or SENTENCES) * SENTENCE_SLOTS
    return int(data.block_size)


def planned_tokens(data: Any, trainer: Mapping[str, Any], row_tokens: int | None) -> int | None:
    """Returns the tokens of a run, None if only its text can tell."""
    steps, micro = trainer.get("max_steps", -1), trainer.get("accumulate_grad_batches", 1)
    if steps > 0:
        rows = data.batch_size * (data.block_size if row_tokens is None else row_tokens)
        batch = getattr(data, "batch_tokens", rows)
        return int(steps * micro * min(batch, rows))
    most = getattr(getattr(data, "corpus", data), "train_tokens", None)
    most = split_tokens(data, "train", row_tokens) if most is None else most
    epochs = trainer.get("max_epochs")
    return None if most is None or not epochs else int(most * epochs)


def split_tokens(data: Any, split: Split, row_tokens: int | None) -> int | None:
    """Returns the tokens of a split; None before its text is prepared."""
    corpus = getattr(data, "corpus", data)
    if is_prepared(corpus) and hasattr(corpus, "counts"):
        return int(corpus.counts(split).tokens)
    if is_prepared(data) and data.rows == "reasoning":
        return len(data.stored(split)) * (row_tokens or 0)
    return None


def validation_tokens(
    data: Any, trainer: Mapping[str, Any], trained: float, *, row: int, devices: int
) -> float | None:
    """Returns the tokens that all validations of a run score.

    Args:
        data: The data module.
        trainer: Options of the trainer.
        trained: Tokens that the run trains on.
        row: Tokens of a row.
        devices: Processes that train.

    Returns:
        None where the text must be prepared first.
    """
    limit, every = trainer["limit_val_batches"], trainer["val_check_interval"]
    if limit == 0:
        return 0.0
    tokens: float | None = split_tokens(data, "val", row)
    if isinstance(limit, int):
        most = limit * data.eval_batch_size * row * devices
        tokens = most if tokens is None else min(most, tokens)
    elif tokens is not None:
        tokens *= 1.0 if limit is None else limit
    epoch = split_tokens(data, "train", row)
    between: float | None = None
    if isinstance(every, int):
        between = every * data.batch_size * row * devices
    elif epoch is not None and (every is None or isinstance(every, float)):
        between = (every or 1.0) * epoch * (trainer["check_val_every_n_epoch"] or 1)
    return None if tokens is None or between is None else trained // between * tokens


# ---- the command


def main(argv: list[str]) -> int:
    """Prints the table, or JSON, and returns the exit code."""
    parser = argparse.ArgumentParser(
        "python train.py list",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", nargs="?", default=None, help="of configs; default: this project's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--cpu_tflops",
        type=float,
        default=CPU_TFLOPS,
        help="TFLOP/s of training on a CPU (default: %(default)s, two cores)",
    )
    parser.add_argument(
        "--gpu_tflops",
        type=float,
        default=GPU_TFLOPS,
        help="the same on a GPU (default: %(default)s, an H100 at 0.4 of its peak)",
    )
    options = parser.parse_args(argv)
    folder = Path(options.folder or ".")
    if options.folder is None or not folder.exists():  # a method's name
        folder = PROJECT / "configs" / folder
    paths = run_configs(folder)
    if not paths:
        raise UserError(f"folder ({folder}): no YAML file with model, data and trainer is below it")
    rates = options.cpu_tflops * 1e12, options.gpu_tflops * 1e12
    if not all(0 < rate < math.inf for rate in rates):
        raise UserError("cpu_tflops and gpu_tflops must be above 0")
    rows = list(_look_up_all(paths, *rates))
    if options.json:
        document = {"cpu_flops": rates[0], "gpu_flops": rates[1], "runs": [asdict(r) for r in rows]}
        print(json.dumps(document, indent=1))
    else:
        print(as_table(rows, *rates))
    return 0


def _look_up_all(paths: list[Path], cpu_rate: float, gpu_rate: float) -> Iterator[Listed]:
    """Yields what the configs are; one that cannot be built is reported and left out."""
    for path in paths:
        try:
            yield look_up(path, cpu_rate, gpu_rate)
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)


def as_table(rows: list[Listed], cpu_rate: float, gpu_rate: float) -> str:
    """Returns a table for people, with a line that says what times were estimated with."""
    headers = ["config", "model", "parameters", "FLOPs/token", "tokens", "CPU", "GPU"]
    cells = [
        [
            row.config.removeprefix("configs/").removesuffix(".yaml"),
            row.model,
            quantity(row.parameters),
            quantity(row.flops_per_token),
            f"{row.epochs} epochs" if row.tokens is None else quantity(row.tokens),
            *("-" if s is None else span(s) for s in (row.cpu_seconds, row.gpu_seconds)),
        ]
        for row in rows
    ]
    table = tabulate(cells, headers, colalign=("left", "left", *("right",) * 5))
    return (
        f"{table}\n\n{len(rows)} runs: python train.py fit -c configs/CONFIG.yaml. Time at "
        f"{quantity(cpu_rate)}FLOP/s (CPU) and {quantity(gpu_rate)}FLOP/s (GPU); see --help."
    )


def span(seconds: float) -> str:
    """Returns seconds in the largest unit that leaves at least 1, such as ``2.5 h``."""
    units = {"min": 60.0, "h": 60.0, "days": 24.0, "years": 365.0}
    shown = "< 1 min"
    for unit, size in units.items():
        seconds /= size
        if seconds < 1:
            break
        shown = f"{seconds:.3g} {unit}"
    return shown
