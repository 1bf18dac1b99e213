"""The text store: a corpus tokenised once into flat memory-mapped files.

A store is a folder::

    <name>-<fingerprint>/
        meta.json              source, tokenizer, options, counts, list of shards
        tokenizer.json         only for tokenizers that are files
        train-00000.tokens     uint16 or uint32, every document followed by EOS
        train-00000.ends       int64, where each document ends in this shard (behind its EOS)
        val-00000.tokens ...

A split may have any number of shards, each complete in itself: readers see one stream. The folder
is written under another name and renamed when it is whole, under a file lock: what an interruption
leaves behind never looks finished.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from datamodules.tokenizers import JsonTokenizer, Tokenizer

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

FORMAT = 1
SHARD_TOKENS = (
    2**28
)  # a shard is closed at the first batch of documents that reaches this many tokens
BATCH_DOCUMENTS = 1024  # documents per call of the tokenizer, or fewer once they hold
BATCH_BYTES = 2**20  # this much text


class StoreError(ValueError):
    """A text store that is missing, incomplete or of another format; the message names the cure."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How much text there is.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens, one EOS a document included.
        utf8_bytes: UTF-8 bytes of the documents' text.
    """

    documents: int = 0
    tokens: int = 0
    utf8_bytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        """Returns the sums."""
        return Counts(
            documents=self.documents + other.documents,
            tokens=self.tokens + other.tokens,
            utf8_bytes=self.utf8_bytes + other.utf8_bytes,
        )


def fingerprint(description: Mapping[str, Any], prefix: str) -> str:
    """Returns ``<prefix>-<16 hex digits>``, which changes with anything in `description`."""
    text = json.dumps({"format": FORMAT, **description}, sort_keys=True, ensure_ascii=True)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns little-endian uint16 where `vocab_size` ids fit, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def as_utf8(text: str) -> tuple[str, int]:
    """Returns `text` with lone surrogates replaced by U+FFFD, and the number of its UTF-8 bytes."""
    try:
        return text, len(text.encode("utf-8"))
    except UnicodeEncodeError:
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return clean, len(clean.encode("utf-8"))


class SplitWriter:
    """Writes the documents of one split, in batches, into as many shards as they need.

    Args:
        folder: Existing folder.
        split: Split that the files are named after.
        tokenizer: Tokenizer of the store.
        shard_tokens: A shard is closed at the first batch of documents that reaches this many
            tokens.
    """

    def __init__(
        self, folder: Path, split: Split, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._folder, self._split, self._tokenizer = folder, split, tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._shard_tokens = shard_tokens
        self._shards: list[Counts] = []
        self._pending: list[str] = []
        self._pending_bytes = 0

    def add(self, text: str) -> None:
        """Takes one document; empty ones are skipped."""
        clean, size = as_utf8(text)
        if not size:
            return
        self._pending.append(clean)
        self._pending_bytes += size
        if len(self._pending) >= BATCH_DOCUMENTS or self._pending_bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Tokenises what is pending and appends it to the last shard, or a new one."""
        if not self._pending:
            return
        if not self._shards or self._shards[-1].tokens >= self._shard_tokens:
            self._shards.append(Counts())
        shard = self._shards[-1]
        ids = self._tokenizer.encode_arrays(self._pending)
        lengths = np.array([len(document) + 1 for document in ids], dtype="<i8")
        ends = shard.tokens + np.cumsum(lengths, dtype="<i8")
        flat = np.full(int(lengths.sum()), self._tokenizer.eos_id, dtype=self._dtype)
        for document, end in zip(ids, ends - shard.tokens, strict=True):
            flat[end - 1 - len(document) : end - 1] = document
        self._append("tokens", flat)
        self._append("ends", ends)
        self._shards[-1] = shard + Counts(
            documents=len(ids), tokens=len(flat), utf8_bytes=self._pending_bytes
        )
        self._pending, self._pending_bytes = [], 0

    def _append(self, suffix: str, values: np.ndarray) -> None:
        with (self._folder / f"{self._name(len(self._shards) - 1)}.{suffix}").open("ab") as file:
            values.tofile(file)

    def _name(self, shard: int) -> str:
        return f"{self._split}-{shard:05d}"

    def close(self) -> dict[str, Any]:
        """Returns this split's part of meta.json; everything is on disk."""
        self.flush()
        for i in range(len(self._shards)):
            for suffix in ("tokens", "ends"):
                _sync(self._folder / f"{self._name(i)}.{suffix}")
        shards = [
            {"name": self._name(i), **asdict(counts)} for i, counts in enumerate(self._shards)
        ]
        return {**asdict(sum(self._shards, Counts())), "shards": shards}


