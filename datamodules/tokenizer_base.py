"""The interface of tokenizers."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules import long_texts

Row = tuple[np.ndarray, ...]  # ids of one text, and further values per id


class TokenizerUnavailableError(ValueError):
    """Raised if a tokenizer cannot be fetched; the message names an alternative."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


class Tokenizer(ABC):
    """Maps text to ids and back.

    Attributes:
        name: The requested name, e.g. ``"gpt2"`` or ``"bpe:1024"``.
        vocab_size: V, the largest id plus one.
        eos_id: Id that ends every stored document.
        stop_ids: Ids that end a generated text.
        text_bos_id: Id that begins every text (BOS), or None if texts begin without one.
        exact_bytes: Whether each id has a fixed number of bytes in any text (`token_bytes`);
            otherwise `encode_measured` counts them.
        gains_from_processes: Whether tokenising costs more than passing text between processes.
    """

    gains_from_processes: bool = True

    name: str
    vocab_size: int
    eos_id: int
    stop_ids: tuple[int, ...]
    text_bos_id: int | None = None
    exact_bytes: bool = True

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` without BOS and EOS; text never becomes a special token."""

    def encode_continuation(self, text: str) -> list[int]:
        """Returns the ids of a text that continues another one, without a dummy prefix."""
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` without special ids; broken UTF-8 becomes U+FFFD."""

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` after other text, keeping a leading space."""
        return self.decode(ids)

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns plain values from which `tokenizer_from_state` rebuilds this tokenizer."""

    @property
    def start_id(self) -> int:
        """Id that a model reads before a text: BOS, or the previous text's EOS."""
        return self.eos_id if self.text_bos_id is None else self.text_bos_id

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids without text; targets among them are not lexical."""
        return (self.eos_id,) if self.text_bos_id is None else (self.eos_id, self.text_bos_id)

    @property
    def byte_pieces(self) -> frozenset[int]:
        """Ids of byte-fallback pieces; a run of them decodes to U+FFFD if any byte is invalid."""
        return frozenset()

    @property
    def text_changes(self) -> str | None:
        """Losses of encoding and decoding, as a predicate, or None if it is lossless."""
        return None

    def prompt_ids(self, text: str) -> list[int]:
        """Returns the prompt ids for a continuation of `text`, with `start_id` first."""
        return [self.start_id, *self.encode(text)]

    def measured_prompt(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns `prompt_ids` and the UTF-8 bytes that each id covers, both int64."""
        ids, sizes = self.encode_measured([text])[0]
        return np.append(self.start_id, ids), np.append(0, sizes)

    def sentence_prompt_ids(self, sentences: Sequence[str]) -> list[int]:
        """Returns `prompt_ids` of the concatenation of the given sentences."""
        return self.prompt_ids("".join(sentences))

    @abstractmethod
    def _byte_counts(self) -> Sequence[int]:
        """Returns the UTF-8 bytes of each id, V entries."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, in parallel if the library supports it."""
        return [self.encode(text) for text in texts]

    def use_one_core(self) -> None:
        """Restricts batches to the calling thread, for use in many processes."""
        return  # most use no threads

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as arrays of int64 or smaller types, for the text store.

        Long texts are encoded in parts that have the tokens of the whole, if it can be cut.
        """
        return [row[0] for row in self._in_parts(texts, self._id_rows)]

    def _id_rows(self, texts: Sequence[str]) -> list[Row]:
        return [(ids,) for ids in self._arrays(texts)]

    def _arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, encoding it whole."""
        return [np.asarray(ids, dtype=np.int64) for ids in self.encode_batch(texts)]

    def encode_measured(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns, for each text, ids and the UTF-8 bytes that each id covers.

        The bytes, int32 or int64, sum to the UTF-8 bytes of the text if it has any ids.
        """
        sizes = self.token_bytes.numpy()
        if any(len(text) > long_texts.PART for text in texts):
            sizes = sizes.astype(np.int32)
        return [(ids, sizes[ids]) for ids in self.encode_arrays(texts)]

    def measure_continuations(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns `encode_measured` of texts that continue another one."""
        return self.encode_measured(texts)

    # Long texts

    @cached_property
    def sure_cuts(self) -> re.Pattern[str] | None:
        """Pattern of positions at which a cut leaves the tokens unchanged; None if unknown."""
        return None

    def _in_parts(
        self,
        texts: Sequence[str],
        encode: Callable[[Sequence[str]], Sequence[Row]],
        begin: Callable[[Sequence[str]], Sequence[Row]] | None = None,
    ) -> list[Row]:
        """Returns the row of each text; long texts are encoded in parts.

        Args:
            texts: Texts to encode.
            encode: Encodes whole texts.
            begin: Encodes the first part of each text. Defaults to `encode`.
        """
        begin = begin or encode
        is_long = [len(text) > long_texts.PART for text in texts]
        if not any(is_long):
            return list(begin(texts))
        short = iter(begin([t for t, long in zip(texts, is_long, strict=True) if not long]))
        return [
            self._long_row(text, encode, begin) if long else next(short)
            for text, long in zip(texts, is_long, strict=True)
        ]

    def _long_row(
        self,
        text: str,
        encode: Callable[[Sequence[str]], Sequence[Row]],
        begin: Callable[[Sequence[str]], Sequence[Row]],
    ) -> Row:
        spans = long_texts.parts_of(text, self.sure_cuts, self.name)
        start, stop = next(spans)
        (first,) = begin([text[start:stop]])
        # Ids use the smallest type, and nothing is kept twice.
        types = [np.min_scalar_type(self.vocab_size - 1), *[np.dtype(np.int32)] * (len(first) - 1)]
        columns = [bytearray(a.astype(t).tobytes()) for a, t in zip(first, types, strict=True)]
        while group := list(islice(spans, long_texts.TOGETHER)):
            # Each part is encoded after its preceding letter, so that no part begins a text.
            letters = [text[start - 1] for start, _ in group]
            rows = encode([*letters, *(text[start - 1 : stop] for start, stop in group)])
            for alone, row in zip(rows[: len(group)], rows[len(group) :], strict=True):
                for column, values, dtype in zip(columns, row, types, strict=True):
                    column += values[len(alone[0]) :].astype(dtype).tobytes()
        return tuple(np.frombuffer(c, dtype=t) for c, t in zip(columns, types, strict=True))

    @cached_property
    def token_bytes(self) -> Tensor:
        """UTF-8 bytes of each id, (V,) int64; 0 for EOS, special and unused ids.

        Without `exact_bytes` this is an estimate, the bytes of the visible piece.
        """
        return torch.tensor(self._byte_counts(), dtype=torch.int64)
