"""Readers of documents and prompts: txt, jsonl (or one JSON array) and parquet.

All readers stream: memory holds one document (or one parquet batch), not the file. Errors are
ValueErrors that name the file and the line, item or row.
"""

import codecs
import contextlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from datamodules.files import CHUNK, HEAD, Format, format_of, not_utf8, open_text
from datamodules.tokenizer_base import first_line

# Characters to keep before and read after a separator match, for look-around in patterns.
_LOOK_AHEAD, _LOOK_BACK = 4096, 256
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped, possibly half of a pair


# ---- documents


class Separator:
    r"""A regular expression that separates the documents of text files, and counts its matches.

    Line ends are read as ``\n``, so ``\r\n`` in the expression stands for ``\n``.

    Args:
        expression: Regular expression, as the user wrote it.

    Attributes:
        expression: The expression that is searched for.

    Raises:
        ValueError: If it is not a regular expression.
    """

    _SHORT, _MANY = 3, 0.1  # minimum characters; share of shorter documents to report

    def __init__(self, expression: str) -> None:
        self._written = expression
        # An escaped backslash is skipped together with the backslash that escapes it.
        self.expression = re.sub(r"(\\\\)|\\r\\n|\r\n", lambda match: match[1] or r"\n", expression)
        try:
            self._pattern = re.compile(self.expression)
        except re.error as error:
            raise ValueError(
                f"separator={expression!r} is not a regular expression ({error})."
            ) from error
        self._documents = self._short = self._matches = 0

    def split(self, read: Callable[[int], str]) -> Iterator[str]:
        """Yields the non-blank documents of a text; see `split_text`."""
        for index, piece in enumerate(split_text(read, self._pattern)):
            self._matches += index > 0
            if piece and not piece.isspace():
                self._documents += 1
                self._short += len(piece.strip()) < self._SHORT
                yield piece

    def warning(self) -> str | None:
        """Returns a warning with a cure if the documents so far look wrong, else None."""
        if self._documents and not self._matches:
            problem = "matches nothing: each file is one document"
        elif self._short > self._MANY * self._documents:
            problem = (
                f"leaves {self._short:,} of {self._documents:,} documents with fewer than "
                f"{self._SHORT} characters"
            )
        else:
            return None
        literal = re.escape(self._written)
        cure = "Check the regular expression."
        if re.search(r"[|*+?.^$(){}\[\]]", self._written) and "\\" not in self._written:
            cure = f"It is a regular expression; to match it literally, write '{literal}'"
        return f"separator={self._written!r} {problem}. {cure}"


def read_documents(
    path: Path,
    *,
    text_field: str = "text",
    separator: str | Separator | None = None,
    lone_surrogates: bool = False,
    default_format: Format | None = None,
) -> Iterator[str]:
    """Yields the documents of a file; null rows become empty documents (see `read_files`).

    Args:
        path: File to read; its suffix names the format.
        text_field: Field (jsonl) or column (parquet) with the text.
        separator: Regular expression that cuts a text file into documents. If None, the file is
            one document.
        lone_surrogates: See `read_rows`.
        default_format: Format of a file with an unknown suffix.

    Raises:
        ValueError: If the file is not UTF-8, or a line, field or column is not as expected.
    """
    file_format = format_of(path, default_format)
    if file_format == "text":
        yield from _read_text(path, separator)
    elif file_format == "jsonl":
        for where, row in read_rows(path, lone_surrogates=lone_surrogates):
            yield text_of(row, text_field, where)
    else:
        yield from read_column(path, text_field)


def has_text(text: str) -> bool:
    """Returns whether a text has a character other than whitespace."""
    return bool(text) and not text.isspace()


