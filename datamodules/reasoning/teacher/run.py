"""Lets a language model place the steps of problems (Thinking States, Sec. 3.4 and App. A.5.2).

Every reply is checked by exact match and written at once: what fits into the output, which
`marked_problems` reads, and what does not into a file next to it, with the reason. A run that was
killed loses the requests that were on their way; the next one asks only what neither file has.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

from datamodules.journals import append_durably, only_writer
from datamodules.readers import parse_json
from datamodules.reasoning.gsm8k.solved import Solved
from datamodules.reasoning.teacher.chat_endpoint import UnfitRequestError
from datamodules.reasoning.teacher.prompt import (
    Message,
    RejectedReplyError,
    messages,
    read_reply,
)

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
    told: Callable[[Counter[str]], None] = lambda counts: None,
) -> Counter[str]:
    """Asks for the places of the steps of all problems that are not in the output yet.

    Args:
        problems: Those to be placed; the same one twice is asked for once.
        ask: Returns a language model's answer to a conversation, from several threads at once.
        output: jsonl file to append to; its folder exists.
        concurrency: Requests on their way at once.
        told: Called with the counts so far after each reply.

    Returns:
        How many were kept, dropped ("dropped" and "dropped: REASON"), there already, or have no
        steps to place.

    Raises:
        ValueError: Another process writes that output, or the output has other lines than these.
        EndpointError: As `ask`. What was answered before is in the output.
    """
    with only_writer(output):
        kept, dropped = _Lines(output), _Lines(dropped_path(output))
        counts: Counter[str] = Counter()
        waiting = _to_ask(problems, kept.identities | dropped.identities, counts)
        refused: list[dict[str, Any]] = []  # in a row; all of them are the options' fault, or none
        with _Requests(ask, waiting, concurrency) as requests:
            for problem, answered in requests:
                row, reason = _judged(problem, answered)
                counts.update([KEPT] if reason is None else [DROPPED, f"{DROPPED}: {reason}"])
                told(counts)
                if reason == "refused":
                    refused.append(row)
                    if len(refused) == _MOST_UNFIT:
                        answered.result()  # raises what the endpoint said
                    continue
                _append_all(dropped, refused)
                (kept if reason is None else dropped).append(row)
        _append_all(dropped, refused)
    return counts


def _append_all(lines: "_Lines", rows: list[dict[str, Any]]) -> None:
    """Writes the rows and forgets them."""
    for row in rows:
        lines.append(row)
    rows.clear()


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


class _Requests:
    """Yields (problem, its finished request) as they come; few problems are read ahead.

    As a context it lets the requests on their way end when something goes wrong.
    """

    def __init__(self, ask: Ask, problems: Iterator[Solved], concurrency: int) -> None:
        self._ask, self._problems, self._concurrency = ask, problems, concurrency
        self._pool = ThreadPoolExecutor(concurrency)

    def __enter__(self) -> "_Requests":
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(wait=failure[0] is None, cancel_futures=True)

    def __iter__(self) -> Iterator[tuple[Solved, "Future[str]"]]:
        sent: dict[Future[str], Solved] = {}
        while True:
            for problem in islice(self._problems, self._concurrency - len(sent)):
                sent[self._pool.submit(self._ask, messages(problem))] = problem
            if not sent:
                return
            for done in wait(sent, return_when=FIRST_COMPLETED).done:
                yield sent.pop(done), done


class _Lines:
    """A jsonl file that is appended to, a line at once.

    Attributes:
        identities: The problems that it has.

    Raises:
        ValueError: A line is not one of ours.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.identities: set[str] = set()
        whole = 0
        content = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break  # a killed process was writing it
            self.identities.add(self._identity(line, number))
            whole += len(line)
        if whole < len(content):
            os.truncate(path, whole)

    def _identity(self, line: bytes, number: int) -> str:
        try:
            return str(parse_json(line)["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self._path}, line {number} is not a line of this command's output; name another "
                "file, or remove the line"
            ) from error

    def append(self, row: dict[str, Any]) -> None:
        """Writes a line, which is on the disk when this returns."""
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        append_durably(self._path, line)
