"""Texts of the baselines of Thinking States: chain of thought written, removed, or left out.

A text is query, for each step the separator and the step, answer prefix, answer, EOS.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tests.reference import qwen2
from tests.reference.qwen2 import Shape, Weights


class Text(NamedTuple):
    """What the model reads and predicts: ``labels[t]`` stands after ``tokens[t]``, -100: none."""

    tokens: list[int]
    labels: list[int]


def text_of(*parts: tuple[Sequence[int], bool]) -> Text:
    """The parts (ids, whether they are scored) one after another; the last id is not read."""
    tokens = [token for ids, _ in parts for token in ids]
    targets = [token if scored else -100 for ids, scored in parts for token in ids]
    return Text(tokens[:-1], targets[1:])


def chain_tokens(steps: Sequence[Sequence[int]], separator: Sequence[int]) -> list[int]:
    """The chain as flat ids: in front of every step the separator."""
    return [token for step in steps for token in (*separator, *step)]


def cot_text(
    query: Sequence[int],
    chain: Sequence[int],
    prefix: Sequence[int],
    answer: Sequence[int],
    score_prefix: bool = True,
) -> Text:
    """Query, chain (or what is left of it), prefix, answer with its EOS; all but the query scored.

    A model that writes its chain itself must learn to end it, with the prefix: ``score_prefix``.
    """
    return text_of((query, False), (chain, True), (prefix, score_prefix), (answer, True))


def no_cot_text(query: Sequence[int], prefix: Sequence[int], answer: Sequence[int]) -> Text:
    """Query, unscored prefix, answer with its EOS."""
    return text_of((query, False), (prefix, False), (answer, True))


def log_probs(weights: Weights, shape: Shape, text: Text, barred: Sequence[int] = ()) -> Tensor:
    """Log-probabilities of the labels that are not -100, in order."""
    logits = qwen2.bar(qwen2.causal_lm(weights, shape, text.tokens), barred)
    return qwen2.label_log_probs(logits, text.labels)
