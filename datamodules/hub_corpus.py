"""The base of corpora that live on the Hugging Face hub, or in your copy of their files."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from datamodules.hub import HubTexts
from datamodules.hub_progress import HubProgress
from datamodules.hub_revision import HubSplit
from datamodules.local_text import Patterns, files_of_splits, identify
from datamodules.readers import format_of, read_documents
from datamodules.splits import split_documents
from datamodules.store import SPLITS, Split
from datamodules.text import TextDataModule

_KEYS: dict[Split, str] = {"train": "data_files", "val": "val_files", "test": "test_files"}


class HubCorpus(TextDataModule):
    """A corpus from the hub, or from files in its own format.

    Without `data_files` everything comes from the hub. With them nothing does: val and test are
    `val_files` and `test_files`, or shares of the documents of `data_files` (`val_fraction`,
    `test_fraction`). Held-out documents are read first, so that a token cap does not lose them.

    Args:
        data_files: Your copy of the training files: one path or glob, or a list of them; null reads
            from the hub.
        val_files: Files of the validation split, with data_files.
        test_files: Files of the test split, with data_files.
        train_tokens: Most training tokens that are stored: whole documents in corpus order, up to
            the first that does not fit. The hub is then streamed and read only that far. Null: all.
        revision: Commit, branch or tag of the hub's repository; null: the newest commit when
            preparation begins. It goes on with the commit it began with, which meta.json keeps
            (``origin``).
        **kwargs: See `TextDataModule`.

    Raises:
        ValueError: An argument is unusable.
    """

    # Besides the arguments of windows and loaders: files are named by their content.
    not_in_source: ClassVar[frozenset[str]] = TextDataModule.not_in_source | {
        "data_files",
        "val_files",
        "test_files",
        "val_fraction",
        "test_fraction",
        "revision",  # is in the place on the hub, where it is given
    }
    local_format: ClassVar[str] = "parquet or jsonl files with a field 'text'"

    def __init__(
        self,
        *,
        data_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        train_tokens: int | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._patterns: Patterns = {"train": data_files, "val": val_files, "test": test_files}
        self._train_tokens = train_tokens
        self._revision = revision
        if train_tokens is not None and train_tokens < 1:
            raise ValueError(f"train_tokens={train_tokens} must be at least 1, or null for all.")
        if data_files is None and (val_files is not None or test_files is not None):
            raise ValueError(
                "val_files and test_files go with data_files: from the hub all splits come from "
                "the hub. Set data.data_files too."
            )
        if data_files is not None and revision is not None:
            raise ValueError(
                f"revision={revision!r} is that of the hub's repository, and data_files are read "
                "instead of it. Set data.revision or data.data_files to null."
            )

    # What a corpus writes

    @abstractmethod
    def hub_split(self, split: Split) -> HubSplit | None:
        """Returns where the hub has a split, None where it has none."""

    def read_file(self, path: Path) -> Iterator[str]:
        """Yields the documents of one of your files."""
        return read_documents(path, lone_surrogates=True)

    def read_hub(self, texts: HubTexts) -> Iterator[str]:
        """Yields the documents of a split on the hub; those of white space alone are left out."""
        return texts.documents()

    def check_file(self, path: Path) -> None:
        """Raises a ValueError if a file's name shows that it cannot be read."""
        format_of(path)

    # What it gets

    @property
    def train_tokens(self) -> int | None:
        """Most tokens that the train split stores; None: no limit."""
        return self._train_tokens

    @property
    def is_local(self) -> bool:
        """Whether the text comes from files of yours."""
        return self._patterns["train"] is not None

    @cached_property
    def files(self) -> dict[Split, list[Path]]:
        """Your files of each split, in reading order.

        Raises:
            ValueError: A file is missing, of unknown format, or in two splits.
        """
        return files_of_splits(self._patterns, self.check_file)

    def has_own(self, split: Split) -> bool:
        """Returns whether a split has files, or a place on the hub, of its own."""
        return (self._patterns if self.is_local else self._hub)[split] is not None

    @cached_property
    def _hub(self) -> dict[Split, HubTexts | None]:
        return {split: self._hub_texts(self._place(split)) for split in SPLITS}

    def _place(self, split: Split) -> HubSplit | None:
        """Returns where the hub has a split, at the revision that was asked for."""
        place = self.hub_split(split)
        return None if place is None else replace(place, revision=self._revision)

    @cached_property
    def _progress(self) -> HubProgress:
        return HubProgress(
            {split: texts for split, texts in self._hub.items() if texts is not None}
        )

    def remote(self) -> HubProgress | None:
        """Returns the places on the hub; None where your files are read."""
        return None if self.is_local else self._progress

    def notes(self) -> list[str]:
        """Returns where the text differs from what papers train on, a sentence each."""
        return [] if self.is_local else self._progress.notes()

    def stored_documents(self) -> Iterator[tuple[Split, str]]:
        """Yields the documents of all splits, noting where they are on the hub."""
        documents = self.labelled_documents()
        return documents if self.is_local else self._progress.watch(documents)

    def _hub_texts(self, place: HubSplit | None) -> HubTexts | None:
        if place is None:
            return None
        cure = f"Pass your copy with data.data_files=... ({self.local_format})"
        streaming = self._train_tokens is not None
        return HubTexts(place, streaming=streaming, corpus=type(self).__name__, cure=cure)

    def shares(self) -> dict[str, float]:
        """Returns the shares of the training documents that are held out."""
        return {
            "val_fraction": 0.0 if self.has_own("val") else self.val_fraction,
            "test_fraction": 0.0 if self.has_own("test") else self.test_fraction,
        }

    def source(self) -> dict[str, Any]:
        """Returns the corpus, its options, and its files by content or its places on the hub."""
        origin: dict[str, Any] = {}
        if self.is_local:
            origin["files"] = {s: [identify(p) for p in paths] for s, paths in self.files.items()}
        else:
            places = {split: self._place(split) for split in SPLITS}
            origin["hub"] = {s: place.identity for s, place in places.items() if place}
        return {**super().source(), **origin, **self.shares()}

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have documents."""
        return split == "train" or self.has_own(split) or self.shares()[f"{split}_fraction"] > 0

    def how_to_get(self, split: Split) -> str:
        """Returns what gives an empty split documents."""
        if split == "train":
            return f"Check data.data_files and data.train_tokens (now {self._train_tokens})."
        key = f"{split}_fraction"
        return f"Set data.{key} (now {getattr(self, key)}), or {_KEYS[split]} with data_files."

    def smaller_splits(self) -> str:
        """Returns what gives smaller held-out splits, for messages."""
        own = ", files of their own (data.val_files, data.test_files)" if self.is_local else ""
        return f"more documents{own}"

    def documents(self, split: Split) -> Iterator[str]:
        """Yields the documents of a split, in corpus order."""
        if self.has_own(split) and not any(self.shares().values()):
            return self.read(split)
        return (text for s, text in self.labelled_documents() if s == split)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        """Yields the documents of all splits in one pass, held-out ones first."""
        for split in SPLITS[1:]:
            if self.has_own(split):
                for text in self.read(split):
                    yield split, text
        yield from split_documents(self.read("train"), **self.shares())

    def read(self, split: Split) -> Iterator[str]:
        """Yields the documents of the files, or of the place on the hub, of a split."""
        if self.is_local:
            for path in self.files[split]:
                yield from self.read_file(path)
            return
        texts = self._hub[split]
        assert texts is not None  # asked for with `has_own`; every corpus has train
        yield from self.read_hub(texts)

    def tokenizer_text(self) -> Iterable[str]:
        """Returns the documents that a ``bpe:N`` is trained on.

        Under a token cap, only so many that they are within the cap for sure: one token stands for
        at least one byte, and each document has an EOS.
        """
        room = self._train_tokens
        for text in self.documents("train"):
            if room is not None:
                room -= len(text.encode("utf-8", "replace")) + 1
                if room < 0:
                    return
            yield text
