"""What a language model is asked to do with a problem, and how its reply is read.

The task is that of Fig. 7 in words of our own: put a marker where each given calculation becomes
possible, and change nothing. Three solved problems show it. The reply is a JSON object.
"""

import json
from collections.abc import Sequence

from datamodules.reasoning.examples import MARKER, Example
from datamodules.reasoning.gsm8k.marked_problems import fields_of, offsets
from datamodules.reasoning.gsm8k.solved import Solved

Message = dict[str, str]

INSTRUCTIONS = f"""\
You mark word problems for a study of how readers calculate while they read. You are given a \
problem and the calculations of its solution, in order. Copy the problem and put one marker, \
{MARKER}, where each calculation becomes possible.

Where the markers go:
- There is exactly one marker for each calculation, and the n-th marker is that of the n-th \
calculation, so markers may have to wait for earlier ones.
- A marker stands as early as possible: directly behind the word or phrase that gives the last \
piece of information its calculation needs. What the problem does not say yet cannot be used, \
including what it asks for.
- Calculations that become possible at the same place have their markers one behind the other.

What stays as it is:
- Every character of the problem, spaces and mistakes included. Put no space before or behind a \
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
"""Shown in front of every problem."""


def messages(problem: Solved) -> list[Message]:
    """Returns the conversation that ends in a problem to be marked."""
    talk = [{"role": "system", "content": INSTRUCTIONS}]
    for example in EXAMPLES:
        talk.append({"role": "user", "content": _task(example.query, example.steps)})
        talk.append({"role": "assistant", "content": _json(example.marked(), example.steps)})
    return [*talk, {"role": "user", "content": _task(problem.question, problem.equations)}]


def _task(query: str, steps: Sequence[str]) -> str:
    return json.dumps({"problem": query, "calculations": list(steps)}, ensure_ascii=False)


def _json(marked: str, steps: Sequence[str]) -> str:
    return json.dumps({"query": marked, "thinking": list(steps)}, ensure_ascii=False)


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
