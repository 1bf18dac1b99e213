"""A language model places the steps of GSM8K's problems (Thinking States, Sec. 3.4, App. A.5.2).

The task is that of Fig. 7 in words of our own: put a marker where each given calculation becomes
possible, and change nothing. Three solved problems show it. The reply is a JSON object.

Every reply is checked by exact match and written at once: what fits into the output, which
`gsm8k.MarkedProblems` reads, and what does not into a file next to it, with the reason. A run that
was killed loses the requests that were on their way; the next one asks only what neither file has.

The model is asked through the `openai` client (the extra of that name) at any endpoint of its kind,
at a bounded rate. The key comes from an environment variable, goes into the header of requests, and
nowhere else: it is cut out of what servers say, is not sent on when they redirect, and not over
plain HTTP to other machines.
"""

import contextlib
import ipaddress
import json
import os
import random
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datamodules.journals import append_durably, only_writer
from datamodules.readers import parse_json
from datamodules.reasoning.examples import MARKER, Example
from datamodules.reasoning.gsm8k import Solved, fields_of, offsets

# ---- what is asked


Message = dict[str, str]

INSTRUCTIONS = f"""\
You mark word problems for a study of how readers calculate while they read. You are given a \
problem and the calculations of its solution, in order. Copy the problem and put one marker, \
{MARKER}, where each calculation becomes possible.

Where the markers go:
- There is exactly one marker for each calculation, and the n-th marker is that of the n-th \
calculation, so markers may have to wait for earlier ones.
- A marker stands as early as possible: directly after the word or phrase that gives the last \
piece of information its calculation needs. What the problem does not say yet cannot be used, \
including what it asks for.
- Calculations that become possible at the same place have their markers one after the other.

What stays as it is:
- Every character of the problem, spaces and mistakes included. Put no space before or after a \
marker that the problem does not have there.
- The list of calculations.

Reply with one JSON object and nothing else: \
{{"query": the problem with its markers, "thinking": the list of calculations}}."""

EXAMPLES = (
    Example.from_marked(
        "A ferry carries 40 cars on each trip. On Friday it makes six trips,<T> and on Saturday "
        "half as many.<T> How many cars does it carry on Saturday?<T>",
        ["<<40*6=240>>", "<<6/2=3>>", "<<40*3=120>>"],
        " 120",
    ),
    Example.from_marked(
        "Olga buys 3 notebooks for $2.50 each<T> and a pen that costs 20% of what the notebooks "
        "cost.<T> How much change does she get from $10?<T><T>",
        ["<<3*2.5=7.5>>", "<<20/100*7.5=1.5>>", "<<7.5+1.5=9>>", "<<10-9=1>>"],
        " 1",
    ),
    Example.from_marked(
        "How old is Ben if he is 4 years younger than Ada, who turns 30 in two years?<T><T>",
        ["<<30-2=28>>", "<<28-4=24>>"],
        " 24",
    ),
)
"""Shown before every problem."""


def messages(problem: Solved) -> list[Message]:
    """Returns the conversation that ends in a problem to be marked."""
    talk = [{"role": "system", "content": INSTRUCTIONS}]
    for example in EXAMPLES:
        reply = {"query": example.marked(), "thinking": list(example.steps)}
        talk.append(_task(example.query, example.steps))
        talk.append({"role": "assistant", "content": json.dumps(reply, ensure_ascii=False)})
    return [*talk, _task(problem.question, problem.equations)]


def _task(query: str, steps: Sequence[str]) -> Message:
    task = {"problem": query, "calculations": list(steps)}
    return {"role": "user", "content": json.dumps(task, ensure_ascii=False)}


class RejectedReplyError(ValueError):
    """A reply that does not keep to the task; the message says in a few words how."""


def read_reply(reply: str, problem: Solved) -> str:
    """Returns the marked problem of a reply, checked by exact match (App. A.5.2).

    Text around the object, e.g. a code fence or thoughts, does not matter.

    Args:
        reply: What the language model wrote.
        problem: What it was asked about.

    Raises:
        RejectedReplyError: There is no such object in it; the problem without markers, or the list
            of calculations, is not exactly what was given; or there are not as many markers.
    """
    marked, steps = _read_object(reply)
    if marked.replace(MARKER, "") != problem.question:
        raise RejectedReplyError("another problem")
    if steps != problem.equations:
        raise RejectedReplyError("other calculations")
    if len(offsets(marked)) != len(steps):
        raise RejectedReplyError("another number of markers")
    return marked


def _read_object(reply: str) -> tuple[str, tuple[str, ...]]:
    """Returns what the first fitting object in a text says."""
    decoder, start = json.JSONDecoder(), reply.find("{")
    while start >= 0:
        try:
            return fields_of(decoder.raw_decode(reply, start)[0], "reply")
        except (ValueError, RecursionError):
            start = reply.find("{", start + 1)
    raise RejectedReplyError("no such JSON object")


# ---- the endpoint


