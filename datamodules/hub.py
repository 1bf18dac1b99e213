"""Files of a dataset on the Hugging Face hub, fetched at one commit into the hub's cache.

A repository can change, a commit cannot. The commit is therefore resolved once, before the first
file, and all files are fetched at it. `readers` reads them like local files; no script of the
repository runs. Fetched files stay in HF_HOME.
"""

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from datamodules.tokenizer_base import first_line

CONVERSION = "refs/convert/parquet"  # branch with the hub's conversion of a dataset
_TIMEOUT = 10  # seconds per request to the hub


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """A split of a dataset on the hub.

    Attributes:
        name: Repository, e.g. ``"Salesforce/wikitext"``.
        split: Name of the split in the repository.
        config: Configuration, or None for the only one.
        files: Glob of jsonl files in the repository, if it also has other files.
        revision: Commit, branch or tag, the newest commit by default.
        pattern: Glob of its files, or several separated by |; * also matches /. Defaults to
            `files`.
    """

    name: str
    split: str
    config: str | None = None
    files: str | None = None
    revision: str | None = None
    pattern: str = field(default="", repr=False)

    @property
    def identity(self) -> dict[str, str]:
        """Values that enter a data fingerprint."""
        return {k: v for k, v in vars(self).items() if v is not None and k != "pattern"}


def check_revision(revision: str | None, data_files: str | list[str] | None) -> None:
    """Raises a ValueError if a revision is given for local files."""
    if data_files is not None and revision is not None:
        raise ValueError(
            f"revision={revision!r} belongs to the hub's repository, but data_files are read "
            "instead of it. Set data.revision or data.data_files to null."
        )


def dataset_info(name: str, revision: str | None = None) -> Any:
    """Returns the hub's record of a dataset, with ``sha`` and the files (``siblings``)."""
    import huggingface_hub

    return huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=_TIMEOUT)


class RowsWarning(UserWarning):
    """Warns that a dataset of the hub does not have the published number of rows."""


def check_rows(where: str, rows: int, published: int | None) -> None:
    """Warns if the number of rows of a split differs from the published one.

    Args:
        where: Repository, split and commit, for the message.
        rows: Number of rows read.
        published: Number of rows that the authors state, if any.
    """
    if published is not None and rows != published:
        rank_zero_warn(
            f"{where} has {rows:,} rows, but {published:,} were published: set data.revision to "
            "another commit, or report it with results.",
            category=RowsWarning,
        )


class CorpusUnavailableError(ValueError):
    """Raised when a corpus cannot be fetched; the message says what to pass or set instead."""


class HubFiles:
    """The files of a split, fetched one after another as they are iterated over.

    Without a network, the hub's cache is used if it has all of them.

    Args:
        name: Repository.
        pattern: Glob of their paths in the repository, or several separated by |; * also matches /.
        revision: Commit, branch or tag, the newest commit by default.
        corpus: Name of the corpus, for messages.
        label: Name of the split or files, for messages.
        cure: How to pass a local copy; the message continues it with "or".
        ahead: Whether to fetch all files, in parallel, before the first one is read.
    """

    def __init__(
        self,
        name: str,
        pattern: str,
        *,
        revision: str | None = None,
        corpus: str,
        label: str,
        cure: str,
        ahead: bool = True,
    ) -> None:
        self._name, self._pattern, self._revision = name, pattern, revision
        self._corpus, self._label, self._cure, self._ahead = corpus, label, cure, ahead
        self._commit: str | None = None
        self._files: list[str] | None = None

    def pin(self, stored: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Returns the repository's name and commit: the stored commit, or else the hub's newest.

        Raises:
            CorpusUnavailableError: If neither the hub nor its cache has it.
        """
        if stored is not None and stored["commit"] != self._commit:
            self._commit, self._files = stored["commit"], None
        if self._files is None:
            with self._explaining():
                self._commit, self._files = self._listed(self._commit or self._revision)
        assert self._commit is not None
        return {"name": self._name, "commit": self._commit}

    def __iter__(self) -> Iterator[Path]:
        """Yields the files, sorted by name.

        Raises:
            CorpusUnavailableError: If one cannot be fetched.
        """
        import huggingface_hub

        commit = self.pin()["commit"]
        assert self._files is not None
        if self._ahead:
            self._ahead = False
            with self._explaining():
                huggingface_hub.snapshot_download(
                    self._name, repo_type="dataset", revision=commit, allow_patterns=self._files
                )
        for file in self._files:
            with self._explaining():
                path = huggingface_hub.hf_hub_download(
                    self._name, file, repo_type="dataset", revision=commit
                )
            yield Path(path)

    def _listed(self, revision: str | None) -> tuple[str, list[str]]:
        """Returns commit and files of a revision, from the hub or its cache."""
        try:
            info = dataset_info(self._name, revision)
        except Exception as reason:
            return self._cached(revision, reason)
        files = self._fitting(sibling.rfilename for sibling in info.siblings)
        if not files:
            raise FileNotFoundError(f"no file matches {self._pattern}")
        return info.sha, files

    def _cached(self, revision: str | None, reason: Exception) -> tuple[str, list[str]]:
        """Returns commit and files in the cache; raises `reason` unless it has all of them."""
        import huggingface_hub

        try:
            cached = huggingface_hub.snapshot_download(
                self._name, repo_type="dataset", revision=revision, local_files_only=True
            )
        except Exception:
            raise reason from None
        folder = Path(cached)
        paths = (path for path in folder.rglob("*") if path.is_file())
        files = self._fitting(path.relative_to(folder).as_posix() for path in paths)
        if self._pattern == "*" and files:  # of several splits, so names give no total
            return folder.name, files
        total = re.search(r"-of-(\d+)", files[0]) if files else None
        if not files or (total is not None and int(total[1]) != len(files)):
            raise reason
        if total is None:
            rank_zero_warn(
                f"{self._name}: the hub cannot be reached; the {len(files)} cached files that "
                f"match {self._pattern} are assumed to be all of them."
            )
        return folder.name, files

    def _fitting(self, names: Iterator[str]) -> list[str]:
        globs = self._pattern.split("|")
        return sorted(n for n in names if any(fnmatchcase(n, pattern) for pattern in globs))

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Converts any error into one that names a remedy."""
        try:
            yield
        except Exception as error:
            problem, cure = _cause(error)
            problem = problem.format(revision=self._revision)
            reason = f"{type(error).__name__}: {first_line(error)}".removesuffix(".")
            raise CorpusUnavailableError(
                f"{self._corpus}: {self._name} ({self._label}) {problem} ({reason}). "
                f"{self._cure}, or {cure}."
            ) from error


def _cause(error: Exception) -> tuple[str, str]:
    """Returns the problem, and a remedy other than a local copy."""
    from huggingface_hub import errors

    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return "does not fit on this disk", "set HF_HOME to a folder with more space"
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            "has no revision {revision!r} on the Hugging Face hub",
            "set data.revision to a commit, branch or tag of it, or to null for the newest",
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.DisabledRepoError):
        return (
            "is not accessible to you on the Hugging Face hub: it is gated, private or deleted",
            "request access on its page and log in (hf auth login, or HF_TOKEN)",
        )
    missing = isinstance(error, errors.EntryNotFoundError | FileNotFoundError)
    if missing and not isinstance(error, errors.LocalEntryNotFoundError):  # means no network
        return (
            "has a layout on the Hugging Face hub that this version does not expect",
            "set data.revision to an older commit",
        )
    return (
        "cannot be read from the Hugging Face hub",
        "set HF_HOME to a cache that has it, or try again with a network: finished parts are kept",
    )
