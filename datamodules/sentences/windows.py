"""Marked text as windows, for models that read it as one stream of tokens."""

from typing import Any

from datamodules.sentences.corpus import SentenceCorpus
from datamodules.text import Report, TextDataModule


class SentenceWindows(SentenceCorpus, TextDataModule):
    """A corpus as windows over its marked stream, BOS and EOS kept (App. E.2 and E.4).

    BOS predicts a sentence's first word, its last word EOS, and EOS the next BOS.

    Args:
        report: What loss and perplexity count when evaluating: 'lexical': only words; 'all' targets
            with the markers. Bits per byte count all.
        **kwargs: See `SentenceCorpus` and `TextDataModule`.

    Raises:
        ValueError: An argument is out of its range; the message lists all of them.
    """

    def __init__(self, *, report: Report = "lexical", **kwargs: Any) -> None:
        super().__init__(report=report, **kwargs)
