"""A language model places the steps of GSM8K's problems (Thinking States, Sec. 3.4, App. A.5.2).

The task is that of Fig. 7 in words of our own: put a marker where each given calculation becomes
possible, and change nothing. Three solved problems show it. The reply is a JSON object.

Every reply is checked by exact match and written at once: what fits into the output, which
`gsm8k.MarkedProblems` reads, and what does not into a file next to it, with the reason. A run that
was killed loses the requests that were on their way; the next one asks only what neither file has.

The model is asked through the `openai` client (the extra of that name) at any endpoint of its kind;
the client tries again where a server is full. The key comes from an environment variable, goes into
the header of requests, and nowhere else: it is cut out of what servers say, and not sent over plain
HTTP to other machines.
"""

import contextlib
import json
import os
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
from datamodules.reasoning.examples import MARKER, Example, offsets
from datamodules.reasoning.gsm8k import Solved, fields_of

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


_UNFIT = (400, 413, 422)  # what servers say of a request that they will never take


class EndpointError(ValueError):
    """The endpoint does not work; the message says what it says, and the cure."""


class UnfitRequestError(EndpointError):
    """The endpoint refuses one request for what it is, such as its length or its content."""


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Which model is asked, and how.

    Raises:
        ValueError: A value is out of its range.
    """

    url: str
    """Address without /chat/completions: https://api.openai.com/v1, http://localhost:8000/v1."""
    model: str
    """Name of the model there."""
    key_variable: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the key; null for an endpoint that needs none."""
    retries: int = 8
    """Tries again for a request that met a full or failing server, each after a longer wait."""
    timeout: float = 120.0
    """Seconds to wait for an answer."""
    temperature: float | None = 0.0
    """Temperature of the sampling; null for models that take no other than their default."""
    max_tokens: int | None = None
    """Longest reply, in tokens; null for the endpoint's limit."""

    def __post_init__(self) -> None:
        """Checks the values."""
        address = urllib.parse.urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname or " " in self.url:
            raise ValueError(
                f"url={self.url!r} must be an address such as https://api.openai.com/v1"
            )
        if address.username or address.password:
            raise ValueError("url must not hold a name or a password; give the key by key_variable")
        if not self.model:
            raise ValueError("model='' must be a name that the endpoint knows")
        if self.retries < 0:
            raise ValueError(f"retries={self.retries} must be at least 0")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be above 0")
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
        address = urllib.parse.urlsplit(self.url)
        if address.scheme == "http" and address.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError(
                f"url={self.url!r} would send the key unencrypted: use https, or set key_variable "
                "to null"
            )
        return key


class ChatEndpoint:
    """Sends conversations through the `openai` client; threads may share it.

    Args:
        config: Which model is asked, and how.

    Raises:
        ValueError: The client is not installed; the key is missing, or would be sent unencrypted.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self._config, self._key = config, config.key()
        self._client = _library().OpenAI(
            base_url=config.url,
            api_key=self._key or "none",
            max_retries=config.retries,
            timeout=config.timeout,
        )

    def close(self) -> None:
        """Ends the requests that are on their way."""
        self._client.close()

    def complete(self, talk: Sequence[Message]) -> str:
        """Returns the model's answer to a conversation; empty where it only refuses.

        Raises:
            EndpointError: The endpoint fails, also when tried again, or refuses everybody.
            UnfitRequestError: It refuses this request.
        """
        openai = _library()
        options = {key: getattr(self._config, key) for key in ("temperature", "max_tokens")}
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        try:
            reply = self._client.chat.completions.create(
                model=self._config.model, messages=list(talk), **given
            )
            contents = [choice.message.content for choice in reply.choices]  # none where it refuses
            return next(iter(contents), None) or ""
        except openai.APIStatusError as error:
            kind = UnfitRequestError if error.status_code in _UNFIT else EndpointError
            said = f"HTTP {error.status_code}: {self._quote(error.response.text)}"
            raise kind(f"{self._config.url}: {said}. {self._cure(error.status_code)}") from error
        except openai.APIConnectionError as error:
            cause = self._quote(str(error.__cause__ or error))
            again = "Run the command again later: it goes on where it stopped."
            raise EndpointError(
                f"{self._config.url} cannot be reached ({cause}). {again}"
            ) from error
        except (openai.OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise EndpointError(
                f"{self._config.url} does not answer as OpenAI does ({self._quote(str(error))}). "
                "Check url."
            ) from error

    def _cure(self, status: int) -> str:
        """Returns what helps where the server answers with an error, at the last try too."""
        if status >= 500 or status == 429:
            return "Run the command again later: it goes on where it stopped."
        if status in (401, 403) and self._config.key_variable:
            return f"Check the key in {self._config.key_variable}."
        return "Check url, model and options."

    def _quote(self, said: str) -> str:
        """Returns the beginning of what a server said, without the key."""
        text = " ".join(said.split())
        return (text if self._key is None else text.replace(self._key, "***"))[:200]


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
