"""What is known of a store while it is written, so that a killed preparation can go on.

- ``journal.jsonl``: a header, then a line for each finished section: the documents it holds.
- ``place.json``: where in its source the corpus stood at the last finished section, to get there
  again without reading all in front of it. Only a shortcut: lost, it costs time.

Nothing here is changed in place: a full disk leaves the file as it was.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datamodules.readers import parse_json
from datamodules.store import FORMAT, Counts, Split, StoreError, counts_of

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Of the lines themselves; goes up when their meaning changes.
_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Section:
    """A finished stretch of documents: a line of the journal.

    Attributes:
        first: Number of its first document, counted over all splits, empty ones included.
        end: Number after its last document.
        splits: What its shards hold.
        checksums: Of its files, by name; see `BlockChecksums.digits`. Empty in a journal of an
            older version.
    """

    first: int
    end: int
    splits: dict[Split, Counts]
    checksums: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Returns the section as JSON."""
        return json.dumps({**vars(self), "splits": {s: asdict(c) for s, c in self.splits.items()}})

    @staticmethod
    def parse(line: str) -> "Section":
        """Returns the section of a line.

        Raises:
            ValueError: It is not a whole line (or KeyError, TypeError).
        """
        data = parse_json(line)
        splits = {split: counts_of(part) for split, part in data["splits"].items()}
        sums = dict(data.get("checksums", {}))
        return Section(first=data["first"], end=data["end"], splits=splits, checksums=sums)


class Journal:
    """The journal in a folder, read when it is made.

    Args:
        folder: Folder of the unfinished store; need not exist.
        limits: Everything that decides where shards are cut: with other values they could not go
            on.

    Attributes:
        sections: The finished sections.
        origin: What the corpus had settled before the first of them, e.g. the commit of a
            repository; None without a section.
        foreign: Whether there are sections of another format or with other limits.
    """

    def __init__(self, folder: Path, limits: Sequence[int]) -> None:
        self._path, self._place = folder / "journal.jsonl", folder / "place.json"
        self._head = {"format": FORMAT, "journal": _VERSION, "limits": list(limits)}
        self.sections: list[Section] = []
        self.origin: dict[str, Any] | None = None
        self.foreign = False
        if self._path.is_file():
            self._read(self._path.read_text(encoding="utf-8").split("\n"))

    def _read(self, lines: list[str]) -> None:
        header = _parsed(lines[0])
        if {key: header.get(key) for key in self._head} != self._head:
            self.foreign = len(lines) > 2  # a header, a finished section, and their line ends
            return
        self.origin = header.get("origin", {})
        for line in lines[1:-1]:  # after the last line end is nothing, or half a line
            try:
                self.sections.append(Section.parse(line))
            except (ValueError, KeyError, TypeError):
                break
        if lines[-1] or len(self.sections) < len(lines) - 2:
            self.keep(len(self.sections))

    def begin(self, origin: Mapping[str, Any]) -> None:
        """Starts a journal without sections."""
        self.origin, self.sections = dict(origin), []
        self._path.write_text(self._content(), encoding="utf-8")  # nothing to lose yet

    def keep(self, number: int) -> None:
        """Forgets all but the first sections; what follows the last whole line goes, too."""
        self.sections = self.sections[:number]
        write_whole(self._path, self._content())

    def _content(self) -> str:
        header = json.dumps({**self._head, "origin": self.origin})
        return "\n".join([header, *(section.line() for section in self.sections), ""])

    def append(self, section: Section, place: Mapping[str, Any] | None) -> None:
        """Adds a section, whose files are on disk, and where the source stands near its end."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(section.line() + "\n")
        sync(self._path)
        self.sections.append(section)
        if place is not None:
            write_whole(self._place, json.dumps(place))

    def place(self) -> dict[str, Any] | None:
        """Returns the last place; None where there is none, or it cannot be read."""
        with contextlib.suppress(OSError):
            return _parsed(self._place.read_text(encoding="utf-8")) or None
        return None

    def finish(self) -> None:
        """Removes what only an unfinished store needs."""
        self._place.unlink(missing_ok=True)


def _parsed(text: str) -> dict[str, Any]:
    """Returns the JSON object in a text, an empty one where it is none."""
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is, whatever happens, the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Turns the error of a full disk into one that names the folder and the cure.

    Args:
        folder: Where a store is written.

    Raises:
        StoreError: The disk, the user's share of it or a limit of file sizes is used up.
    """
    try:
        yield
    except OSError as error:
        elsewhere = error.filename is not None and folder.parent not in Path(error.filename).parents
        if error.errno not in _NO_ROOM or elsewhere:
            raise
        raise StoreError(
            f"{folder} cannot be written ({error.strerror}). Make room there, or name a cache_dir "
            "on another disk; what is finished is kept, the same command continues from it."
        ) from error


def sync(path: Path) -> None:
    """Makes sure that a file, or the names in a folder, are on disk, not only in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
