"""`Pile`: 22 collections of text (825 GB), of which any subset can be read."""

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

from datamodules.base import choice_problems, raise_problems
from datamodules.corpora import HubCorpus
from datamodules.encoding import Encoded
from datamodules.files import format_of
from datamodules.hub import HubSplit
from datamodules.readers import (
    TOKEN_SUFFIXES,
    cut_at,
    has_text,
    read_rows,
    read_tokens,
    text_of,
)
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


PileCopy = Literal["deduplicated", "uncopyrighted", "tokenized"]
_PILE_COPIES: dict[PileCopy, tuple[str, dict[Split, str], str]] = {
    "deduplicated": (
        "EleutherAI/the_pile_deduplicated",
        {"train": "*train*.parquet"},
        "the deduplicated Pile, without the names of the collections (meta.pile_set_name) and "
        "without validation and test sets: parts of it are held out instead.",
    ),
    "uncopyrighted": (
        "monology/pile-uncopyrighted",
        {"train": "train/*.jsonl.zst", "val": "val.jsonl.zst", "test": "test.jsonl.zst"},
        "the Pile without Books3, BookCorpus2, OpenSubtitles, YoutubeSubtitles and OpenWebText2, "
        "with published validation and test sets.",
    ),
    "tokenized": (
        "hyq718/uint16smallpile",
        {"train": "train/*.arrow|data-*.arrow"},
        "the part of the deduplicated Pile that PonderLM-2's authors train on, as their tokens: "
        "rows of 2,048, joined here and cut at each EOS; validation and test documents are held "
        "out from it, while the authors validate on mit-han-lab/pile-val-backup.",
    ),
}
"""Repository, files of each split, and description, by `Pile`'s ``copy``."""


