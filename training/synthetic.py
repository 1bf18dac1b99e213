"""Models that read no files, and batches of random tokens, for plans and benchmarks."""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from lightning_models import LanguageModel
from lightning_models.thinking_states.architectures import KNOWN

SENTENCE_SLOTS, MARKERS = 27, 2
"""Positions of a typical sentence (Thought Gestalt, section 2.2), including BOS and EOS."""
ANSWER, STEPS = 16, 8
"""Numbers of answer tokens and reasoning steps per question."""
WORDING = {"answer_prefix": (1, 2, 3, 4), "step_separator": (5,)}
FIRST_TOKEN = 7
"""Lowest id of random text; lower ids are special tokens of questions."""


def without_files(model: LanguageModel, *, longest: bool = True) -> LanguageModel:
    """Returns a copy of a model without a network that reads no file when it builds one.

    Args:
        model: The model.
        longest: Whether each training step takes the maximum number of iterations that it may draw.
    """
    outline = copy.deepcopy(model)
    changes: dict[str, Any] = {}
    outline.network, outline.compile_network = None, False
    config: Any = outline.config
    if getattr(config, "backbone", None) in KNOWN:
        changes = {"architecture": dict(KNOWN[config.backbone]), "backbone": None}
    if hasattr(config, "answer_prefix"):
        changes |= {key: value for key, value in WORDING.items() if hasattr(config, key)}
    if longest and hasattr(config, "jacobi_iterations"):
        changes["jacobi_iterations"] = (config.jacobi_iterations[1],) * 2
    outline.config = dataclasses.replace(config, **changes)
    return outline


def make_batch(model: LanguageModel, rows: int, slots: int) -> dict[str, Any]:
    """Returns a batch of the type that the model reads.

    Args:
        model: The model that reads the batch.
        rows: Number of windows, streams of sentences, or questions.
        slots: Number of positions per row; for sentences, a multiple of SENTENCE_SLOTS.
    """
    config: Any = model.config
    if model.reads == "sentences":
        return sentence_batch(rows, max(1, slots // SENTENCE_SLOTS), config.vocab_size)
    if model.reads == "reasoning":
        half = max(STEPS, (slots - ANSWER) // 2 // STEPS * STEPS)
        return question_batch(rows, half, STEPS, half // STEPS, config.vocab_size)
    stream = random_tokens((rows, slots + 1), config.vocab_size)
    mask = torch.ones(rows, slots, dtype=torch.bool)
    batch = {"tokens": stream[:, :-1].contiguous(), "targets": stream[:, 1:].contiguous()}
    return {**batch, "mask": mask, "lexical": mask, "sequence_id": torch.arange(rows)}


def random_tokens(shape: tuple[int, ...], vocab: int, first: int = 0) -> Tensor:
    """Returns fixed random token ids from ``first`` on, int64."""
    return torch.randint(first, vocab, shape, generator=torch.Generator().manual_seed(0))


def sentence_batch(rows: int, sentences: int, vocab: int) -> dict[str, Any]:
    """Returns streams (B, S, U) of sentences of typical length, with BOS and EOS."""
    tokens = random_tokens((rows, sentences, SENTENCE_SLOTS), vocab - 3)
    tokens[..., 0], tokens[..., -1] = vocab - 3, vocab - 2
    targets = torch.cat((tokens[..., 1:], torch.full_like(tokens[..., :1], -100)), dim=-1)
    lengths = torch.full((rows, sentences), SENTENCE_SLOTS)
    is_last = torch.zeros(rows, sentences, dtype=torch.bool)
    return {"tokens": tokens, "targets": targets, "lengths": lengths, "is_last": is_last}


def question_batch(
    rows: int, query: int, steps: int, step_tokens: int, vocab: int, answer: int = ANSWER
) -> dict[str, Any]:
    """Returns questions with a reasoning step at the end of each of ``steps`` equal chunks.

    Args:
        rows: Number of questions.
        query: Number of tokens per query.
        steps: Number of reasoning steps; a divisor of ``query``.
        step_tokens: Number of tokens per step, including its end.
        vocab: Size of the vocabulary.
        answer: Number of tokens of the answer, excluding its end.
    """
    answers = random_tokens((rows, answer), vocab, FIRST_TOKEN)
    ends = torch.arange(1, steps + 1) * (query // steps) - 1
    return {
        "query": random_tokens((rows, query), vocab, FIRST_TOKEN),
        "query_lengths": torch.full((rows,), query),
        "steps": random_tokens((rows, steps, step_tokens - 1), vocab, FIRST_TOKEN),
        "step_lengths": torch.full((rows, steps), step_tokens - 1),
        "step_places": ends.expand(rows, -1),
        "targets": torch.cat((answers, torch.zeros_like(answers[:, :1])), dim=1),
        "sequence_id": torch.arange(rows),
        "epochs": 0.0,
    }
