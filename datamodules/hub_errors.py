"""Why a data set of the hub cannot be read, and what helps: a message for each cause."""

import errno
import gzip
import json
import zlib
from collections.abc import Iterator

from datamodules.hub_revision import NotLoadableError
from datamodules.tokenizers.interface import first_line


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
