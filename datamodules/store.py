"""The text store: a corpus tokenised once into flat memory-mapped files.

A store is a folder::

    <name>-<fingerprint>/
        meta.json              source, tokenizer, options, commits that were read (origin), notes
                               on what differs from the papers' text, counts, list of shards
        tokenizer.json         only for tokenizers that are files
        train-00000.tokens     uint16 or uint32, every document followed by EOS
        train-00000.ends       int64, where each document ends in this shard (behind its EOS)
        val-00000.tokens ...
        journal.jsonl          which documents the shards of each number hold
        train-order-0-3        only of many documents: their order for seed 0 in epoch 3, made when
                               it is needed and safe to delete
        train-sentences        only of a large marked split: where its sentences end, likewise

A split may have any number of shards, each complete in itself: readers see one stream.
`preparation` writes the folder under another name and renames it when it is whole, under a file
lock: what an interruption leaves behind never looks finished.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

FORMAT = 1


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


def counts_of(part: Mapping[str, Any]) -> Counts:
    """Returns the counts in a part of meta.json or of the journal."""
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
        return counts_of(self.meta["splits"][split])

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
        ends, _ = self._ends
        if len(ends) == 1:
            return ends[0]
        return np.concatenate(
            [e + base for e, base in zip(ends, self._bases[:-1], strict=True)] or [_EMPTY]
        )

    @cached_property
    def _ends(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Where documents end in each shard, and the documents in front of each shard."""
        parts = [_map(shard, "ends", "<i8") for shard in self._shards]
        return parts, np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)

    @property
    def num_documents(self) -> int:
        """Documents of the split."""
        return int(self._ends[1][-1])

    def ends(self, documents: np.ndarray) -> np.ndarray:
        """Returns where those documents (numbers, any shape) end in the stream, int64.

        As `document_ends`, which for several shards is a copy in memory, but read from the files.
        """
        parts, firsts = self._ends
        if len(parts) == 1:
            return np.asarray(parts[0][documents])
        out = np.empty(np.shape(documents), dtype=np.int64)
        shard = np.searchsorted(firsts, documents, side="right") - 1
        for s in np.unique(shard):
            here = shard == s
            out[here] = parts[s][documents[here] - firsts[s]] + self._bases[s]
        return out

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Returns where those documents (numbers, any shape) begin in the stream, int64."""
        numbers = np.asarray(documents, dtype=np.int64)
        return np.where(numbers > 0, self.ends(np.maximum(numbers - 1, 0)), 0)

    def beside(self, name: str) -> Path:
        """Returns the path of a file of this split in the store: ``<split>-<name>``."""
        shard = self._shards[0]
        return shard.with_name(f"{shard.name.partition('-')[0]}-{name}")

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
