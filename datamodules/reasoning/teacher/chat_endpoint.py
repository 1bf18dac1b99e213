"""A language model behind an HTTP endpoint of the OpenAI kind, asked at a bounded rate.

The key comes from an environment variable, goes into the header of requests, and nowhere else: it
is cut out of what servers say, is not sent on when they redirect, and not over plain HTTP to other
machines.
"""

import http.client
import ipaddress
import json
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.readers import parse_json
from datamodules.reasoning.teacher.prompt import Message

_PATH = "/chat/completions"
_MOST_BYTES = 2**24  # of a reply; a server that sends more is broken
_LONGEST_WAIT = 60.0  # seconds between tries, unless the server asks for more
_ASKED_WAIT = 600.0  # seconds that a server may ask for
_UNFIT = (400, 413, 422)  # what servers say of a request that they will not take, ever
_LATER = (408, 409, 425, 429)  # and these, besides 5xx, of one to be sent again


class EndpointError(ValueError):
    """The endpoint does not work; the message says what it says, and the cure."""


class UnfitRequestError(EndpointError):
    """The endpoint refuses one request for what it is, e.g. its length or its content."""


class StoppedError(Exception):
    """The endpoint was closed while a request waited."""


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Which model is asked, and how.

    Raises:
        ValueError: A value is out of its range.
    """

    url: str
    """Address up to /chat/completions, e.g. https://api.openai.com/v1 or http://localhost:8000/v1.
    """
    model: str
    """Name of the model there."""
    key_variable: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the key; null: the endpoint needs none."""
    requests_per_minute: float = 60.0
    """Most requests a minute, tries again included."""
    retries: int = 8
    """Tries again for a request that met a full or failing server, each after a longer wait."""
    timeout: float = 120.0
    """Seconds to wait for an answer."""
    temperature: float | None = 0.0
    """Of the sampling; null: the endpoint's own, for models that take no other."""
    max_tokens: int | None = None
    """Longest reply, in tokens; null: the endpoint's own limit."""

    def __post_init__(self) -> None:
        """Checks the values."""
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or " " in self.url:
            raise ValueError(
                f"url={self.url!r} must be an address such as https://api.openai.com/v1"
            )
        if parts.query or parts.fragment:
            raise ValueError("url must end with the path; what stands after ? or # is not sent")
        if parts.username or parts.password:
            raise ValueError("url must not hold a name or a password; give the key by key_variable")
        if not self.model:
            raise ValueError("model='' must be a name that the endpoint knows")
        for key, above in (("requests_per_minute", 0), ("timeout", 0), ("retries", -1)):
            if not getattr(self, key) > above:
                least = "above 0" if above == 0 else "at least 0"
                raise ValueError(f"{key}={getattr(self, key)} must be {least}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or null")

    def key(self) -> str | None:
        """Returns the key.

        Raises:
            ValueError: The variable is not set, or the key would be sent unencrypted.
        """
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            raise ValueError(
                f"the environment variable {self.key_variable} is not set: put the key of the "
                "endpoint there, or set key_variable to null for one that needs none"
            )
        if not (key.isascii() and key.isprintable()):  # http.client would quote it
            raise ValueError(f"{self.key_variable} holds more than a key; set it again")
        if urllib.parse.urlsplit(self.url).scheme == "http" and not self.is_local:
            raise ValueError(
                f"url={self.url!r} would send the key unencrypted: use https, or set key_variable "
                "to null"
            )
        return key

    @property
    def is_local(self) -> bool:
        """Whether the endpoint runs on this machine."""
        host = urllib.parse.urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


