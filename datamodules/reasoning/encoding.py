"""Examples to tokens: every text for itself, steps aligned with the query."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from datamodules.prepare import as_utf8
from datamodules.reasoning.examples import Example
from datamodules.reasoning.token_places import Alignment, align
from datamodules.tokenizers import Tokenizer

BATCH = 1024
"""Examples that are tokenised at once, on all cores where the library can."""


@dataclass(frozen=True)
class EncodedExample:
    """An example as tokens.

    Attributes:
        texts: Ids of the query, of each step, and of the answer, without EOS.
        sizes: UTF-8 bytes of each of these texts.
        alignment: Where the steps belong; None where a text is not what its ids decode to, so that
            nothing can be said of places in it.
        group: The example's.
    """

    texts: list[np.ndarray]
    sizes: list[int]
    alignment: Alignment | None
    group: int

    def without_steps(self) -> "EncodedExample":
        """Returns the query and the answer alone."""
        nothing = np.empty(0, dtype=np.int64)
        ends = slice(None, None, len(self.texts) - 1)
        return EncodedExample(
            self.texts[ends], self.sizes[ends], Alignment(nothing, nothing), self.group
        )

    def row_length(self, prefix: int, separator: int) -> int:
        """Returns the tokens of EOS, query, steps, prefix, answer and EOS.

        Args:
            prefix: Tokens of the answer prefix.
            separator: Tokens in front of each step.
        """
        steps = len(self.texts) - 2
        return 1 + sum(map(len, self.texts)) + steps * separator + prefix + 1


def encode_examples(
    examples: Iterable[Example], tokenizer: Tokenizer
) -> Iterator[list[EncodedExample]]:
    """Yields the examples in their order, in lists of up to `BATCH`."""
    rest = iter(examples)
    while batch := list(islice(rest, BATCH)):
        yield _encode_batch(batch, tokenizer)


def _encode_batch(examples: Sequence[Example], tokenizer: Tokenizer) -> list[EncodedExample]:
    given = [(one.query, *one.steps, one.answer) for one in examples]
    clean = [[as_utf8(text) for text in texts] for texts in given]
    ids = iter(tokenizer.encode_arrays([text for texts in clean for text, _ in texts]))
    token_bytes = tokenizer.token_bytes.numpy()
    encoded = []
    for example, texts in zip(examples, clean, strict=True):
        own, sizes = list(islice(ids, len(texts))), [size for _, size in texts]
        alignment = None
        query_sizes = token_bytes[own[0]]
        if int(query_sizes.sum()) == sizes[0] and _restored(example, own, tokenizer):
            alignment = align(example.query, example.markers, query_sizes)
        encoded.append(EncodedExample(own, sizes, alignment, example.group))
    return encoded


def _restored(example: Example, ids: Sequence[np.ndarray], tokenizer: Tokenizer) -> bool:
    """Returns whether the ids of the texts decode to them, joined: much faster than one by one."""
    text = "".join((example.query, *example.steps, example.answer))
    return tokenizer.decode(np.concatenate(ids).tolist()) == text