_PATH = "/chat/completions"
_UNFIT = (400, 413, 422)  # what servers say of a request that they will not take, ever
_LATER = (408, 409, 425, 429)  # and these, as well as 5xx, of one to be sent again
_LONGEST_WAIT = 60.0  # seconds before a try, unless the server asks for more
_ASKED_WAIT = 600.0  # the most that a server may ask for
_MOST_BYTES = 2**24  # of an answer
# headers of a request; the client adds others, some of them from variables OPENAI_*
_SENT = {"host", "accept", "accept-encoding", "connection", "user-agent"}
_SENT |= {"content-type", "content-length", "authorization", "x-stainless-raw-response"}


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
        if not (key.isascii() and key.isprintable()):  # an error about the header would quote it
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
    """Sends conversations through the `openai` client; threads may share it.

    Args:
        config: Which model is asked, and how.
        pace: Lets requests through; None: at `config.requests_per_minute`.
        wait: Waits that many seconds, and returns whether the endpoint was closed meanwhile.

    Raises:
        ValueError: The client is not installed; the key is missing, or would be sent unencrypted.
    """

    def __init__(
        self,
        config: EndpointConfig,
        *,
        pace: Pace | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        openai = _library()
        self._config, self._key = config, config.key()
        self._pace = Pace(config.requests_per_minute) if pace is None else pace
        self._closed = threading.Event()
        self._wait = self._closed.wait if wait is None else wait
        transport = openai.DefaultHttpxClient(
            follow_redirects=False,  # which would carry the key to another place
            trust_env=not config.is_local,  # no proxy between this machine and itself
            event_hooks={"request": [self._clean], "response": [self._check_size]},
        )
        self._client = openai.OpenAI(
            base_url=config.url.rstrip("/").removesuffix(_PATH),
            api_key=self._key or "none",
            admin_api_key="",  # not from the environment
            max_retries=0,  # its waits are short, and do not end when the endpoint is closed
            timeout=config.timeout,
            http_client=transport,
        )

    def close(self) -> None:
        """Ends all waiting; requests that are on their way get their answer."""
        self._closed.set()

    def _clean(self, request: Any) -> None:
        """Leaves a request no header but those it needs, and no key but the configured one."""
        for name in set(request.headers) - _SENT:
            del request.headers[name]
        request.headers.pop("authorization", None)
        if self._key is not None:
            request.headers["authorization"] = f"Bearer {self._key}"

    def _check_size(self, response: Any) -> None:
        if int(response.headers.get("content-length", 0)) > _MOST_BYTES:
            raise EndpointError(
                f"{self._client.base_url} answers with more than {_MOST_BYTES} bytes. Check url."
            )

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._wait(seconds)
        if self._closed.is_set():
            raise StoppedError

    def complete(self, talk: Sequence[Message]) -> str:
        """Returns the model's answer to a conversation; empty where it only refuses.

        Raises:
            EndpointError: The endpoint fails, also when tried again, or refuses everybody.
            UnfitRequestError: It refuses this request.
            StoppedError: It was closed.
        """
        openai = _library()
        options = {key: getattr(self._config, key) for key in ("temperature", "max_tokens")}
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        ask = self._client.chat.completions.with_raw_response.create
        for tried in range(self._config.retries + 1):
            self._pause(self._pace.delay())
            try:
                reply = ask(model=self._config.model, messages=list(talk), **given)
                return self._content(reply.text)
            except openai.APIStatusError as error:
                reason = self._explain(error.status_code, error.response.text)
                asked = _asked_wait(error.response.headers)
            except openai.APIConnectionError as error:
                reason, asked = f"it cannot be reached ({error.__cause__ or error})", 0.0
            except openai.OpenAIError as error:
                said = self._quote(str(error))
                raise EndpointError(f"{self._client.base_url}: {said}") from error
            if tried < self._config.retries:
                backoff = min(_LONGEST_WAIT, 2.0**tried) * random.uniform(0.5, 1.0)
                self._pause(max(asked, backoff))
        raise EndpointError(
            f"{self._client.base_url}: {reason}, {self._config.retries + 1} times. Run the command "
            "again later: it goes on where it stopped."
        )

    def _content(self, body: str) -> str:
        try:
            choices: Any = parse_json(body)["choices"]
            content = choices[0]["message"]["content"] if choices else None
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(
                f"{self._client.base_url} does not answer as {_PATH} of OpenAI does "
                f"({self._quote(body)}). Check url."
            ) from error
        return content if isinstance(content, str) else ""

    def _explain(self, status: int, body: str) -> str:
        """Returns what a server says that may do better later.

        Raises:
            UnfitRequestError: It says that it does not take this request.
            EndpointError: It says that it takes none.
        """
        said = f"HTTP {status}: {self._quote(body)}"
        if status in _LATER or status >= 500:
            return said
        if status in _UNFIT:
            raise UnfitRequestError(f"{self._client.base_url}: {said}. Check model and options.")
        variable = self._config.key_variable
        cure = f"the key in {variable}" if status in (401, 403) and variable else "url, model"
        raise EndpointError(f"{self._client.base_url}: {said}. Check {cure}.")

    def _quote(self, body: str) -> str:
        """Returns the beginning of what a server said, without the key."""
        text = " ".join(body.split())
        if self._key is not None:
            text = text.replace(self._key, "***")
        return text[:200]


def _asked_wait(headers: Any) -> float:
    """Returns the seconds that a server asks to wait; 0 if it does not say so in seconds."""
    try:
        return min(max(float(headers.get("Retry-After", 0)), 0.0), _ASKED_WAIT)
    except ValueError:
        return 0.0


def _library() -> Any:
    """Returns the package `openai`.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import openai
    except ImportError as error:
        raise ValueError(
            f"a teacher needs the package openai ({error}): pip install -e '.[openai]', or place "
            "the steps with the command `rule`"
        ) from error
    return openai


# ---- all problems


Ask = Callable[[Sequence[Message]], str]

KEPT, DROPPED, THERE, NO_STEPS = "kept", "dropped", "there already", "without steps"

_MOST_UNFIT = 10  # refused requests in a row: then it is not the problems
_QUOTED = 2000  # characters of a rejected reply that are kept


def dropped_path(output: Path) -> Path:
    """Returns where the problems are whose replies did not fit; delete it to ask for them again."""
    return output.with_name(f"{output.name}.dropped")


def place_steps(
    problems: Iterable[Solved],
    ask: Ask,
    output: Path,
    *,
    concurrency: int = 4,
    report: Callable[[Counter[str]], None] = lambda counts: None,
) -> Counter[str]:
    """Asks for the places of the steps of all problems that are not in the output yet.

    Args:
        problems: Those to be placed; the same one twice is asked for once.
        ask: Returns a language model's answer to a conversation, from several threads at once.
        output: jsonl file to append to; its folder exists.
        concurrency: Requests on their way at once.
        report: Called with the counts so far after each reply.

    Returns:
        How many were kept, dropped ("dropped" and "dropped: REASON"), there already, or have no
        steps to place.

    Raises:
        ValueError: Another process writes that output, or the output has other lines than these.
        EndpointError: As `ask`. What was answered before is in the output.
    """
    with only_writer(output):
        dropped = dropped_path(output)
        counts: Counter[str] = Counter()
        waiting = _to_ask(problems, _written(output) | _written(dropped), counts)
        refused: list[dict[str, Any]] = []  # in a row; all of them are the options' fault, or none
        with contextlib.closing(_answers(ask, waiting, concurrency)) as answers:
            for problem, answered in answers:
                row, reason = _judged(problem, answered)
                counts.update([KEPT] if reason is None else [DROPPED, f"{DROPPED}: {reason}"])
                report(counts)
                if reason == "refused":
                    refused.append(row)
                    if len(refused) == _MOST_UNFIT:
                        answered.result()  # raises what the endpoint said
                    continue
                _append(dropped, refused)
                refused.clear()
                _append(output if reason is None else dropped, [row])
        _append(dropped, refused)
    return counts


def _to_ask(problems: Iterable[Solved], done: set[str], counts: Counter[str]) -> Iterator[Solved]:
    for problem in problems:
        if not problem.equations:
            counts[NO_STEPS] += 1
        elif problem.identity in done:
            counts[THERE] += 1
        else:
            done.add(problem.identity)
            yield problem


def _judged(problem: Solved, answered: "Future[str]") -> tuple[dict[str, Any], str | None]:
    """Returns the line of a problem, and why it is dropped; None: it is kept.

    Raises:
        EndpointError: The endpoint failed.
    """
    row: dict[str, Any] = {"id": problem.identity}
    try:
        reply = answered.result()
    except UnfitRequestError as error:
        return {**row, "reason": "refused", "reply": str(error)[:_QUOTED]}, "refused"
    try:
        marked = read_reply(reply, problem)
    except RejectedReplyError as error:
        return {**row, "reason": str(error), "reply": reply[:_QUOTED]}, str(error)
    solution = {"thinking": list(problem.equations), "answer": problem.answer}
    return {**row, "query": marked, **solution}, None


def _answers(
    ask: Ask, problems: Iterator[Solved], concurrency: int
) -> Generator[tuple[Solved, "Future[str]"]]:
    """Yields problems and their finished requests as they come; few are read ahead.

    When it is closed, no further request is sent.
    """
    pool = ThreadPoolExecutor(concurrency)
    sent: dict[Future[str], Solved] = {}
    try:
        while True:
            for problem in islice(problems, concurrency - len(sent)):
                sent[pool.submit(ask, messages(problem))] = problem
            if not sent:
                return
            for done in wait(sent, return_when=FIRST_COMPLETED).done:
                yield sent.pop(done), done
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _written(path: Path) -> set[str]:
    """Returns which problems a jsonl file has; a line that a killed process began is removed.

    Raises:
        ValueError: A line is not one of ours.
    """
    found, whole = set(), 0
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            os.truncate(path, whole)
            break
        try:
            found.add(str(parse_json(line)["id"]))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is not a line of this command's output; name another file, "
                "or remove the line"
            ) from error
        whole += len(line)
    return found


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes lines, which are on the disk when this returns."""
    for row in rows:
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        append_durably(path, line)
