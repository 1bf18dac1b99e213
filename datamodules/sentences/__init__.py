"""Corpora cut into sentences, for *Modeling Language as a Sequence of Thoughts* (Thought Gestalt).

| the paper's | here |
|---|---|
| sentence splitting, "SaT Capped" (2.1) | `splitters`, `tokenizer.SentenceTokenizer` |
| BOS, EOS and EOD (2.1) | `tokenizer.SentenceTokenizer`, `batches.grid_batch` |
| documents of the corpus, marked | `corpus.SentenceCorpus`, `corpus.SentenceIndex` |
| sentence streams and their curriculum (2.1, 2.3) | `streams` |
| uniform token-budget bucketing (B.1) | `streams.distribute` |
| batches | `batches.Sentences`; the streams of batch n: `batches.StreamSource` |
| flat streams with boundaries (E.2, E.4) | `corpus.SentenceWindows` |

"Words" are the lexical tokens here: all tokens except BOS, EOS and EOD.
"""

from datamodules.sentences.batches import Sentences
from datamodules.sentences.corpus import SentenceCorpus, SentenceIndex, SentenceWindows
from datamodules.sentences.splitters import Splitter, SplitterUnavailableError, parse_splitter
from datamodules.sentences.tokenizer import SentenceTokenizer

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
