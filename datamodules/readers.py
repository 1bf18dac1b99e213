"""The documents of one file: txt, jsonl or parquet, the first two also as .gz or .zst.

All readers stream: memory holds one document (or one parquet batch), not the file. Errors are
ValueErrors that name the file and the place: a line or a row.
"""

import contextlib
import glob
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from datamodules.tokenizers import first_line

TEXT_SUFFIXES = (".txt", ".text", ".md")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # suffix: what pyarrow calls it

_Part = TypeVar("_Part")

_CHUNK = 2**20  # bytes read at once
# Characters kept before and awaited after a separator match: as far as a pattern may look around
# itself.
_LOOK_AHEAD, _LOOK_BACK = 4096, 256
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped, maybe one of a pair


def format_of(path: Path) -> str:
    """Returns ``"text"``, ``"jsonl"`` or ``"parquet"``, by the suffix.

    Raises:
        ValueError: Another suffix.
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
    raise ValueError(
        f"{path}: the suffix decides the format, which must be one of "
        f"{', '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)} (also followed by "
        f"{' or '.join(COMPRESSIONS)}) or {PARQUET_SUFFIXES[0]}. Rename or convert the file."
    )


def read_documents(
    path: Path,
    *,
    text_field: str = "text",
    separator: str | None = None,
    lone_surrogates: bool = False,
) -> Iterator[str]:
    """Yields the documents of a file; those of white space alone are left out.

    Args:
        path: File to read; its suffix names the format.
        text_field: Field (jsonl) or column (parquet) with the text.
        separator: Regular expression that cuts a text file into documents; None: the file is one
            document.
        lone_surrogates: See `read_rows`.

    Raises:
        ValueError: The file has no document, is not UTF-8, or a line, field or column is not as
            expected.
    """
    kind = format_of(path)
    if kind == "text":
        texts = _read_text(path, separator)
    elif kind == "jsonl":
        rows = read_rows(path, lone_surrogates=lone_surrogates)
        texts = (text_of(row, text_field, where) for where, row in rows)
    else:
        texts = read_column(path, text_field)
    empty = True
    for text in texts:
        if text and not text.isspace():
            empty = False
            yield text
    if empty:
        raise ValueError(
            f"{path} is empty: it holds no text. Remove it from the files, or fill it."
        )


def _open(path: Path) -> BinaryIO:
    """Returns the decompressed bytes of a file."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    import pyarrow as pa

    # Unlike the readers of gzip and zstandard it notices every cut, between frames and in them.
    stream = pa.input_stream(str(path), compression=compression, buffer_size=_CHUNK)
    return cast(BinaryIO, io.BufferedReader(stream, buffer_size=_CHUNK))


def _reading(path: Path, parts: Callable[[BinaryIO], Iterator[_Part]]) -> Iterator[_Part]:
    """Yields what `parts` reads from the file.

    Raises:
        ValueError: The compressed data are damaged, or text is not UTF-8.
    """
    with _open(path) as file:
        try:
            yield from parts(file)
        except UnicodeDecodeError as error:
            raise not_utf8(path) from error
        except OSError as error:
            if error.errno is not None:  # of the disk, not of the decompression
                raise
            raise ValueError(
                f"{path}: the compressed data are damaged or cut off ({error}). Get it again."
            ) from error


def not_utf8(place: object) -> ValueError:
    """Returns the error for bytes that are not UTF-8.

    Args:
        place: The file, or the file and the line.
    """
    return ValueError(
        f"{place} is not UTF-8. Convert it, e.g. with: iconv -f latin1 -t utf-8 (if it is Latin-1)."
    )


def _read_text(path: Path, separator: str | None) -> Iterator[str]:
    """Yields the documents of a text file, with Unix line ends and without a byte order mark."""

    def parts(file: BinaryIO) -> Iterator[str]:
        """Yields the documents of an open file."""
        text = io.TextIOWrapper(file, encoding="utf-8-sig")
        if separator is None:
            yield text.read()
        else:
            yield from split_text(text.read, re.compile(separator))

    return _reading(path, parts)


