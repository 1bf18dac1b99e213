"""Text corpora as Lightning data modules: text in, batches of token windows out.

| file | what it holds |
|---|---|
| `corpus` | `TextCorpus`: documents, splits, tokenizer, text store, fingerprint, recipe |
| `base` | `LanguageDataModule`: batches by number, ranks, resuming; `BatchLoader`; prompts |
| `text` | `TextDataModule`: a corpus as batches of windows; write `documents(split)` |
| `local_corpora` | `LocalText`: your own txt, jsonl and parquet files; `PythonDocs` |
| `corpora` | `HubCorpus`: from the Hugging Face hub, or your copy; token cap |
| | `OpenWebText`, `PeS2o`, `Pile`, `WikiText103` |
| `zero_shot` | `ZeroShotText`: sets that papers score and do not train on |
| `detokenizers` | from benchmark text to text as people write it, for those sets |
| `answers` | `AnswerDataModule`: questions with marked answers, one a window; their rows |
| `gsm8k` | word problems with worked answers, from the hub or your files |
| `reasoning/` | `ReasoningDataModule`: questions, aligned reasoning steps, answers |
| | `StateTracking`: Parity and Vars; `ReasoningGSM8K`; `TwoHop`; `Kinship` |
| `sentences/` | `Sentences`, `SentenceWindows`: another corpus, cut into sentences |
| `hub` | texts of a split on the hub, at one commit, downloaded or streamed |
| `readers` | documents of one file: compression, encodings, broken lines, separators |
| `tokenizers` | one interface over bytes, tiktoken, tokenizer.json and a trained BPE |
| `prepare` | `prepare_store`: tokenising on several processes, resuming, the final name |
| `store` | a corpus tokenised once: memory-mapped shards, offsets, meta.json |
| `check` | ``python -m datamodules.check FOLDER``: whether stores hold what was written |
| `order` | seeded orders of documents and of examples |
| `recipe` | from an object back to its class path and arguments |

The path of a document: `labelled_documents` -> `prepare.prepare_store` (`encode_in_order`:
tokenizer, EOS) -> `store.TokenStream` -> a window order -> `text.WindowSource.batch(n)` ->
`base.BatchLoader` -> the model. Nothing here imports a model.
"""

from datamodules.answers import AnswerDataModule, answer_batch
from datamodules.base import BatchLoader, BatchSource, LanguageDataModule, read_prompts
from datamodules.corpora import HubCorpus, OpenWebText, PeS2o, Pile, WikiText103
from datamodules.corpus import TextCorpus
from datamodules.hub import CorpusUnavailableError
from datamodules.local_corpora import LocalText, PythonDocs
from datamodules.reasoning import (
    Example,
    Kinship,
    ReasoningDataModule,
    ReasoningGSM8K,
    StateTracking,
    TwoHop,
    Wording,
)
from datamodules.sentences import Sentences, SentenceTokenizer, SentenceWindows
from datamodules.store import Counts, Store, StoreError
from datamodules.text import TextDataModule
from datamodules.tokenizers import (
    Tokenizer,
    TokenizerUnavailableError,
    load_tokenizer,
    tokenizer_from_state,
)
from datamodules.zero_shot import ZeroShotText

__all__ = [
    "AnswerDataModule",
    "BatchLoader",
    "BatchSource",
    "CorpusUnavailableError",
    "Counts",
    "Example",
    "HubCorpus",
    "Kinship",
    "LanguageDataModule",
    "LocalText",
    "OpenWebText",
    "PeS2o",
    "Pile",
    "PythonDocs",
    "ReasoningDataModule",
    "ReasoningGSM8K",
    "SentenceTokenizer",
    "SentenceWindows",
    "Sentences",
    "StateTracking",
    "Store",
    "StoreError",
    "TextCorpus",
    "TextDataModule",
    "Tokenizer",
    "TokenizerUnavailableError",
    "TwoHop",
    "WikiText103",
    "Wording",
    "ZeroShotText",
    "answer_batch",
    "load_tokenizer",
    "read_prompts",
    "tokenizer_from_state",
]
