"""Placement of GSM8K's steps by a language model (Thinking States, Sec. 3.4, App. A.5.2).

The task is the one in Fig. 7, reworded: put a marker where each given calculation becomes possible,
and change nothing else. The prompt has three solved examples, and the reply is a JSON object.

Every reply is checked by exact match and written immediately: valid replies go to the output, which
`gsm8k.MarkedProblems` reads, and the others to a file next to it, with the reason. A killed run
loses only its pending requests; the next run requests only problems in neither file.

Requests go through the `openai` client (the extra `openai`) to any compatible endpoint; the client
retries if a server is overloaded. The API key is read from an environment variable and sent only in
the request header: it is removed from quoted server replies, and never sent over plain HTTP to
other machines.
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
from datamodules.reasoning.gsm8k import SolvedProblem, fields_of

# ---- the prompt


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
"""Few-shot examples before every problem."""


def messages(problem: SolvedProblem) -> list[Message]:
    """Returns the conversation that asks for the markers of a problem."""
    conversation = [{"role": "system", "content": INSTRUCTIONS}]
    for example in EXAMPLES:
        reply = {"query": example.marked(), "thinking": list(example.steps)}
        content = json.dumps(reply, ensure_ascii=False)
        conversation.append(_task(example.query, example.steps))
        conversation.append({"role": "assistant", "content": content})
    return [*conversation, _task(problem.question, problem.equations)]


def _task(query: str, steps: Sequence[str]) -> Message:
    task = {"problem": query, "calculations": list(steps)}
    return {"role": "user", "content": json.dumps(task, ensure_ascii=False)}


class RejectedReplyError(ValueError):
    """Raised for a reply that violates the task; the message is a short reason."""


def read_reply(reply: str, problem: SolvedProblem) -> str:
    """Returns the marked problem of a reply, checked by exact match (App. A.5.2).

    Text around the JSON object, e.g. a code fence or thoughts, is ignored.

    Args:
        reply: Text that the language model generated.
        problem: The problem in the request.

    Raises:
        RejectedReplyError: If there is no valid object, the problem or the list of calculations was
            changed, or the number of markers is wrong.
    """
    marked, steps = _read_object(reply)
    if marked.replace(MARKER, "") != problem.question:
        raise RejectedReplyError("changed problem")
    if steps != problem.equations:
        raise RejectedReplyError("changed calculations")
    if len(offsets(marked)) != len(steps):
        raise RejectedReplyError("wrong number of markers")
    return marked


def _read_object(reply: str) -> tuple[str, tuple[str, ...]]:
    """Returns the fields of the first valid object in a text."""
    decoder, start = json.JSONDecoder(), reply.find("{")
    while start >= 0:
        try:
            return fields_of(decoder.raw_decode(reply, start)[0], "reply")
        except (ValueError, RecursionError):
            start = reply.find("{", start + 1)
    raise RejectedReplyError("no valid JSON object")


# ---- the endpoint


_UNFIT = (400, 413, 422)  # status codes of requests that can never succeed


class EndpointError(ValueError):
    """Raised if the endpoint fails; the message quotes it and names the cure."""


class UnfitRequestError(EndpointError):
    """Raised if the endpoint rejects a particular request, such as for its length or content."""


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Settings of the endpoint and the model.

    Raises:
        ValueError: If a value is out of range.
    """

    url: str
    """Base URL without /chat/completions: https://api.openai.com/v1, http://localhost:8000/v1."""
    model: str
    """Name of the model at the endpoint."""
    key_variable: str | None = "OPENAI_API_KEY"
    """Environment variable with the API key, or null for an endpoint that needs none."""
    retries: int = 8
    """Number of retries if the server is overloaded or fails, with increasing delays."""
    timeout: float = 120.0
    """Seconds to wait for an answer."""
    temperature: float | None = 0.0
    """Sampling temperature, or null for models that accept only their default."""
    max_tokens: int | None = None
    """Maximum length of a reply in tokens, or null for the endpoint's limit."""

    def __post_init__(self) -> None:
        """Checks the values."""
        address = urllib.parse.urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname or " " in self.url:
            raise ValueError(
                f"url={self.url!r} must be a base URL such as https://api.openai.com/v1"
            )
        if address.username or address.password:
            raise ValueError("url must not contain a user or password; set key_variable instead")
        if not self.model:
            raise ValueError("model='' must be the name of a model at the endpoint")
        if self.retries < 0:
            raise ValueError(f"retries={self.retries} must be at least 0")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be above 0")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1, or null")

    def key(self) -> str | None:
        """Returns the API key, or None if the endpoint needs none.

        Raises:
            ValueError: If the variable is not set, or the key would be sent unencrypted.
        """
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            raise ValueError(
                f"the environment variable {self.key_variable} is not set: put the key of the "
                "endpoint there, or set key_variable to null for one that needs none"
            )
        if not (key.isascii() and key.isprintable()):  # a header error would quote the key
            raise ValueError(f"{self.key_variable} contains more than an API key; set it again")
        address = urllib.parse.urlsplit(self.url)
        if address.scheme == "http" and address.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise ValueError(
                f"url={self.url!r} would send the key unencrypted: use https, or set key_variable "
                "to null"
            )
        return key


