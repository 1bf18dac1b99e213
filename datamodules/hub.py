"""Texts of a data set on the Hugging Face hub, downloaded or streamed through `datasets`.

A repository changes under its name; a commit does not. So the commit is asked for once, before the
first document, and everything is read at it.
"""

import contextlib
import errno
import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import Any

from datamodules.readers import text_of
from datamodules.store import Split
from datamodules.tokenizers import first_line

# Which commit and which files are read

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


# Why a data set cannot be read, and what helps


class CorpusUnavailableError(ValueError):
    """A corpus that could not be fetched; the message says what to pass or set instead."""


def explained(
    error: Exception, *, corpus: str, place: str, revision: str | None, cure: str
) -> CorpusUnavailableError:
    """Returns the error to raise for one that occurred while reading from the hub.

    Args:
        error: What occurred.
        corpus: Class that asks.
        place: Repository and split.
        revision: What the user set, None: nothing.
        cure: How to give a copy of one's own, in words that go on with "or".
    """
    what, help_ = _cause(error, revision)
    # `datasets` wraps what happens while it writes its cache; its own words say nothing.
    said = next((e for e in _chain(error) if "Generation" not in type(e).__name__), error)
    reason = f"{type(said).__name__}: {first_line(said)}".removesuffix(".")
    return CorpusUnavailableError(f"{corpus}: {place} {what} ({reason}). {cure}, or {help_}.")


def _cause(error: Exception, revision: str | None) -> tuple[str, str]:
    """Returns what is wrong, and what helps besides a copy of one's own."""
    import pyarrow
    from datasets import exceptions as library
    from huggingface_hub import errors as hub

    chain = list(_chain(error))
    words = " ".join(map(str, chain))

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    if any(getattr(link, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for link in chain):
        return "does not fit on this disk", "set HF_HOME to a folder with more room"
    if any(map(_is_network, chain)):
        return (
            "cannot be read from the Hugging Face hub",
            "set HF_HOME to a cache that holds it, or try again with a network: finished shards "
            "are kept",
        )
    if among(hub.RevisionNotFoundError) or "Revision '" in words:
        return (
            f"has no revision {revision!r} on the Hugging Face hub",
            "set data.revision to a commit, branch or tag of it, or to null for the newest",
        )
    if among(hub.RepositoryNotFoundError, library.DatasetNotFoundError, hub.DisabledRepoError):
        return (
            "is not open to you on the Hugging Face hub: it is gated, private, or gone",
            "ask for access on its page there and log in (hf auth login, or HF_TOKEN)",
        )
    if among(NotLoadableError) or "Dataset scripts are no longer supported" in words:
        return (
            "cannot be loaded as the Hugging Face hub has it",
            "set data.revision to a commit that has data files",
        )
    damaged = (
        pyarrow.ArrowInvalid,
        zlib.error,
        gzip.BadGzipFile,
        EOFError,
        json.JSONDecodeError,
        UnicodeDecodeError,
        library.ChecksumVerificationError,
        library.SplitsVerificationError,
    )
    if among(*damaged):
        return (
            "has a damaged file, on the Hugging Face hub or in HF_HOME",
            "delete its files in HF_HOME and try again: finished shards are kept",
        )
    laid_out = ("BuilderConfig '", "Unknown split", "Bad split")
    if among(FileNotFoundError, hub.EntryNotFoundError) or any(w in words for w in laid_out):
        return (
            "is laid out otherwise on the Hugging Face hub than this version expects",
            "set data.revision to an older commit of it",
        )
    return "could not be read", "try again: finished shards are kept"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_network(error: BaseException) -> bool:
    """Returns whether an error comes from the way to the hub, or its being overloaded."""
    if isinstance(error, ConnectionError | TimeoutError):  # also OfflineModeIsEnabled
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status == 429 or status >= 500
    # Of whatever HTTP library the hub's client uses: httpx, aiohttp (streaming), requests.
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "ClientConnectionError", "LocalEntryNotFoundError"})


# The texts

