"""Corpora cut into sentences, for *Modeling Language as a Sequence of Thoughts* (Thought Gestalt).

| the paper's | here |
|---|---|
| sentence splitting, "SaT Capped" (2.1) | `splitters`, `sat`, `tokenizer.SentenceTokenizer` |
| BOS, EOS and EOD (2.1) | `tokenizer.SentenceTokenizer`, `grids.grid_batch` |
| documents of the corpus, marked | `corpus.SentenceCorpus`, `index.SentenceIndex` |
| sentence streams and their curriculum (2.1, 2.3) | `streams` |
| uniform token-budget bucketing (B.1) | `bucketing`, `dealing`, `even_batches` |
| batches | `batches`, `module.Sentences` |
| flat streams with boundaries (E.2, E.4) | `windows.SentenceWindows` |

Words are lexical tokens here: all but BOS, EOS and EOD.
"""

from datamodules.sentences.corpus import SentenceCorpus
from datamodules.sentences.index import SentenceIndex
from datamodules.sentences.module import Sentences
from datamodules.sentences.splitter import Splitter, SplitterUnavailableError
from datamodules.sentences.splitters import parse_splitter
from datamodules.sentences.tokenizer import SentenceTokenizer
from datamodules.sentences.windows import SentenceWindows

__all__ = [
    "SentenceCorpus",
    "SentenceIndex",
    "SentenceTokenizer",
    "SentenceWindows",
    "Sentences",
    "Splitter",
    "SplitterUnavailableError",
    "parse_splitter",
]