class ChatEndpoint:
    """Sends conversations through the `openai` client; it is thread-safe.

    Args:
        config: Settings of the endpoint and the model.

    Raises:
        ValueError: If the client is not installed, or the key is missing or would be sent
            unencrypted.
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
        """Aborts pending requests."""
        self._client.close()

    def complete(self, conversation: Sequence[Message]) -> str:
        """Returns the model's reply to a conversation; empty if it only refuses.

        Raises:
            EndpointError: If the endpoint fails despite retries, or rejects all requests.
            UnfitRequestError: If it rejects this request.
        """
        openai = _library()
        keys = ("temperature", "max_tokens")
        options: dict[str, Any] = {key: getattr(self._config, key) for key in keys}
        options = {key: value for key, value in options.items() if value is not None}
        try:
            reply = self._client.chat.completions.create(
                model=self._config.model, messages=list(conversation), **options
            )
            contents = [choice.message.content for choice in reply.choices]  # empty if it refuses
            return next(iter(contents), None) or ""
        except openai.APIStatusError as error:
            error_cls = UnfitRequestError if error.status_code in _UNFIT else EndpointError
            status = f"HTTP {error.status_code}: {self._quote(error.response.text)}"
            raise error_cls(
                f"{self._config.url}: {status}. {self._cure(error.status_code)}"
            ) from error
        except openai.APIConnectionError as error:
            cause = self._quote(str(error.__cause__ or error))
            again = "Run the command again later: it continues where it stopped."
            raise EndpointError(
                f"{self._config.url} cannot be reached ({cause}). {again}"
            ) from error
        except (openai.OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise EndpointError(
                f"{self._config.url} sent a reply that the openai client cannot read "
                f"({self._quote(str(error))}). Check url."
            ) from error

    def _cure(self, status: int) -> str:
        """Returns the cure for an error status that persisted after retries."""
        if status >= 500 or status == 429:
            return "Run the command again later: it continues where it stopped."
        if status in (401, 403) and self._config.key_variable:
            return f"Check the key in {self._config.key_variable}."
        return "Check url, model and options."

    def _quote(self, message: str) -> str:
        """Returns the beginning of a server's message, without the key."""
        text = " ".join(message.split())
        return (text if self._key is None else text.replace(self._key, "***"))[:200]


def _library() -> Any:
    """Returns the package `openai`.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        import openai
    except ImportError as error:
        raise ValueError(
            f"a teacher needs the package openai ({error}): run pip install -e '.[openai]', or "
            "place the steps with the command `rule`"
        ) from error
    return openai


# ---- all problems


Ask = Callable[[Sequence[Message]], str]

KEPT, DROPPED, DONE, NO_STEPS = "kept", "dropped", "already done", "without steps"

_MAX_UNFIT = 10  # consecutive rejected requests, which cannot be due to the problems
_QUOTED = 2000  # characters of a rejected reply to keep


def dropped_path(output: Path) -> Path:
    """Returns the path of the rejected problems; delete the file to request them again."""
    return output.with_name(f"{output.name}.dropped")


def place_steps(
    problems: Iterable[SolvedProblem],
    ask: Ask,
    output: Path,
    *,
    concurrency: int = 4,
    report: Callable[[Counter[str]], None] = lambda counts: None,
) -> Counter[str]:
    """Requests the step positions of all problems that are not in the output yet.

    Args:
        problems: Problems to place; duplicates are requested once.
        ask: Returns a language model's reply to a conversation; called from several threads.
        output: jsonl file to append to; its folder exists.
        concurrency: Number of concurrent requests.
        report: Called with the counts so far after each reply.

    Returns:
        Counts of problems kept, dropped ("dropped" and "dropped: REASON"), already in the output,
        or without steps.

    Raises:
        ValueError: If another process writes the output, or it has lines of another program.
        EndpointError: If `ask` raises it; earlier replies are in the output.
    """
    with only_writer(output):
        dropped = dropped_path(output)
        counts: Counter[str] = Counter()
        waiting = _to_ask(problems, _written(output) | _written(dropped), counts)
        # Consecutive rejections; either all of them are due to the options, or none.
        refused: list[dict[str, Any]] = []
        with contextlib.closing(_answers(ask, waiting, concurrency)) as answers:
            for problem, answered in answers:
                row, reason = _judged(problem, answered)
                counts.update([KEPT] if reason is None else [DROPPED, f"{DROPPED}: {reason}"])
                report(counts)
                if reason == "refused":
                    refused.append(row)
                    if len(refused) == _MAX_UNFIT:
                        answered.result()  # raises the endpoint's error
                    continue
                _append(dropped, refused)
                refused.clear()
                _append(output if reason is None else dropped, [row])
        _append(dropped, refused)
    return counts


def _to_ask(
    problems: Iterable[SolvedProblem], done: set[str], counts: Counter[str]
) -> Iterator[SolvedProblem]:
    for problem in problems:
        if not problem.equations:
            counts[NO_STEPS] += 1
        elif problem.identity in done:
            counts[DONE] += 1
        else:
            done.add(problem.identity)
            yield problem


def _judged(problem: SolvedProblem, answered: "Future[str]") -> tuple[dict[str, Any], str | None]:
    """Returns the output line of a problem, and the reason to drop it, or None to keep it.

    Raises:
        EndpointError: If the endpoint failed.
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
    ask: Ask, problems: Iterator[SolvedProblem], concurrency: int
) -> Generator[tuple[SolvedProblem, "Future[str]"]]:
    """Yields problems and their finished requests as they complete, with little read-ahead.

    Closing it cancels all requests that have not started.
    """
    pool = ThreadPoolExecutor(concurrency)
    sent: dict[Future[str], SolvedProblem] = {}
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
    """Returns the ids of the problems in a jsonl file, after removing an incomplete last line.

    Raises:
        ValueError: If a line has a different format.
    """
    ids, size = set(), 0  # bytes of the complete lines
    content = path.read_bytes() if path.exists() else b""
    for line_number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            os.truncate(path, size)
            break
        try:
            ids.add(str(parse_json(line)["id"]))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}, line {line_number} was not written by this command; name another file, "
                "or remove the line"
            ) from error
        size += len(line)
    return ids


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Appends lines and syncs them to disk."""
    for row in rows:
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        append_durably(path, line)