_ROWS = 64  # rows fetched at once; a paper of peS2o has up to a megabyte
_REPOSITORIES = "hf://datasets/"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a stretch of rows has been read.

    Attributes:
        rows: Rows read.
        documents: Documents in them: rows that are not blank.
        stream: State of a streamed data set, which finds the row without reading those in front of
            it; None where rows have numbers, or at the beginning.
        skipped: Rows in front of the stretch that this stream was told to skip.
        finished: Whether that was all.
    """

    rows: int = 0
    documents: int = 0
    finished: bool = False
    stream: dict[str, Any] | None = None
    skipped: int = 0


class HubTexts:
    """The texts of a split, read from the hub or its cache when they are asked for.

    Args:
        source: What to read.
        streaming: Whether to read over the network as far as needed and keep nothing; else the
            whole split is downloaded into HF_HOME first.
        corpus: Who asks, for messages.
        cure: How to give a copy of one's own, for messages.
    """

    def __init__(self, source: HubSplit, *, streaming: bool, corpus: str, cure: str) -> None:
        self._source, self._streaming = source, streaming
        self._corpus, self._cure = corpus, cure
        self._pin: Pin | None = None
        self._data: Any = None
        self._reachable = False
        self._begun: dict[str, Place] = {}
        self._places: dict[str, Place] = {}

    def __len__(self) -> int:
        """Returns the rows; only for a split that is not streamed.

        Raises:
            CorpusUnavailableError: It cannot be fetched.
        """
        return len(self._opened())

    # Which revision

    def pin(self, stored: Mapping[str, Any] | None = None) -> Pin:
        """Returns what is read: as stored, or, asked once, as the hub has it now.

        Raises:
            CorpusUnavailableError: The hub cannot tell, and no cache can.
        """
        if stored is not None:
            self._pin = Pin(**stored)
        if self._pin is None:
            with self._explaining():
                self._pin = self._find()
        return self._pin

    def _find(self) -> Pin:
        reason = unreachable(self._source.name)
        if reason is None:
            self._reachable = True
            return find(self._source)
        commit = self._cached(reason).hash
        return Pin(name=self._source.name, commit=commit)

    def _cached(self, reason: Exception) -> Any:
        """Returns the data set in the cache, which holds whole ones, where there is no hub.

        Raises:
            Exception: `reason`, where the cache has none, or another commit than is wanted.
        """
        import datasets

        source, wanted = self._source, self._pin.commit if self._pin else self._source.revision
        with _offline():
            try:
                builder = datasets.load_dataset_builder(source.name, source.config)
            except Exception:
                raise reason from None
        if wanted is not None and _COMMIT.fullmatch(wanted) and builder.hash != wanted:
            raise reason
        return builder

    # Reading

    def read(self, first: int = 0, end: int | None = None) -> Iterator[str]:
        """Yields the texts of the rows from `first` up to `end`.

        Raises:
            CorpusUnavailableError: They cannot be fetched; also later, where the network fails.
        """
        for _, texts in self._batches(first, end, Place()):
            yield from texts

    def documents(self, first: int = 0, end: int | None = None) -> Iterator[str]:
        """Yields the texts of those rows that are more than white space.

        After `go_to`, empty texts stand for those in front of the place.

        Raises:
            CorpusUnavailableError: As `read`.
        """
        key = f"{first}:{end}"
        begun = self._begun.get(key, Place())
        yield from repeat("", begun.documents)
        rows, documents = begun.rows, begun.documents
        for state, texts in self._batches(first, end, begun):
            self._places[key] = replace(state, rows=rows, documents=documents)
            for text in texts:
                if text and not text.isspace():
                    yield text
                    documents += 1
            rows += len(texts)
        self._places[key] = Place(rows=rows, documents=documents, finished=True)

    def places(self) -> dict[str, Any]:
        """Returns how far `documents` came, by stretch, for `go_to`; as JSON has it."""
        return {key: asdict(place) for key, place in self._places.items()}

    def go_to(self, places: Mapping[str, Any]) -> None:
        """Lets `documents` begin at these places; at none: at the beginning."""
        self._begun = {key: Place(**place) for key, place in places.items()}
        self.restart()

    def restart(self) -> None:
        """Forgets how far `documents` came beyond the places it was let begin at."""
        self._places = dict(self._begun)

    def _batches(
        self, first: int, end: int | None, place: Place
    ) -> Iterator[tuple[Place, list[str]]]:
        """Yields texts of the rows after a place, with the state of the stream before them."""
        row = first + place.rows
        if place.finished or row == end:
            return
        data = self._opened()
        with self._explaining():
            if hasattr(data, "select"):
                batches = _numbered(data, row, end)
            else:
                batches = _streamed(data, row, place)
            for state, values in batches:
                texts = [
                    self._text(value) for value in values[: None if end is None else end - row]
                ]
                yield state, texts
                row += len(texts)
                if row == end:
                    return
            self._refuse_the_end_of_a_part(row)

    def _text(self, value: str) -> str:
        """Returns the text of a row, or of a line of a jsonl file."""
        if self._source.files is None:
            return value
        return text_of(json.loads(value), "text", self._source.name) if value.strip() else ""

    def _refuse_the_end_of_a_part(self, row: int) -> None:
        if self._pin is not None and self._pin.partial:
            raise CorpusUnavailableError(
                f"{self._corpus}: the hub's conversion of {self._source.name} has only the first "
                f"{row} rows. {self._cure}, or set data.train_tokens so low that they suffice."
            )

    # Opening

    def _opened(self) -> Any:
        if self._data is None:
            pin = self.pin()
            with self._explaining():
                self._data = self._open(pin)
        return self._data

    def _open(self, pin: Pin) -> Any:
        reason = None if self._reachable else unreachable(self._source.name)
        if reason is not None:
            with _offline():
                return _whole(self._cached(reason), self._source.split)
        if pin.partial and not self._streaming:
            self._refuse_the_whole_of_a_part()
        return self._load(pin)

    def _refuse_the_whole_of_a_part(self) -> None:
        raise CorpusUnavailableError(
            f"{self._corpus}: {self._source.name} is a script, which `datasets` no longer runs, "
            f"and the hub's conversion of it has only its beginning. {self._cure}, or set "
            "data.train_tokens."
        )

    def _load(self, pin: Pin) -> Any:
        import datasets

        source = self._source
        files = source.files or pin.files
        if files is None:
            builder = datasets.load_dataset_builder(source.name, source.config, revision=pin.commit)
            if builder.hash != pin.commit:  # `datasets` takes any cached one if the hub stumbles
                raise ConnectionError(f"got the revision {builder.hash}, not {pin.commit}")
        else:
            # As lines: the library's json loader wants one schema in all files, and fails where a
            # field that we do not need is null in one and a date in the next.
            builder = datasets.load_dataset_builder(
                "text" if source.files else "parquet",
                data_files={source.split: f"{_REPOSITORIES}{source.name}@{pin.commit}/{files}"},
            )
        if self._streaming:
            return builder.as_streaming_dataset(split=source.split)
        return _whole(builder, source.split)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turns any error into one that says what helps."""
        try:
            yield
        except CorpusUnavailableError:
            raise
        except Exception as error:
            raise explained(
                error,
                corpus=self._corpus,
                place=f"{self._source.name} ({self._source.split})",
                revision=self._source.revision,
                cure=self._cure,
            ) from error


