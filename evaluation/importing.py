"""``evaluate.py import``: a checkpoint from the weights of a ``transformers`` model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import ArgumentParser, Namespace

from datamodules import PythonDocs
from datamodules.tokenizers import parse_tokenizer
from evaluation.output import check_target, format_table, write_atomically
from lightning_models import TransformerLM
from lightning_models.transformer.import_weights import import_transformers


def import_checkpoint(source: str, target: Path, tokenizer: str | None = None) -> TransformerLM:
    """Returns the imported model, having written it as a checkpoint of this project.

    Its data recipe is PythonDocs with the model's tokenizer and block size, so that ``train.py
    validate --ckpt_path`` and ``evaluate.py`` can use it as it is.

    Args:
        source: hub name or folder of a GPT-2 or LLaMA model.
        target: the checkpoint to write; replaced where it exists.
        tokenizer: name in the sense of the data's option ``tokenizer``; None: the model's own.

    Raises:
        ValueError: if the model cannot be expressed, or the tokenizer does not fit it.
    """
    model = import_transformers(source)
    name = own_tokenizer(source) if tokenizer is None else tokenizer
    data = PythonDocs(tokenizer=name, block_size=model.config.block_size, batch_size=1)
    rows = model.config.vocab_size
    if data.vocab_size > rows:
        raise ValueError(
            f"tokenizer ({name}) has {data.vocab_size} entries, the model's vocabulary {rows}; "
            "name the tokenizer it was trained with"
        )
    if data.vocab_size < rows:
        # Rows without a token stay as padding, which the softmax sees and sampling never chooses.
        model = import_transformers(source, vocab_size=data.vocab_size, vocab_multiple=rows)
    content = checkpoint_content(model, data)
    write_atomically(target, lambda path: torch.save(content, path))
    return model


def own_tokenizer(source: str) -> str:
    """Returns the name of the tokenizer that belongs to a model.

    Raises:
        ValueError: if a folder has no tokenizer.json.
    """
    folder = Path(source)
    if not folder.is_dir():
        return source
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; name the tokenizer with --tokenizer")
    return str(path.resolve())


def checkpoint_content(model: TransformerLM, data: PythonDocs) -> dict[str, Any]:
    """Returns what Lightning's checkpoint of an untrained step would hold, without an optimiser."""
    content: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": L.__version__,
        "state_dict": model.state_dict(),
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
    }
    model.on_save_checkpoint(content)
    content["recipe"]["data"] = data.recipe()
    content[type(data).__qualname__] = data.state_dict()
    return content


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--hf", type=str, required=True, help="Hub name or folder of a GPT-2 or LLaMA model."
    )
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        default=None,
        help="Tokenizer name as in the data's options (null: the model's own).",
    )
    parser.add_argument("--output", type=str, required=True, help="Checkpoint to write (.ckpt).")


def run(settings: Namespace) -> None:
    """Writes the checkpoint and prints what it holds."""
    target = check_target(settings.output)
    if settings.tokenizer is not None:
        parse_tokenizer(settings.tokenizer)  # before the weights are read
    model = import_checkpoint(settings.hf, target, settings.tokenizer)
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = {
        "checkpoint": str(target),
        "parameters": f"{parameters:,}",
        "vocabulary": f"{config.vocab_size:,}",
        "block size": f"{config.block_size:,}",
    }
    print(format_table(rows))
