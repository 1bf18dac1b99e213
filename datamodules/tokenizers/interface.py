"""What every tokenizer can do, and the byte tokenizer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


class TokenizerUnavailableError(ValueError):
    """A tokenizer that could not be fetched; the message says what to pass or set instead."""


class Tokenizer(ABC):
    """Maps text to ids and back.

    Attributes:
        name: The name it was asked for by, e.g. ``"gpt2"`` or ``"bpe:1024"``.
        vocab_size: V, the largest id plus one.
        eos_id: The id that ends every stored document.
        gains_from_processes: Whether tokenising costs more than passing text between processes.
    """

    gains_from_processes: bool = True

    name: str
    vocab_size: int
    eos_id: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without EOS; special-token text is ordinary text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special ids vanish, broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns plain values from which `tokenizer_from_state` rebuilds this tokenizer."""

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that are no text: targets among them are no lexical ones."""
        return (self.eos_id,)

    @property
    def stop_id(self) -> int:
        """The id after which a generated text ends."""
        return self.eos_id

    def prompt_ids(self, text: str) -> list[int]:
        """Returns what a model reads before it continues `text`: documents stand after an EOS."""
        return [self.eos_id, *self.encode(text)]

    def sentence_prompt_ids(self, sentences: Sequence[str]) -> list[int]:
        """Returns `prompt_ids` of a text whose sentences are known; they join to that text."""
        return self.prompt_ids("".join(sentences))

    @abstractmethod
    def _byte_counts(self) -> Sequence[int]:
        """Returns the UTF-8 bytes of each id, V entries."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, in parallel where the library can."""
        return [self.encode(text) for text in texts]

    def use_one_core(self) -> None:
        """Keeps batches on the calling thread, for a process that is one of many."""
        return  # most have no threads of their own

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as int64 or smaller arrays (what the text store writes)."""
        return [np.asarray(ids, dtype=np.int64) for ids in self.encode_batch(texts)]

    @cached_property
    def token_bytes(self) -> Tensor:
        """UTF-8 bytes that each id stands for, (V,) int64; 0 for EOS, special and unused ids.

        Exact for byte-level vocabularies. For others (SentencePiece, WordPiece) it counts the
        visible piece.
        """
        return torch.tensor(self._byte_counts(), dtype=torch.int64)


class BytesTokenizer(Tokenizer):
    """One id a UTF-8 byte, and EOS = 256: a vocabulary of 257 that needs no files."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    gains_from_processes = False

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the UTF-8 bytes of each text as uint8 arrays."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the byte ids; EOS vanishes, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def state(self) -> dict[str, str]:
        """Returns ``{"kind": "bytes"}``."""
        return {"kind": "bytes"}

    def _byte_counts(self) -> Sequence[int]:
        return [1] * 256 + [0]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
