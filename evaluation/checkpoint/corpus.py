"""Data and tokenizer from a checkpoint's recipe."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules import LanguageDataModule, Sentences, TextCorpus, Tokenizer, tokenizer_from_state
from datamodules.sentences.tokenizer import MARKERS
from evaluation.output import write_atomically
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, CheckpointError, Recipe
from lightning_models.recipe import resolve_class


def build_data(checkpoint: Checkpoint, recipe: Recipe | None = None) -> LanguageDataModule:
    """Returns the datamodule of a recipe, not yet prepared.

    Args:
        checkpoint: its data are the default; a tokenizer that was trained on them is handed to any
            other corpus that asks for it by name.
        recipe: other data; None: those of the checkpoint.

    Raises:
        ValueError: if there is no recipe, or its arguments are refused.
    """
    recipe = recipe or checkpoint.data_recipe
    if recipe is None:
        raise CheckpointError(
            f"{checkpoint.path} was trained without a datamodule; name the data with --data, and "
            "their tokenizer with --data.tokenizer"
        )
    kind = resolve_class(recipe["class_path"], LanguageDataModule)
    try:
        data: LanguageDataModule = kind(
            **_with_tokenizer(kind, recipe["init_args"], checkpoint.data_state)
        )
    except TypeError as error:
        raise ValueError(f"cannot build {recipe['class_path']}: {error}") from error
    return data


def _with_tokenizer(
    kind: Any, init_args: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns init arguments in which a tokenizer that only the checkpoint has became a file.

    ``bpe:1024`` would be trained again on another corpus, and a tokenizer.json may be gone. Where
    data are made of another corpus, the tokenizer is that one's.
    """
    inner = init_args.get("corpus")
    if isinstance(inner, Mapping) and "class_path" in inner:
        corpus = resolve_class(inner["class_path"], TextCorpus)
        own = _with_tokenizer(corpus, inner.get("init_args", {}), state.get("corpus", {}))
        return {**init_args, "corpus": {"class_path": inner["class_path"], "init_args": own}}
    name, saved = str(init_args.get("tokenizer")), state.get("tokenizer", {})
    if saved.get("kind") != "json" or saved.get("name") != name:
        return dict(init_args)
    lost = name.endswith(".json") and not Path(name).expanduser().is_file()
    if name.startswith("bpe:"):
        lost = kind(**init_args).fingerprint != state.get("fingerprint")
    if not lost:
        return dict(init_args)
    digest = hashlib.sha256(saved["json"].encode()).hexdigest()[:16]
    folder = Path(init_args.get("cache_dir", "data_cache")).expanduser() / "tokenizers" / digest
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    write_atomically(path, lambda target: _write(target, saved["json"]))
    return {**init_args, "tokenizer": str(path)}


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")


def check_fit(model: LanguageModel, data: LanguageDataModule) -> None:
    """Checks, before anything is prepared, that the model can read the data's windows.

    Raises:
        ValueError: if kind, vocabulary or length of their rows do not fit; the message has both
            values.
    """
    model.check_data(data)
    config = model.config
    if data.vocab_size != config.vocab_size:
        raise ValueError(
            f"the data's tokenizer ({data.hparams['tokenizer']}) has {data.vocab_size} entries, "
            f"the checkpoint's model has a vocabulary of {config.vocab_size}; use the tokenizer it "
            "was trained with"
        )
    limit = config.position_limit
    if limit is not None and data.block_size > limit:
        key, fitting = "block_size", limit
        if isinstance(data, Sentences):
            key, fitting = "max_sentence_tokens", fitting - MARKERS
        raise ValueError(
            f"block_size ({data.block_size}) of the data is longer than the {limit} "
            f"positions that the model has learned; set --data.{key} {fitting}"
        )


def prepare(data: LanguageDataModule, checkpoint: Checkpoint) -> None:
    """Prepares and opens the data.

    Raises:
        ValueError: if that fails, or the data's tokenizer is not the checkpoint's.
    """
    data.prepare_data()
    data.setup("validate")
    check_tokenizer(data, checkpoint)


def check_tokenizer(data: LanguageDataModule, checkpoint: Checkpoint) -> None:
    """Checks that prepared data have the tokenizer that a checkpoint was trained with.

    Raises:
        ValueError: if its ids mean other text.
    """
    check_meaning(data.tokenizer, checkpoint, "the data's tokenizer")


def check_meaning(used: Tokenizer, checkpoint: Checkpoint, what: str) -> None:
    """Checks that a tokenizer's ids mean what they did in a checkpoint's training.

    Args:
        used: the tokenizer.
        checkpoint: one that names no tokenizer is content with any.
        what: names it in the message.

    Raises:
        ValueError: if they mean other text.
    """
    saved = checkpoint.data_state.get("tokenizer")
    if not saved or _content(saved) == _content(used.state()):
        return
    trained = tokenizer_from_state(saved)
    if not same_tokenizer(trained, used):
        raise ValueError(
            f"{what} ({used.name}, {used.vocab_size} entries) is not the checkpoint's "
            f"({trained.name}, {trained.vocab_size} entries): the same ids mean different text"
        )


def _content(state: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer that is stored whole is the same under any name."""
    return {k: v for k, v in state.items() if k != "name" or state["kind"] != "json"}


def same_tokenizer(first: Tokenizer, second: Tokenizer) -> bool:
    """Returns whether two tokenizers give every id the same meaning."""
    if (first.vocab_size, first.eos_id) != (second.vocab_size, second.eos_id):
        return False
    ids = range(first.vocab_size)
    return all(first.decode([i]) == second.decode([i]) for i in ids)


def build_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Returns the checkpoint's tokenizer; the corpus need not be there.

    Raises:
        ValueError: if the checkpoint names none, or it cannot be loaded.
    """
    saved = checkpoint.data_state.get("tokenizer")
    if saved:
        return tokenizer_from_state(saved)
    if checkpoint.data_recipe is None:
        raise CheckpointError(
            f"{checkpoint.path} was trained without a datamodule, so it names no tokenizer; name "
            "one with --tokenizer"
        )
    return build_data(checkpoint).tokenizer
