"""Files of the user's: their formats, and the one place that opens them.

`open_bytes` decompresses .gz and .zst and notices every cut within them; `open_text` also notices
text that is not UTF-8.
"""

import codecs
import contextlib
import glob
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import zstandard

from datamodules.tokenizer_base import first_line

Format = Literal["text", "jsonl", "parquet"]
TEXT_SUFFIXES = (".txt", ".text", ".md")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
COMPRESSIONS = (".gz", ".zst")

CHUNK = 2**20  # bytes read at once
# Compressed bytes that are expanded at once: zstd packs up to 2**17 bytes into 4.
_PACKED = 2**12
_LONGEST_WINDOW = 2**31  # bytes; of `zstd --long=31`, the longest there is


def format_of(path: Path, default: Format | None = None) -> Format:
    """Returns the format that the suffix names.

    Args:
        path: File, which need not exist.
        default: Format of a file with any other suffix. Null refuses it.

    Raises:
        ValueError: The suffix is of no format, and there is no default.
    """
    suffixes = [s.lower() for s in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    suffix = suffixes[-2] if compressed and len(suffixes) > 1 else (suffixes or [""])[-1]
    if suffix in TEXT_SUFFIXES:
        return "text"
    if suffix in JSONL_SUFFIXES:
        return "jsonl"
    if suffix in PARQUET_SUFFIXES and not compressed:
        return "parquet"
    if default is not None:
        return default
    raise ValueError(
        f"{path}: the suffix decides the format, which must be one of "
        f"{', '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)} (also followed by "
        f"{' or '.join(COMPRESSIONS)}) or {PARQUET_SUFFIXES[0]}. Rename or convert the file, or "
        "name the format where there is an option for it (LocalText: data.format)."
    )


class _ZstdFrames(io.RawIOBase):
    """The decompressed bytes of a zstd file of one or more frames.

    Unlike the library's own stream it notices a file that ends within a frame (EOFError).
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._library = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW)
        self._frame: Any = None  # that is being read
        self._packed = b""  # read from the file, belongs to the next frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._decompress():
            pass
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress(self) -> bool:
        """Decompresses a piece of the file; returns whether there was one."""
        packed = self._packed or self._file.read(_PACKED)
        if not packed:
            if self._frame is not None:
                raise EOFError("the file ends within a frame")
            return False
        if self._frame is None:
            self._frame = self._library.decompressobj()
        self._ready, self._packed = memoryview(self._frame.decompress(packed)), b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(path: Path) -> io.BufferedReader:
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return path.open("rb")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the compressed data are cut off (0 bytes). Get it again.")
    packed = _ZstdFrames(path) if suffix == ".zst" else gzip.GzipFile(path)
    return io.BufferedReader(cast(io.RawIOBase, packed), CHUNK)


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for its bytes, decompressed where its name ends in .gz or .zst.

    Raises:
        ValueError: The compressed data are damaged or cut off; also while the file is read.
    """
    with _open(path) as file:
        try:
            yield file
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk
                raise
            raise ValueError(
                f"{path}: the compressed data are damaged or cut off ({first_line(error)}). Get it "
                "again."
            ) from error


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file, which may be compressed, for the bytes of its UTF-8 text.

    Raises:
        ValueError: The compressed data are damaged, or the text is not UTF-8; also while the file
            is read.
    """
    with open_bytes(path) as file:
        reader = cast(io.BufferedReader, file)
        _refuse_other_encodings(path, reader.peek(HEAD)[:HEAD])
        try:
            yield reader
        except UnicodeDecodeError as error:
            raise not_utf8(path) from error


HEAD = 1024  # bytes from which other encodings are told
_BEGINNINGS = {
    b"\x1f\x8b": "is compressed with gzip. Rename it so that it ends in .gz.",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd. Rename it so that it ends in .zst.",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def _refuse_other_encodings(path: Path, head: bytes) -> None:
    """Raises a ValueError if the first bytes of a file are of another encoding than UTF-8."""
    what = next((what for bytes_, what in _BEGINNINGS.items() if head.startswith(bytes_)), None)
    if what is None and len(head) > 3:
        # Without a mark at the beginning: every other byte of Latin text in UTF-16 is 0.
        even, odd = (head[i::2].count(0) / len(head[i::2]) for i in (0, 1))
        what = "UTF-16" if max(even, odd) > 0.5 and min(even, odd) < 0.1 else None
    if what is not None and what.startswith("UTF-"):
        what = f"is {what}, not UTF-8. Convert it, e.g. with: iconv -f {what} -t UTF-8"
    if what is not None:
        raise ValueError(f"{path} {what}")


def not_utf8(path: Path, where: str | None = None) -> ValueError:
    """Returns the error for a file that is not UTF-8, with the place of its first such bytes.

    Args:
        path: File, which may be compressed.
        where: File and line, where the line is known.
    """
    place = ""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with contextlib.suppress(OSError, ValueError), open_bytes(path) as file:
        chunk = file.read(CHUNK)
        while chunk or decoder.getstate()[0]:
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # The decoder puts the begun character of the last chunk before this one.
                first = offset - (len(error.object) - len(chunk)) + error.start
                found = error.object[error.start : error.end].hex(" ")
                unpacked = "decompressed " if path.suffix.lower() in COMPRESSIONS else ""
                place = f" ({unpacked}byte {first}: {found})"
                break
            offset += len(chunk)
            chunk = file.read(CHUNK)
    return ValueError(
        f"{where or path} is not UTF-8{place}. Convert it, e.g. with: iconv -f latin1 -t utf-8 "
        "(if it is Latin-1)."
    )


def expand(patterns: str | Iterable[str]) -> list[Path]:
    """Returns the files that paths and globs name, in that order; the files of a glob are sorted.

    A file of several names (a link, a relative and an absolute path) is returned once, under the
    first of them.

    Raises:
        ValueError: A path is missing or a folder, or a glob matches nothing.
    """
    paths: dict[Path, Path] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for path in _expand_one(pattern):
            paths.setdefault(path.resolve(), path)
    return list(paths.values())


def _expand_one(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        raise ValueError(
            f"{pattern} is a folder. Name its files with a glob, e.g. {pattern.rstrip('/')}/*.txt "
            "or /**/*.jsonl."
        )
    if not glob.has_magic(pattern):
        raise ValueError(
            f"{pattern}: there is no such file (looked from {Path.cwd()}). Check the path."
        )
    names = sorted(glob.glob(_with_folders(path), recursive=True))
    found = [path for path in map(Path, names) if path.is_file()]
    if not found:
        raise ValueError(
            f"{pattern}: no file matches (looked from {Path.cwd()}). Check the pattern; a bracket "
            "that is part of a name is written [[]."
        )
    return found


def _with_folders(pattern: Path) -> str:
    """Returns a glob whose first folders, as far as they exist, stand for themselves."""
    parts = list(pattern.parts)
    count = next(i for i in range(len(parts), -1, -1) if Path(*parts[:i]).is_dir())
    return str(Path(*map(glob.escape, parts[:count]), *parts[count:]))


def files_like(folder: Path, pattern: str) -> list[Path]:
    """Returns the files of a folder whose names, but for case and compression, fit a glob."""
    endings = ("", *COMPRESSIONS)
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and any(fnmatchcase(path.name.lower(), pattern.lower() + ending) for ending in endings)
    )
