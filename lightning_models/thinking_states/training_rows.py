"""The rows of a training step, as tensors: what the network reads and where it predicts."""

from typing import NamedTuple

from torch import Tensor

from lightning_models.output_layer import IGNORE_INDEX


class Targets(NamedTuple):
    """What is predicted, and where.

    Attributes:
        where: The position of each prediction in flattened rows (B, P) int64.
        tokens: What is predicted there (B, P) int64; -100: nothing.
    """

    where: Tensor
    tokens: Tensor


class ThoughtTargets(NamedTuple):
    """What T predicts.

    Attributes:
        where: See ``Targets``; rows are those of ``Speech`` (B, P).
        tokens: (B, P) int64, the ends of thoughts among them.
        sizes: Predictions of the thought that each one is of, its end included (B, P) int64; 1: the
            thought is trivial.
    """

    where: Tensor
    tokens: Tensor
    sizes: Tensor

    @property
    def valid(self) -> Tensor:
        """Whether anything is predicted (B, P) bool."""
        return self.tokens != IGNORE_INDEX

    @property
    def trivial(self) -> Tensor:
        """Whether the end of a trivial thought is predicted (B, P) bool."""
        return self.valid & (self.sizes == 1)

    @property
    def spoken(self) -> Tensor:
        """Whether a token of a thought with tokens, or its end, is predicted (B, P) bool."""
        return self.valid & (self.sizes > 1)


class Speech(NamedTuple):
    """What T reads behind the row's first W tokens.

    Attributes:
        tokens: Of all thoughts of each row, without ends (B, M) int64.
        positions: Of both parts (B, W + M) int64; the last token of a chunk has c - 1.
        mask: What sees what (B, 1, W + M, W + M) bool: its own chunk and thought, up to itself.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor


class States(NamedTuple):
    """The thoughts that C compresses, and where their states go.

    Attributes:
        thoughts: Their tokens, end and padding (K, N) int64, N >= c; at least one.
        lengths: Their tokens, end included (K,) int64.
        where: The token of flattened rows that each vector is added to (K * c,) int64; the number
            of all tokens: to none.
    """

    thoughts: Tensor
    lengths: Tensor
    where: Tensor


class ForcedRows(NamedTuple):
    """The rows of a training step: query, prefix and answer, without the EOS behind it.

    Attributes:
        tokens: (B, T) int64, 0 behind a row's end.
        answers: What the backbone predicts; rows are those of ``tokens``.
        states: What is injected.
        speech: What T reads.
        thoughts: What T predicts.
    """

    tokens: Tensor
    answers: Targets
    states: States
    speech: Speech
    thoughts: ThoughtTargets
