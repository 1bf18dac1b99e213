"""Texts of a data set on the Hugging Face hub, downloaded or streamed through `datasets`."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from datamodules.readers import text_of
from datamodules.tokenizers.interface import first_line

_ROWS = 64  # rows fetched at once; a paper of peS2o has up to a megabyte
_REPOSITORIES = "hf://datasets/"
_TIMEOUT = 10  # seconds for the question whether the hub can be reached


class CorpusUnavailableError(ValueError):
    """A corpus that could not be fetched; the message says what to pass or set instead."""


@dataclass(frozen=True, kw_only=True)
class HubSplit:
    """A split of a data set on the hub.

    Attributes:
        name: Repository, e.g. ``"Salesforce/wikitext"``.
        split: Its name there.
        config: Configuration, None for the only one.
        files: Glob of jsonl files in the repository, for those whose own loader is a script, which
            `datasets` no longer runs; None: the repository describes itself.
    """

    name: str
    split: str
    config: str | None = None
    files: str | None = None

    @property
    def identity(self) -> dict[str, str]:
        """What goes into a data fingerprint."""
        return {key: value for key, value in vars(self).items() if value is not None}


class HubTexts:
    """The texts of a split, read from the hub or its cache when they are asked for.

    Args:
        source: What to read.
        streaming: Whether to read over the network as far as needed and keep nothing; else the
            whole split is downloaded into HF_HOME first.
        corpus: Who asks, for the message.
        cure: What to do without a network, for the message.
    """

    def __init__(self, source: HubSplit, *, streaming: bool, corpus: str, cure: str) -> None:
        self._source, self._streaming = source, streaming
        self._corpus, self._cure = corpus, cure
        self._data: Any = None

    def __len__(self) -> int:
        """Returns the rows; only for a split that is not streamed.

        Raises:
            CorpusUnavailableError: It cannot be fetched.
        """
        return len(self._opened())

    def read(self, first: int = 0, end: int | None = None) -> Iterator[str]:
        """Yields the texts of the rows from `first` up to `end`.

        Raises:
            CorpusUnavailableError: They cannot be fetched; also later, where the network fails.
        """
        data = self._opened()
        try:
            if self._streaming_now(data):
                data = data.skip(first) if first else data
                data = data if end is None else data.take(end - first)
            elif first or end is not None:
                data = data.select(range(first, len(data) if end is None else end))
            for batch in data.iter(batch_size=_ROWS):
                yield from map(self._text, batch["text"])
        except Exception as error:
            raise self._unavailable(error) from error

    def _text(self, value: str) -> str:
        """Returns the text of a row, or of a line of a jsonl file."""
        if self._source.files is None:
            return value
        return text_of(json.loads(value), "text", self._source.name) if value.strip() else ""

    @staticmethod
    def _streaming_now(data: Any) -> bool:
        return not hasattr(data, "select")

    def _opened(self) -> Any:
        if self._data is None:
            try:
                self._data = self._open()
            except Exception as error:
                raise self._unavailable(error) from error
        return self._data

    def _open(self) -> Any:
        reason = unreachable(self._source.name)
        if reason is None:
            return self._load(self._streaming)
        # Without the hub only the cache is left, which holds whole data sets.
        with _offline():
            try:
                return self._load(streaming=False)
            except Exception:
                raise reason from None

    def _load(self, streaming: bool) -> Any:
        import datasets

        source = self._source
        if source.files is None:
            data = datasets.load_dataset(
                source.name, source.config, split=source.split, streaming=streaming
            )
        else:
            files = {source.split: f"{_REPOSITORIES}{source.name}/{source.files}"}
            # As lines: the library's json loader wants one schema in all files, and fails where a
            # field that we do not need is null in one and a date in the next.
            data = datasets.load_dataset(
                "text", data_files=files, split=source.split, streaming=streaming
            )
        return data.select_columns(["text"])

    def _unavailable(self, error: Exception) -> CorpusUnavailableError:
        return CorpusUnavailableError(
            f"{self._corpus}: {self._source.name} ({self._source.split}) cannot be read from the "
            f"Hugging Face hub ({type(error).__name__}: {first_line(error)}). {self._cure}, or set "
            "HF_HOME to a cache that holds it, or try again with a network: finished shards are "
            "kept."
        )


def without_blank(texts: Iterable[str | None]) -> Iterator[str]:
    """Yields the texts that are more than white space."""
    return (text for text in texts if text and not text.isspace())


def unreachable(name: str) -> Exception | None:
    """Returns why the hub cannot tell about a data set, None if it can.

    One short question: the loaders of `datasets` try again for 20 seconds before they say so.
    """
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=_TIMEOUT)
    except Exception as error:
        return error
    return None


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