def _sync(path: Path) -> None:
    """Makes sure that a file's content is on disk, not only in the system's memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def prepare_store(
    folder: Path,
    *,
    description: Mapping[str, Any],
    documents: Callable[[], Iterable[tuple[Split, str]]],
    make_tokenizer: Callable[[], Tokenizer],
    check: Callable[[Mapping[Split, Counts]], None] = lambda counts: None,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Writes the store at `folder`, unless it is there already; several processes may ask at once.

    Args:
        folder: Final place; its parents are created.
        description: What goes into meta.json beside the counts: source and tokenizer.
        documents: Called once, yields the documents of all splits in any order.
        make_tokenizer: Called once, before `documents`.
        check: Called with the counts of each split before the store gets its name; may raise to
            refuse it.
        shard_tokens: A shard is closed at the first batch of documents that reaches this many
            tokens.

    Raises:
        StoreError: A store is there and damaged.
    """
    if folder.exists():  # renamed into place, so it was whole; a read-only cache needs no lock
        Store(folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            Store(folder)
            return
        for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
            shutil.rmtree(
                leftover, ignore_errors=True
            )  # of a process that was killed: the lock is ours
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        try:
            _write(unfinished, description, documents, make_tokenizer(), check, shard_tokens)
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _write(
    folder: Path,
    description: Mapping[str, Any],
    documents: Callable[[], Iterable[tuple[Split, str]]],
    tokenizer: Tokenizer,
    check: Callable[[Mapping[Split, Counts]], None],
    shard_tokens: int,
) -> None:
    """Writes all files of a store; meta.json last."""
    writers = {split: SplitWriter(folder, split, tokenizer, shard_tokens) for split in SPLITS}
    for split, text in tqdm(documents(), desc="tokenising", unit=" documents", disable=None):
        writers[split].add(text)
    splits = {split: writer.close() for split, writer in writers.items()}
    check({split: _counts(part) for split, part in splits.items()})
    if isinstance(tokenizer, JsonTokenizer):
        (folder / "tokenizer.json").write_text(tokenizer.json_text, encoding="utf-8")
        _sync(folder / "tokenizer.json")
    meta = {
        "format": FORMAT,
        **description,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "splits": splits,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    _sync(folder / "meta.json")


def _counts(part: Mapping[str, Any]) -> Counts:
    return Counts(**{key: part[key] for key in ("documents", "tokens", "utf8_bytes")})


class Store:
    """A text store, opened for reading.

    Args:
        folder: Folder that `prepare_store` wrote.

    Attributes:
        folder: The same.
        meta: Content of meta.json.

    Raises:
        StoreError: There is none, its format is another, or its files are not those that meta.json
            names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = self._read_meta()
        for split in SPLITS:
            for shard in self.meta["splits"][split]["shards"]:
                self._check_size(
                    f"{shard['name']}.tokens", shard["tokens"], np.dtype(self.meta["dtype"])
                )
                self._check_size(f"{shard['name']}.ends", shard["documents"], np.dtype("<i8"))

    def _read_meta(self) -> dict[str, Any]:
        if not self.folder.is_dir():
            raise StoreError(
                f"There is no text store at {self.folder}. Run prepare_data() first; with several "
                "machines each needs it, or a cache_dir that all of them see."
            )
        try:
            meta: dict[str, Any] = json.loads(
                (self.folder / "meta.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError) as error:
            raise self._damaged(f"meta.json cannot be read ({error})") from error
        if meta.get("format") != FORMAT:
            raise self._damaged(f"its format is {meta.get('format')}, this version reads {FORMAT}")
        return meta

    def _check_size(self, name: str, count: int, dtype: np.dtype) -> None:
        path = self.folder / name
        actual = path.stat().st_size if path.is_file() else 0
        if actual != count * dtype.itemsize:
            raise self._damaged(
                f"{name} has {actual} bytes where meta.json names {count * dtype.itemsize}"
            )

    def _damaged(self, what: str) -> StoreError:
        return StoreError(
            f"The text store {self.folder} is damaged: {what}. Delete the folder; it is prepared "
            "anew."
        )

    def counts(self, split: Split) -> Counts:
        """Returns how much text a split has."""
        return _counts(self.meta["splits"][split])

    def tokenizer_json(self) -> str | None:
        """Returns the stored tokenizer.json, or None where the tokenizer is known by name alone."""
        path = self.folder / "tokenizer.json"
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def stream(self, split: Split) -> "TokenStream":
        """Returns a split's tokens as one stream."""
        shards = self.meta["splits"][split]["shards"]
        return TokenStream([self.folder / shard["name"] for shard in shards], self.meta["dtype"])


class TokenStream:
    """The N tokens of a split, each document ending in EOS; memory-mapped, pickled by path.

    Args:
        shards: Paths without suffix, in order.
        dtype: Type of the stored tokens.
    """

    def __init__(self, shards: Sequence[Path], dtype: str) -> None:
        self._shards, self._dtype = list(shards), dtype
        self._tokens = [_map(shard, "tokens", dtype) for shard in shards]
        self._bases = np.cumsum([0, *(len(part) for part in self._tokens)], dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what opens the same files elsewhere; a pickled memory map would copy them."""
        return TokenStream, (self._shards, self._dtype)

    def __len__(self) -> int:
        """Returns N."""
        return int(self._bases[-1])

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Where each document ends, behind its EOS; int64, ascending, the last one is N."""
        ends = [_map(shard, "ends", "<i8") for shard in self._shards]
        if len(ends) == 1:
            return ends[0]
        return np.concatenate(
            [e + base for e, base in zip(ends, self._bases[:-1], strict=True)] or [_EMPTY]
        )

    def gather(self, positions: np.ndarray) -> np.ndarray:
        """Returns the tokens at `positions` (any shape, each in [0, N)), int64 of that shape."""
        if len(self._tokens) == 1:
            return self._tokens[0][positions].astype(np.int64)
        shard = np.searchsorted(self._bases, positions, side="right") - 1
        out = np.empty(positions.shape, dtype=np.int64)
        for s in np.unique(shard):
            here = shard == s
            out[here] = self._tokens[s][positions[here] - self._bases[s]]
        return out


_EMPTY = np.empty(0, dtype=np.int64)


def _map(shard: Path, suffix: str, dtype: str) -> np.ndarray:
    return np.memmap(shard.with_name(f"{shard.name}.{suffix}"), dtype=np.dtype(dtype), mode="r")
