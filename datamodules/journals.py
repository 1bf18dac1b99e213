"""Files that survive being killed, and the journal of a text store that is being written.

The journal is what is known of an unfinished store, so that a killed preparation can go on: a
header, then a line for each finished section with the documents it holds. It is written whole each
time, and never changed in place: a full disk leaves the file as it was.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from datamodules.readers import parse_json
from datamodules.store import FORMAT, Counts, Split, StoreError, counts_of

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Holds the lock of an output.

    Raises:
        ValueError: Another process has it.
    """
    lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"output ({output}) is being written by another process; wait for it, or name another "
            "file"
        ) from error
    try:
        yield
    finally:
        lock.release()


def append_durably(path: Path, data: bytes) -> None:
    """Adds bytes to a file; they are on the disk when this returns."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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


# The journal of a text store

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
    """The journal in the folder of an unfinished store, read when it is made.

    Args:
        folder: The folder; need not exist.
        limits: Everything that decides where shards are cut: with other values they could not go
            on.

    Attributes:
        sections: The finished sections.
        origin: What the corpus had settled before the first of them, e.g. the commit of a
            repository; None without a section.
        place: Where in its source the corpus stood near the end of the last section, to get there
            again without reading all before it; None: not known.
        foreign: Whether there are sections of another format or with other limits.
    """

    def __init__(self, folder: Path, limits: Sequence[int]) -> None:
        self._path = folder / "journal.jsonl"
        self._head = {"format": FORMAT, "journal": _VERSION, "limits": list(limits)}
        self.sections: list[Section] = []
        self.origin: dict[str, Any] | None = None
        self.place: dict[str, Any] | None = None
        self.foreign = False
        if self._path.is_file():
            self._read(self._path.read_text(encoding="utf-8").split("\n"))

    def _read(self, lines: list[str]) -> None:
        header = _parsed(lines[0])
        if {key: header.get(key) for key in self._head} != self._head:
            self.foreign = len(lines) > 2  # a header, a finished section, and their line ends
            return
        self.origin, self.place = header.get("origin", {}), header.get("place")
        for line in lines[1:-1]:  # after the last line end is nothing, or half a line
            try:
                self.sections.append(Section.parse(line))
            except (ValueError, KeyError, TypeError):
                break
        if lines[-1] or len(self.sections) < len(lines) - 2:
            self._write()

    def begin(self, origin: Mapping[str, Any]) -> None:
        """Starts a journal without sections."""
        self.origin, self.place, self.sections = dict(origin), None, []
        self._write()

    def keep(self, number: int) -> None:
        """Forgets all but the first sections."""
        self.sections = self.sections[:number]
        self._write()

    def append(self, section: Section, place: Mapping[str, Any] | None) -> None:
        """Adds a section, whose files are on disk, and where the source stands near its end."""
        self.sections.append(section)
        self.place = self.place if place is None else dict(place)
        self._write()

    def finish(self) -> None:
        """Leaves out what only an unfinished store needs."""
        self.place = None
        self._write()

    def _write(self) -> None:
        place = {} if self.place is None else {"place": self.place}
        header = json.dumps({**self._head, "origin": self.origin, **place})
        lines = [header, *(section.line() for section in self.sections), ""]
        write_whole(self._path, "\n".join(lines))


def _parsed(text: str) -> dict[str, Any]:
    """Returns the JSON object in a text, an empty one where it is none."""
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
