"""Texts of a data set on the Hugging Face hub, downloaded or streamed through `datasets`."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import Any

from datamodules.hub_errors import CorpusUnavailableError, explained
from datamodules.hub_revision import HubSplit, Pin, find, unreachable
from datamodules.readers import text_of

__all__ = ["CorpusUnavailableError", "HubSplit", "HubTexts", "Place"]

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