def _whole(builder: Any, split: str) -> Any:
    """Returns a split with numbered rows, downloaded where that is not done."""
    builder.download_and_prepare()
    return builder.as_dataset(split=split).select_columns(["text"])


def _numbered(data: Any, row: int, end: int | None) -> Iterator[tuple[Place, list[str]]]:
    """Yields texts from a row on, where rows have numbers."""
    rows = data.select(range(row, len(data) if end is None else end))
    for batch in rows.iter(batch_size=_ROWS):
        yield Place(), batch["text"]


def _streamed(data: Any, row: int, place: Place) -> Iterator[tuple[Place, list[str]]]:
    """Yields texts from a row on, with the state of the stream before each batch of them."""
    import datasets

    data = data.select_columns(["text"])  # a new object: the state belongs to one reading
    saved = place.stream
    skipped = place.skipped if saved and saved["datasets"] == datasets.__version__ else row
    data = data.skip(skipped) if skipped else data
    state = None
    if saved and saved["datasets"] == datasets.__version__:
        data.load_state_dict(saved["state"])
        state = saved
    for batch in data.iter(batch_size=_ROWS):
        yield Place(stream=state, skipped=skipped), batch["text"]
        state = {"datasets": datasets.__version__, "state": data.state_dict()}


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keeps both libraries off the network."""
    import datasets
    import huggingface_hub.constants as hub

    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


# Where the reading stands

_EVERY = 1024  # documents between two noted places: what is read again is at most so many


class HubProgress:
    """Pins the splits of a corpus, and notes places while their documents pass.

    Args:
        texts: The splits that are read from the hub.
    """

    def __init__(self, texts: Mapping[Split, HubTexts]) -> None:
        self._texts = texts
        self._marks: deque[dict[str, Any]] = deque()

    def pin(self, stored: Mapping[str, Any] | None) -> dict[str, Any]:
        """Settles the commit of each split; see `prepare.Remote`."""
        pins = {} if stored is None else stored
        return {split: asdict(t.pin(pins.get(split))) for split, t in self._texts.items()}

    def notes(self) -> list[str]:
        """Returns what a user should know of the files that are read, a sentence each."""
        pins: list[Pin] = [texts.pin() for texts in self._texts.values()]
        return list(dict.fromkeys(note for pin in pins for note in pin.notes()))

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Goes to a place that `place` returned."""
        for split, texts in self._texts.items():
            texts.go_to(place["splits"].get(split, {}))

    def watch(self, documents: Iterable[tuple[Split, str]]) -> Iterator[tuple[Split, str]]:
        """Yields the documents, which begin at the first one, and notes places on the way."""
        self._marks.clear()
        for texts in self._texts.values():
            texts.restart()  # they may have been read before, to train a tokenizer
        try:
            for number, document in enumerate(documents):
                if number % _EVERY == 0:
                    splits = {split: texts.places() for split, texts in self._texts.items()}
                    self._marks.append({"document": number, "splits": splits})
                yield document
        finally:
            for texts in self._texts.values():
                texts.go_to({})

    def place(self, document: int) -> dict[str, Any] | None:
        """Returns the last place at or in front of a document; earlier ones are forgotten."""
        found = None
        while self._marks and self._marks[0]["document"] <= document:
            found = self._marks.popleft()
        if found is not None:
            self._marks.appendleft(found)
        return found
