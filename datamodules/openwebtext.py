"""OpenWebText: the open copy of GPT-2's training text (8 million web pages, 40 GB)."""

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

from tqdm import tqdm

from datamodules.hub import HubTexts
from datamodules.hub_corpus import HubCorpus
from datamodules.hub_revision import HubSplit
from datamodules.splits import split_documents
from datamodules.store import Split


class OpenWebText(HubCorpus):
    """OpenWebText; the last 100,000 documents are the validation split.

    The hub has one split. A token cap streams it, and the end of a stream is known only when all of
    it is read: validation is then the *first* `val_documents` documents, training begins after
    them, and the log and meta.json say so. Your own files always hold out the last ones.

    Hub: Skylion007/openwebtext, as parquet files; at a time when it is a script, the hub's own
    conversion, which has only the beginning of it and so takes a token cap. Files: parquet or jsonl
    with the field ``text``.

    Args:
        val_documents: Documents held out for validation, where there are no val_files.
        test_fraction: Share of the remaining documents held out for the test.
        **kwargs: See `HubCorpus`; val_fraction has no effect here.

    Raises:
        ValueError: val_documents is negative; when preparing: the corpus has no more documents.
    """

    not_in_source = HubCorpus.not_in_source | {"val_documents"}

    def __init__(
        self, *, val_documents: int = 100_000, test_fraction: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(test_fraction=test_fraction, **kwargs)
        self._val_documents = val_documents
        if val_documents < 0:
            raise ValueError(
                f"val_documents={val_documents} must not be negative; 0 does without validation."
            )

    def hub_split(self, split: Split) -> HubSplit | None:
        """Returns the only split for train."""
        return HubSplit(name="Skylion007/openwebtext", split="train") if split == "train" else None

    @property
    def _from_the_head(self) -> bool:
        return not self.is_local and self.train_tokens is not None

    def shares(self) -> dict[str, float]:
        """Returns the shares of the training documents that are held out: none for validation."""
        return {**super().shares(), "val_fraction": 0.0}

    def source(self) -> dict[str, Any]:
        """Returns the corpus, its options, and which documents are held out."""
        where = "first" if self._from_the_head else "last"
        rule = {} if self.has_own("val") else {"val": f"{where} {self._val_documents} documents"}
        return {**super().source(), **rule}

    def notes(self) -> list[str]:
        """Returns where the text differs from what papers train on, a sentence each."""
        if not self._from_the_head or not self._val_documents:
            return super().notes()
        return [
            f"With train_tokens from the hub the first {self._val_documents} documents validate, "
            "not the last ones as without a cap or with data_files: validation losses of the two "
            "do not compare.",
            *super().notes(),
        ]

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have documents."""
        if split == "val" and not self.has_own("val"):
            return self._val_documents > 0
        return super().expects(split)

    def how_to_get(self, split: Split) -> str:
        """Returns what gives an empty split documents."""
        if split == "test":
            return super().how_to_get(split)
        return f"Change data.val_documents, now {self._val_documents}."

    def documents(self, split: Split) -> Iterator[str]:
        """Yields the documents of a split, in corpus order."""
        return (text for s, text in self.labelled_documents() if s == split)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        """Yields the documents of all splits, those for validation first."""
        if self.has_own("val") or not self._val_documents:
            yield from super().labelled_documents()
            return
        first, end = self._held_out()
        for text in self._between(first, end):
            yield "val", text
        if self.has_own("test"):
            for text in self.read("test"):
                yield "test", text
        rest = self._between(end, None) if self._from_the_head else self._between(0, first)
        yield from split_documents(rest, **self.shares())

    def _held_out(self) -> tuple[int, int]:
        """Returns the number of the first document for validation, and the one after the last.

        Raises:
            ValueError: There are not more documents than that.
        """
        if self._from_the_head:
            return 0, self._val_documents
        total = sum(self._file_counts) if self.is_local else len(self._texts)
        if total <= self._val_documents:
            raise ValueError(
                f"val_documents={self._val_documents} leaves nothing for training: there are "
                f"{total} documents. Set data.val_documents lower, e.g. {total // 20}, or give "
                "data.val_files."
            )
        return total - self._val_documents, total

    @property
    def _texts(self) -> HubTexts:
        texts = self._hub["train"]
        assert texts is not None
        return texts

    @cached_property
    def _file_counts(self) -> list[int]:
        """The documents of each of your files: their end is known only when they are read."""
        files = tqdm(self.files["train"], desc="counting documents", unit=" files", disable=None)
        return [sum(1 for _ in self.read_file(path)) for path in files]

    def _between(self, first: int, end: int | None) -> Iterator[str]:
        """Yields the documents with the numbers from `first` up to `end`."""
        if not self.is_local:
            yield from self._texts.documents(first, end)
            return
        base = 0
        for path, count in zip(self.files["train"], self._file_counts, strict=True):
            begin, stop = max(first - base, 0), count if end is None else min(end - base, count)
            if begin < stop:
                yield from islice(self.read_file(path), begin, stop)
            base += count
