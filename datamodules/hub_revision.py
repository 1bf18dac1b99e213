"""Which commit of a data set on the hub is read, and which of its files.

A repository changes under its name; a commit does not. So the commit is asked for once, before the
first document, and everything is read at it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CONVERSION = "refs/convert/parquet"  # the hub's own conversion of a data set, a branch next to it
_TIMEOUT = 10  # seconds for a question to the hub: `datasets` tries for 20 before it gives up
_DATA = re.compile(r"\.(parquet|arrow|jsonl?|ndjson|csv|txt)(\.(gz|zst|bz2|xz))?$")
# Of the conversion: <configuration>/<split>/0000.parquet; of a large one the first 5 GB are all.
_CONVERTED = re.compile(r"(?P<config>[^/]+)/(?P<partial>partial-)?(?P<split>[^/]+)/\d+\.parquet")


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """A split of a data set on the hub.

    Attributes:
        name: Repository, e.g. ``"Salesforce/wikitext"``.
        split: Its name there.
        config: Configuration, None for the only one.
        files: Glob of jsonl files in the repository, for those whose own loader is a script, which
            `datasets` no longer runs; None: the repository describes itself.
        revision: Commit, branch or tag; None: the newest.
    """

    name: str
    split: str
    config: str | None = None
    files: str | None = None
    revision: str | None = None

    @property
    def identity(self) -> dict[str, str]:
        """What goes into a data fingerprint."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Pin:
    """What is read of a split.

    Attributes:
        name: Repository.
        commit: Its commit.
        files: Glob of parquet files in it, where it is the hub's conversion; None: the repository
            describes itself.
        partial: Whether the conversion has only the beginning of the split.
    """

    name: str
    commit: str
    files: str | None = None
    partial: bool = False

    def notes(self) -> list[str]:
        """Returns what a user should know of these files, a sentence each."""
        if self.files is None:
            return []
        part = ", which has only the beginning of the split" if self.partial else ""
        return [f"{self.name} is read from the hub's conversion to parquet{part}."]


class NotLoadableError(Exception):
    """A repository without files that can be loaded; the message says what it has instead."""


def find(source: HubSplit) -> Pin:
    """Asks the hub for the commit and the files of a split.

    A repository that is a script, or has no data files, is read from the hub's own conversion.

    Raises:
        NotLoadableError: It has no conversion, or not of that split.
        Exception: As `huggingface_hub` raises them, without a network for example.
    """
    info = dataset_info(source.name, source.revision)
    names = [file.rfilename for file in info.siblings or ()]
    if source.files is not None:
        return Pin(name=source.name, commit=info.sha)
    if _loads_itself(source.name, names):
        return Pin(name=source.name, commit=info.sha)
    if any(map(_CONVERTED.fullmatch, names)):  # asked for as the revision
        return _converted(source, info.sha, names)
    if source.revision is not None:
        raise NotLoadableError(
            f"at the revision {source.revision!r} it is a script, or has no data files. Set "
            f"data.revision to null, {CONVERSION!r}, or a commit with parquet files"
        )
    info = _conversion_of(source.name)
    return _converted(source, info.sha, [file.rfilename for file in info.siblings or ()])


def dataset_info(name: str, revision: str | None = None) -> Any:
    """Returns what the hub tells of a data set: ``sha`` and the files (``siblings``)."""
    import huggingface_hub

    return huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=_TIMEOUT)


def unreachable(name: str) -> Exception | None:
    """Returns why the hub cannot tell about a data set, None if it can."""
    try:
        dataset_info(name)
    except Exception as error:
        return error
    return None


def _loads_itself(name: str, files: Iterable[str]) -> bool:
    """Returns whether `datasets` can load a repository: one with a script it refuses outright."""
    names = set(files)
    if f"{name.rpartition('/')[2]}.py" in names or any(map(_CONVERTED.fullmatch, names)):
        return False
    return any(map(_DATA.search, names))


def _conversion_of(name: str) -> Any:
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return dataset_info(name, CONVERSION)
    except RevisionNotFoundError as error:
        raise NotLoadableError(
            "it is a script, which `datasets` no longer runs, or has no data files, and the hub "
            "has no conversion of it to parquet"
        ) from error


def _converted(source: HubSplit, commit: str, files: Iterable[str]) -> Pin:
    """Returns the place of a split in the hub's conversion, whole if there is a whole one."""
    found = [match for match in map(_CONVERTED.fullmatch, files) if match]
    fitting = [
        match
        for match in found
        if match["split"] == source.split and source.config in (None, match["config"])
    ]
    configs = {match["config"] for match in fitting}
    if len(configs) != 1:
        wanted = source.split if source.config is None else f"{source.config}/{source.split}"
        there = ", ".join(sorted({f"{m['config']}/{m['split']}" for m in found})) or "nothing"
        raise NotLoadableError(
            f"the hub's conversion of it has no (or no single) split {wanted!r}; it has {there}"
        )
    partial = all(match["partial"] for match in fitting)
    folder = f"{configs.pop()}/{'partial-' if partial else ''}{source.split}"
    return Pin(name=source.name, commit=commit, files=f"{folder}/*.parquet", partial=partial)