class Pace:
    """Lets callers through at a bounded rate, in the order they come.

    Args:
        per_minute: Most calls a minute, evenly spaced.
        clock: Returns seconds.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap, self._clock = 60.0 / per_minute, clock
        self._next = 0.0
        self._lock = threading.Lock()

    def delay(self) -> float:
        """Takes the next free moment and returns the seconds until then."""
        with self._lock:
            now = self._clock()
            moment = max(now, self._next)
            self._next = moment + self._gap
            return moment - now


class ChatEndpoint:
    """Sends conversations and returns what the model answers; threads may share it.

    Args:
        config: Which model is asked, and how.
        pace: Lets requests through; None: at `config.requests_per_minute`.
        wait: Waits so many seconds, and returns whether the endpoint was closed meanwhile.

    Raises:
        ValueError: The key is missing, or would be sent unencrypted.
    """

    def __init__(
        self,
        config: EndpointConfig,
        *,
        pace: Pace | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._config, self._key = config, config.key()
        self._address = config.url.rstrip("/").removesuffix(_PATH) + _PATH
        self._pace = Pace(config.requests_per_minute) if pace is None else pace
        self._closed = threading.Event()
        self._wait = self._closed.wait if wait is None else wait
        # A proxy has no business between this machine and itself.
        proxies = urllib.request.ProxyHandler({} if config.is_local else None)
        self._open = urllib.request.build_opener(proxies, _NoRedirects).open

    def close(self) -> None:
        """Ends all waiting; requests that are on their way get their answer."""
        self._closed.set()

    def complete(self, talk: Sequence[Message]) -> str:
        """Returns the model's answer to a conversation.

        Raises:
            EndpointError: The endpoint fails, also when tried again, or refuses everybody.
            UnfitRequestError: It refuses this request.
            StoppedError: It was closed.
        """
        body = self._body(talk)
        for tried in range(self._config.retries + 1):
            self._pause(self._pace.delay())
            try:
                return self._content(self._post(body))
            except urllib.error.HTTPError as error:
                reason, asked = self._explain(error), _asked_wait(error)
            except (OSError, http.client.HTTPException) as error:
                reason, asked = f"it cannot be reached ({error})", 0.0
            if tried < self._config.retries:
                backoff = min(_LONGEST_WAIT, 2.0**tried) * random.uniform(0.5, 1.0)
                self._pause(max(asked, backoff))
        raise EndpointError(
            f"{self._address}: {reason}, {self._config.retries + 1} times. Run the command again "
            "later: it goes on where it stopped."
        )

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._wait(seconds)
        if self._closed.is_set():
            raise StoppedError

    def _body(self, talk: Sequence[Message]) -> bytes:
        options = {
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        given = {key: value for key, value in options.items() if value is not None}
        return json.dumps({"model": self._config.model, "messages": list(talk), **given}).encode()

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._address, data=body, headers=headers, method="POST")
        with self._open(request, timeout=self._config.timeout) as response:
            content: bytes = response.read(_MOST_BYTES)
            if response.length:  # a bounded read does not say that something is missing
                raise http.client.IncompleteRead(content, response.length)
        return content

    def _content(self, body: bytes) -> str:
        """Returns the text of an answer; empty where there is none, e.g. only a refusal."""
        try:
            choices: Any = parse_json(body)["choices"]
            content = choices[0]["message"]["content"] if choices else None
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(
                f"{self._address} does not answer as {_PATH} of OpenAI does "
                f"({self._quote(body)}). Check url."
            ) from error
        return content if isinstance(content, str) else ""

    def _explain(self, error: urllib.error.HTTPError) -> str:
        """Returns what a server says that may do better later.

        Raises:
            UnfitRequestError: It says that it does not take this request.
            EndpointError: It says that it takes none.
        """
        with error:
            said = f"HTTP {error.code}: {self._quote(_read(error))}"
        if error.code in _LATER or error.code >= 500:
            return said
        if error.code in _UNFIT:
            raise UnfitRequestError(f"{self._address}: {said}. Check model and options.")
        variable = self._config.key_variable
        cure = f"the key in {variable}" if error.code in (401, 403) and variable else "url, model"
        raise EndpointError(f"{self._address}: {said}. Check {cure}.")

    def _quote(self, body: bytes) -> str:
        """Returns the beginning of what a server said, without the key."""
        text = " ".join(body.decode("utf-8", "replace").split())
        if self._key is not None:
            text = text.replace(self._key, "***")
        return text[:200]


def _read(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException):
        return b""


def _asked_wait(error: urllib.error.HTTPError) -> float:
    """Returns the seconds that a server asks to wait; 0 if it does not say so in seconds."""
    try:
        return min(max(float(error.headers.get("Retry-After", 0)), 0.0), _ASKED_WAIT)
    except ValueError:
        return 0.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would carry the key to another place."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Returns None: the redirect is an error."""
