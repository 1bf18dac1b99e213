"""``train.py list``: the configs of runs, with their parameters and tokens."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tabulate import tabulate

from callbacks.answer_accuracy import AnswerAccuracy
from callbacks.overview import quantity
from datamodules import LanguageDataModule
from datamodules.sources import StepBatch
from datamodules.store import Split
from datamodules.tokenizers import TokenizerUnavailableError
from lightning_models import LanguageModel
from lightning_models.recipe import as_started, resolve_class
from training.errors import PROJECT, UserError
from training.synthetic import SENTENCE_SLOTS

SENTENCES = 30
"""Assumed number of sentences in a document of unknown length (Thought Gestalt, section 2.2)."""
DESCRIPTION = """\
Shows the configs of runs: parameters and FLOPs per token of the model, and training tokens. The
tokens of runs that end by epochs are known once their text is prepared (in data_cache).
`python train.py plan -c CONFIG` plans a run's hours and memory."""


def run_configs(folder: Path) -> list[Path]:
    """Returns the YAML files under a folder that have a model, data and a trainer."""
    paths = []
    for path in sorted(folder.rglob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if {"model:", "data:", "trainer:"} <= {line.rstrip() for line in lines}:
            paths.append(path)
    return paths


def look_up(path: Path) -> dict[str, Any]:
    """Returns the sizes of a config's run.

    Args:
        path: The config.

    Returns:
        The config, the model's class, its parameters, training FLOPs per token, and the tokens of
        the run, or None and the number of epochs if the tokens depend on its text; ``estimated`` is
        true if FLOPs and tokens depend on the lengths of texts that are not prepared.

    Raises:
        UserError: If the config names an unknown class or option.
    """
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        data_class = resolve_class(content["data"]["class_path"], LanguageDataModule)
        data = data_class(**content["data"].get("init_args", {}))
        arguments = content["model"].get("init_args", {})
        links = {"vocab_size": data.vocab_size, "block_size": data.block_size}
        model_class = resolve_class(content["model"]["class_path"], LanguageModel)
        model = model_class(**{**arguments, "config": {**arguments.get("config", {}), **links}})
        with torch.device("meta"):
            model.configure_model()
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; name its class") from error
    except (TypeError, ValueError, AttributeError, ImportError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    context = row_tokens(data) or model.config.block_size
    trainer = content["trainer"]
    return {
        "config": str(path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path),
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.network.parameters()),
        "flops_per_token": model.flops_per_token(context, training=True),
        "tokens": planned_tokens(data, trainer, row_tokens(data)),
        "estimated": data.rows != "windows" and not is_prepared(data),
        "epochs": None if trainer.get("max_steps", -1) > 0 else trainer.get("max_epochs"),
    }


def is_prepared(data: Any) -> bool:
    """Returns whether a data module's text is tokenised already."""
    try:
        return hasattr(data, "store_dir") and bool(data.store_dir.exists())
    except TokenizerUnavailableError:  # the path of the text depends on its files
        return False


def row_tokens(data: Any) -> int | None:
    """Returns the mean length of a training row in tokens, or None for windows."""
    if data.rows == "windows":
        return None
    if is_prepared(data):
        data.prepare_data()
        return int(data.row_tokens("train"))
    if data.rows == "sentences":
        return (getattr(data, "max_sentences", None) or SENTENCES) * SENTENCE_SLOTS
    return int(data.block_size)


def planned_tokens(data: Any, trainer: Mapping[str, Any], row_tokens: int | None) -> int | None:
    """Returns the tokens of a run, or None if they depend on its text."""
    steps = trainer.get("max_steps", -1)
    if steps > 0:
        batch = data.step_batch(1, trainer.get("accumulate_grad_batches", 1))
        row = data.block_size if row_tokens is None else row_tokens
        return int(steps * batch.size * (row if batch.unit == "rows" else 1))
    num_tokens = getattr(getattr(data, "corpus", data), "train_tokens", None)
    num_tokens = split_tokens(data, "train", row_tokens) if num_tokens is None else num_tokens
    epochs = trainer.get("max_epochs")
    return None if num_tokens is None or not epochs else int(num_tokens * epochs)


def split_tokens(data: Any, split: Split, row_tokens: int | None) -> int | None:
    """Returns the tokens of a split, or None before its text is prepared."""
    corpus = getattr(data, "corpus", data)
    if is_prepared(corpus) and hasattr(corpus, "counts"):
        return int(corpus.counts(split).tokens)
    if is_prepared(data) and data.rows == "reasoning":
        return len(data.stored(split)) * (row_tokens or 0)
    return None


def validation_tokens(
    data: Any, trainer: Mapping[str, Any], trained: float, *, row: int, batch: StepBatch
) -> float | None:
    """Returns the tokens that all validations of a run score and, for answers, read again.

    Args:
        data: The data module.
        trainer: Options of the trainer.
        trained: Number of training tokens of the run.
        row: Length of a row in tokens.
        batch: The batch of an optimiser step.

    Returns:
        The tokens, or None if the text must be prepared first.
    """
    limit, every = trainer["limit_val_batches"], trainer["val_check_interval"]
    if limit == 0:
        return 0.0
    tokens: float | None = split_tokens(data, "val", row)
    if isinstance(limit, int):
        max_tokens = limit * data.eval_batch_size * row * batch.devices
        tokens = max_tokens if tokens is None else min(max_tokens, tokens)
    elif tokens is not None:
        tokens *= 1.0 if limit is None else limit
    if tokens is not None:
        tokens *= 1 + answered_share(data, trainer, tokens, row=row, devices=batch.devices)
    epoch = split_tokens(data, "train", row)
    between: float | None = None
    if isinstance(every, int):
        tokens_of_step = batch.size * (row if batch.unit == "rows" else 1)
        between = every * tokens_of_step / batch.accumulate
    elif epoch is not None and (every is None or isinstance(every, float)):
        between = (every or 1.0) * epoch * (trainer["check_val_every_n_epoch"] or 1)
    return None if tokens is None or between is None else trained // between * tokens


def answered_share(
    data: Any, trainer: Mapping[str, Any], tokens: float, *, row: int, devices: int
) -> float:
    """Returns the share of a validation's questions that ``AnswerAccuracy`` asks.

    A written answer costs as much as a scored one with the same number of tokens.
    """
    callbacks = trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if isinstance(callback, AnswerAccuracy):
            num_batches = callback.num_batches
            num_tokens = (
                tokens
                if num_batches is None
                else num_batches * data.eval_batch_size * row * devices
            )
            return min(num_tokens, tokens) / tokens if tokens else 0.0
    return 0.0


# ---- the command


def main(argv: list[str]) -> int:
    """Prints the table, or JSON, and returns the exit code."""
    parser = argparse.ArgumentParser(
        as_started("python train.py list"),
        description=as_started(DESCRIPTION),
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", nargs="?", default=None, help="folder of configs (default: this project's)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(argv)
    folder = Path(options.folder or ".")
    if options.folder is None or not folder.exists():  # a method's name
        folder = PROJECT / "configs" / folder
    paths = run_configs(folder)
    if not paths:
        raise UserError(f"folder ({folder}): it contains no YAML file with model, data and trainer")
    rows = []
    for path in paths:
        try:
            rows.append(look_up(path))
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)
    print(json.dumps({"runs": rows}, indent=1) if options.json else as_table(rows))
    return 0


def _length(row: Mapping[str, Any]) -> str:
    """Formats the tokens of a run, or its epochs if the tokens are unknown, or a dash."""
    if row["tokens"] is None:
        return "-" if row["epochs"] is None else f"{row['epochs']} epochs"
    return "~" * row["estimated"] + quantity(row["tokens"])


def as_table(rows: list[dict[str, Any]]) -> str:
    """Formats the table of runs."""
    guessed = any(row["estimated"] for row in rows)
    headers = ["config", "model", "parameters", "FLOPs/token", "tokens"]
    cells = [
        [
            row["config"].removeprefix("configs/").removesuffix(".yaml"),
            row["model"],
            quantity(row["parameters"]),
            "~" * row["estimated"] + quantity(row["flops_per_token"]),
            _length(row),
        ]
        for row in rows
    ]
    table = tabulate(cells, headers, colalign=("left", "left", "right", "right", "right"))
    note = "\n~ estimated for rows of a usual length; it depends on the texts." if guessed else ""
    call = as_started("python train.py fit -c configs/CONFIG.yaml")
    return f"{table}\n\n{len(rows)} runs: {call}{note}"
