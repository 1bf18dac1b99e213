"""Text corpora as Lightning data modules: text in, batches of token windows out.

| file | what it holds |
|---|---|
| `corpus` | `TextCorpus`: documents, splits, tokenizer, text store, fingerprint, recipe |
| `base` | `LanguageDataModule`: batches by number, ranks, resuming |
| `text` | `TextDataModule`: a corpus as batches of windows; write `documents(split)` |
| `python_docs` | `PythonDocs`: the documentation inside every CPython |
| `local_text` | `LocalText`: your own txt, jsonl and parquet files |
| `answers` | `AnswerDataModule`: questions with marked answers, one a window; their rows |
| `row_order` | which example is row n, where a row holds a whole example |
| `gsm8k` | word problems with worked answers, from the hub or your files |
| `reasoning/` | `ReasoningDataModule`: questions, aligned reasoning steps, answers |
| | `StateTracking`: Parity and Vars; `ReasoningGSM8K`; `TwoHop`; `Kinship` |
| `sentences/` | `Sentences`, `SentenceWindows`: another corpus, cut into sentences |
| `hub_corpus` | `HubCorpus`: a corpus of the Hugging Face hub, or your copy; token cap |
| `openwebtext` | `OpenWebText`: the last 100,000 documents validate |
| `pes2o` | `PeS2o`: papers and abstracts |
| `wikitext103` | `WikiText103`: cut into articles; seeded subsets |
| `pile` | `Pile`: all of it, or some of its collections |
| `zero_shot/` | `ZeroShotText`: sets that papers score and do not train on, detokenised |
| `hub` | texts of a split on the hub, downloaded or streamed |
| `hub_revision` | which commit and which files of a repository are read |
| `hub_progress` | where the reading stands, so that a preparation can go on there |
| `hub_errors` | why the hub cannot be read, and what helps |
| `readers` | documents of one file: compression, encodings, broken lines, separators |
| `splits` | which split a document belongs to |
| `split_sizes` | how much text each split got, and whether that is what was asked |
| `tokenizers` | one interface over bytes, tiktoken, tokenizer.json and a trained BPE |
| `shuffling` | a seeded order of more documents than memory holds |
| `tokenising` | documents to tokens in chunks, on several processes, in order |
| `preparation` | `prepare_store`: sections, resuming, the final name |
| `journal` | what is known of a store while it is written |
| `shards` | the files of a section |
| `store` | a corpus tokenised once: memory-mapped shards, offsets, meta.json |
| `check` | ``python -m datamodules.check FOLDER``: whether stores hold what was written |
| `document_order` | the order of an epoch's documents, shared by all processes |
| `windows` | rows of T+1 tokens by number: random, packed, non-overlapping |
| `prompts` | texts to continue, for `predict` |
| `recipe` | from an object back to its class path and arguments |
| `loader` | `BatchLoader`: batch n as a pure function of n, for exact resuming |

The path of a document: `labelled_documents` -> `tokenising.encode_in_order` (tokenizer, EOS) ->
`preparation.prepare_store` -> `store.TokenStream` -> a window order ->
`windows.WindowSource.batch(n)` -> `loader.BatchLoader` -> the model. Nothing here imports a model.
"""

from datamodules.answers import AnswerDataModule, answer_batch
from datamodules.base import LanguageDataModule
from datamodules.corpus import TextCorpus
from datamodules.hub import CorpusUnavailableError
from datamodules.hub_corpus import HubCorpus
from datamodules.loader import BatchLoader, BatchSource
from datamodules.local_text import LocalText
from datamodules.openwebtext import OpenWebText
from datamodules.pes2o import PeS2o
from datamodules.pile import Pile
from datamodules.prompts import read_prompts
from datamodules.python_docs import PythonDocs
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
from datamodules.wikitext103 import WikiText103
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