class Reading:
    """Filters empty texts out of files, and reports them at the end."""

    def __init__(self) -> None:
        self._paths: list[Path | str] = []
        self._empty: list[Path | str] = []
        self._texts = self._blank = 0

    def texts(self, path: Path | str, documents: Iterable[str]) -> Iterator[str]:
        """Yields the non-blank documents of a file or a named dataset."""
        before = self._texts - self._blank
        for text in documents:
            self._texts += 1
            if has_text(text):
                yield text
            else:
                self._blank += 1
        self._paths.append(path)
        if self._texts - self._blank == before:
            self._empty.append(path)

    def finish(self) -> None:
        """Logs the number of omitted texts, and warns about files without text.

        Raises:
            ValueError: If no file has text.
        """
        total = len(self._paths)
        if self._empty and len(self._empty) == total:
            if total == 1:
                problem = f"{self._paths[0]} is empty: it has no text. Leave it out"
            else:
                problem = (
                    f"All {total} files are empty: none has text ({self._named()}). Check them"
                )
            raise ValueError(f"{problem}, or fill it." if total == 1 else f"{problem}.")
        if self._empty:
            rank_zero_warn(
                f"{len(self._empty)} of {total} files have no text and are skipped: {self._named()}"
            )
        if self._blank:
            source = str(self._paths[0]) if total == 1 else f"{total} files"
            rank_zero_info(
                f"{source}: {self._blank:,} of {self._texts:,} texts are empty or null and are "
                "left out."
            )

    def _named(self) -> str:
        names = ", ".join(map(str, self._empty[:5]))
        more = len(self._empty) - 5
        return f"{names} and {more} more" if more > 0 else names


def read_files(paths: Iterable[Path], read: Callable[[Path], Iterable[str]]) -> Iterator[str]:
    """Yields the non-blank documents of files in turn.

    At the end it logs the number of omitted texts, and warns about files without documents.

    Args:
        paths: Files, in reading order.
        read: Returns the documents of a file.

    Raises:
        ValueError: If no file has a document.
    """
    reading = Reading()
    for path in paths:
        yield from reading.texts(path, read(path))
    reading.finish()


# ---- text


