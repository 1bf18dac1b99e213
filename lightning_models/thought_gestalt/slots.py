"""Which slot of which sentence comes next, for rows of text that advance at their own pace.

A sentence tensor of U slots holds BOS, up to U - 3 words, EOD where a document ends, and EOS:

==============================  ===============================================================
a row's next token              slots, one a step; the row is ready after the last one
==============================  ===============================================================
word, EOD                       its own: 1, 2, ... for words, U - 2 for EOD
EOS                             U - 1, then BOS (slot 0) of the next sentence
word after U - 3 words          cut, as the data cuts: EOS, BOS, then the word
anything but EOS after EOD      EOS, BOS, then the token
any, at the start of the text   BOS, then the token
BOS in an empty sentence        0, or none: where BOS was just processed, its state is the answer
BOS after a word                that of a word; trained models do not say it
==============================  ===============================================================

EOD ends the document: what follows the sentence's EOS begins another one, which remembers nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_models.thought_gestalt.config import ThoughtGestaltConfig


@dataclass(frozen=True)
class Slots:
    """The slot that each row processes next; all are (B,)."""

    tokens: Tensor
    """int64: BOS, EOS, or the row's token."""
    positions: Tensor
    """int64: slot numbers."""
    begins: Tensor
    """Bool: it is the BOS of a sentence."""
    closes: Tensor
    """Bool: it is the EOS of a sentence."""
    forgets: Tensor
    """Bool: it is the EOS of a document."""
    repeats: Tensor
    """Bool: there is none, the row's last state is asked again."""
    ready: Tensor
    """Bool: the row's token is used up after it."""


class OpenSentences:
    """How far the open sentence of each row is."""

    def __init__(
        self, config: ThoughtGestaltConfig, batch: int, device: torch.device | None = None
    ) -> None:
        """Starts ``batch`` texts."""
        self._config = config
        self.used = torch.zeros(batch, dtype=torch.int64, device=device)
        """int64 (B,): slots of the sentence that are processed; 0: BOS comes next."""
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        """Bool (B,): the last one was EOD."""
        self.closed = torch.zeros(batch, dtype=torch.bool, device=device)
        """Bool (B,): the row's token is EOS, and its slot is processed."""

    def next(self, tokens: Tensor) -> Slots:
        """Returns the slots that come next, towards ``tokens`` (B,)."""
        config = self._config
        begins, eod, eos = self.used == 0, tokens == config.eod_id, tokens == config.eos_id
        bos = tokens == config.bos_id
        full = (self.used == config.block_size - 2) & ~eod
        closes = ~begins & (eos | self.ended | full)
        positions = torch.where(eod, config.block_size - 2, self.used)
        positions = positions.masked_fill(closes, config.block_size - 1).masked_fill(begins, 0)
        return Slots(
            tokens=tokens.masked_fill(closes, config.eos_id).masked_fill(begins, config.bos_id),
            positions=positions,
            begins=begins,
            closes=closes,
            forgets=closes & self.ended,
            repeats=bos & (self.used == 1),
            ready=torch.where(begins, self.closed | bos, ~closes),
        )

    def advance(self, tokens: Tensor, slots: Slots, moves: Tensor) -> None:
        """Notes that the rows in ``moves`` (B,) have processed ``slots``, towards ``tokens``."""
        eos, eod = tokens == self._config.eos_id, slots.tokens == self._config.eod_id
        self.used = torch.where(moves, (self.used + 1).masked_fill(slots.closes, 0), self.used)
        self.ended = torch.where(moves, eod, self.ended)
        self.closed = torch.where(moves, slots.closes & eos, self.closed)

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.used, self.ended, self.closed = self.used[rows], self.ended[rows], self.closed[rows]


def split_text(
    ids: Sequence[int], config: ThoughtGestaltConfig
) -> tuple[list[list[int]], list[int]]:
    """Returns the complete sentences of a text's last document, and its open sentence.

    All without boundary tokens, but for an EOD at the end of the open one. Fed token by token, the
    text is cut in the same places.
    """
    complete: list[list[int]] = []
    words: list[int] = []
    for token in ids:
        ended = words[-1:] == [config.eod_id]
        full = len(words) == config.block_size - 3 and token != config.eod_id
        if token == config.eos_id or ended or full:
            if ended:
                complete = []
            else:
                complete.append(words)
            words = []
        if token != config.eos_id and (words or token != config.bos_id):
            words.append(token)
    return complete, words


def complete_sentences(
    texts: Sequence[Sequence[Sequence[int]]], config: ThoughtGestaltConfig
) -> tuple[Tensor, Tensor]:
    """Returns texts of sentences without boundary tokens as ``packing.pack`` takes them.

    That is tokens (B, S, U) and lengths (B, S), int64.
    """
    shape = len(texts), max(map(len, texts), default=0), config.block_size
    tokens = torch.zeros(shape, dtype=torch.int64)
    lengths = torch.zeros(shape[:2], dtype=torch.int64)
    for row, sentences in enumerate(texts):
        for t, words in enumerate(sentences):
            marked = [config.bos_id, *words, config.eos_id]
            tokens[row, t, : len(marked)] = torch.tensor(marked)
            lengths[row, t] = len(marked)
    return tokens, lengths
