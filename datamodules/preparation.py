"""Writing a text store: parallel, resumable, and visible only when it is whole.

Shards are written into ``<store>.partial``. A section is a stretch of documents with at most one
shard a split; when its largest shard is full, all are closed and synced, and a line of the journal
says which documents they hold. A preparation that was killed goes on after the last line: finished
shards stay as they are, what was begun is thrown away, and the result is the same to the byte. The
folder gets its final name at the end, under a file lock.

Finished shards are never removed silently: those after a damaged one are made again, a folder that
cannot be gone on with is moved aside, and one line says so.
"""

import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tqdm import tqdm

from datamodules import tokenising
from datamodules.journal import Journal, Section, full_disk_named, write_whole
from datamodules.shards import SectionWriter, is_whole, shard_name
from datamodules.store import FORMAT, SPLITS, Counts, Split, Store, all_checksums, token_dtype
from datamodules.tokenising import EncodedChunk, encode_in_order
from datamodules.tokenizers import JsonTokenizer, Tokenizer

# A shard is full at the first chunk of documents that reaches this many tokens: minutes of work
# that a kill may cost, and under 600 files for the whole Pile, which an open stream holds open.
SHARD_TOKENS = 2**29

Documents = Callable[[], Iterable[tuple[Split, str]]]


class Remote(Protocol):
    """A source of documents that changes with time and is slow to read, asked while it is stored.

    Everything it returns is kept as JSON.
    """

    def pin(self, stored: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Settles what is read, e.g. a commit: `stored`, where a killed preparation had that.

        Returns what was settled, for the journal and for meta.json (``origin``).
        """
        ...

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Lets the documents in front of a place be anything, e.g. empty: they are stored."""
        ...

    def place(self, document: int) -> Mapping[str, Any] | None:
        """Returns a place at or in front of that document, None where it knows none."""
        ...


def prepare_store(
    folder: Path,
    *,
    description: Mapping[str, Any],
    documents: Documents,
    make_tokenizer: Callable[[], Tokenizer],
    check: Callable[[Mapping[Split, Counts]], None] = lambda counts: None,
    shard_tokens: int = SHARD_TOKENS,
    train_tokens: int | None = None,
    num_proc: int | None = None,
    remote: Remote | None = None,
    notes: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Writes the store at `folder`, unless it is there already; several processes may ask at once.

    Args:
        folder: Final place; its parents are created.
        description: What goes into meta.json besides the rest: source and tokenizer.
        documents: Called once, yields the documents of all splits in an order that never changes.
        make_tokenizer: Called once, before `documents`, unless a killed preparation left a
            tokenizer.json.
        check: Called with the counts of each split before the store gets its name; may raise to
            refuse it. The shards are kept.
        shard_tokens: A shard is full at the first chunk of documents that reaches this many tokens.
        train_tokens: Most tokens of the train split: reading stops in front of the first train
            document that would exceed it. None: all documents.
        num_proc: See `tokenising.encode_in_order`.
        remote: The source of `documents`, where that can change or is slow to read.
        notes: Called once, when the source has settled what is read; goes into meta.json.

    Raises:
        StoreError: A store is there and damaged, or the disk is full.
    """
    if folder.exists():  # renamed into place, so it was whole; a read-only cache needs no lock
        Store(folder)
        return
    unfinished = folder.with_name(f"{folder.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_named(unfinished), FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            Store(folder)
            return
        partial = _Partial(unfinished, shard_tokens)
        with partial.kept_if_begun():
            origin = partial.begin(remote)
            noted = list(notes())
            tokenizer = partial.tokenizer(make_tokenizer)
            partial.write(documents, tokenizer, train_tokens, num_proc, remote)
        with partial.told_if_refused():
            check(partial.counts())
        partial.finish({**description, "origin": origin, "notes": noted}, tokenizer)
        partial.folder.rename(folder)


class _Partial:
    """The folder of a store that is being written, with its journal."""

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        self.folder = folder
        self._shard_tokens = shard_tokens
        self._limits = [shard_tokens, tokenising.CHUNK_DOCUMENTS, tokenising.CHUNK_BYTES]
        self._journal = Journal(folder, self._limits)
        if self._journal.foreign:
            self._move_aside()
        if not self.sections:
            self._remove()
        folder.mkdir(exist_ok=True)

    @property
    def sections(self) -> list[Section]:
        return self._journal.sections

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _move_aside(self) -> None:
        """Keeps what another version or other limits wrote under another name."""
        names = (self.folder.with_name(f"{self.folder.name}.old-{n}") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        self.folder.rename(aside)
        rank_zero_warn(
            f"An unfinished preparation of another version, or with other limits of shards, is now "
            f"at {aside}; delete it if you do not need it. The corpus is prepared again."
        )

    @contextlib.contextmanager
    def kept_if_begun(self) -> Iterator[None]:
        """Removes the folder if what is done here fails before anything was finished."""
        try:
            yield
        except BaseException:
            if not self.sections:
                self._remove()
            raise

    @contextlib.contextmanager
    def told_if_refused(self) -> Iterator[None]:
        """Says that the finished shards are kept, if what is done here fails."""
        with self.kept_if_begun():
            try:
                yield
            except BaseException:
                if self.sections:
                    tokens = sum(counts.tokens for counts in self.counts().values())
                    rank_zero_warn(
                        f"The {tokens} tokens that were written are kept in {self.folder}. Delete "
                        "it if you change the options of the corpus, or to start again."
                    )
                raise

    def begin(self, remote: Remote | None) -> Mapping[str, Any]:
        """Returns the origin of the text: that of the finished shards, else the present one."""
        if not self.sections:
            self._journal.begin({} if remote is None else remote.pin(None))
        elif remote is not None:
            remote.pin(self._journal.origin)
        assert self._journal.origin is not None
        return self._journal.origin

    def tokenizer(self, make: Callable[[], Tokenizer]) -> Tokenizer:
        """Returns the tokenizer that the finished shards were written with, or a new one."""
        path = self.folder / "tokenizer.json"
        if path.is_file():
            return JsonTokenizer.from_file(path.name, path)
        tokenizer = make()
        if isinstance(tokenizer, JsonTokenizer):
            write_whole(path, tokenizer.json_text)
        return tokenizer

    def write(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        train_tokens: int | None,
        num_proc: int | None,
        remote: Remote | None,
    ) -> None:
        """Writes all sections that are missing."""
        self._check_sections(token_dtype(tokenizer.vocab_size).itemsize)
        start = self._start(remote)
        train = self.counts()["train"].tokens
        rest = itertools.islice(documents(), start, None)
        room = math.inf if train_tokens is None else train_tokens - train
        bar = tqdm(
            desc="tokenising",
            unit=" tokens",
            unit_scale=True,
            total=train_tokens,
            initial=sum(counts.tokens for counts in self.counts().values()),
            disable=None,
        )
        # Closing ends the workers at once, whatever else still holds on to the generator.
        with bar, contextlib.closing(encode_in_order(rest, tokenizer, num_proc)) as encoded:
            self._write_sections(_until(encoded, room), start, bar, remote)

    def _start(self, remote: Remote | None) -> int:
        """Returns the number of the first missing document; the source goes near it at once."""
        start = self.sections[-1].end if self.sections else 0
        if start:
            rank_zero_info(f"Going on after document {start}, finished in {self.folder}")
        place = self._journal.place()
        if remote is not None and place is not None and place["document"] <= start:
            remote.go_to(place)
        return start

    def _write_sections(
        self,
        encoded: Iterator[EncodedChunk],
        start: int,
        bar: "tqdm[Any]",
        remote: Remote | None,
    ) -> None:
        section = SectionWriter(self.folder, len(self.sections), start)
        try:
            for chunk in encoded:
                section.add(chunk)
                bar.update(len(chunk.tokens))
                bar.set_postfix(documents=section.end, refresh=False)
                if section.largest() >= self._shard_tokens:
                    self._finish_section(section, remote)
                    section = SectionWriter(self.folder, len(self.sections), section.end)
            if section.end > section.first:
                self._finish_section(section, remote)
        finally:
            section.close()

    def _finish_section(self, writer: SectionWriter, remote: Remote | None) -> None:
        section = writer.finish()
        self._journal.append(section, None if remote is None else remote.place(section.end))

    def _check_sections(self, itemsize: int) -> None:
        """Forgets the sections from the first on whose files are not as the journal says."""
        sound = [is_whole(self.folder, i, s, itemsize) for i, s in enumerate(self.sections)]
        kept = sound.index(False) if False in sound else len(sound)
        if kept < len(sound):
            rank_zero_warn(
                f"{self.folder}: the shards number {kept} are damaged. They and those after them "
                f"are made again; those in front of them are kept."
            )
            self._journal.keep(kept)
        known = {shard_name(split, i) for i, s in enumerate(self.sections) for split in s.splits}
        for path in self.folder.iterdir():
            unknown = path.suffix in (".tokens", ".ends") and path.stem not in known
            if unknown or path.suffix == ".tmp":
                path.unlink()

    def counts(self) -> dict[Split, Counts]:
        """Returns what the finished sections hold of each split."""
        return {
            split: sum((s.splits[split] for s in self.sections if split in s.splits), Counts())
            for split in SPLITS
        }

    def finish(self, description: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        """Writes meta.json: all that is missing but the name."""
        totals = self.counts()
        splits = {
            split: {
                **asdict(totals[split]),
                "shards": [
                    {"name": shard_name(split, i), **asdict(section.splits[split])}
                    for i, section in enumerate(self.sections)
                    if split in section.splits
                ],
            }
            for split in SPLITS
        }
        known = {name: sums for s in self.sections for name, sums in s.checksums.items()}
        meta = {
            "format": FORMAT,
            **description,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "dtype": token_dtype(tokenizer.vocab_size).str,
            "splits": splits,
            "checksums": all_checksums(self.folder, known),
        }
        write_whole(self.folder / "meta.json", json.dumps(meta, indent=2))
        self._journal.finish()


def _until(encoded: Iterable[EncodedChunk], room: float) -> Iterator[EncodedChunk]:
    """Yields chunks up to the first train document that does not fit into `room` tokens."""
    for chunk in encoded:
        train = np.array([split == "train" for split in chunk.splits], dtype=bool)
        filled = np.cumsum(np.where(train, chunk.lengths, 0))
        over = np.flatnonzero(train & (filled > room))
        if len(over):
            yield chunk.until(int(over[0]))
            return
        yield chunk
        room -= int(filled[-1]) if len(filled) else 0