def split_text(read: Callable[[int], str], separator: re.Pattern[str]) -> Iterator[str]:
    """Yields the pieces between matches of `separator`; holds one piece in memory.

    A match may look up to 256 characters back and be, with what it looks ahead at, up to 4096
    characters long.

    Args:
        read: Returns text of about that many characters, empty at the end.
        separator: Pattern between documents; matches of no characters do not cut.
    """
    text, start, at_end = "", 0, False  # the current document begins at text[start]
    while not at_end:
        kept = max(0, start - _LOOK_BACK)
        more = read(
            max(_CHUNK, len(text) - kept)
        )  # doubling: a long document is not scanned over and over
        text, start, at_end = text[kept:] + more, start - kept, not more
        for match in separator.finditer(text, start):
            if not at_end and match.end() > len(text) - _LOOK_AHEAD:
                break
            if match.end() > match.start():
                yield text[start : match.start()]
                start = match.end()
    yield text[start:]


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file of any suffix, which may be compressed, without line ends.

    Raises:
        ValueError: A line is not UTF-8.
    """
    return (line.rstrip("\r\n") for _, line in _numbered_lines(path))


def _numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (place for messages, line with its end) of a text file, which may be compressed."""

    def parts(file: BinaryIO) -> Iterator[tuple[str, str]]:
        """Yields lines, each with its place."""
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                yield where, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(where) from error

    return _reading(path, parts)


def read_rows(path: Path, *, lone_surrogates: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields (place for messages, row) of a jsonl file.

    Args:
        path: File to read.
        lone_surrogates: Whether text may hold half a surrogate pair: for published corpora, which
            nobody can change.

    Raises:
        ValueError: A line is not UTF-8 or not JSON, or its text is not UTF-8.
    """
    for where, line in _numbered_lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(
                f"{where} is not JSON ({error}). Each line must be one JSON object; correct or "
                "remove the line."
            ) from error
        if not lone_surrogates and _SURROGATE.search(line):
            check_utf8(row, where)
        yield where, row


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: It is not JSON, is nested too deeply, or has a number of too many digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column" if error.lineno > 1 else "column"
        raise ValueError(f"{error.msg} at {place} {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check_utf8(value: Any, where: str) -> None:
    """Raises a ValueError if text in a value, lists and objects included, cannot be UTF-8.

    Args:
        value: As read from JSON or from a command line.
        where: Its place, for the message.
    """
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += [*value, *value.values()]
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{where}: the text holds {value[error.start]!a}, half a surrogate pair "
                    "or a byte that is not UTF-8. Correct or remove it."
                ) from error


def text_of(row: Any, field: str, where: str) -> str:
    """Returns the text field of a row.

    Raises:
        ValueError: `row` has no such field, or it is not text.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: expected an object with the field {field!r}, found {type(row).__name__}."
        )
    if field not in row:
        raise ValueError(
            f"{where}: there is no field {field!r}, the fields are {', '.join(map(repr, row))}. "
            "Set text_field to one of them."
        )
    if not isinstance(row[field], str):
        raise ValueError(
            f"{where}: the field {field!r} holds {type(row[field]).__name__}, not text. Set "
            "text_field."
        )
    return row[field]


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Opens a parquet file.

    Raises:
        ValueError: It is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a parquet file, or cut off ({first_line(error)}). Download or write it "
            "again."
        ) from error


def read_table(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a parquet file.

    Raises:
        ValueError: It is damaged.
    """
    with _parquet(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def read_column(path: Path, field: str) -> Iterator[str]:
    """Yields the text of every row of a parquet file.

    Raises:
        ValueError: It is damaged, or has no such column of text.
    """
    with _parquet(path) as file:
        names = file.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{path}: there is no column {field!r}, the columns are "
                f"{', '.join(map(repr, names))}. Set text_field to one of them."
            )
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            try:
                values = batch.column(0).to_pylist()
            except UnicodeDecodeError as error:
                rows = f"rows {row + 1} to {row + len(batch)}"
                raise ValueError(f"{path}, {rows}: the column {field!r} is not UTF-8.") from error
            for value in values:
                row += 1
                yield text_of({field: value}, field, f"{path}, row {row}")


def expand(patterns: str | Iterable[str]) -> list[Path]:
    """Returns the files that paths and globs name, in that order, those of a glob sorted.

    Raises:
        ValueError: A path is missing or a folder, or a glob matches nothing.
    """
    paths: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        paths.update(dict.fromkeys(_expand_one(pattern)))
    return list(paths)


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
    found = [p for p in map(Path, sorted(glob.glob(str(path), recursive=True))) if p.is_file()]
    if not found:
        raise ValueError(
            f"{pattern}: no file matches (looked from {Path.cwd()}). Check the pattern."
        )
    return found
