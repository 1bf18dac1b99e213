"""Text corpora as Lightning data modules: text in, batches of token windows out.

| file | what it holds |
|---|---|
| `corpus` | `TextCorpus`: documents, splits, tokenizer, text store, fingerprint, recipe |
| `base` | `TextDataModule`: a corpus as batches of windows; write `documents(split)` |
| `python_docs` | `PythonDocs`: the documentation inside every CPython |
| `local_text` | `LocalText`: your own txt, jsonl and parquet files |
| `readers` | documents of one file: compression, encodings, broken lines, separators |
| `splits` | which split a document belongs to |
| `tokenizers` | one interface over bytes, tiktoken, tokenizer.json and a trained BPE |
| `store` | a corpus tokenised once: memory-mapped shards, offsets, meta.json |
| `windows` | rows of T+1 tokens by number: random, packed, non-overlapping |
| `prompts` | texts to continue, for `predict` |
| `recipe` | from an object back to its class path and arguments |
| `loader` | `BatchLoader`: batch n as a pure function of n, for exact resuming |

The path of a document: `documents` -> `store.SplitWriter` (tokenizer, EOS) -> `store.TokenStream`
-> a window order -> `windows.WindowSource.batch(n)` -> `loader.BatchLoader` -> the model. Nothing
here imports a model.
"""

from datamodules.base import TextDataModule
from datamodules.loader import BatchLoader, BatchSource
from datamodules.local_text import LocalText
from datamodules.prompts import read_prompts
from datamodules.python_docs import PythonDocs
from datamodules.store import Counts, Store, StoreError
from datamodules.tokenizers import (
    Tokenizer,
    TokenizerUnavailableError,
    load_tokenizer,
    tokenizer_from_state,
)

__all__ = [
    "BatchLoader",
    "BatchSource",
    "Counts",
    "LocalText",
    "PythonDocs",
    "Store",
    "StoreError",
    "TextDataModule",
    "Tokenizer",
    "TokenizerUnavailableError",
    "load_tokenizer",
    "read_prompts",
    "tokenizer_from_state",
]
