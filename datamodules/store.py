"""The text store: a corpus tokenised once into flat memory-mapped files.

A store is a folder::

    <name>-<fingerprint>/
        meta.json              source, tokenizer, options, commits of the source (origin), notes
                               on differences from the papers' text, counts, list of shards,
                               checksums: the CRC-32 of each MiB of the other files
        tokenizer.json         only for tokenizers that are files
        special_tokens.json    only if names alone do not give its BOS and EOS
        train-00000.tokens     uint16 or uint32, every document followed by EOS
        train-00000.ends       int64, end of each document in this shard (after its EOS)
        train-00000.sizes      only for tokenizers whose ids have no fixed number of bytes:
                               uint32, the UTF-8 bytes of text that each token covers
        val-00000.tokens ...
        train-order-0-3        only for many documents: their order for seed 0 in epoch 3, written
                               on demand and safe to delete
        train-sentences        only for a large marked split: the ends of its sentences, likewise

A split may have any number of complete shards, which readers see as one stream. `prepare` writes
the folder under a temporary name and renames it when it is complete, under a file lock, so that an
interrupted store never looks finished.

Opening a store of up to 1 GiB compares every block with its checksum; a larger one is compared once
before the first training step, and by ``python -m datamodules.check FOLDER``. Stores of older
versions have no checksums: only their sizes, ids and document ends are checked.
"""

import hashlib
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from tqdm import tqdm

from datamodules.json_tokenizer import JsonTokenizer
from datamodules.readers import parse_json
from datamodules.special_tokens import SPECIAL_TOKENS_FILE, SpecialTokens
from datamodules.tokenizer_base import Tokenizer

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

FORMAT = 1
BLOCK_BYTES = 2**20  # per checksum
VERIFIED_BYTES = 2**30  # stores up to this size are compared with their checksums when opened
_NUMBER = np.dtype("<i8")
SIZE = np.dtype("<u4")  # bytes of a token


class StoreError(ValueError):
    """Raised if a text store is missing, incomplete or in a different format."""


def damaged(folder: Path, problem: str) -> StoreError:
    """Returns the error for a damaged store."""
    return StoreError(
        f"The text store {folder} is damaged: {problem}. Delete the folder; it is prepared again."
    )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Size of a text.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens, including one EOS per document.
        utf8_bytes: UTF-8 bytes of the documents' text.
    """

    documents: int = 0
    tokens: int = 0
    utf8_bytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        """Adds the counts."""
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
    """Returns little-endian uint16 if `vocab_size` ids fit, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def counts_of(part: Mapping[str, Any]) -> Counts:
    """Returns the counts in a part of meta.json or in a record."""
    return Counts(**{key: part[key] for key in ("documents", "tokens", "utf8_bytes")})


