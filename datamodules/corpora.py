"""Published corpora, from the Hugging Face hub or your copy of their files.

| class | corpus |
|---|---|
| `OpenWebText` | an open reproduction of GPT-2's training text (8 million web pages, 40 GB) |
| `PeS2o` | 39 million open-access papers and abstracts (42 billion words), or version 3 |
| `WikiText103` | 28,475 good and featured articles of Wikipedia, one document each |
"""

import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from tqdm import tqdm

from datamodules.base import choice_problems, raise_problems
from datamodules.corpus import REMOVE_REPEATS, published_repeats, split_documents
from datamodules.files import PARQUET_SUFFIXES, Format, format_of
from datamodules.hub import HubFiles, HubSplit, check_revision
from datamodules.local_corpora import FILE_KEYS, Patterns, files_of_splits, identify
from datamodules.order import in_order, shuffled
from datamodules.readers import (
    Reading,
    has_text,
    read_column,
    read_documents,
    read_files,
    read_lines,
)
from datamodules.store import SPLITS, Split
from datamodules.text import TextDataModule


class SplitText(TextDataModule):
    """Text with some published splits; the others are held out from the training documents.

    Held-out splits are read first, so that a token cap does not lose them.

    Args:
        train_tokens: Maximum number of training tokens to store: whole documents in corpus order,
            up to the first that does not fit. Null stores all of them.
        **kwargs: See `TextDataModule`.

    Raises:
        ValueError: If an argument is invalid.
    """

    # Option that gives each split separate documents, for messages.
    split_options: ClassVar[Mapping[Split, str]] = FILE_KEYS

    def __init__(self, *, train_tokens: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._train_tokens = train_tokens
        if train_tokens is not None and train_tokens < 1:
            raise ValueError(f"train_tokens={train_tokens} must be at least 1, or null for all.")

    @abstractmethod
    def is_separate(self, split: Split) -> bool:
        """Returns whether a split has separate documents, as the train split always has."""

    @abstractmethod
    def read(self, split: Split) -> Iterator[str]:
        """Yields the documents of a split for which `is_separate` is true."""

    @property
    def train_tokens(self) -> int | None:
        return self._train_tokens

    def shares(self) -> dict[str, float]:
        return {
            "val_fraction": 0.0 if self.is_separate("val") else self.val_fraction,
            "test_fraction": 0.0 if self.is_separate("test") else self.test_fraction,
        }

    def expects(self, split: Split) -> bool:
        return split == "train" or self.is_separate(split) or self.shares()[f"{split}_fraction"] > 0

    def how_to_get(self, split: Split) -> str:
        option = self.split_options[split]
        if split == "train":
            return f"Check data.{option} and data.train_tokens (now {self._train_tokens})."
        key = f"{split}_fraction"
        return f"Set data.{key} (now {getattr(self, key)}) or data.{option}."

    def documents(self, split: Split) -> Iterator[str]:
        if self.is_separate(split) and not any(self.shares().values()):
            return self.read(split)
        return (text for s, text in self.labelled_documents() if s == split)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        for split in SPLITS[1:]:
            if self.is_separate(split):
                for text in self.read(split):
                    yield split, text
        yield from split_documents(self.read("train"), **self.shares())

    def tokenizer_text(self) -> Iterable[str]:
        """Returns the documents that a ``bpe:N`` is trained on.

        With a token cap, these are the documents that are certain to fit: a token covers at least
        one byte, and each document has an EOS.
        """
        budget = self._train_tokens
        for text in self.documents("train"):
            if budget is not None:
                budget -= len(text.encode("utf-8", "replace")) + 1
                if budget < 0:
                    return
            yield text


class HubCorpus(SplitText):
    """A corpus from the hub, or from local files in its published format.

    Without `data_files`, all splits come from the hub. With `data_files`, no split does: val and
    test are `val_files` and `test_files`, or are held out from the documents of `data_files`
    (`val_fraction`, `test_fraction`). With a token cap (`train_tokens`), only the hub files that
    are needed are fetched.

    Args:
        data_files: Local copy of the training files: one path or glob, or a list of them; null
            reads from the hub.
        val_files: Files of the validation split, with data_files.
        test_files: Files of the test split, with data_files.
        revision: Commit, branch or tag of the hub repository. Null uses the newest commit when
            preparation begins. An interrupted preparation continues with the same commit, which
            meta.json records (``origin``).
        **kwargs: See `SplitText` and `TextDataModule`.

    Raises:
        ValueError: If an argument is invalid.
    """

    # Files are identified by their content, so their paths are excluded too.
    not_in_source: ClassVar[frozenset[str]] = TextDataModule.not_in_source | {
        "data_files",
        "val_files",
        "test_files",
        "val_fraction",
        "test_fraction",
        "revision",  # part of the identity on the hub, if given
    }
    local_format: ClassVar[str] = "parquet or jsonl files with a field 'text'"

    def __init__(
        self,
        *,
        data_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._patterns: Patterns = {"train": data_files, "val": val_files, "test": test_files}
        self._revision = revision
        if data_files is None and (val_files is not None or test_files is not None):
            raise ValueError(
                "val_files and test_files need data_files: without it all splits come from the "
                "hub. Set data.data_files too."
            )
        check_revision(revision, data_files)

    # Implemented by subclasses

    @abstractmethod
    def hub_split(self, split: Split) -> HubSplit | None:
        """Returns the location of a split on the hub, or None if the hub has no such split."""

    def read_file(self, path: Path) -> Iterator[str]:
        """Yields the documents of one local file, including empty ones."""
        return read_documents(path, lone_surrogates=True)

    def read_hub(self, files: Iterable[Path]) -> Iterator[str]:
        """Yields the documents of a split on the hub, fetching files as they are read."""
        return read_files(files, self.read_file)

    def check_file(self, path: Path) -> None:
        """Raises a ValueError if a file's name shows that it cannot be read."""
        format_of(path)

    # Provided here

    @property
    def is_local(self) -> bool:
        """Whether the text is read from local files."""
        return self._patterns["train"] is not None

    @cached_property
    def files(self) -> dict[Split, list[Path]]:
        """Local files of each split, in reading order.

        Raises:
            ValueError: If a file is missing, of unknown format, or in two splits.
        """
        return files_of_splits(self._patterns, self.check_file)

    def is_separate(self, split: Split) -> bool:
        """Returns whether a split has separate files or a separate location on the hub."""
        return self._patterns[split] is not None if self.is_local else split in self._locations

    @cached_property
    def _locations(self) -> dict[Split, HubSplit]:
        """Locations of the hub's splits, at the requested revision."""
        splits = {split: self.hub_split(split) for split in SPLITS}
        return {s: replace(p, revision=self._revision) for s, p in splits.items() if p is not None}

    @cached_property
    def _hub(self) -> dict[Split, HubFiles]:
        return {
            split: HubFiles(
                location.name,
                location.pattern or location.files or "*",
                revision=location.revision,
                corpus=type(self).__name__,
                label=location.split,
                cure=f"Pass your copy with data.data_files=... ({self.local_format})",
                ahead=self._train_tokens is None,
            )
            for split, location in self._locations.items()
        }

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Resolves the commit of each split on the hub; nothing for local files."""
        if self.is_local:
            return {}
        pins = {} if stored is None else stored
        return {split: files.pin(pins.get(split)) for split, files in self._hub.items()}

    def source(self) -> dict[str, Any]:
        origin: dict[str, Any] = {}
        if self.is_local:
            origin["files"] = {s: [identify(p) for p in paths] for s, paths in self.files.items()}
        else:
            origin["hub"] = {
                split: location.identity for split, location in self._locations.items()
            }
        return {**super().source(), **origin, **self.shares()}

    def smaller_splits(self) -> str:
        extra = ", separate files (data.val_files, data.test_files)" if self.is_local else ""
        return f"more documents{extra}"

    def repeats_cure(self) -> str | None:
        return REMOVE_REPEATS if self.is_local else published_repeats(self.document_noun)

    def read(self, split: Split) -> Iterator[str]:
        """Yields the documents of a split, from local files or the hub."""
        if self.is_local:
            return read_files(self.files[split], self.read_file)
        return self.read_hub(self._paths(split))

    def _paths(self, split: Split) -> Iterable[Path]:
        """Returns the files of a split; iteration fetches files of the hub."""
        return self.files[split] if self.is_local else self._hub[split]


_VAL_DOCUMENTS = 100_000
_NANOGPT_SHARE, _NANOGPT_SEED = 0.0005, 2357  # from nanoGPT's data/openwebtext/prepare.py


class OpenWebText(HubCorpus):
    """OpenWebText, with its last 100,000 documents or nanoGPT's 0.05 % held out for validation.

    The hub has one split. With a token cap, only its beginning is read, so the *first*
    `val_documents` documents are held out and training starts after them, as the log and meta.json
    state. With local files, the last documents are always held out.

    Hub: Skylion007/openwebtext. Files: parquet or jsonl with the field ``text``.

    Args:
        val_documents: Number of documents held out for validation if there are no val_files; only
            with split='last'.
        test_fraction: Share of the remaining documents held out for testing.
        split: 'last' holds out `val_documents`; 'nanogpt' holds out 0.05 % of the documents, drawn
            as in nanoGPT's data/openwebtext/prepare.py, by `datasets`' ``train_test_split`` with
            seed 2357: the same documents in the same order. It needs the total number of documents,
            so it reads all of them into a temporary file in `cache_dir`.
        **kwargs: See `HubCorpus`; val_fraction has no effect here.

    Raises:
        ValueError: If val_documents is negative, or split='nanogpt' is combined with train_tokens,
            val_files, test_fraction or a non-default val_documents; when preparing, if
            val_documents leaves nothing for training.
    """

    not_in_source = HubCorpus.not_in_source | {"val_documents", "split"}

    def __init__(
        self,
        *,
        val_documents: int = _VAL_DOCUMENTS,
        test_fraction: float = 0.0,
        split: Literal["last", "nanogpt"] = "last",
        **kwargs: Any,
    ) -> None:
        super().__init__(test_fraction=test_fraction, **kwargs)
        self._val_documents = val_documents
        self._split = split
        if val_documents < 0:
            raise ValueError(
                f"val_documents={val_documents} must not be negative; 0 trains without validation."
            )
        raise_problems(choice_problems(("last", "nanogpt"), split=split))
        if split == "nanogpt":
            self._check_nanogpt_options(test_fraction)

    def _check_nanogpt_options(self, test_fraction: float) -> None:
        """Raises a ValueError for options that contradict nanoGPT's split."""
        if self.train_tokens is not None:
            raise ValueError(
                f"train_tokens={self.train_tokens} reads only a part of the corpus, but "
                "split='nanogpt' draws from all documents. Set data.train_tokens to null, or "
                "data.split to last."
            )
        if self._val_documents != _VAL_DOCUMENTS:
            raise ValueError(
                f"val_documents={self._val_documents} has no effect on split='nanogpt', which "
                "holds out 0.05 % of the documents. Leave data.val_documents out, or set "
                "data.split to last."
            )
        if self.is_separate("val") or test_fraction:
            raise ValueError(
                "split='nanogpt' holds out 0.05 % of the documents for validation and none for "
                "testing. Set data.val_files to null and data.test_fraction to 0, or data.split to "
                "last."
            )

    def hub_split(self, split: Split) -> HubSplit | None:
        if split != "train":
            return None
        return HubSplit(name="Skylion007/openwebtext", split="train", pattern="*train*.parquet")

    @property
    def _validates_on_first(self) -> bool:
        return not self.is_local and self.train_tokens is not None

    def shares(self) -> dict[str, float]:
        """Returns the held-out shares of the training documents; none for validation."""
        return {**super().shares(), "val_fraction": 0.0}

    def source(self) -> dict[str, Any]:
        side = "first" if self._validates_on_first else "last"
        rule = {} if self.is_separate("val") else {"val": f"{side} {self._val_documents} documents"}
        if self._split == "nanogpt":
            rule = {"val": f"train_test_split({_NANOGPT_SHARE}, seed {_NANOGPT_SEED})"}
        return {**super().source(), **rule}

    def notes(self) -> list[str]:
        if not self._validates_on_first or not self._val_documents:
            return []
        return [
            f"With train_tokens the first {self._val_documents} documents of the hub's corpus are "
            "the validation split, not the last ones as without a cap or with data_files: "
            "validation losses of the two are not comparable.",
        ]

    def expects(self, split: Split) -> bool:
        if split == "val" and not self.is_separate("val"):
            return self._split == "nanogpt" or self._val_documents > 0
        return super().expects(split)

    def how_to_get(self, split: Split) -> str:
        if split == "test":
            return super().how_to_get(split)
        if self._split == "nanogpt":
            return "It is 0.05 % of the documents: use more of them, or set data.split to last."
        return f"Change data.val_documents (now {self._val_documents})."

    def documents(self, split: Split) -> Iterator[str]:
        return (text for s, text in self.labelled_documents() if s == split)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        if self._split == "nanogpt":
            yield from self._drawn()
            return
        if self.is_separate("val") or not self._val_documents:
            yield from super().labelled_documents()
            return
        if self._validates_on_first:
            rest = self.read("train")
            held_out: Iterable[str] = islice(rest, self._val_documents)
        else:
            first = self._count() - self._val_documents
            held_out, rest = self._between(first, None), self._between(0, first)
        for text in held_out:
            yield "val", text
        if self.is_separate("test"):
            for text in self.read("test"):
                yield "test", text
        yield from split_documents(rest, **self.shares())

    def _drawn(self) -> Iterator[tuple[Split, str]]:
        """Yields nanoGPT's validation documents, then the training documents, in its order.

        ``train_test_split`` permutes all rows, so empty ones are dropped only afterwards.
        """
        held_out = 0

        def permutation(count: int) -> np.ndarray:
            nonlocal held_out
            held_out = math.ceil(_NANOGPT_SHARE * count)
            return np.random.default_rng(_NANOGPT_SEED).permutation(count)

        rows = chain.from_iterable(map(self.read_file, self._paths("train")))
        for index, text in enumerate(in_order(rows, permutation, self.cache_dir)):
            if has_text(text):
                yield "val" if index < held_out else "train", text
        if self.is_separate("test"):
            for text in self.read("test"):
                yield "test", text

    def _count(self) -> int:
        """Returns the number of documents.

        Raises:
            ValueError: If all of them are held out.
        """
        total = sum(self._file_counts)
        if total <= self._val_documents:
            raise ValueError(
                f"val_documents={self._val_documents} leaves nothing for training: there are "
                f"{total} documents. Lower data.val_documents, e.g. to {total // 20}, or set "
                "data.val_files."
            )
        return total

    @cached_property
    def _file_counts(self) -> list[int]:
        """Number of documents of each file; counting reads all of them."""
        files = tqdm(self._paths("train"), desc="counting documents", unit=" files", disable=None)
        reading = Reading()
        counts = [sum(1 for _ in reading.texts(path, self.read_file(path))) for path in files]
        reading.finish()
        return counts

    def _between(self, first: int, end: int | None) -> Iterator[str]:
        """Yields the documents with indices `first` (inclusive) to `end` (exclusive)."""
        base = 0
        for path, count in zip(self._paths("train"), self._file_counts, strict=True):
            begin, stop = max(first - base, 0), count if end is None else min(end - base, count)
            if begin < stop:
                yield from islice(filter(has_text, self.read_file(path)), begin, stop)
            base += count


class PeS2o(HubCorpus):
    """peS2o, with its published train and validation splits.

    Hub: allenai/peS2o, data/v2 or data/v3. Files: its ``*.json.gz`` (version 2) or ``*.zst``
    (version 3), or jsonl (also .gz, .zst) or parquet, with the field ``text``; without val_files,
    val_fraction of the documents are held out.

    Args:
        version: Version of the corpus on the hub. 'v3' also reads files without a known suffix,
            such as train-0000-of-0136.zst, as jsonl.
        test_fraction: Share of the training documents held out for testing, as peS2o has no test
            split.
        **kwargs: See `HubCorpus`.
    """

    not_in_source = HubCorpus.not_in_source | {"version"}  # part of the location on the hub
    local_format = (
        "train-*.json.gz or train-*.zst as published, or other jsonl or parquet with a field 'text'"
    )

    def __init__(
        self, *, version: Literal["v2", "v3"] = "v2", test_fraction: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(test_fraction=test_fraction, **kwargs)
        raise_problems(choice_problems(("v2", "v3"), version=version))
        self._version = version

    @property
    def _default_format(self) -> Format | None:
        return "jsonl" if self._version == "v3" else None

    def hub_split(self, split: Split) -> HubSplit | None:
        """Returns the files of a split, without running the repository's loading script."""
        if split == "test":
            return None
        name, files = {"train": ("train", "train*"), "val": ("validation", "valid*")}[split]
        suffix = "zst" if self._version == "v3" else "json.gz"
        path = f"data/{self._version}/{files}.{suffix}"
        return HubSplit(name="allenai/peS2o", split=name, files=path)

    def read_file(self, path: Path) -> Iterator[str]:
        return read_documents(path, lone_surrogates=True, default_format=self._default_format)

    def check_file(self, path: Path) -> None:
        format_of(path, self._default_format)


# " = Title = ": exactly one = on each side, where " = = Section = = " has more.
_TITLE = re.compile(r" ?= (?!= ).*(?<! =) = ?")
_LINE_SUFFIXES = (".raw", ".tokens")  # in the original archive: wiki.train.raw, wiki.train.tokens


class WikiText103(HubCorpus):
    """WikiText-103, cut into articles: each document runs from one title line to the next.

    A title is a line `` = Title = `` with a blank line (or nothing) before and after it; without
    this condition a few formulas would count as titles. Lines are kept unchanged.

    Hub: Salesforce/wikitext, wikitext-103-raw-v1 or -v1, with its three splits. Files: one
    paragraph per line, as wiki.train.raw, wiki.train.tokens or txt (also .gz, .zst), or the hub's
    parquet files; set val_files and test_files too.

    Args:
        level: 'raw' for the original text, 'word' for the hub's word-level text with ``<unk>``. It
            has no effect on local files.
        shuffle_seed: Seed for shuffling the training articles once, before a token cap is applied
            (the data subsets of the Thought Gestalt paper). Null keeps their order.
        **kwargs: See `HubCorpus`.

    Raises:
        ValueError: If an argument is invalid; when preparing, if a file has no article titles.
    """

    not_in_source = HubCorpus.not_in_source | {"level"}
    local_format = "wiki.train.raw, wiki.train.tokens, txt or the hub's parquet files"

    def __init__(
        self,
        *,
        level: Literal["raw", "word"] = "raw",
        shuffle_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        raise_problems(choice_problems(("raw", "word"), level=level))
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed={shuffle_seed} must be at least 0, or null.")
        self._level = level
        self._shuffle_seed = shuffle_seed

    def hub_split(self, split: Split) -> HubSplit:
        config = "wikitext-103-raw-v1" if self._level == "raw" else "wikitext-103-v1"
        name = {"train": "train", "val": "validation", "test": "test"}[split]
        pattern = f"{config}/{name}-*.parquet"
        return HubSplit(name="Salesforce/wikitext", config=config, split=name, pattern=pattern)

    def check_file(self, path: Path) -> None:
        original = any(suffix.lower() in _LINE_SUFFIXES for suffix in path.suffixes)
        if not original and format_of(path) == "jsonl":
            raise ValueError(f"{path}: WikiText-103 is read from {self.local_format}, not jsonl.")

    def read_file(self, path: Path) -> Iterator[str]:
        parquet = path.suffix.lower() in PARQUET_SUFFIXES
        return articles(read_column(path, "text") if parquet else read_lines(path), str(path))

    def read_hub(self, files: Iterable[Path]) -> Iterator[str]:
        """Yields the articles of a split on the hub; a row is a line, and articles span files."""
        lines = chain.from_iterable(read_column(path, "text") for path in files)
        return articles(lines, "The hub's WikiText-103")

    def read(self, split: Split) -> Iterator[str]:
        documents = super().read(split)
        if split != "train" or self._shuffle_seed is None:
            return documents
        return shuffled(documents, seed=self._shuffle_seed, folder=self.cache_dir)


def articles(lines: Iterable[str], where: str) -> Iterator[str]:
    """Yields the articles: joined lines from a title to the last line with text.

    Text before the first title (in a truncated file) is a separate document.

    Args:
        lines: Lines with or without their line endings.
        where: Name of their source, for the message.

    Raises:
        ValueError: If there is text but no title.
    """
    article: list[str] = []
    titles, before_is_blank, candidate = 0, True, None
    for raw in lines:
        line = raw.rstrip("\r\n")
        blank = not line or line.isspace()
        if candidate is not None and blank:  # blank on both sides: the candidate is a title
            yield from _joined(article)
            titles, article = titles + 1, []
        if candidate is not None:
            article.append(candidate)
        candidate = line if before_is_blank and _TITLE.fullmatch(line) else None
        if candidate is None:
            article.append(line)
        before_is_blank = blank
    if candidate is not None:
        yield from _joined(article)
        titles, article = titles + 1, [candidate]
    if not titles and any(line.strip() for line in article):
        raise ValueError(
            f"{where}: no line is an article's title, ' = Title = ' with a blank line before and "
            "after it. Use the files as published (some copies lack the blank lines), or "
            "datamodules.LocalText."
        )
    yield from _joined(article)


def _joined(lines: list[str]) -> Iterator[str]:
    """Yields the lines as one text, without blank ones at either end; nothing if all are blank."""
    used = [i for i, line in enumerate(lines) if line.strip()]
    if used:
        yield "\n".join(lines[used[0] : used[-1] + 1]) + "\n"
