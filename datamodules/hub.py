"""Texts of a data set on the Hugging Face hub, downloaded or streamed through `datasets`.

A repository changes under its name; a commit does not. So the commit is asked for once, before the
first document, and everything is read at it.
"""

import contextlib
import errno
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import Any

from datamodules.readers import text_of
from datamodules.store import Split
from datamodules.tokenizers import first_line

CONVERSION = "refs/convert/parquet"  # the hub's own conversion of a data set, a branch next to it
_TIMEOUT = 10  # seconds for a question to the hub: `datasets` tries for 20 before it gives up
_ROWS = 64  # rows fetched at once; a paper of peS2o has up to a megabyte
_REPOSITORIES = "hf://datasets/"
_COMMIT = re.compile(r"[0-9a-f]{40}")


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


def dataset_info(name: str, revision: str | None = None) -> Any:
    """Returns what the hub says of a data set: ``sha`` and the files (``siblings``)."""
    import huggingface_hub

    return huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=_TIMEOUT)


def unreachable(name: str) -> Exception | None:
    """Returns why the hub cannot be asked about a data set, None if it can."""
    try:
        dataset_info(name)
    except Exception as error:
        return error
    return None


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
    what, help_ = _cause(error)
    # `datasets` wraps what happens while it writes its cache; its own words say nothing.
    said = next((e for e in _chain(error) if "Generation" not in type(e).__name__), error)
    reason = f"{type(said).__name__}: {first_line(said)}".removesuffix(".")
    what = what.format(revision=revision)
    return CorpusUnavailableError(f"{corpus}: {place} {what} ({reason}). {cure}, or {help_}.")


# Names of error classes, of whatever HTTP library the hub's client uses (httpx, aiohttp, requests),
# and pieces of messages; then what is wrong, and what helps apart from a copy of one's own.
_NETWORK = {"ConnectionError", "TimeoutError", "TransportError", "ClientConnectionError"}
_CAUSES: list[tuple[set[str], tuple[str, ...], str, str]] = [
    (
        {*_NETWORK, "LocalEntryNotFoundError"},
        (),
        "cannot be read from the Hugging Face hub",
        "set HF_HOME to a cache that holds it, or try again with a network: finished shards are "
        "kept",
    ),
    (
        {"RevisionNotFoundError"},
        ("Revision '",),
        "has no revision {revision!r} on the Hugging Face hub",
        "set data.revision to a commit, branch or tag of it, or to null for the newest",
    ),
    (
        {"RepositoryNotFoundError", "DatasetNotFoundError", "DisabledRepoError"},
        (),
        "is not open to you on the Hugging Face hub: it is gated, private, or gone",
        "ask for access on its page there and log in (hf auth login, or HF_TOKEN)",
    ),
    (
        set(),
        ("Dataset scripts are no longer supported",),
        "cannot be loaded as the Hugging Face hub has it",
        "set data.revision to a commit that has data files",
    ),
    (
        {"ArrowInvalid", "BadGzipFile", "EOFError", "JSONDecodeError", "UnicodeDecodeError"}
        | {"ChecksumVerificationError", "SplitsVerificationError"},
        ("while decompressing",),
        "has a damaged file, on the Hugging Face hub or in HF_HOME",
        "delete its files in HF_HOME and try again: finished shards are kept",
    ),
    (
        {"FileNotFoundError", "EntryNotFoundError"},
        ("BuilderConfig '", "Unknown split", "Bad split"),
        "is laid out otherwise on the Hugging Face hub than this version expects",
        "set data.revision to an older commit of it",
    ),
]


def _cause(error: Exception) -> tuple[str, str]:
    """Returns what is wrong, and what helps apart from a copy of one's own."""
    chain = list(_chain(error))
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    words = " ".join(map(str, chain))
    if any(getattr(link, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for link in chain):
        return "does not fit on this disk", "set HF_HOME to a folder with more room"
    if any(map(_is_overload, chain)):
        names |= _NETWORK
    for kinds, phrases, what, help_ in _CAUSES:
        if names & kinds or any(phrase in words for phrase in phrases):
            return what, help_
    return "could not be read", "try again: finished shards are kept"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_overload(error: BaseException) -> bool:
    """Returns whether an error is the hub's answer that it has too much to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and (status == 429 or status >= 500)


# The texts


@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a stretch of rows has been read.

    Attributes:
        rows: Rows read.
        documents: Documents in them: rows that are not blank.
        stream: State of a streamed data set, which finds the row without reading those before
            it; None where rows have numbers, or at the beginning.
        skipped: Rows before the stretch that this stream skips.
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
        self._commit: str | None = None
        self._data: Any = None
        self._begun: dict[str, Place] = {}
        self._places: dict[str, Place] = {}

    def __len__(self) -> int:
        """Returns the rows; only for a split that is not streamed.

        Raises:
            CorpusUnavailableError: It cannot be fetched.
        """
        return len(self._opened())

    def pin(self, stored: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Returns name and commit of what is read: as stored, or, asked once, the hub's newest.

        Raises:
            CorpusUnavailableError: Neither the hub nor a cache has it.
        """
        source = self._source
        if stored is not None:
            self._commit = stored["commit"]
        if self._commit is None:
            with self._explaining():
                reason = unreachable(source.name)
                known = dataset_info(source.name, source.revision) if reason is None else None
                self._commit = known.sha if known else self._cached(reason).hash
        return {"name": source.name, "commit": self._commit}

    def _cached(self, reason: Exception | None) -> Any:
        """Returns the data set in the cache, which holds whole ones, where there is no hub.

        Raises:
            Exception: `reason`, where the cache has none, or another commit than is wanted.
        """
        import datasets

        source, wanted = self._source, self._commit or self._source.revision
        assert reason is not None
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

        After `go_to`, empty texts stand for those before the place.

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

    def _text(self, value: str) -> str:
        """Returns the text of a row, or of a line of a jsonl file."""
        if self._source.files is None:
            return value
        return text_of(json.loads(value), "text", self._source.name) if value.strip() else ""

    # Opening

    def _opened(self) -> Any:
        if self._data is None:
            commit = self.pin()["commit"]
            with self._explaining():
                reason = unreachable(self._source.name)
                if reason is None:
                    self._data = self._load(commit)
                else:
                    with _offline():
                        self._data = _whole(self._cached(reason), self._source.split)
        return self._data

    def _load(self, commit: str) -> Any:
        import datasets

        source = self._source
        if source.files is None:
            builder = datasets.load_dataset_builder(source.name, source.config, revision=commit)
            if builder.hash != commit:  # `datasets` takes any cached one if the hub stumbles
                raise ConnectionError(f"got the revision {builder.hash}, not {commit}")
        else:
            # As lines: the library's json loader wants one schema in all files, and fails where a
            # field that we do not need is null in one and a date in the next.
            files = f"{_REPOSITORIES}{source.name}@{commit}/{source.files}"
            builder = datasets.load_dataset_builder("text", data_files={source.split: files})
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

_EVERY = 1024  # documents between two noted places: at most that many are read again


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
        return {split: texts.pin(pins.get(split)) for split, texts in self._texts.items()}

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
        """Returns the last place at or before a document; earlier ones are forgotten."""
        found = None
        while self._marks and self._marks[0]["document"] <= document:
            found = self._marks.popleft()
        if found is not None:
            self._marks.appendleft(found)
        return found