class Pile(HubCorpus):
    """The Pile, with the GPT-NeoX tokenizer.

    Hub, by `copy`: EleutherAI/the_pile_deduplicated, one split, without the names of the
    collections; monology/pile-uncopyrighted, 17 collections, with published splits; or
    hyq718/uint16smallpile, PonderLM-2's tokens. Files: the original shards ``*.jsonl.zst`` with
    ``{"text": ..., "meta": {"pile_set_name": ...}}`` (val_files: val.jsonl.zst, test_files:
    test.jsonl.zst), or jsonl or parquet with the field ``text``. The log says which Pile it was.

    Args:
        copy: Copy on the hub to read. With 'tokenized', data_files are tokens too: ``.arrow`` files
            with the column ``input_ids``, as `datasets` saves them, or ``.bin`` files of uint16
            ids; documents are delimited by EOS and may span rows.
        pile_sets: Names of the collections to read, e.g. ``[Wikipedia (en), ArXiv]``. Null reads
            all. The files must name them.
        tokenizer: See `TextCorpus`; with copy='tokenized' GPT-NeoX's, or a tokenizer.json of the
            tokens in data_files.
        val_fraction: Share of the documents held out for validation if there are no val_files; the
            Pile's published splits have about this size.
        test_fraction: Share of the documents held out for testing if there are no test_files.
        **kwargs: See `HubCorpus`.

    Raises:
        ValueError: If an argument is invalid, e.g. an unknown collection.
    """

    not_in_source = HubCorpus.not_in_source | {"copy"}
    local_format = "the original *.jsonl.zst, or other jsonl or parquet with a field 'text'"

    def __init__(
        self,
        *,
        copy: PileCopy = "deduplicated",
        pile_sets: list[str] | None = None,
        tokenizer: str = "EleutherAI/gpt-neox-20b",
        val_fraction: float = 0.001,
        test_fraction: float = 0.001,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer, val_fraction=val_fraction, test_fraction=test_fraction, **kwargs
        )
        raise_problems(choice_problems(get_args(PileCopy), copy=copy))
        self._copy = copy
        if copy == "uncopyrighted" and self.is_local:
            raise ValueError(
                "copy='uncopyrighted' is read from the hub, but data_files are read instead of it. "
                "Set data.copy to deduplicated, its default, or data.data_files to null."
            )
        if self._is_tokens and self._spec.family in ("bytes", "tiktoken", "bpe"):
            raise ValueError(
                f"tokenizer={tokenizer!r}: copy='tokenized' has tokens of another tokenizer. Set "
                "data.tokenizer to EleutherAI/gpt-neox-20b, or to a tokenizer.json."
            )
        self._sets = None if pile_sets is None else frozenset(pile_sets)
        if self._sets is not None:
            self._check_sets(self._sets)

    @property
    def _is_tokens(self) -> bool:
        return self._copy == "tokenized"

    def _check_sets(self, names: frozenset[str]) -> None:
        unknown = sorted(names.difference(PILE_SETS))
        if unknown or not names:
            raise ValueError(
                f"pile_sets={unknown} are not collections of the Pile. Choose from: "
                f"{', '.join(PILE_SETS)}; or null for all."
            )
        if self._is_tokens or (not self.is_local and self._copy != "uncopyrighted"):
            raise ValueError(
                "pile_sets needs files that name their collection, and this copy does not. Set "
                "data.copy to uncopyrighted, which lacks five collections, or pass "
                f"data.data_files=... ({self.local_format})."
            )

    def hub_split(self, split: Split) -> HubSplit | None:
        name, files, _ = _PILE_COPIES[self._copy]
        if split not in files:
            return None
        return HubSplit(name=name, split=split, pattern=files[split])

    def source(self) -> dict[str, Any]:
        tokens = {"tokens": "uint16"} if self._is_tokens else {}
        return {**super().source(), **tokens}

    def notes(self) -> list[str]:
        if self.is_local:
            first, *more = self.files["train"]
            others = f" and {len(more)} more files" if more else ""
            return [f"The Pile is read from your files, {first.name}{others}."]
        name, _, description = _PILE_COPIES[self._copy]
        return [
            f"The Pile is {name}, {description} Results are not comparable to papers' on the "
            "original Pile; for that, pass its files as data_files.",
        ]

    def check_file(self, path: Path) -> None:
        if self._is_tokens:
            if path.suffix not in TOKEN_SUFFIXES:
                raise ValueError(
                    f"{path}: copy='tokenized' reads {' and '.join(TOKEN_SUFFIXES)} files. Set "
                    "data.copy to deduplicated, its default, for files of text."
                )
        elif format_of(path) != "jsonl" and self._sets is not None:
            raise ValueError(f"{path}: pile_sets needs the Pile's jsonl files, with 'meta'.")

    def read_file(self, path: Path) -> Iterator[str]:
        return super().read_file(path) if self._sets is None else self._chosen(path, self._sets)

    def read(self, split: Split) -> Iterator[str]:
        if self._is_tokens:
            tokens = chain.from_iterable(map(read_tokens, self._paths(split)))
            return map(Encoded.of, cut_at(self.tokenizer.eos_id, tokens))
        # a file may have no document of the chosen collections
        if self._sets is None:
            return super().read(split)
        return filter(has_text, chain.from_iterable(map(self.read_file, self._paths(split))))

    def stored_documents(self, first: int = 0) -> Iterator[tuple[Split, str]]:
        if self._is_tokens:
            return islice(super().labelled_documents(), first, None)
        return super().stored_documents(first)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        for split, text in super().labelled_documents():
            if isinstance(text, Encoded):
                text = self.tokenizer.decode(text.ids.tolist())
            yield split, text

    def documents(self, split: Split) -> Iterator[str]:
        if self._is_tokens:
            return (text for s, text in self.labelled_documents() if s == split)
        return super().documents(split)

    @staticmethod
    def _chosen(path: Path, names: frozenset[str]) -> Iterator[str]:
        for where, row in read_rows(path, lone_surrogates=True):
            text = text_of(row, "text", where)
            meta = row.get("meta")
            name = meta.get("pile_set_name") if isinstance(meta, dict) else None
            if name is None:
                raise ValueError(
                    f"{where}: the row has no meta.pile_set_name to select by. Set data.pile_sets "
                    "to null, or use the Pile's original files."
                )
            if name in names:
                yield text
