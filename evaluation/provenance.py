"""Provenance of a result: its checkpoint, data and settings, under the keys of the JSON files."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from datamodules import LanguageDataModule, Store, StoreError, Tokenizer
from datamodules.store import Split, TokenStream
from evaluation.devices import Precision
from evaluation.load import changed_fields
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint


def trained_on(checkpoint: Checkpoint) -> str | None:
    """Returns the fingerprint of the training text, or None without training in this project."""
    text = checkpoint.data_state.get("fingerprint")
    return None if text is None or checkpoint.step == 0 else str(text)


def describe_data(checkpoint: Checkpoint, data: LanguageDataModule, split: Split) -> dict[str, Any]:
    """Returns the recipe of the data, and the fingerprints of their text and the training text.

    ``left_out`` counts the questions that are too long for block_size, if there are any.
    """
    left_out = data.left_out(split)
    return {
        "recipe": data.recipe(),
        "split": split,
        "fingerprint": data.fingerprint,
        "trained_on": trained_on(checkpoint),
        **({"left_out": left_out} if left_out else {}),
    }


def describe_model(checkpoint: Checkpoint, model: LanguageModel) -> dict[str, Any]:
    """Returns the device of a checkpoint's model, and the changes to its config."""
    return {
        "device": str(model.device),
        "set": changed_fields(checkpoint, model),
        "which": checkpoint.which,
    }


def describe_result(
    checkpoint: Checkpoint,
    model: LanguageModel,
    tokenizer: Tokenizer,
    precision: Precision,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns ``model``, ``checkpoint`` and ``settings`` of a result without a corpus.

    ``options`` has the settings of the command.
    """
    return {
        "model": type(model).__name__,
        "checkpoint": str(checkpoint.path),
        "settings": {
            **options,
            "tokenizer": tokenizer.name,
            "precision": precision,
            **describe_model(checkpoint, model),
            "trained_on": trained_on(checkpoint),
        },
    }


def count_train_tokens(checkpoint: Checkpoint, data: LanguageDataModule) -> int | None:
    """Returns D, the lexical tokens in the train split of the text a checkpoint was trained on.

    Each token counts once, however often training saw it. ``data`` must be prepared, with the
    checkpoint's tokenizer. D is None if the checkpoint was not trained in this project, or its text
    store is not next to the store of ``data``.
    """
    text = trained_on(checkpoint)
    if text is None:
        return None
    try:
        store = Store(data.store_dir.parent / text)
    except StoreError:
        return None
    counts, special_ids = store.counts("train"), data.tokenizer.special_ids
    if set(special_ids) == {data.tokenizer.eos_id}:
        return counts.tokens - counts.documents  # every document ends in its only EOS
    return count_lexical(store.stream("train"), special_ids)


def count_lexical(stream: TokenStream, special_ids: Collection[int], chunk: int = 2**20) -> int:
    """Counts the tokens of a stream that are not in ``special_ids``, ``chunk`` tokens at a time."""
    special = np.array(sorted(special_ids), dtype=np.int64)
    count = 0
    for start in range(0, len(stream), chunk):
        ids = stream.gather(np.arange(start, min(start + chunk, len(stream))))
        count += int(np.isin(ids, special, invert=True).sum())
    return count
