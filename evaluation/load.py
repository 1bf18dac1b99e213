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
    """Returns the checkpoint's model with its weights, on the CPU, in eval mode, not compiled.

    The global random state does not change. ``changes`` are fields of the method's config to set to
    other values than in training.

    Raises:
        CheckpointError: if recipe or weights do not fit this version's classes.
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

    ``changes`` are fields of the method's config to set to other values, of shapes too.

    Raises:
        CheckpointError: if the recipe does not fit this version's classes.
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
    kind = resolve_class(recipe["class_path"], LanguageModel)
    arguments = dict(recipe["init_args"])
    if "compile" in arguments:
        arguments["compile"] = False
    if changes:
        config = arguments["config"] = {**arguments.get("config", {}), **changes}
        kind_of_config = get_type_hints(kind.__init__)["config"]
        fields = {field.name for field in dataclasses.fields(kind_of_config)}
        if unknown := config.keys() - fields:
            raise CheckpointError(
                f"{checkpoint.path}: {kind.__name__} has no setting {', '.join(sorted(unknown))}; "
                "it is misspelt, or the checkpoint comes from another version"
            )
    try:
        model: LanguageModel = build({**recipe, "init_args": arguments}, LanguageModel)
        check_layers(dataclasses.asdict(model.config), "model.config.")
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path}: cannot rebuild {kind.__name__}: {error}"
        ) from error
    return model


def changed_fields(checkpoint: Checkpoint, model: LanguageModel) -> dict[str, Any]:
    """Returns the config fields of a rebuilt model that are not as in training."""
    trained = checkpoint.model_recipe["init_args"].get("config", {})
    defaults = {field.name: field.default for field in dataclasses.fields(model.config)}
    known = {**defaults, **trained}  # an older checkpoint lacks fields that were added since
    now = model.recipe()["init_args"]["config"]
    return {
        key: value
        for key, value in now.items()
        if known[key] is not dataclasses.MISSING and value != known[key]
    }


def known_changes(
    checkpoints: Sequence[Checkpoint], changes: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns for each checkpoint the changes of those fields that its model's config has.

    Raises:
        ValueError: if no config has a field.
    """
    configs = [checkpoint.model_recipe["init_args"].get("config", {}) for checkpoint in checkpoints]
    for key in changes:
        if not any(key in config for config in configs):
            raise ValueError(f"none of the models has the setting {key}; leave it out")
    return [{key: v for key, v in changes.items() if key in config} for config in configs]


MOST_OF_REASON = 300
"""Letters of a message of torch that are repeated."""


def _load_weights(
    model: LanguageModel, checkpoint: Checkpoint, changes: Mapping[str, Any] | None
) -> None:
    try:
        model.load_state_dict(checkpoint.content["state_dict"])
    except RuntimeError as error:
        given = ", ".join(f"{key}={value}" for key, value in (changes or {}).items())
        asked = f"with {given}, which changes their shapes" if given else "as saved"
        # torch names each tensor in a line of its own, below a heading
        reason = textwrap.shorten(str(error).partition("\n")[2], MOST_OF_REASON, placeholder=" ...")
        raise CheckpointError(
            f"{checkpoint.path}: the weights do not fit {type(model).__name__} {asked}; {reason}"
        ) from error


# ---- data and tokenizer


