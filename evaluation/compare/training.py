"""What a run was trained on, and what that cost."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datamodules import LanguageDataModule, Sentences, Store
from evaluation.checkpoint.provenance import non_embedding_parameters
from evaluation.compare.found import Run
from evaluation.curves.points import micro_batches, window_tokens
from evaluation.runs.events import FLOPS_TAG

SPEED_TAG = "throughput/tokens_per_second"
ACCURACY_TAG = "val/accuracy"


@dataclass(frozen=True)
class Training:
    """Sizes and costs of one run."""

    parameters: int
    """Trainable numbers."""
    non_embedding: int
    """Numbers outside embeddings and output matrix, frozen ones too."""
    steps: int
    """Optimiser steps."""
    tokens: int | None
    """Tokens of text, each time they were trained on; None where that is not known."""
    positions: int | None
    """The same with the markers of sentences: what FLOPs are counted on."""
    flops_per_position: float | None
    """FLOPs of a training step."""
    published_per_position: float | None
    """The same as the method's paper counts them; None where it counts as we do."""
    tokens_per_second: float | None
    """Tokens of text, by the median of what was logged; None where nothing was."""
    accuracy: float | None
    """Share of right answers, as last logged in validation; None where nothing was."""

    @property
    def flops(self) -> float | None:
        """FLOPs of the whole training."""
        if self.positions is None or self.flops_per_position is None:
            return None
        return self.positions * self.flops_per_position

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs per token of text."""
        return None if self.flops is None or not self.tokens else self.flops / self.tokens


def describe_training(run: Run, data: LanguageDataModule, train_tokens: int | None) -> Training:
    """Returns sizes and costs of a run.

    Args:
        run: which.
        data: its own, prepared.
        train_tokens: lexical tokens of the train split, each counted once; None: not known.
    """
    tokens, positions = _amount(run, data, train_tokens)
    outline = run.outline
    share = tokens / positions if tokens and positions else 1.0
    speeds, answers = run.scalars.get(SPEED_TAG, {}), run.scalars.get(ACCURACY_TAG, {})
    return Training(
        parameters=sum(p.numel() for p in outline.parameters() if p.requires_grad),
        non_embedding=non_embedding_parameters(outline),
        steps=run.checkpoint.step,
        tokens=tokens,
        positions=positions,
        flops_per_position=_flops(run, data),
        published_per_position=outline.published_flops_per_token(outline.config.block_size),
        tokens_per_second=statistics.median(speeds.values()) * share if speeds else None,
        accuracy=answers[max(answers)] if answers else None,
    )


def describe_order(run: Run) -> dict[str, Any]:
    """Returns what decides, beside the text, which tokens an optimiser step has, in its order."""
    order: Mapping[str, Any] = run.checkpoint.data_state.get("order", {})
    accumulated = run.record.get("trainer", "accumulate_grad_batches")
    if accumulated is None and run.checkpoint.step:
        accumulated = round(micro_batches(run.checkpoint) / run.checkpoint.step)
    return {"rows": run.outline.reads, **order, "accumulate_grad_batches": accumulated}


def _amount(
    run: Run, data: LanguageDataModule, train_tokens: int | None
) -> tuple[int | None, int | None]:
    """Returns tokens of text and positions that a run was trained on; None: not known."""
    if isinstance(data, Sentences):
        return _of_sentences(run, data)
    each = window_tokens(run.checkpoint, run.outline)
    if each is None:
        return None, None
    positions = round(each * run.checkpoint.step)
    if not has_markers(data):
        return positions, positions
    if train_tokens is None:
        return None, positions
    counts = data.counts("train")
    return round(positions * (train_tokens + counts.documents) / counts.tokens), positions


def _of_sentences(run: Run, data: Sentences) -> tuple[int | None, int | None]:
    """Returns the same of sentences, by dealing them again.

    On several devices the batches of as many steps on one of them are counted, which are even.
    """
    ranks = run.checkpoint.data_state.get("order", {}).get("world_size", 1)
    number = micro_batches(run.checkpoint) * ranks
    if not number or run.checkpoint.data_state.get("fingerprint") != data.fingerprint:
        return None, None
    source = data.training_source()
    sums = dict.fromkeys(("lexical", "eos", "eod"), 0.0)
    for n in range(number):
        counts = source.counts(n)
        sums = {key: value + counts[key] for key, value in sums.items()}
    text = sums["lexical"] + sums["eod"]  # the end of a document is a token of windows, too
    return round(text), round(text + 2 * sums["eos"])  # BOS and EOS of every sentence


def has_markers(data: LanguageDataModule) -> bool:
    """Whether tokens beside those that end documents are no text: the markers of sentences."""
    return set(data.tokenizer.special_ids) != {data.tokenizer.eos_id}


def _flops(run: Run, data: LanguageDataModule) -> float | None:
    """Returns the FLOPs per position of a training step.

    Of windows by today's count, of other rows by that of the training, on the batches it met;
    where that was not logged, of documents of average length.
    """
    if run.outline.reads == "windows":
        return run.outline.flops_per_token(run.outline.config.block_size, training=True)
    logged = run.scalars.get(FLOPS_TAG, {})
    if logged:
        return statistics.fmean(logged.values())
    if run.outline.reads != "sentences":
        return None
    return run.outline.flops_per_token(data.row_tokens("train"), training=True)


def read_source(data: LanguageDataModule) -> dict[str, Any]:
    """Returns what identifies the text of prepared data, whatever it was tokenised with."""
    corpus = getattr(data, "corpus", data)
    meta = Store(corpus.store_dir).meta
    return {"source": meta.get("source"), "origin": meta.get("origin")}
