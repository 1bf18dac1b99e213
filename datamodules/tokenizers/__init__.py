"""Tokenizers behind one interface, chosen by a plain name.

| name | tokenizer | file |
|---|---|---|
| ``bytes`` | 256 byte values and EOS; needs nothing | `interface` |
| ``gpt2``, ``cl100k_base``, ... | a tiktoken encoding | `tiktoken_encoding` |
| ``path/tokenizer.json`` | a file of the ``tokenizers`` library | `json_file` |
| ``owner/name`` | the ``tokenizer.json`` of a repository on the Hugging Face hub | `json_file` |
| ``bpe:1024`` | a byte-level BPE of exactly so many entries, trained on the corpus | `json_file` |

`names` says which is which. Text never becomes a special id: a document that spells out
``<|endoftext|>`` is encoded as those 13 characters.
"""

from datamodules.tokenizers.interface import BytesTokenizer, Tokenizer, TokenizerUnavailableError
from datamodules.tokenizers.json_file import JsonTokenizer, train_bpe
from datamodules.tokenizers.names import (
    TokenizerSpec,
    check_vocab_size,
    load_tokenizer,
    parse_tokenizer,
    tokenizer_from_state,
)
from datamodules.tokenizers.tiktoken_encoding import TiktokenTokenizer

__all__ = [
    "BytesTokenizer",
    "JsonTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "TokenizerSpec",
    "TokenizerUnavailableError",
    "check_vocab_size",
    "load_tokenizer",
    "parse_tokenizer",
    "tokenizer_from_state",
    "train_bpe",
]
