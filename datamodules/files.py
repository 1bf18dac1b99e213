"""The user's files: their formats, and the only functions that open them.

`open_bytes` decompresses .gz and .zst and detects every truncation; `open_text` also detects text
that is not UTF-8.
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
# Compressed bytes to expand at once: zstd packs up to 2**17 bytes into 4.
_PACKED = 2**12
_LONGEST_WINDOW = 2**31  # bytes; the maximum, `zstd --long=31`


def format_of(path: Path, default: Format | None = None) -> Format:
    """Returns the format given by a file's suffix.

    Args:
        path: File, which need not exist.
        default: Format of files with any other suffix. If None, they are rejected.

    Raises:
        ValueError: If the suffix names no format and there is no default.
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
        "name the format if there is an option for it (LocalText: data.format)."
    )


class _ZstdFrames(io.RawIOBase):
    """Raw stream of the decompressed bytes of a zstd file with one or more frames.

    Unlike the library's stream, it raises an EOFError if the file ends within a frame.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._library = zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW)
        self._frame: Any = None  # currently being read
        self._packed = b""  # bytes already read, from the next frame
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
        """Decompresses the next piece of the file; returns False at its end."""
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
        raise ValueError(
            f"{path}: the compressed data are truncated (0 bytes). Download or copy it again."
        )
    packed = _ZstdFrames(path) if suffix == ".zst" else gzip.GzipFile(path)
    return io.BufferedReader(cast(io.RawIOBase, packed), CHUNK)


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Opens a file in binary mode, decompressing names that end in .gz or .zst.

    Raises:
        ValueError: If the compressed data are damaged or truncated; also while reading.
    """
    with _open(path) as file:
        try:
            yield file
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # disk error
                raise
            raise ValueError(
                f"{path}: the compressed data are damaged or truncated ({first_line(error)}). "
                "Download or copy it again."
            ) from error


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file, which may be compressed, for the bytes of its UTF-8 text.

    Raises:
        ValueError: If the compressed data are damaged, or the text is not UTF-8; also while
            reading.
    """
    with open_bytes(path) as file:
        reader = cast(io.BufferedReader, file)
        _refuse_other_encodings(path, reader.peek(HEAD)[:HEAD])
        try:
            yield reader
        except UnicodeDecodeError as error:
            raise not_utf8(path) from error


HEAD = 1024  # bytes that suffice to detect other encodings
_BEGINNINGS = {
    b"\x1f\x8b": "is compressed with gzip. Rename it so that it ends in .gz.",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd. Rename it so that it ends in .zst.",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def _refuse_other_encodings(path: Path, head: bytes) -> None:
    """Raises a ValueError if the first bytes of a file show an encoding other than UTF-8."""
    problem = next(
        (problem for bytes_, problem in _BEGINNINGS.items() if head.startswith(bytes_)), None
    )
    if problem is None and len(head) > 3:
        # Without a byte order mark, every other byte of Latin text in UTF-16 is 0.
        even, odd = (head[i::2].count(0) / len(head[i::2]) for i in (0, 1))
        problem = "UTF-16" if max(even, odd) > 0.5 and min(even, odd) < 0.1 else None
    if problem is not None and problem.startswith("UTF-"):
        problem = f"is {problem}, not UTF-8. Convert it, e.g. with: iconv -f {problem} -t UTF-8"
    if problem is not None:
        raise ValueError(f"{path} {problem}")


def not_utf8(path: Path, where: str | None = None) -> ValueError:
    """Returns the error for a file that is not UTF-8, with the offset of the first bad bytes.

    Args:
        path: File, which may be compressed.
        where: File and line, if the line is known.
    """
    position = ""
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    with contextlib.suppress(OSError, ValueError), open_bytes(path) as file:
        chunk = file.read(CHUNK)
        while chunk or decoder.getstate()[0]:
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # The decoder prepends the incomplete character of the last chunk.
                first = offset - (len(error.object) - len(chunk)) + error.start
                bad_bytes = error.object[error.start : error.end].hex(" ")
                unpacked = "decompressed " if path.suffix.lower() in COMPRESSIONS else ""
                position = f" ({unpacked}byte {first}: {bad_bytes})"
                break
            offset += len(chunk)
            chunk = file.read(CHUNK)
    return ValueError(
        f"{where or path} is not UTF-8{position}. Convert it, e.g. with: iconv -f latin1 -t utf-8 "
        "(if it is Latin-1)."
    )


def expand(patterns: str | Iterable[str]) -> list[Path]:
    """Returns the files that paths and globs match, in that order; files of a glob are sorted.

    A file with several names (a link, a relative and an absolute path) is returned once, under the
    first name.

    Raises:
        ValueError: If a path is missing or a folder, or a glob matches nothing.
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
            f"{pattern}: no such file (working directory: {Path.cwd()}). Check the path."
        )
    names = sorted(glob.glob(_with_folders(path), recursive=True))
    matches = [path for path in map(Path, names) if path.is_file()]
    if not matches:
        raise ValueError(
            f"{pattern}: no file matches (working directory: {Path.cwd()}). Check the pattern; "
            "write a bracket that is part of a name as [[]."
        )
    return matches


def _with_folders(pattern: Path) -> str:
    """Returns a glob with its leading existing folders escaped."""
    parts = list(pattern.parts)
    count = next(i for i in range(len(parts), -1, -1) if Path(*parts[:i]).is_dir())
    return str(Path(*map(glob.escape, parts[:count]), *parts[count:]))


def files_like(folder: Path, pattern: str) -> list[Path]:
    """Returns the files of a folder whose names match a glob, ignoring case and compression."""
    endings = ("", *COMPRESSIONS)
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and any(fnmatchcase(path.name.lower(), pattern.lower() + ending) for ending in endings)
    )
