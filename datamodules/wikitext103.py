"""WikiText-103: 28,475 good and featured articles of Wikipedia, one document each."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from datamodules.hub import HubTexts
from datamodules.hub_corpus import HubCorpus
from datamodules.hub_revision import HubSplit
from datamodules.readers import PARQUET_SUFFIXES, format_of, read_column, read_lines
from datamodules.shuffling import shuffled
from datamodules.store import Split

# " = Title = ": exactly one = on each side, where " = = Section = = " has more.
_TITLE = re.compile(r" ?= (?!= ).*(?<! =) = ?")
_LINE_SUFFIXES = (".raw", ".tokens")  # of the original archive: wiki.train.raw, wiki.train.tokens


class WikiText103(HubCorpus):
    """WikiText-103, cut into articles: a document is a title line and all up to the next one.

    A title is a line `` = Title = `` with a blank line (or nothing) before and after it; without
    that condition a few formulas would pass for titles. Lines are kept as they are.

    Hub: Salesforce/wikitext, wikitext-103-raw-v1 or -v1, with its own three splits. Files: one
    paragraph a line, as wiki.train.raw, wiki.train.tokens or txt (also .gz, .zst), or the hub's
    parquet files; give val_files and test_files too.

    Args:
        level: 'raw': text as written; 'word': the hub's word-level text with ``<unk>``. Your own
            files are what they are.
        shuffle_seed: Seed of one shuffle of the training articles before a token cap takes the
            first of them (the data subsets of the Thought Gestalt paper); null keeps their order.
        **kwargs: See `HubCorpus`.

    Raises:
        ValueError: An argument is unusable; when preparing: a file has no article titles.
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
        if level not in ("raw", "word"):
            raise ValueError(f"level={level!r} must be 'raw' or 'word'.")
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed={shuffle_seed} must not be negative, or null.")
        self._level = level
        self._shuffle_seed = shuffle_seed

    def hub_split(self, split: Split) -> HubSplit:
        """Returns the split of the chosen configuration."""
        return HubSplit(
            name="Salesforce/wikitext",
            config="wikitext-103-raw-v1" if self._level == "raw" else "wikitext-103-v1",
            split={"train": "train", "val": "validation", "test": "test"}[split],
        )

    def check_file(self, path: Path) -> None:
        """Raises a ValueError for another suffix than the formats have."""
        original = any(suffix.lower() in _LINE_SUFFIXES for suffix in path.suffixes)
        if not original and format_of(path) == "jsonl":
            raise ValueError(f"{path}: WikiText-103 comes as {self.local_format}, not as jsonl.")

    def read_file(self, path: Path) -> Iterator[str]:
        """Yields the articles of one of your files."""
        parquet = path.suffix.lower() in PARQUET_SUFFIXES
        return articles(read_column(path, "text") if parquet else read_lines(path), str(path))

    def read_hub(self, texts: HubTexts) -> Iterator[str]:
        """Yields the articles of a split on the hub, where a row is a line."""
        return articles(texts.read(), "The hub's WikiText-103")

    def read(self, split: Split) -> Iterator[str]:
        """Yields the articles of a split; those for training shuffled where that is asked for."""
        documents = super().read(split)
        if split != "train" or self._shuffle_seed is None:
            return documents
        return shuffled(documents, seed=self._shuffle_seed, folder=self.cache_dir)


def articles(lines: Iterable[str], where: str) -> Iterator[str]:
    """Yields the articles: lines joined by line ends, from a title to the last one with text.

    Text in front of the first title (a file that was cut) is a document of its own.

    Args:
        lines: Lines with or without their line ends.
        where: What they are from, for the message.

    Raises:
        ValueError: There is text, but no title.
    """
    article: list[str] = []
    titles, before_is_blank, candidate = 0, True, None
    for raw in lines:
        line = raw.rstrip("\r\n")
        blank = not line or line.isspace()
        if candidate is not None and blank:  # a blank line on both sides: it was a title
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
            "after it. Take the files as published (some copies lack the blank lines), or "
            "datamodules.LocalText."
        )
    yield from _joined(article)


def _joined(lines: list[str]) -> Iterator[str]:
    """Yields the text of the lines without blank ones at either end; nothing if all are blank."""
    used = [i for i, line in enumerate(lines) if line.strip()]
    if used:
        yield "\n".join(lines[used[0] : used[-1] + 1]) + "\n"
