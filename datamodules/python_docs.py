"""The documentation that every CPython carries: real English technical text without a download."""

import ast
import inspect
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from datamodules.splits import split_documents
from datamodules.store import Split
from datamodules.text import TextDataModule

# Folders of the standard library without documentation of it: installed packages and tests.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


class PythonDocs(TextDataModule):
    """Python's reference topics and its library's docstrings: about 1.9 MB of English.

    One document is a topic of ``pydoc_data.topics`` (as ``help("assert")`` shows) or all docstrings
    of one module of the standard library, read from its source file and never imported. Splits are
    by document. The text is that of the running interpreter: another Python version has another
    fingerprint.

    Args:
        min_docstring: Shortest docstring that is taken, in characters; shorter ones are mostly
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
        """Returns the interpreter, whose documentation this is, and the options."""
        return {
            **super().source(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
        }

    def shares(self) -> dict[str, float]:
        """Returns the shares of the documents that are held out."""
        return {"val_fraction": self.val_fraction, "test_fraction": self.test_fraction}

    def documents(self, split: Split) -> Iterator[str]:
        """Yields the documents of a split, topics first, each beginning with its name."""
        return (text for s, text in self.labelled_documents() if s == split)

    def labelled_documents(self) -> Iterator[tuple[Split, str]]:
        """Yields the documents of all splits in one pass."""
        return split_documents(self._documents, **self.shares())

    @cached_property
    def _documents(self) -> list[str]:
        """All documents; kept, since parsing the library takes seconds and they take 2 MB."""
        return [*topics(), *module_documents(self._min_docstring)]


def topics() -> list[str]:
    """Returns the reference topics of ``help()``, sorted by name; a text under two names once."""
    from pydoc_data.topics import topics as texts

    return list(dict.fromkeys(text.strip() + "\n" for _, text in sorted(texts.items())))


def module_documents(min_length: int) -> Iterator[str]:
    """Yields a document for each module of the standard library with a long enough docstring."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in module_files(root):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        text = module_document(path, name, min_length)
        if text:
            yield text


def module_files(root: Path) -> list[Path]:
    """Returns the library's source files, sorted, without tests and installed packages."""
    files = root.rglob("*.py")
    return sorted(p for p in files if not _LEFT_OUT.intersection(p.relative_to(root).parts))


def module_document(path: Path, name: str, min_length: int) -> str:
    """Returns a module's docstrings of at least `min_length` characters, each below its name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(path.read_bytes())
    except (
        SyntaxError,
        ValueError,
        OSError,
    ):  # templates and files of other versions, which some distributions add
        return ""
    found = (
        text
        for text in docstrings(tree, name.removesuffix(".__init__"))
        if len(text[1]) >= min_length
    )
    return "\n".join(f"{title}\n\n{text}\n" for title, text in found)


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
