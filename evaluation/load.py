"""Models, data and tokenizers of checkpoints, rebuilt from their recipes."""

import dataclasses
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch

from datamodules import (
    LanguageDataModule,
    Sentences,
    TextCorpus,
    Tokenizer,
    tokenizer_from_state,
)
from datamodules.sentences.tokenizer import MARKERS
from datamodules.tokenizers import (
    JsonTokenizer,
    file_at_hand,
    keep_tokenizer,
    with_other_special_tokens,
)
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, CheckpointError, Recipe
from lightning_models.memory import (
    TooLargeError,
    bounded_weights,
    check_batch,
    check_layers,
    host_memory,
    weights_size,
)
from lightning_models.recipe import build, resolve_class

# ---- model


def build_model(checkpoint: Checkpoint, changes: Mapping[str, Any] | None = None) -> LanguageModel:
    """Builds the checkpoint's model with its weights, on the CPU, in eval mode, not compiled.

    The global random state does not change. ``changes`` are fields of the method's config with
    other values than in training.

    Raises:
        CheckpointError: If recipe or weights do not fit this version's classes.
    """
    model = _without_network(checkpoint, changes)
    try:
        weights_size(model, host_memory())
    except TooLargeError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        model.configure_model()
    model.on_load_checkpoint(dict(checkpoint.content))
    _load_weights(model, checkpoint, changes)
    return model.eval()


def build_outline(
    checkpoint: Checkpoint, changes: Mapping[str, Any] | None = None
) -> LanguageModel:
    """Builds the checkpoint's model on the meta device, without allocating weights.

    ``changes`` are fields of the method's config with other values; they may change shapes.

    Raises:
        CheckpointError: If the recipe does not fit this version's classes.
    """
    model = _without_network(checkpoint, changes)
    try:
        with torch.device("meta"), bounded_weights(math.inf):
            model.configure_model()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise CheckpointError(f"{checkpoint.path}: the network is too large: {error}") from error
    return model.eval()


def _without_network(checkpoint: Checkpoint, changes: Mapping[str, Any] | None) -> LanguageModel:
    recipe = checkpoint.model_recipe
    cls = resolve_class(recipe["class_path"], LanguageModel)
    arguments = dict(recipe["init_args"])
    if "compile" in arguments:
        arguments["compile"] = False
    if changes:
        config = arguments["config"] = {**arguments.get("config", {}), **changes}
        config_cls = get_type_hints(cls.__init__)["config"]
        fields = {field.name for field in dataclasses.fields(config_cls)}
        if unknown := config.keys() - fields:
            raise CheckpointError(
                f"{checkpoint.path}: {cls.__name__} has no setting {', '.join(sorted(unknown))}; "
                "it is misspelt, or the checkpoint comes from another version"
            )
    try:
        model: LanguageModel = build({**recipe, "init_args": arguments}, LanguageModel)
        check_layers(dataclasses.asdict(model.config), "model.config.")
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path}: cannot rebuild {cls.__name__}: {error}"
        ) from error
    return model


def changed_fields(checkpoint: Checkpoint, model: LanguageModel) -> dict[str, Any]:
    """Returns the config fields of a rebuilt model that differ from its training."""
    trained = checkpoint.model_recipe["init_args"].get("config", {})
    defaults = {field.name: field.default for field in dataclasses.fields(model.config)}
    original = {**defaults, **trained}  # an older checkpoint lacks fields that were added since
    current = model.recipe()["init_args"]["config"]
    return {
        key: value
        for key, value in current.items()
        if original[key] is not dataclasses.MISSING and value != original[key]
    }


