"""A corpus with documents cut into sentences, derived from an inner corpus.

There are two text stores: the inner corpus' store, which models of plain tokens also use (its token
cap holds for both), and one with marked documents (see `tokenizer`). `SentenceIndex` locates the
sentences of a split in the latter.

The marked documents are decoded from the inner store if the inner tokenizer is lossless; otherwise
they are read from the source again.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from datamodules.corpus import TextCorpus
from datamodules.order import shared
from datamodules.sentences.splitters import RuleSplitter, parse_splitter
from datamodules.sentences.tokenizer import MARKERS, SentenceTokenizer, check_length
from datamodules.store import SPLITS, Counts, Split, StoreError, TokenStream, fingerprint
from datamodules.text import Report, TextDataModule
from lightning_models.recipe import build, public_path

# ---- the index of sentences


SHARED_FROM = 2**24  # tokens; a smaller split is indexed quickly
_PART = 2**22  # tokens to read at once
_SAMPLED = 64  # sentences to check when a file is opened
_ENDS = np.dtype("<i8")
_NONE = np.empty(0, _ENDS)
_NAME = "sentences"


class SentenceIndex:
    """Index of a split's sentences, counted over all documents; pickled by path.

    Args:
        stream: Marked tokens of the split.
        eos_id: Last token of a sentence.

    Attributes:
        stream: Marked tokens of the split.
    """

    def __init__(self, stream: TokenStream, eos_id: int) -> None:
        self.stream, self._eos_id = stream, eos_id

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the paths of the files."""
        return SentenceIndex, (self.stream, self._eos_id)

    def __len__(self) -> int:
        """Returns the number of sentences."""
        return len(self.ends)

    @cached_property
    def ends(self) -> np.ndarray:
        """End of each sentence in the stream, after its EOS; int64, ascending."""
        return sentence_ends(self.stream, self._eos_id)

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Index of the sentence after each document's last one; int64, ascending."""
        return np.searchsorted(self.ends, self.stream.document_ends) + 1

    def starts(self, sentences: np.ndarray) -> np.ndarray:
        """Returns the starts of sentences in the stream, at their BOS; int64."""
        indices = np.asarray(sentences, dtype=np.int64)
        return np.where(indices > 0, self.ends[np.maximum(indices - 1, 0)], 0)

    def ends_document(self, stops: np.ndarray) -> np.ndarray:
        """Returns whether a document ends right before each sentence, bool."""
        document = np.searchsorted(self.document_ends, stops)
        return self.document_ends[np.minimum(document, len(self.document_ends) - 1)] == stops

    def lexical(self, firsts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the number of words in runs of sentences, int64.

        Args:
            firsts: First sentence of each run.
            stops: Sentence after the last one, or the first one if the run is empty. A run is
                within one document, so it has at most one EOD, at its end.
        """
        slots = self.starts(stops) - self.starts(firsts)
        return slots - 2 * (stops - firsts) - (self.ends_document(stops) & (stops > firsts))


def sentence_ends(stream: TokenStream, eos_id: int) -> np.ndarray:
    """Returns the ends of a stream's sentences, int64, from a file if there is one.

    A large index that cannot be written (a read-only or full disk) is kept in memory, with a
    warning.
    """
    ends: np.ndarray | None = None
    if len(stream) >= SHARED_FROM:
        path = stream.split_file(_NAME)
        ends = shared(
            path,
            stream.split_file(f"{_NAME}.lock"),
            opened=lambda: _opened(path, stream, eos_id),
            write=lambda file: file.writelines(part.data for part in _scan(stream, eos_id)),
            held="the ends of the sentences, 8 bytes each",
        )
    return np.concatenate([_NONE, *_scan(stream, eos_id)]) if ends is None else ends


def _scan(stream: TokenStream, eos_id: int) -> Iterator[np.ndarray]:
    """Yields, in parts, the positions after each EOS."""
    for first in range(0, len(stream), _PART):
        tokens = stream.gather(np.arange(first, min(first + _PART, len(stream))))
        yield (np.flatnonzero(tokens == eos_id) + first + 1).astype(_ENDS)


def _opened(path: Path, stream: TokenStream, eos_id: int) -> np.ndarray | None:
    """Returns the ends in a file, or None if it is missing or does not match the stream."""
    if not path.is_file() or path.stat().st_size < _ENDS.itemsize:
        return None
    ends = np.memmap(path, _ENDS, "r")
    sample = ends[np.unique(np.linspace(0, len(ends) - 1, _SAMPLED, dtype=np.int64))]
    ascending = sample[0] > 0 and sample[-1] == len(stream) and (sample[1:] > sample[:-1]).all()
    return ends if ascending and (stream.gather(sample - 1) == eos_id).all() else None


# ---- the corpus


_MARKING = 1  # incremented when the marking of documents changes


class SentenceCorpus(TextCorpus):
    """The documents of another corpus, cut into sentences.

    Args:
        corpus: Corpus of the documents, which determines splits, tokenizer, token cap, cache_dir
            and num_proc. It may be a dict of class_path and init_args. Its batches are not used.
        splitter: Sentence splitter: 'rules' (sentencex), 'sat' (the paper's; its weights come
            from the hub), 'sat:' with another model's name or a local folder, or 'spans:25' for
            spans of 25 tokens.
        max_sentence_tokens: Maximum length of a sentence in tokens (L_max, 64 in the paper); longer
            ones are cut after punctuation.
        language: Language of the texts, for 'rules': a code such as 'en'.
        **kwargs: See the other base classes.

    Raises:
        ValueError: If an argument is out of range.
    """

    object_arguments: ClassVar[tuple[str, ...]] = ("corpus",)
    # Arguments that the inner corpus determines.
    _of_corpus: ClassVar[frozenset[str]] = frozenset(
        {"tokenizer", "cache_dir", "val_fraction", "test_fraction", "num_proc"}
    )

    def __init__(
        self,
        *,
        corpus: TextCorpus,
        splitter: str = "rules",
        max_sentence_tokens: int = 64,
        language: str = "en",
        **kwargs: Any,
    ) -> None:
        self.corpus = _built(corpus)
        self.splitter = parse_splitter(splitter, language)
        self.max_sentence_tokens = max_sentence_tokens
        check_length(self.splitter, max_sentence_tokens)
        super().__init__(
            tokenizer=str(self.corpus.hparams["tokenizer"]),
            cache_dir=str(self.corpus.cache_dir),
            val_fraction=self.corpus.val_fraction,
            test_fraction=self.corpus.test_fraction,
            num_proc=self.corpus.num_proc,
            **kwargs,
        )
        # An object could neither be loaded from a checkpoint nor written to YAML.
        self.hparams["corpus"] = self.corpus.recipe()
        self.hparams["splitter"] = self.splitter.name  # with the absolute path of a folder

    # Documents

    @cached_property
    def _decodes(self) -> bool:
        """Whether the tokens of the inner store are guaranteed to decode to the original text."""
        # a trained tokenizer is lossless, but it may not exist yet
        return self._spec.family == "bpe" or self.corpus.tokenizer.exact_bytes

    def documents(self, split: Split) -> Iterator[str]:
        if self._decodes:
            return _decoded(self.corpus, split, 0)
        return (text for s, text in self.stored_documents() if s == split)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        return self.stored_documents()

    def stored_documents(self, first: int = 0) -> Iterator[tuple[Split, str]]:
        if not self._decodes:
            yield from _source(self.corpus, first)
            return
        for split in SPLITS:
            for text in _decoded(self.corpus, split, first):
                yield split, text
            first = max(0, first - self.corpus.counts(split).documents)

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Returns the name and the source of the inner store.

        Raises:
            StoreError: If the finished parts were marked from a different text.
        """
        origin = {"store": self.corpus.fingerprint, **self.corpus.origin}
        if stored is not None and dict(stored) != origin:
            raise StoreError(
                f"An unfinished preparation next to {self.corpus.store_dir} was started from "
                f"text ({stored}) that differs from the current one ({origin}). Delete its folder, "
                "*.partial."
            )
        return origin

    def expects(self, split: Split) -> bool:
        return self.corpus.expects(split)

    def how_to_get(self, split: Split) -> str:
        return self.corpus.how_to_get(split)

    def notes(self) -> list[str]:
        """Returns the difference from the paper's sentences; the inner corpus has more notes."""
        if isinstance(self.splitter, RuleSplitter):
            return ["Sentences are split by the rules of sentencex; the paper uses a SaT model."]
        return []

    # Names

    @property
    def vocab_size(self) -> int:
        """V: the inner vocabulary plus three markers, known without loading if the inner one is."""
        return self.corpus.vocab_size + MARKERS

    @cached_property
    def fingerprint(self) -> str:
        """Name of the marked store: inner fingerprint, splitter, longest sentence."""
        method = self.splitter.name.partition(":")[0]
        name = self.corpus.fingerprint.rpartition("-")[0]
        return fingerprint(self._description(), f"{name}-{method}_sentences")

    def source(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus.fingerprint,
            "splitter": self.splitter.identity(),
            "max_sentence_tokens": self.max_sentence_tokens,
            "marking": _MARKING,
            # older versions decoded tokens of lossy tokenizers
            **({} if self._decodes else {"documents": "source"}),
        }

    @cached_property
    def tokenizer(self) -> SentenceTokenizer:
        """The inner tokenizer with markers; a trained one exists only after preparation."""
        return SentenceTokenizer(
            self.corpus.tokenizer, self.splitter, max_sentence_tokens=self.max_sentence_tokens
        )

    def _make_tokenizer(self) -> SentenceTokenizer:
        return self.tokenizer

    # Preparing

    def prepare_data(self) -> None:
        """Tokenises the inner corpus, then marks its documents, unless the stores exist.

        Raises:
            ValueError: If the inner corpus has a problem, or the splitter's model is unavailable.
        """
        if not self.store_dir.exists():
            self.splitter.load()  # fails early
        self.corpus.prepare_data()
        if not self.store_dir.exists():
            self.corpus.verify()  # its documents get new checksums
        super().prepare_data()

    def _check_counts(self, counts: Mapping[Split, Counts]) -> None:
        super()._check_counts(counts)
        for split in () if self._decodes else SPLITS:
            inner, marked = self.corpus.counts(split), counts[split]
            if (inner.documents, inner.utf8_bytes) != (marked.documents, marked.utf8_bytes):
                raise StoreError(
                    f"The {split} split of the source has {marked.documents} documents with "
                    f"{marked.utf8_bytes} bytes, but {self.corpus.store_dir} was made from "
                    f"{inner.documents} with {inner.utf8_bytes}. Delete that folder and "
                    f"{self.store_dir}.partial; both are prepared again."
                )

    def _log_sizes(self) -> None:
        """Logs nothing, because the inner corpus logs the sizes of the same documents."""

    def setup(self, stage: str | None = None) -> None:
        """Opens the text stores.

        Raises:
            StoreError: If one is missing or damaged, or they are from different texts.
        """
        self.corpus.setup(stage)
        super().setup(stage)
        if self.origin != self.pin(None):
            raise StoreError(
                f"{self.store_dir} was not made from the current {self.corpus.store_dir} (their "
                "commits differ). Delete the former; it is prepared again."
            )

    # For checkpoints

    def _init_args(self) -> dict[str, Any]:
        arguments = super()._init_args().items()
        return {key: value for key, value in arguments if key not in self._of_corpus}

    def state_dict(self) -> dict[str, Any]:
        inner = {"fingerprint": self.corpus.fingerprint, "tokenizer": self.corpus.tokenizer.state()}
        return {**super().state_dict(), "corpus": inner}


def _built(corpus: TextCorpus | Mapping[str, Any]) -> TextCorpus:
    """Returns the corpus, building it if it is given by class path and arguments."""
    built = build(corpus, TextCorpus) if isinstance(corpus, Mapping) else corpus
    if not isinstance(built, TextCorpus) or isinstance(built, SentenceCorpus):
        raise ValueError(
            f"corpus={public_path(type(built))} must be a corpus of documents, e.g. class_path: "
            "datamodules.LocalText."
        )
    return built


def _decoded(corpus: TextCorpus, split: Split, first: int) -> Iterator[str]:
    """Yields the documents in a corpus' store as text, from index `first` on."""
    stream = corpus.stream(split)
    ends = stream.document_ends
    start = int(ends[first - 1]) if 0 < first <= len(ends) else 0
    for end in ends[first:]:
        yield corpus.tokenizer.decode(stream.gather(np.arange(start, end - 1)).tolist())
        start = int(end)


def _source(corpus: TextCorpus, first: int) -> Iterator[tuple[Split, str]]:
    """Yields (split, source text) of the documents in a corpus' store, from index `first` on."""
    corpus.pin(corpus.origin)  # the commit that the store was made from
    stored = sum(corpus.counts(split).documents for split in SPLITS)  # fewer under a token cap
    with_text = ((split, text) for split, text in corpus.labelled_documents() if text)
    return islice(with_text, first, stored)


# ---- as windows


class SentenceWindows(SentenceCorpus, TextDataModule):
    """A corpus in windows over its marked stream, including BOS and EOS (App. E.2 and E.4).

    BOS predicts a sentence's first word, its last word predicts EOS, and EOS predicts the next BOS.

    Args:
        report: Targets that loss and perplexity cover in evaluation: 'lexical' for words only,
            'all' for words and markers. Bits per byte cover all.
        **kwargs: See `SentenceCorpus` and `TextDataModule`.

    Raises:
        ValueError: If arguments are out of range; the message lists all of them.
    """

    def __init__(self, *, report: Report = "lexical", **kwargs: Any) -> None:
        super().__init__(report=report, **kwargs)
