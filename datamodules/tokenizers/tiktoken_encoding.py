"""The encodings of tiktoken."""

import os
from collections.abc import Sequence

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
        self.vocab_size = self._encoding.n_vocab
        self.eos_id = self._encoding.eot_token
        special = self._encoding.special_tokens_set
        self._special_ids = {self._encoding.encode_single_token(text) for text in special}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; special-token text is ordinary text."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, on all cores."""
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)

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