def _read_text(path: Path, separator: str | Separator | None) -> Iterator[str]:
    """Yields the documents of a text file, with Unix line endings and no byte order mark."""
    with open_text(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig")
        if separator is None:
            whole = text.read()
            if has_text(whole):
                yield whole
        else:
            cut = Separator(separator) if isinstance(separator, str) else separator
            yield from cut.split(text.read)


def split_text(read: Callable[[int], str], separator: re.Pattern[str]) -> Iterator[str]:
    """Yields the pieces between matches of `separator`; holds one piece in memory.

    A match may look back up to 256 characters; match and look-ahead together may have up to 4096.

    Args:
        read: Returns about the given number of characters, or "" at the end.
        separator: Pattern between documents; empty matches do not cut.
    """
    text, start, at_end = "", 0, False  # the current document begins at text[start]
    while not at_end:
        kept = max(0, start - _LOOK_BACK)
        more = read(max(CHUNK, len(text) - kept))  # doubling keeps the scan linear
        text, start, at_end = text[kept:] + more, start - kept, not more
        for match in separator.finditer(text, start):
            if not at_end and match.end() > len(text) - _LOOK_AHEAD:
                break
            if match.end() > match.start():
                yield text[start : match.start()]
                start = match.end()
    yield text[start:]


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file of any suffix, which may be compressed, without line endings.

    Raises:
        ValueError: If a line is not UTF-8.
    """
    with open_text(path) as file:
        for _, line in _numbered_lines(path, file):
            yield line.rstrip("\r\n")


def _numbered_lines(path: Path, file: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yields (location for messages, line with its end) of an open text file."""
    for line_number, line in enumerate(file, start=1):
        where = f"{path}, line {line_number}"
        try:
            yield where, line.decode("utf-8-sig" if line_number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(path, where) from error


# ---- JSON


def read_rows(path: Path, *, lone_surrogates: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields (location for messages, row) of a jsonl file, or of a file with one JSON array.

    Args:
        path: File to read.
        lone_surrogates: Whether text may contain half a surrogate pair, as in published corpora.

    Raises:
        ValueError: If a line or an item is not UTF-8 or not JSON, or its text is not UTF-8.
    """
    with open_text(path) as file:
        head = file.peek(HEAD).removeprefix(codecs.BOM_UTF8).lstrip()
        read = _array_items if head.startswith(b"[") else _line_values
        for where, text, row in read(path, file):
            if not lone_surrogates and _SURROGATE.search(text):
                check_utf8(row, where)
            yield where, row


def _line_values(path: Path, file: BinaryIO) -> Iterator[tuple[str, str, Any]]:
    """Yields (location for messages, text, value) of the lines of a jsonl file."""
    for where, line in _numbered_lines(path, file):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(
                f"{where} is not JSON ({error}). The file must have one JSON object on each line "
                "(jsonl), or be one JSON array; correct or remove the line."
            ) from error
        yield where, line, row


def _array_items(path: Path, file: BinaryIO) -> Iterator[tuple[str, str, Any]]:
    """Yields (location for messages, text, value) of the items of a JSON array."""
    text = _JsonText(io.TextIOWrapper(file, encoding="utf-8-sig").read)
    sign = text.sign()  # the opening bracket
    if text.sign(take=False) == "]":
        sign = text.sign()
    for index in itertools.count(1):
        if sign == "]":
            break
        where = f"{path}, item {index}"
        try:
            source, value = text.value()
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}). Correct or remove it.") from error
        yield where, source, value
        sign = text.sign()
        if sign not in (",", "]"):
            after = repr(sign) if sign else "nothing"
            raise ValueError(f"{where} is followed by {after} instead of a comma or ].")
    if sign := text.sign():
        raise ValueError(
            f"{path}: {sign!r} follows the JSON array. The file must be one array, or have one "
            "JSON object per line."
        )


class _JsonText:
    """Incremental reader of a JSON text."""

    _SPACE = re.compile(r"[ \t\r\n]*")
    # If the end of the buffer cuts a value other than a string, decoding fails within this many
    # characters of the end; for "-Infinity" and escaped surrogate pairs.
    _CUT = 16

    def __init__(self, read: Callable[[int], str]) -> None:
        self._read, self._text, self._at = read, "", 0
        self._decoder = json.JSONDecoder()

    def _more(self) -> bool:
        """Reads more text; returns whether there was any."""
        rest = self._text[self._at :]
        more = self._read(max(CHUNK, len(rest)))
        self._text, self._at = rest + more, 0
        return bool(more)

    def sign(self, *, take: bool = True) -> str:
        """Returns the next non-space character, consuming it if `take`; empty at the end."""
        while True:
            self._at = self._SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                sign = self._text[self._at]
                self._at += take
                return sign
            if not self._more():
                return ""

    def value(self) -> tuple[str, Any]:
        """Returns the text of the next value, and the value.

        Raises:
            ValueError: If it is not JSON, is nested too deeply, or a number has too many digits.
        """
        self.sign(take=False)
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                near = error.pos > len(self._text) - self._CUT
                if (near or error.msg.startswith("Unterminated")) and self._more():
                    continue
                raise ValueError(error.msg) from error
            except RecursionError as error:
                raise ValueError("nested too deeply") from error
            if end == len(self._text) and self._more():  # digits may follow
                continue
            source, self._at = self._text[self._at : end], end
            return source, value


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: If it is not JSON, is nested too deeply, or a number has too many digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column" if error.lineno > 1 else "column"
        raise ValueError(f"{error.msg} at {position} {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check_utf8(value: Any, where: str) -> None:
    """Raises a ValueError if a value, or a list or object in it, has text that is not UTF-8.

    Args:
        value: Value from JSON or from a command line.
        where: Its location, for the message.
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
                    f"{where}: the text contains {value[error.start]!a}, half a surrogate pair "
                    "or a byte that is not UTF-8. Correct or remove it."
                ) from error


def text_of(row: Any, field: str, where: str) -> str:
    """Returns the text field of a row; null becomes an empty text.

    Raises:
        ValueError: If `row` has no such field, or it is not text.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: expected an object with the field {field!r}, found {type(row).__name__}."
        )
    if field not in row:
        raise ValueError(
            f"{where}: no field {field!r}; the fields are {', '.join(map(repr, row))}. "
            "Set text_field to one of them."
        )
    if row[field] is None:
        return ""
    if not isinstance(row[field], str):
        raise ValueError(
            f"{where}: the field {field!r} is {type(row[field]).__name__}, not text. Set "
            "text_field."
        )
    return row[field]


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Opens a parquet file.

    Raises:
        ValueError: If it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a parquet file or is truncated ({first_line(error)}). Download or "
            "write it again."
        ) from error


def read_table(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a parquet file.

    Raises:
        ValueError: If it is damaged.
    """
    with _parquet(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def read_column(path: Path, field: str) -> Iterator[str]:
    """Yields the text of every row of a parquet file.

    Raises:
        ValueError: If it is damaged, or has no such column of text.
    """
    with _parquet(path) as file:
        names = file.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{path}: no column {field!r}; the columns are "
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


# ---- tokenised documents

TOKEN_SUFFIXES = (".arrow", ".bin")


def read_tokens(path: Path, column: str = "input_ids") -> Iterator[np.ndarray]:
    """Yields the token ids of a file in pieces (N,), cut at arbitrary positions.

    Args:
        path: File of ids: .arrow with rows as `datasets` saves them, or .bin with consecutive
            uint16 ids (nanoGPT, Megatron).
        column: Column of the .arrow file with the ids.

    Raises:
        ValueError: If the file is damaged, or has no such column.
    """
    import pyarrow as pa

    if path.suffix == ".bin":
        if path.stat().st_size % 2:
            raise ValueError(
                f"{path}: uint16 tokens take 2 bytes each, but the file has an odd number of bytes."
            )
        ids = np.memmap(path, "<u2", "r") if path.stat().st_size else np.empty(0, "<u2")
        for start in range(0, len(ids), CHUNK):
            yield np.asarray(ids[start : start + CHUNK])
        return
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as batches:
            if column not in batches.schema.names:
                raise ValueError(
                    f"{path}: no column {column!r}; the columns are "
                    f"{', '.join(map(repr, batches.schema.names))}."
                )
            for batch in batches:
                yield batch.column(column).flatten().to_numpy(zero_copy_only=False)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not an Arrow stream or is truncated ({first_line(error)}). Get it again."
        ) from error


def cut_at(eos_id: int, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the documents in pieces of token ids, without their EOS."""
    begun = np.empty(0, dtype=np.int64)
    for piece in pieces:
        ids = np.concatenate([begun, piece])
        start = 0
        for end in np.flatnonzero(ids == eos_id).tolist():
            yield ids[start:end]
            start = end + 1
        begun = ids[start:]
    if len(begun):
        yield begun


# ---- prompts for `predict`


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts in a txt (one per line, blank lines skipped), jsonl or parquet file.

    A file with an unknown suffix is read as txt; txt and jsonl may be compressed.

    Raises:
        ValueError: If the file is missing, empty or not UTF-8, or a row's field ``prompt`` has no
            text or text that is not UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"the prompts file {path} does not exist")
    file_format = format_of(path, "text")
    if file_format == "text":
        prompts = [line for line in read_lines(path) if line.strip()]
    elif file_format == "jsonl":
        prompts = [_prompt(row, where) for where, row in read_rows(path)]
    else:
        rows = enumerate(read_table(path), start=1)
        prompts = [_prompt(row, f"{path}, row {index}") for index, row in rows]
    if not prompts:
        raise ValueError(f"the prompts file {path} is empty")
    return prompts


def _prompt(row: Any, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{where}: expected {{"prompt": "text"}}')
    return str(row["prompt"])