def known_changes(
    checkpoints: Sequence[Checkpoint], changes: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns for each checkpoint the changes that its model's config has fields for.

    Raises:
        ValueError: If a field is in no config.
    """
    configs = [checkpoint.model_recipe["init_args"].get("config", {}) for checkpoint in checkpoints]
    for key in changes:
        if not any(key in config for config in configs):
            raise ValueError(f"none of the models has the setting {key}; leave it out")
    return [{key: v for key, v in changes.items() if key in config} for config in configs]


MAX_REASON_LENGTH = 300
"""Number of characters of torch's message to quote."""


def _load_weights(
    model: LanguageModel, checkpoint: Checkpoint, changes: Mapping[str, Any] | None
) -> None:
    try:
        model.load_state_dict(checkpoint.content["state_dict"])
    except RuntimeError as error:
        assignments = ", ".join(f"{key}={value}" for key, value in (changes or {}).items())
        condition = f"with {assignments}, which changes their shapes" if assignments else "as saved"
        # torch names each tensor on a separate line, below a heading
        reason = str(error).partition("\n")[2]
        reason = textwrap.shorten(reason, MAX_REASON_LENGTH, placeholder=" ...")
        raise CheckpointError(
            f"{checkpoint.path}: the weights do not fit {type(model).__name__} {condition}; "
            f"{reason}"
        ) from error


# ---- data and tokenizer


def build_data(checkpoint: Checkpoint, recipe: Recipe | None = None) -> LanguageDataModule:
    """Builds the datamodule of a recipe, not yet prepared.

    Args:
        checkpoint: Checkpoint whose data are the default. If its tokenizer was trained on them, a
            different corpus that names the same tokenizer gets it too.
        recipe: Other data to build instead.

    Raises:
        ValueError: If there is no recipe, or its arguments are invalid.
    """
    recipe = recipe or checkpoint.data_recipe
    if recipe is None:
        raise CheckpointError(
            f"{checkpoint.path} was trained without a datamodule; name the data with --data, and "
            "their tokenizer with --data.tokenizer"
        )
    cls = resolve_class(recipe["class_path"], LanguageDataModule)
    arguments = _with_tokenizer(cls, recipe["init_args"], checkpoint.data_state)
    data: LanguageDataModule = build({**recipe, "init_args": arguments}, LanguageDataModule)
    return data


def _with_tokenizer(
    cls: Any, init_args: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns init arguments with a file for a tokenizer that only the checkpoint has.

    ``bpe:1024`` would be trained again on another corpus, a tokenizer.json may be gone, and one
    that older versions read without BOS, or with another EOS, keeps that meaning. If data contain
    an inner corpus, the tokenizer is an argument of that corpus.
    """
    inner = init_args.get("corpus")
    if isinstance(inner, Mapping) and "class_path" in inner:
        corpus = resolve_class(inner["class_path"], TextCorpus)
        arguments = _with_tokenizer(corpus, inner.get("init_args", {}), state.get("corpus", {}))
        return {**init_args, "corpus": {"class_path": inner["class_path"], "init_args": arguments}}
    name, saved = str(init_args.get("tokenizer")), state.get("tokenizer", {})
    if saved.get("kind") != "json" or saved.get("name") != name:
        return dict(init_args)
    if name.startswith("bpe:"):
        lost = cls(**init_args).fingerprint != state.get("fingerprint")
    else:
        lost = _is_lost(saved, str(state.get("fingerprint")))
    if not lost:
        return dict(init_args)
    tokenizer = tokenizer_from_state(saved)
    assert isinstance(tokenizer, JsonTokenizer)  # saved["kind"] is json
    cache_dir = Path(init_args.get("cache_dir", "data_cache")).expanduser()
    return {**init_args, "tokenizer": str(keep_tokenizer(tokenizer, cache_dir))}


def _is_lost(saved: Mapping[str, Any], fingerprint: str) -> bool:
    """Returns whether the name of a checkpoint's JSON tokenizer means another tokenizer now.

    The fingerprint of the training text tells files and folders from hub names, which may look the
    same.
    """
    name = saved["name"]
    is_there = Path(name).expanduser().exists()
    if not is_there and (name.endswith(".json") or "-json-" in fingerprint):
        return True
    if is_there and "special" in saved:
        return False
    path = file_at_hand(name)
    # `check_meaning` reports a tokenizer that differs otherwise
    return path is not None and bool(
        with_other_special_tokens(saved, JsonTokenizer.from_file(name, path))
    )


def check_fit(model: LanguageModel, data: LanguageDataModule) -> None:
    """Checks, before anything is prepared, that the model can read the data's rows.

    Raises:
        ValueError: If the type of the rows, their vocabulary or their length does not fit.
    """
    model.check_data(data)
    check_batch(data)
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
            f"positions of the model; set data.{key} to {fitting} or less"
        )


def prepare(data: LanguageDataModule, checkpoint: Checkpoint) -> None:
    """Prepares and opens the data.

    Raises:
        ValueError: If that fails, or the data's tokenizer is not the checkpoint's.
    """
    data.prepare_data()
    data.setup("validate")
    check_meaning(data.tokenizer, checkpoint, "the data's tokenizer")


def prepare_for_all(
    data: LanguageDataModule, models: Sequence[tuple[Checkpoint, LanguageModel]], key: str
) -> None:
    """Prepares and opens data that several models read.

    Args:
        data: The data.
        models: Checkpoints and their models, with or without weights.
        key: Option that names the checkpoints, for messages.

    Raises:
        ValueError: If one of the models, which is named, cannot read the data or has another
            tokenizer.
    """

    def check_all(check: Callable[[Checkpoint, LanguageModel], None]) -> None:
        """Checks all models."""
        for checkpoint, model in models:
            try:
                check(checkpoint, model)
            except ValueError as error:
                raise ValueError(
                    f"{key} ({checkpoint.path}): {error}; all checkpoints read the same data, the "
                    "first one's unless --data names others; or leave this checkpoint out"
                ) from error

    check_all(lambda _, model: check_fit(model, data))
    prepare(data, models[0][0])
    check_all(lambda saved, _: check_meaning(data.tokenizer, saved, "the data's tokenizer"))


def check_meaning(used: Tokenizer, checkpoint: Checkpoint, source: str) -> None:
    """Checks that a tokenizer's ids mean the same text as in a checkpoint's training.

    Checkpoints without a tokenizer accept any. ``source`` names the tokenizer in the message.

    Raises:
        ValueError: If they mean other text.
    """
    saved = checkpoint.data_state.get("tokenizer")
    if not saved or _content(saved) == _content(used.state()):
        return
    trained = tokenizer_from_state(saved)
    if not same_tokenizer(trained, used):
        raise ValueError(
            f"{source} ({used.name}, {used.vocab_size} entries) is not the checkpoint's "
            f"({trained.name}, {trained.vocab_size} entries): the same ids mean different text"
        )
    if trained.text_bos_id != used.text_bos_id:
        raise ValueError(
            f"{source} ({used.name}) begins texts with {_begin(used)}, the checkpoint's "
            f"({trained.name}) with {_begin(trained)}; use the tokenizer it was trained with"
        )


def _content(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer's state without its name if the state has the whole tokenizer."""
    return {k: v for k, v in state.items() if k != "name" or state["kind"] != "json"}


def _begin(tokenizer: Tokenizer) -> str:
    return "no BOS" if tokenizer.text_bos_id is None else f"BOS (id {tokenizer.text_bos_id})"


def same_tokenizer(first: Tokenizer, second: Tokenizer) -> bool:
    """Returns whether two tokenizers decode every id to the same text."""
    if (first.vocab_size, first.eos_id) != (second.vocab_size, second.eos_id):
        return False
    ids = range(first.vocab_size)
    return all(first.decode([i]) == second.decode([i]) for i in ids)


def build_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Returns the checkpoint's tokenizer, without its corpus.

    Raises:
        ValueError: If the checkpoint names none, or it cannot be loaded.
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
