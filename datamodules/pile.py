"""The Pile: 22 collections of text (825 GB)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from datamodules.hub_corpus import HubCorpus
from datamodules.hub_revision import HubSplit
from datamodules.readers import format_of, read_rows, text_of
from datamodules.store import Split

PILE_SETS = (
    "ArXiv",
    "BookCorpus2",
    "Books3",
    "DM Mathematics",
    "Enron Emails",
    "EuroParl",
    "FreeLaw",
    "Github",
    "Gutenberg (PG-19)",
    "HackerNews",
    "NIH ExPorter",
    "OpenSubtitles",
    "OpenWebText2",
    "PhilPapers",
    "Pile-CC",
    "PubMed Abstracts",
    "PubMed Central",
    "StackExchange",
    "USPTO Backgrounds",
    "Ubuntu IRC",
    "Wikipedia (en)",
    "YoutubeSubtitles",
)


class Pile(HubCorpus):
    """The Pile, with the GPT-NeoX tokenizer.

    Hub: EleutherAI/the_pile_deduplicated, one split, without the names of the collections. Files:
    the original shards ``*.jsonl.zst`` with ``{"text": ..., "meta": {"pile_set_name": ...}}``
    (val_files: val.jsonl.zst, test_files: test.jsonl.zst), or jsonl or parquet with the field
    ``text``.

    Args:
        pile_sets: Names of the collections to take, e.g. ``[Wikipedia (en), ArXiv]``; null takes
            all. Only with files that name them.
        tokenizer: See `TextCorpus`.
        val_fraction: Share of the documents held out for validation, where there are no val_files;
            the Pile's own splits have about as much.
        test_fraction: Share of the documents held out for the test, where there are no test_files.
        **kwargs: See `HubCorpus`.

    Raises:
        ValueError: An argument is unusable, e.g. an unknown collection.
    """

    not_in_source: ClassVar[frozenset[str]] = HubCorpus.not_in_source
    local_format = "the original *.jsonl.zst, or other jsonl or parquet with a field 'text'"

    def __init__(
        self,
        *,
        pile_sets: list[str] | None = None,
        tokenizer: str = "EleutherAI/gpt-neox-20b",
        val_fraction: float = 0.001,
        test_fraction: float = 0.001,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer, val_fraction=val_fraction, test_fraction=test_fraction, **kwargs
        )
        self._sets = None if pile_sets is None else frozenset(pile_sets)
        if self._sets is not None:
            self._check_sets(self._sets)

    def _check_sets(self, names: frozenset[str]) -> None:
        unknown = sorted(names.difference(PILE_SETS))
        if unknown or not names:
            raise ValueError(
                f"pile_sets={unknown} are not collections of the Pile. Choose from: "
                f"{', '.join(PILE_SETS)}; or null for all."
            )
        if not self.is_local:
            raise ValueError(
                "pile_sets needs files that name their collection, and the hub's copy does not. "
                f"Pass data.data_files=... ({self.local_format})."
            )

    def hub_split(self, split: Split) -> HubSplit | None:
        """Returns the only split for train."""
        if split != "train":
            return None
        return HubSplit(name="EleutherAI/the_pile_deduplicated", split="train")

    def notes(self) -> list[str]:
        """Returns where the text differs from what papers train on, a sentence each."""
        if self.is_local:
            return []
        return [
            "The hub's copy is the deduplicated Pile, without the names of the collections "
            "(meta.pile_set_name) and without validation and test sets: shares of its documents "
            "stand in for them. Numbers of papers on the original Pile do not compare; pass its "
            "files as data_files for those.",
            *super().notes(),
        ]

    def check_file(self, path: Path) -> None:
        """Raises a ValueError if the file is no text, or has no names of collections to choose."""
        if format_of(path) != "jsonl" and self._sets is not None:
            raise ValueError(f"{path}: pile_sets needs the Pile's jsonl files, with 'meta'.")

    def read_file(self, path: Path) -> Iterator[str]:
        """Yields the documents of one of your files that are in the chosen collections."""
        return super().read_file(path) if self._sets is None else self._chosen(path, self._sets)

    @staticmethod
    def _chosen(path: Path, names: frozenset[str]) -> Iterator[str]:
        for where, row in read_rows(path, lone_surrogates=True):
            text = text_of(row, "text", where)
            meta = row.get("meta")
            name = meta.get("pile_set_name") if isinstance(meta, dict) else None
            if name is None:
                raise ValueError(
                    f"{where}: there is no meta.pile_set_name to choose by. Set data.pile_sets to "
                    "null, or use the Pile's original files."
                )
            if name in names and text and not text.isspace():
                yield text
