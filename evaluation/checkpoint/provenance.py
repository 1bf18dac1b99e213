"""What a result says about where it comes from, under the keys of the JSON files."""

from collections.abc import Collection
from typing import Any

import numpy as np
from torch import nn

from datamodules import LanguageDataModule, Store, StoreError
from datamodules.store import TokenStream
from evaluation.arguments import Split
from evaluation.checkpoint.device import Precision
from evaluation.checkpoint.rebuild import changed_fields
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint


def describe_data(checkpoint: Checkpoint, data: LanguageDataModule, split: Split) -> dict[str, Any]:
    """Returns what rebuilds the data, and the fingerprints of theirs and the training's text."""
    return {
        "recipe": data.recipe(),
        "split": split,
        "fingerprint": data.fingerprint,
        "trained_on": checkpoint.data_state.get("fingerprint"),
    }


def describe_settings(
    checkpoint: Checkpoint,
    model: LanguageModel,
    data: LanguageDataModule,
    *,
    batches: int,
    of_batches: int,
    precision: Precision,
) -> dict[str, Any]:
    """Returns how much of the split was measured, and how."""
    return {
        "batches": batches,
        "of_batches": of_batches,
        "batch_size": data.eval_batch_size,
        "precision": precision,
        **describe_model(checkpoint, model),
    }


def describe_model(checkpoint: Checkpoint, model: LanguageModel) -> dict[str, Any]:
    """Returns where a checkpoint's model ran, and what of its config was changed."""
    return {
        "device": str(model.device),
        "set": changed_fields(checkpoint, model),
        "which": checkpoint.which,
    }


def non_embedding_parameters(model: LanguageModel) -> int:
    """Returns N, the numbers outside token and position embeddings and output matrix.

    As Kaplan et al. (arXiv 2001.08361) count and the papers quote sizes; biases, norms and frozen
    weights are in.

    Args:
        model: its output matrix, where it has one, is ``model.network.output_matrix``.
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    tables.add(id(getattr(model.network, "output_matrix", None)))
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in tables)


def count_train_tokens(checkpoint: Checkpoint, data: LanguageDataModule) -> int | None:
    """Returns D, the lexical tokens in the train split of the text a checkpoint was trained on.

    Each counts once, however often training saw it. None where that is not known: the checkpoint
    was not trained here, or its text store is not next to that of ``data``.

    Args:
        checkpoint: where the model comes from.
        data: prepared, with the checkpoint's tokenizer.
    """
    trained_on = checkpoint.data_state.get("fingerprint")
    if trained_on is None or checkpoint.step == 0:
        return None
    try:
        store = Store(data.store_dir.parent / str(trained_on))
    except StoreError:
        return None
    counts, special_ids = store.counts("train"), data.tokenizer.special_ids
    if set(special_ids) == {data.tokenizer.eos_id}:
        return counts.tokens - counts.documents  # every document ends in its only EOS
    return count_lexical(store.stream("train"), special_ids)


def count_lexical(stream: TokenStream, special_ids: Collection[int], chunk: int = 2**20) -> int:
    """Returns how many tokens of a stream are none of ``special_ids``; reads ``chunk`` at once."""
    special = np.array(sorted(special_ids), dtype=np.int64)
    found = 0
    for start in range(0, len(stream), chunk):
        ids = stream.gather(np.arange(start, min(start + chunk, len(stream))))
        found += int(np.isin(ids, special, invert=True).sum())
    return found
