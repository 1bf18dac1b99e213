"""The encodings of tiktoken."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from datamodules.tokenizers.interface import Tokenizer, TokenizerUnavailableError, first_line


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding.

    Args:
        name: One of the encodings that tiktoken knows.

    Raises:
        TokenizerUnavailableError: The encoding's files are not cached and cannot be downloaded.
    """

    def __init__(self, name: str) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:
            raise TokenizerUnavailableError(
                f"tokenizer={name!r}: tiktoken could not get the encoding's files "
                f"({type(error).__name__}: {first_line(error)}). Set TIKTOKEN_CACHE_DIR to the "
                "absolute path of a folder that holds them, or pass the path of a local "
                "tokenizer.json, 'bytes' or 'bpe:1024'."
            ) from error
        self.name = name
        self._threads = os.cpu_count() or 1
        self.vocab_size = self._encoding.n_vocab
        self.eos_id = self._encoding.eot_token
        special = self._encoding.special_tokens_set
        self._special_ids = {self._encoding.encode_single_token(text) for text in special}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; special-token text is ordinary text."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, on all cores."""
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=self._threads)

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as uint32 arrays, on all cores."""
        if self._threads == 1:
            return [self._array(text) for text in texts]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._array, texts))

    def _array(self, text: str) -> np.ndarray:
        """Returns the ids of `text` as the library lays them down, without a list between."""
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def use_one_core(self) -> None:
        """Keeps batches on the calling thread."""
        self._threads = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what rebuilds this tokenizer in another process."""
        return TiktokenTokenizer, (self.name,)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special ids vanish, broken UTF-8 becomes U+FFFD."""
        return self._encoding.decode([int(i) for i in ids if int(i) not in self._special_ids])

    def state(self) -> dict[str, str]:
        """Returns the encoding's name."""
        return {"kind": "tiktoken", "name": self.name}

    def _byte_counts(self) -> Sequence[int]:
        return [self._bytes_of(i) for i in range(self.vocab_size)]

    def _bytes_of(self, i: int) -> int:
        if i in self._special_ids:
            return 0
        try:
            return len(self._encoding.decode_single_token_bytes(i))
        except KeyError:  # some vocabularies have unused ids
            return 0
