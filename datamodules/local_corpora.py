"""Corpora that need no download: local files, and the documentation shipped with CPython."""

import ast
import hashlib
import inspect
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from datamodules.base import choice_problems, raise_problems
from datamodules.corpus import split_documents
from datamodules.files import Format, expand, format_of
from datamodules.readers import Separator, read_documents, read_files
from datamodules.store import SPLITS, Split
from datamodules.text import TextDataModule

_WHOLE = 2**26  # files up to this size, in bytes, are hashed whole
_SAMPLES, _SAMPLE = 64, 2**16  # larger files: number of evenly spaced pieces, bytes of each
PASSAGES, _SHORTEST = 50, 500  # passages of a single-file book; minimum number of characters
_ENDS = tuple(map(re.compile, (r"\n\s*\n", r"\n", r"\s")))  # passage ends, best first

Patterns = dict[Split, str | list[str] | None]  # paths and globs of each split
FILE_KEYS: dict[Split, str] = {"train": "data_files", "val": "val_files", "test": "test_files"}


class LocalText(TextDataModule):
    """Text from local files: txt, jsonl or parquet.

    A txt file is one document, or is cut by `separator`; each row of the others is a document. Txt
    and jsonl files may be compressed as .gz or .zst, and a .json file may be one array. A file with
    several names (links) is read once. Each split is either explicit (`val_files`,
    `test_files`) or a share of the documents of `data_files` (`val_fraction`, `test_fraction`). If
    documents are held out from a single txt file, it is cut into about 50 passages at ends of
    paragraphs, which are its documents.

    Args:
        data_files: Files to train on: one path or glob, or a list of them; ** matches folders at
            any depth. Null if only val_files or test_files are scored.
        val_files: Files of the validation split. Null holds out val_fraction of the documents of
            data_files.
        test_files: Files of the test split. Null holds out test_fraction of the documents of
            data_files.
        text_field: Field (jsonl) or column (parquet) with the text.
        separator: Regular expression that cuts txt files into documents, e.g. three newlines. Null
            reads each file as one document, except for a single file that is cut into passages.
        format: Format of files with an unknown suffix (Changes.old.gz): 'text', 'jsonl' or
            'parquet'. Null rejects them.
        **kwargs: See `TextDataModule`.

    Raises:
        ValueError: If an argument is invalid: a missing file, an unknown format, a broken pattern,
            or a file in two splits.
    """

    def __init__(
        self,
        *,
        data_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        text_field: str = "text",
        separator: str | None = None,
        format: Format | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if format is not None:
            raise_problems(choice_problems(("text", "jsonl", "parquet"), format=format))
        self._patterns: Patterns = {"train": data_files, "val": val_files, "test": test_files}
        self._text_field = text_field
        self._separator = None if separator is None else Separator(separator).expression
        self._written_separator = separator
        self._format = format
        if data_files is None and val_files is None and test_files is None:
            raise ValueError("data_files (null) names no text: set data.data_files to your files.")
        # Held-out shares of data_files, for the splits without separate files.
        shared = {"val_fraction": val_files, "test_fraction": test_files}
        self._shares = {
            key: getattr(self, key) if files is None and data_files is not None else 0.0
            for key, files in shared.items()
        }

    @cached_property
    def files(self) -> dict[Split, list[Path]]:
        """Files of each split, in reading order; none for a split held out from data_files.

        Raises:
            ValueError: If a file is missing, of unknown format, or in two splits.
        """
        return files_of_splits(self._patterns, self._format_of)

    def _format_of(self, path: Path) -> Format:
        return format_of(path, self._format)

    def source(self) -> dict[str, Any]:
        """Returns name (without folder), size and hash of every file, and the reading options."""
        return {
            "corpus": type(self).__name__,
            "files": {
                split: [identify(path) for path in paths] for split, paths in self.files.items()
            },
            "text_field": self._text_field,
            "separator": self._separator,
            **({"passages": PASSAGES} if self._is_one_book else {}),
            **({} if self._format is None else {"format": self._format}),
            **self._shares,
        }

    @property
    def _is_one_book(self) -> bool:
        """Whether a single txt file must be cut into passages to populate several splits."""
        files = self.files["train"]
        uncut = self._separator is None and len(files) == 1 and self._format_of(files[0]) == "text"
        return uncut and any(share > 0 for share in self._shares.values())

    def notes(self) -> list[str]:
        if not self._is_one_book:
            return []
        shares = " and ".join(f"{k}={share}" for k, share in self._shares.items() if share > 0)
        return [
            f"{self.files['train'][0].name}, the only file, is cut into passages at ends of "
            f"paragraphs, of which {shares} are held out; data.separator cuts elsewhere."
        ]

    def expects(self, split: Split) -> bool:
        """Returns whether a split must have documents, because it has files or a share."""
        return self._patterns[split] is not None or self._shares.get(f"{split}_fraction", 0) > 0

    def shares(self) -> dict[str, float]:
        return dict(self._shares)

    def smaller_splits(self) -> str:
        files = self.files["train"]
        uncut = self._separator is None and any(self._format_of(p) == "text" for p in files)
        cut = " (data.separator cuts txt files)" if uncut else ""
        return f"more documents{cut}, separate files (data.val_files, data.test_files)"

    def setup(self, stage: str | None = None) -> None:
        """Opens the text store.

        Raises:
            ValueError: If there are no files to train on.
        """
        if stage == "fit" and self._patterns["train"] is None:
            raise ValueError("data_files (null): set data.data_files to the files to train on.")
        super().setup(stage)

    def documents(self, split: Split) -> Iterator[str]:
        return (text for s, text in self.labelled_documents() if s == split)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        yield from split_documents(self._read("train"), **self._shares)
        for split in SPLITS[1:]:
            for text in self._read(split):
                yield split, text

    def _read(self, split: Split) -> Iterator[str]:
        cut = None if self._written_separator is None else Separator(self._written_separator)
        read = partial(
            read_documents,
            text_field=self._text_field,
            separator=cut,
            default_format=self._format,
        )
        texts = read_files(self.files[split], read)
        if split == "train" and self._is_one_book:
            texts = (part for text in texts for part in passages(text) if part.strip())
        yield from texts
        if cut is not None and (warning := cut.warning()) is not None:
            rank_zero_warn(warning)


def passages(text: str) -> list[str]:
    """Cuts a text into at most 50 pieces of about equal length, which concatenate to the text.

    A piece has at least 500 characters and ends with a blank line or, if none is near, at the end
    of a line or a word.
    """
    length = max(_SHORTEST, -(-len(text) // PASSAGES))  # plus up to half of it, to find an end
    pieces: list[str] = []
    start = 0
    while 2 * (len(text) - start) >= 5 * length:
        at = start + length
        matches = (end.search(text, at, at + length // 2) for end in _ENDS)
        stop = next((match.end() for match in matches if match), at)
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def files_of_splits(
    patterns: Patterns, check: Callable[[Path], Any] = format_of
) -> dict[Split, list[Path]]:
    """Returns the files of each split, in reading order; none for a split without a pattern.

    Args:
        patterns: Paths and globs of each split, or None for a split without files.
        check: Raises a ValueError for a file that cannot be read.

    Raises:
        ValueError: If a file is missing, of unknown format, or in two splits.
    """
    files: dict[Split, list[Path]] = {}
    seen: dict[Path, str] = {}
    for split in SPLITS:
        paths = patterns[split]
        files[split] = [] if paths is None else expand(paths)
        for path in files[split]:
            check(path)
            other = seen.setdefault(path.resolve(), FILE_KEYS[split])
            if other != FILE_KEYS[split]:
                raise ValueError(
                    f"{path} is in {other} and in {FILE_KEYS[split]}: training text cannot be held "
                    "out. Remove it from one of them."
                )
    if patterns["train"] is not None and not files["train"]:
        raise ValueError("data_files is empty. Name at least one file.")
    return files


def identify(path: Path) -> dict[str, Any]:
    """Returns name, size in bytes and SHA-256 of a file.

    For a file above 64 MiB, only 64 evenly spaced pieces of 64 KiB are hashed, so that a corpus of
    terabytes need not be read to recognise it. An edit between the pieces that keeps the size goes
    unnoticed.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest = hashlib.file_digest(file, "sha256")
        else:
            for i in range(_SAMPLES):
                file.seek(i * (size - _SAMPLE) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


# Folders of the standard library to skip: installed packages and tests.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


class PythonDocs(TextDataModule):
    """Python's reference topics and its library's docstrings: about 1.9 MB of English.

    Each document is a topic of ``pydoc_data.topics`` (as ``help("assert")`` shows) or all
    docstrings of one module of the standard library, read from its source file and never imported.
    Splits are by document. The text comes from the running interpreter, so a different Python
    version has a different fingerprint.

    Args:
        min_docstring: Minimum length of a docstring, in characters; shorter ones are mostly
            one-liners.
        **kwargs: See `TextDataModule`.
    """

    def __init__(self, *, min_docstring: int = 200, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if min_docstring < 0:
            raise ValueError(
                f"min_docstring={min_docstring} must not be negative; 200 leaves out one-liners."
            )
        self._min_docstring = min_docstring

    def source(self) -> dict[str, Any]:
        return {
            **super().source(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
        }

    def shares(self) -> dict[str, float]:
        return {"val_fraction": self.val_fraction, "test_fraction": self.test_fraction}

    def documents(self, split: Split) -> Iterator[str]:
        return (text for s, text in self.labelled_documents() if s == split)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        documents = [*topics(), *module_documents(self._min_docstring)]
        return split_documents(documents, **self.shares())


def topics() -> list[str]:
    """Returns the reference topics of ``help()`` without duplicates, sorted by name."""
    from pydoc_data.topics import topics as texts

    return list(dict.fromkeys(text.strip() + "\n" for _, text in sorted(texts.items())))


@cache
def module_documents(min_length: int) -> tuple[str, ...]:
    """Returns a document for each module of the standard library with a long enough docstring.

    The result is cached: parsing the library takes seconds, and the documents take 2 MB.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = module_files(root)
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in files]
    documents = map(module_document, files, names, repeat(min_length))
    return tuple(filter(None, documents))


def module_files(root: Path) -> list[Path]:
    """Returns the library's source files, sorted, without tests and installed packages."""
    files = root.rglob("*.py")
    return sorted(p for p in files if not _LEFT_OUT.intersection(p.relative_to(root).parts))


def module_document(path: Path, name: str, min_length: int) -> str:
    """Returns a module's docstrings of at least `min_length` characters, each under its name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(path.read_bytes())
    except (
        SyntaxError,
        ValueError,
        OSError,
    ):  # templates and files of other Python versions, which some distributions add
        return ""
    entries = (
        text
        for text in docstrings(tree, name.removesuffix(".__init__"))
        if len(text[1]) >= min_length
    )
    return "\n".join(f"{title}\n\n{text}\n" for title, text in entries)


def docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yields (qualified name, docstring) of a module and what it defines, in source order."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield name, inspect.cleandoc(text)
    for child in ast.iter_child_nodes(node):
        inner = getattr(child, "name", None)
        is_definition = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from docstrings(child, f"{name}.{inner}" if is_definition else name)