def build_data(checkpoint: Checkpoint, recipe: Recipe | None = None) -> LanguageDataModule:
    """Returns the datamodule of a recipe, not yet prepared.

    Args:
        checkpoint: Its data are built by default. A tokenizer that was trained on them is handed to
            any other corpus that asks for it by name.
        recipe: Other data to build instead.

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
    arguments = _with_tokenizer(kind, recipe["init_args"], checkpoint.data_state)
    data: LanguageDataModule = build({**recipe, "init_args": arguments}, LanguageDataModule)
    return data


def _with_tokenizer(
    kind: Any, init_args: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns init arguments in which a tokenizer that only the checkpoint has became a file.

    ``bpe:1024`` would be trained again on another corpus, a tokenizer.json may be gone, and one
    that older versions read without BOS, or with another EOS, keeps that meaning. Where data are
    made of another corpus, the tokenizer is that one's.
    """
    inner = init_args.get("corpus")
    if isinstance(inner, Mapping) and "class_path" in inner:
        corpus = resolve_class(inner["class_path"], TextCorpus)
        own = _with_tokenizer(corpus, inner.get("init_args", {}), state.get("corpus", {}))
        return {**init_args, "corpus": {"class_path": inner["class_path"], "init_args": own}}
    name, saved = str(init_args.get("tokenizer")), state.get("tokenizer", {})
    if saved.get("kind") != "json" or saved.get("name") != name:
        return dict(init_args)
    if name.startswith("bpe:"):
        lost = kind(**init_args).fingerprint != state.get("fingerprint")
    else:
        lost = _is_lost(saved, str(state.get("fingerprint")))
    if not lost:
        return dict(init_args)
    tokenizer = tokenizer_from_state(saved)
    assert isinstance(tokenizer, JsonTokenizer)  # as its kind says
    cache_dir = Path(init_args.get("cache_dir", "data_cache")).expanduser()
    return {**init_args, "tokenizer": str(keep_tokenizer(tokenizer, cache_dir))}


def _is_lost(saved: Mapping[str, Any], fingerprint: str) -> bool:
    """Returns whether the name of a checkpoint's tokenizer, of kind json, has another meaning now.

    The fingerprint of the training's text says whether the tokenizer was a file or folder, whose
    name can look like one of the hub.
    """
    name = saved["name"]
    is_there = Path(name).expanduser().exists()
    if not is_there and (name.endswith(".json") or "-json-" in fingerprint):
        return True
    if is_there and "special" in saved:
        return False
    path = file_at_hand(name)
    # another tokenizer is named by `check_meaning`
    return path is not None and bool(
        with_other_special_tokens(saved, JsonTokenizer.from_file(name, path))
    )


def check_fit(model: LanguageModel, data: LanguageDataModule) -> None:
    """Checks, before anything is prepared, that the model can read the data's windows.

    Raises:
        ValueError: if kind, vocabulary or length of their rows do not fit; the message has both
            values.
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
            f"positions that the model has learned; set data.{key} to {fitting} or less"
        )


def prepare(data: LanguageDataModule, checkpoint: Checkpoint) -> None:
    """Prepares and opens the data.

    Raises:
        ValueError: if that fails, or the data's tokenizer is not the checkpoint's.
    """
    data.prepare_data()
    data.setup("validate")
    check_meaning(data.tokenizer, checkpoint, "the data's tokenizer")


def prepare_for_all(
    data: LanguageDataModule, models: Sequence[tuple[Checkpoint, LanguageModel]], key: str
) -> None:
    """Prepares and opens data that several models read.

    Models may be without weights; ``key`` is the option that names the checkpoints, for messages.

    Raises:
        ValueError: if one of them cannot read the data, or has another tokenizer; it names it.
    """

    def check_all(check: Callable[[Checkpoint, LanguageModel], None]) -> None:
        """Checks all models."""
        for checkpoint, model in models:
            try:
                check(checkpoint, model)
            except ValueError as error:
                raise ValueError(
                    f"{key} ({checkpoint.path}): {error}; all checkpoints read the same data, "
                    "those of the first one or the ones that are named; or leave it out"
                ) from error

    check_all(lambda _, model: check_fit(model, data))
    prepare(data, models[0][0])
    check_all(lambda each, _: check_meaning(data.tokenizer, each, "the data's tokenizer"))


def check_meaning(used: Tokenizer, checkpoint: Checkpoint, what: str) -> None:
    """Checks that a tokenizer's ids mean what they did in a checkpoint's training.

    Checkpoints without a tokenizer accept any; ``what`` names it in the message.

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
    if trained.text_bos_id != used.text_bos_id:
        raise ValueError(
            f"{what} ({used.name}) begins texts with {_begin(used)}, the checkpoint's "
            f"({trained.name}) with {_begin(trained)}; use the tokenizer it was trained with"
        )


def _content(state: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer that is stored whole is the same under any name."""
    return {k: v for k, v in state.items() if k != "name" or state["kind"] != "json"}


def _begin(tokenizer: Tokenizer) -> str:
    return "no BOS" if tokenizer.text_bos_id is None else f"BOS (id {tokenizer.text_bos_id})"


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