class BlockChecksums:
    """CRC-32 of each block of a file, computed while it is written or read."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._filled = BLOCK_BYTES  # bytes in the last block

    def add(self, data: bytes | memoryview) -> None:
        """Adds the next bytes of the file."""
        rest = memoryview(data)
        while len(rest):
            if self._filled == BLOCK_BYTES:
                self._sums.append(0)
                self._filled = 0
            part = rest[: BLOCK_BYTES - self._filled]
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self._filled += len(part)
            rest = rest[len(part) :]

    def digits(self) -> str:
        """Returns eight hex digits per block, in order."""
        return "".join(f"{value:08x}" for value in self._sums)


def all_checksums(folder: Path, computed: Mapping[str, str]) -> dict[str, Any]:
    """Returns the checksums for meta.json of the files in an unfinished store.

    Args:
        folder: Folder with all files of the store but meta.json.
        computed: Hex digits of files whose checksums were computed during writing; other files are
            read.
    """
    sums = dict(computed)
    for path in folder.iterdir():
        if path.name in sums or not path.is_file():
            continue
        blocks = BlockChecksums()
        with path.open("rb") as file:
            while data := file.read(BLOCK_BYTES):
                blocks.add(data)
        sums[path.name] = blocks.digits()
    return {"block_bytes": BLOCK_BYTES, "crc32": dict(sorted(sums.items()))}


class Store:
    """A text store, opened for reading.

    Args:
        folder: Folder that `prepare_store` wrote.

    Attributes:
        folder: Folder of the store.
        meta: Content of meta.json.
        is_verified: Whether the whole store was compared with its checksums.

    Raises:
        StoreError: If it is missing or in a different format, its files do not match meta.json, or
            a block of a store of up to 1 GiB is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = self._read_meta()
        self._added_up: bool | None = None
        self.is_verified = False
        try:
            self._sizes = {name: count * dtype.itemsize for name, count, dtype in self._files()}
            self._checksums = self._read_checksums()
        except _FlawError as flaw:
            raise damaged(self.folder, f"meta.json: {flaw}") from flaw
        for name, size in self._sizes.items():
            self._check_size(name, size)
        if self.size <= VERIFIED_BYTES:
            self.verify()

    def _read_meta(self) -> dict[str, Any]:
        if not self.folder.is_dir():
            raise StoreError(
                f"There is no text store at {self.folder}. Run prepare_data() first; each of "
                "several machines needs one, or a shared cache_dir."
            )
        try:
            meta = parse_json((self.folder / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise damaged(self.folder, f"meta.json cannot be read ({error})") from error
        if not isinstance(meta, dict):
            raise damaged(self.folder, f"meta.json is {reprlib.repr(meta)}, not an object")
        if meta.get("format") != FORMAT:
            actual = reprlib.repr(meta.get("format"))
            raise damaged(self.folder, f"its format is {actual}, but this version reads {FORMAT}")
        return meta

    def _files(self) -> Iterator[tuple[str, int, np.dtype]]:
        """Yields name, number of values and dtype of each file in meta.json.

        Raises:
            _FlawError: If a value in meta.json is missing, or has a wrong type or range.
        """
        vocab_size = whole_number(self.meta, "vocab_size", minimum=1)
        dtype = expect(self.meta, "dtype", str)
        if dtype != token_dtype(vocab_size).str:
            raise _FlawError(f"dtype is {dtype!r}, which does not fit {vocab_size} ids")
        if whole_number(self.meta, "eos_id") >= vocab_size:
            raise _FlawError(f"eos_id is {self.meta['eos_id']}, but there are {vocab_size} ids")
        expect({"origin": {}, **self.meta}, "origin", dict)
        for note in expect({"notes": [], **self.meta}, "notes", list):
            expect({"note": note}, "note", str)
        splits = expect(self.meta, "splits", dict)
        for split in SPLITS:
            for name, counts in _shards(expect(splits, split, dict), split):
                yield f"{name}.tokens", counts.tokens, np.dtype(dtype)
                yield f"{name}.ends", counts.documents, _NUMBER
                if self.meta.get("sizes"):
                    yield f"{name}.sizes", counts.tokens, SIZE

    def _read_checksums(self) -> dict[str, np.ndarray] | None:
        """Returns the checksums of each file, uint32, or None in stores of older versions."""
        if "checksums" not in self.meta:
            return None
        part = expect(self.meta, "checksums", dict)
        if part.get("block_bytes") != BLOCK_BYTES:
            raise _FlawError(f"block_bytes is {part.get('block_bytes')!r}, not {BLOCK_BYTES}")
        digits = expect(part, "crc32", dict)
        for file in digits.keys() & {"tokenizer.json", SPECIAL_TOKENS_FILE}:
            path = self.folder / file
            if not path.is_file():
                raise _FlawError(f"{file} is missing")
            self._sizes[file] = path.stat().st_size
        for name, size in self._sizes.items():
            blocks = -(-size // BLOCK_BYTES)
            if not re.fullmatch(rf"[0-9a-f]{{{8 * blocks}}}", expect(digits, name, str)):
                raise _FlawError(f"the checksums of {name} are not for {blocks} blocks")
        return {name: np.frombuffer(bytes.fromhex(digits[name]), ">u4") for name in self._sizes}

    def _check_size(self, name: str, size: int) -> None:
        path = self.folder / name
        actual = path.stat().st_size if path.is_file() else 0
        if actual != size:
            raise damaged(self.folder, f"{name} has {actual} bytes, but meta.json says {size}")

    @property
    def has_checksums(self) -> bool:
        """Whether the store has checksums; stores of older versions have none."""
        return self._checksums is not None

    @property
    def size(self) -> int:
        """Bytes of the checked files."""
        return sum(self._sizes.values())

    def verify(self, checked: Callable[[int], object] = lambda size: None) -> None:
        """Compares the files with their checksums, and checks the range of their values.

        Args:
            checked: Called after each block with its size in bytes.

        Raises:
            StoreError: If a block is damaged; the message names it.
        """
        with ThreadPoolExecutor() as pool:  # checksums and comparisons release the GIL
            for name, size in self._sizes.items():
                starts = range(0, size, BLOCK_BYTES)
                for block_bytes in pool.map(self._verify_block, repeat(name), starts):
                    checked(block_bytes)
        self.is_verified = True

    def _verify_block(self, name: str, start: int) -> int:
        """Verifies the block of a file from byte `start` on, and returns its size in bytes."""
        with (self.folder / name).open("rb") as file:
            file.seek(start)
            data = file.read(BLOCK_BYTES)
        if self._checksums is not None:
            expected = int(self._checksums[name][start // BLOCK_BYTES])
            if zlib.crc32(data) != expected:
                problem = f"bytes {start} to {start + len(data) - 1} of {name} changed"
                sums = f"CRC-32 {zlib.crc32(data):08x}, not {expected:08x}"
                raise damaged(self.folder, f"{problem} ({sums})")
        if name.endswith(".tokens"):
            self._check_ids(name, np.frombuffer(data, self.meta["dtype"]))
        elif name.endswith(".ends"):
            self._check_ends(name, start, np.frombuffer(data, _NUMBER))
        return len(data)

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        if ids.max() >= self.meta["vocab_size"]:
            raise damaged(
                self.folder,
                f"{name} has the id {ids.max()}, but the vocabulary has {self.meta['vocab_size']}",
            )

    def _check_ends(self, name: str, start: int, ends: np.ndarray) -> None:
        """Raises if the ends do not ascend to the last token, or a document lacks its EOS.

        Args:
            name: File of the ends.
            start: First byte of the block.
            ends: Ends of the documents in the block.
        """
        shard = self.folder / name
        tokens = _map(shard.with_suffix(""), "tokens", self.meta["dtype"])
        first = start // _NUMBER.itemsize
        before = int(_map(shard.with_suffix(""), "ends", _NUMBER.str)[first - 1]) if first else 0
        last = start + ends.nbytes == self._sizes[name]
        ascending = ends[0] > max(before, 0) and bool((ends[1:] > ends[:-1]).all())
        if not ascending or (ends[-1] != len(tokens) if last else ends[-1] >= len(tokens)):
            raise damaged(
                self.folder, f"the document ends in {name} do not ascend to {len(tokens)} tokens"
            )
        if (tokens[ends - 1] != self.meta["eos_id"]).any():
            raise damaged(self.folder, f"a document that ends by {name} has no EOS in the tokens")

    def counts(self, split: Split) -> Counts:
        """Returns the counts of a split."""
        return counts_of(self.meta["splits"][split])

    def tokenizer(self, name: str, special: SpecialTokens | None = None) -> JsonTokenizer | None:
        """Returns the stored tokenizer, or None if its name alone defines it.

        Args:
            name: Name of the tokenizer.
            special: Current special tokens of the name. By default they are unknown, and stores of
                older versions must have the special tokens that the file alone gives.

        Raises:
            StoreError: If its files cannot be read, or its special tokens differ.
        """
        if not (self.folder / "tokenizer.json").is_file():
            return None
        try:
            tokenizer = JsonTokenizer.from_store(name, self.folder)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(self.folder, f"tokenizer.json: {error}") from error
        if special is None and SPECIAL_TOKENS_FILE in tokenizer.files().keys() - self._sizes.keys():
            special = tokenizer.by_names
        if special is not None and special != tokenizer.special:
            raise self._outdated(
                name, f"special tokens are {tokenizer.special}, but now they are {special}"
            )
        return tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Checks that the stored tokens are consistent with the tokenizer.

        Raises:
            StoreError: If an older version prepared the store, and its documents lack BOS, or the
                bytes of its tokens do not sum to the size of the text.
        """
        lacks = None
        if tokenizer.text_bos_id != self.meta.get("bos_id"):
            lacks = "documents do not begin with the BOS of this tokenizer"
        elif not (tokenizer.exact_bytes or self.meta.get("sizes") or self._adds_up(tokenizer)):
            lacks = "bytes per token were not stored, so bits per byte would be wrong"
        if lacks is not None:
            raise self._outdated(tokenizer.name, lacks)

    def _adds_up(self, tokenizer: Tokenizer) -> bool:
        """Returns whether the bytes of each shard's tokens sum to the size of its text."""
        if self._added_up is None:
            token_bytes = tokenizer.token_bytes.numpy()
            self._added_up = all(
                self._bytes_of_tokens(shard["name"], token_bytes) == shard["utf8_bytes"]
                for split in SPLITS
                for shard in self.meta["splits"][split]["shards"]
            )
        return self._added_up

    def _bytes_of_tokens(self, shard: str, token_bytes: np.ndarray) -> int:
        tokens = _map(self.folder / shard, "tokens", self.meta["dtype"])
        blocks = (tokens[i : i + BLOCK_BYTES] for i in range(0, len(tokens), BLOCK_BYTES))
        return sum(int(token_bytes[block].sum()) for block in blocks)

    def _outdated(self, tokenizer: str, problem: str) -> StoreError:
        return StoreError(
            f"The text store {self.folder} was prepared by an older version with "
            f"tokenizer={tokenizer!r}: its {problem}. Delete the folder; it is prepared again."
        )

    def stream(self, split: Split, token_bytes: np.ndarray | None = None) -> "TokenStream":
        """Returns a split's tokens as one stream.

        Args:
            split: Name of the split.
            token_bytes: UTF-8 bytes of each id, (V,) int64, for stores without the bytes of each
                token.
        """
        shards = [self.folder / shard["name"] for shard in self.meta["splits"][split]["shards"]]
        sizes = None if self.meta.get("sizes") else token_bytes
        return TokenStream(shards, self.meta["dtype"], self.meta["vocab_size"], sizes)


def verify_store(store: Store) -> None:
    """Compares the whole store with its checksums, with a progress bar.

    Raises:
        StoreError: If a block is damaged.
    """
    name, size = f"verifying {store.folder.name}", store.size
    with tqdm(desc=name, total=size, unit="B", unit_scale=True, disable=None) as bar:
        store.verify(bar.update)


class _FlawError(ValueError):
    """Raised for an invalid value in meta.json."""


def expect(part: Mapping[str, Any], key: str, cls: type) -> Any:
    """Returns a value in a part of meta.json after checking its type.

    Raises:
        ValueError: If it is missing or has the wrong type.
    """
    value = part.get(key)
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise _FlawError(f"{key} is {reprlib.repr(value)}, not of type {cls.__name__}")
    return value


def whole_number(part: Mapping[str, Any], key: str, minimum: int = 0) -> int:
    """Returns an integer in a part of meta.json after checking its range.

    Raises:
        ValueError: If it is not an integer, is below `minimum`, or is larger than any file.
    """
    value = int(expect(part, key, int))
    if not minimum <= value < 2**48:
        raise _FlawError(f"{key} is {reprlib.repr(value)}, which is out of range")
    return value


def _shards(part: Mapping[str, Any], split: Split) -> Iterator[tuple[str, Counts]]:
    """Yields name and counts of the shards of a split, which must sum to the split's counts."""
    total = Counts()
    for shard in expect(part, "shards", list):
        name = expect(expect({"shard": shard}, "shard", dict), "name", str)
        if not re.fullmatch(rf"{split}-[0-9]{{5,}}", name):
            raise _FlawError(f"{reprlib.repr(name)} is not the name of a shard of {split}")
        keys = ("documents", "tokens", "utf8_bytes")
        counts = Counts(**{key: whole_number(shard, key) for key in keys})
        if not 1 <= counts.documents <= counts.tokens:
            raise _FlawError(f"{name} has {counts.documents} documents in {counts.tokens} tokens")
        total += counts
        yield name, counts
    if vars(total) != {key: part.get(key) for key in vars(total)}:
        raise _FlawError(f"the counts of {split} are not the sums over its shards")


class TokenStream:
    """The N tokens of a split, each document ending in EOS; memory-mapped, pickled by path.

    Args:
        shards: Paths without suffix, in order.
        dtype: Type of the stored tokens.
        vocab_size: V.
        token_bytes: UTF-8 bytes of each id, (V,) int64. Defaults to the shards' files of sizes.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        dtype: str,
        vocab_size: int,
        token_bytes: np.ndarray | None = None,
    ) -> None:
        self._shards, self._dtype, self._vocab_size = list(shards), dtype, vocab_size
        self.token_bytes = token_bytes
        self._tokens = [_map(shard, "tokens", dtype) for shard in shards]
        self._bases = np.cumsum([0, *(len(part) for part in self._tokens)], dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the paths; a pickled memory map would copy the files."""
        return TokenStream, (self._shards, self._dtype, self._vocab_size, self.token_bytes)

    def __len__(self) -> int:
        """Returns the number of tokens, N."""
        return int(self._bases[-1])

    @cached_property
    def document_ends(self) -> np.ndarray:
        """End of each document, after its EOS; int64, ascending, the last one is N."""
        ends, _ = self._ends
        if len(ends) == 1:
            return ends[0]
        return np.concatenate(
            [e + base for e, base in zip(ends, self._bases[:-1], strict=True)] or [_EMPTY]
        )

    @cached_property
    def _ends(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Ends of the documents in each shard, and number of documents before each shard."""
        parts = [_map(shard, "ends", "<i8") for shard in self._shards]
        return parts, np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)

    @property
    def num_documents(self) -> int:
        """Number of documents of the split."""
        return int(self._ends[1][-1])

    def ends(self, documents: np.ndarray) -> np.ndarray:
        """Returns the ends of documents (indices of any shape) in the stream, int64.

        Unlike `document_ends`, it reads the files and makes no copy of several shards.
        """
        parts, firsts = self._ends
        if len(parts) == 1:
            return np.asarray(parts[0][documents])
        result = np.empty(np.shape(documents), dtype=np.int64)
        shard = np.searchsorted(firsts, documents, side="right") - 1
        for s in np.unique(shard):
            in_shard = shard == s
            result[in_shard] = parts[s][documents[in_shard] - firsts[s]] + self._bases[s]
        return result

    def starts(self, documents: np.ndarray) -> np.ndarray:
        """Returns the starts of documents (indices of any shape) in the stream, int64."""
        indices = np.asarray(documents, dtype=np.int64)
        return np.where(indices > 0, self.ends(np.maximum(indices - 1, 0)), 0)

    def split_file(self, name: str) -> Path:
        """Returns the path of a file of this split in the store: ``<split>-<name>``."""
        shard = self._shards[0]
        return shard.with_name(f"{shard.name.partition('-')[0]}-{name}")

    def gather(self, positions: np.ndarray) -> np.ndarray:
        """Returns the tokens at `positions` (any shape, each in [0, N)), int64 of that shape.

        Raises:
            StoreError: If a position is outside the stream, or a token outside the vocabulary,
                because the files were damaged after their verification.
        """
        try:
            tokens = self._gathered(self._tokens, positions)
        except IndexError as error:
            problem = f"its documents end beyond its {len(self)} tokens"
            raise damaged(self._shards[0].parent, problem) from error
        if tokens.size and tokens.max() >= self._vocab_size:
            problem = f"it has the id {tokens.max()}, but the vocabulary has {self._vocab_size}"
            raise damaged(self._shards[0].parent, problem)
        return tokens

    def bytes_at(self, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the UTF-8 bytes of text that the `tokens` at `positions` cover, int64."""
        if self.token_bytes is not None:
            return self.token_bytes[tokens]
        return self._gathered(self._sizes, positions)

    @cached_property
    def _sizes(self) -> list[np.ndarray]:
        return [_map(shard, "sizes", SIZE.str) for shard in self._shards]

    def _gathered(self, parts: Sequence[np.ndarray], positions: np.ndarray) -> np.ndarray:
        """Gathers values at `positions` from sharded arrays, int64."""
        if len(parts) == 1:
            return parts[0][positions].astype(np.int64)
        shard = np.searchsorted(self._bases, positions, side="right") - 1
        result = np.empty(positions.shape, dtype=np.int64)
        for s in np.unique(shard):
            in_shard = shard == s
            result[in_shard] = parts[s][positions[in_shard] - self._bases[s]]
        return result


_EMPTY = np.empty(0, dtype=np.int64)


def _map(shard: Path, suffix: str, dtype: str) -> np.ndarray:
    return np.memmap(shard.with_name(f"{shard.name}.{suffix}"), dtype=np.dtype(dtype), mode="r")
