"""Text corpora as Lightning data modules: from text to batches of token windows.

| file | content |
|---|---|
| `corpus` | `TextCorpus`: documents, splits, tokenizer, text store, fingerprint, recipe |
| `base` | `LanguageDataModule`: batches by index, ranks, resuming, prompts |
| `text` | `TextDataModule`: a corpus in batches of windows; implement `documents(split)` |
| `local_corpora` | `LocalText`: local txt, jsonl and parquet files; `PythonDocs` |
| `corpora` | `SplitText`, `HubCorpus`: from the hub, or a local copy; token cap |
| | `OpenWebText`, `PeS2o`, `WikiText103` |
| `pile` | `Pile`: as text, or as the tokens published by PonderLM's authors |
| `hub_text` | `HubText`: any dataset of the `datasets` library, by name or as an object |
| `synthetic` | `SyntheticText`: generated texts that require one mechanism |
| `zero_shot` | `ZeroShotText`: sets for zero-shot evaluation |
| `detokenizers` | from tokenised benchmark text to running text, for these sets |
| `answers` | `AnswerDataModule`: questions with marked answers, one per window |
| `word_problems` | GSM8K: word problems with worked answers, from the hub or local files |
| `reasoning/` | `ReasoningDataModule`: questions, aligned reasoning steps, answers |
| | `StateTracking`: Parity and Vars; `ReasoningGSM8K`; `TwoHop`; `Kinship` |
| `sentences/` | `Sentences`, `SentenceWindows`: another corpus cut into sentences |
| `hub` | files of a split on the hub, fetched at one commit into its cache |
| `files` | the user's files: formats, patterns, compression, encodings |
| `readers` | documents of files: separators, JSON lines and arrays, columns, broken rows |
| `tokenizers` | tokenizers by name: bytes, tiktoken, tokenizer.json or a trained BPE |
| `tokenizer_base` | the interface of tokenizers |
| `json_tokenizer` | published tokenizer.json files: bytes of tokens, continuations; ``bpe:N`` |
| `long_texts` | cuts in long texts that leave the tokens unchanged |
| `special_tokens` | BOS and EOS of tokenizer.json files |
| `encoding` | documents to tokens: chunks, encoded in order by one or more processes |
| `prepare` | `prepare_store`: resumable preparation in parts |
| `journals` | output files of long jobs: a single writer, durable appends, full disks |
| `store` | a corpus tokenised once: memory-mapped shards, offsets, meta.json |
| `check` | ``python -m datamodules.check FOLDER``: verifies stores |
| `numbers` | parsing of numbers in answers, for every grader |
| `order` | seeded permutations of documents and examples; files that processes share |
| `sources` | `BatchLoader`, `RowSource`; the division of a step among devices |

The path of a document: `labelled_documents` -> `prepare.prepare_store`
(`encoding.encode_in_order`: tokenizer, EOS) -> `store.TokenStream` -> a window order
-> `text.WindowSource.batch(n)` -> `sources.BatchLoader` -> the model. Nothing here imports a model.

To add a corpus: subclass `HubCorpus` (files on the hub) or `TextDataModule` (any
`documents(split)`), add its name below, a line in ``tests/data_modules.py``, which applies the
contract of all data modules, and a config in ``configs/data``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.answers import AnswerDataModule as AnswerDataModule
    from datamodules.answers import answer_batch as answer_batch
    from datamodules.base import LanguageDataModule as LanguageDataModule
    from datamodules.corpora import HubCorpus as HubCorpus
    from datamodules.corpora import OpenWebText as OpenWebText
    from datamodules.corpora import PeS2o as PeS2o
    from datamodules.corpora import WikiText103 as WikiText103
    from datamodules.corpus import TextCorpus as TextCorpus
    from datamodules.hub import CorpusUnavailableError as CorpusUnavailableError
    from datamodules.hub_text import HubText as HubText
    from datamodules.local_corpora import LocalText as LocalText
    from datamodules.local_corpora import PythonDocs as PythonDocs
    from datamodules.pile import Pile as Pile
    from datamodules.readers import read_prompts as read_prompts
    from datamodules.reasoning import Example as Example
    from datamodules.reasoning import FixedTokens as FixedTokens
    from datamodules.reasoning import Kinship as Kinship
    from datamodules.reasoning import ReasoningDataModule as ReasoningDataModule
    from datamodules.reasoning import ReasoningGSM8K as ReasoningGSM8K
    from datamodules.reasoning import StateTracking as StateTracking
    from datamodules.reasoning import TwoHop as TwoHop
    from datamodules.sentences import Sentences as Sentences
    from datamodules.sentences import SentenceTokenizer as SentenceTokenizer
    from datamodules.sentences import SentenceWindows as SentenceWindows
    from datamodules.sources import BatchLoader as BatchLoader
    from datamodules.sources import BatchSource as BatchSource
    from datamodules.store import Counts as Counts
    from datamodules.store import Store as Store
    from datamodules.store import StoreError as StoreError
    from datamodules.synthetic import SyntheticText as SyntheticText
    from datamodules.text import TextDataModule as TextDataModule
    from datamodules.tokenizers import Tokenizer as Tokenizer
    from datamodules.tokenizers import TokenizerUnavailableError as TokenizerUnavailableError
    from datamodules.tokenizers import load_tokenizer as load_tokenizer
    from datamodules.tokenizers import tokenizer_from_state as tokenizer_from_state
    from datamodules.zero_shot import ZeroShotText as ZeroShotText

_NAMES = {
    "datamodules.answers": "AnswerDataModule answer_batch",
    "datamodules.base": "LanguageDataModule",
    "datamodules.sources": "BatchLoader BatchSource",
    "datamodules.corpora": "HubCorpus OpenWebText PeS2o WikiText103",
    "datamodules.corpus": "TextCorpus",
    "datamodules.hub": "CorpusUnavailableError",
    "datamodules.hub_text": "HubText",
    "datamodules.local_corpora": "LocalText PythonDocs",
    "datamodules.pile": "Pile",
    "datamodules.readers": "read_prompts",
    "datamodules.reasoning": "Example Kinship ReasoningDataModule ReasoningGSM8K "
    "StateTracking TwoHop FixedTokens",
    "datamodules.sentences": "SentenceTokenizer SentenceWindows Sentences",
    "datamodules.store": "Counts Store StoreError",
    "datamodules.synthetic": "SyntheticText",
    "datamodules.text": "TextDataModule",
    "datamodules.tokenizers": "Tokenizer TokenizerUnavailableError load_tokenizer "
    "tokenizer_from_state",
    "datamodules.zero_shot": "ZeroShotText",
}
"""Public names by module; a module is imported on the first use of one of its names."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
