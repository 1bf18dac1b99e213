"""Where the reading of a hub corpus stands while it is stored, so that it can go on there."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from datamodules.hub import HubTexts
from datamodules.hub_revision import Pin
from datamodules.store import Split

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
        """Settles the commit of each split; see `preparation.Remote`."""
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
