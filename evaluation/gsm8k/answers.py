"""The number that a text gives as its answer, and whether it is the right one."""

import re

from datamodules.gsm8k import Problem, result_of
from evaluation.gsm8k.prompts import QUESTION

_MINUS = "[-\u2212]"
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
# A minus behind a word, a number or a bracket subtracts, or joins: "10-4" has no -4. A number over
# a number is one thing, so that "1/2" is not taken for 2.
_SIGNS = rf"(?:(?<![\w.)%]){_MINUS})?(?:[$\u20ac\u00a3]{_MINUS}?)?"
_NUMBER = re.compile(rf"{_SIGNS}{_DIGITS}(?:/{_DIGITS})*")
_MARKED = re.compile(r"####([^\n]*)")
_NOT_OF_THE_VALUE = str.maketrans({"\u2212": "-", "$": "", "\u20ac": "", "\u00a3": "", ",": ""})


def extract_answer(text: str) -> str | None:
    """Returns the number that a continuation of a prompt gives, in its plainest form.

    That is the first number behind the first ``####``, on its line; if there is none, the last
    number of the text. What follows the next "Question:" is not part of the answer: models go on
    to ask themselves. Currency signs, percent signs, thousands' commas, a period behind the number
    and decimals of zero do not count; a fraction is not worked out.

    Args:
        text: what a model wrote behind "Answer:".

    Returns:
        E.g. "18" for "$18.00.", "-1200" for "-1,200", "1/2" for "1/2"; None without any number.
    """
    own = text.partition(QUESTION)[0]
    marked = _MARKED.search(own)
    found = _NUMBER.search(marked[1]) if marked else None
    if found is not None:
        return plain_number(found[0])
    numbers = _NUMBER.findall(own)
    return plain_number(numbers[-1]) if numbers else None


def gold_answer(problem: Problem, where: str) -> str:
    """Returns the right answer of a problem, in the form of `extract_answer`.

    Args:
        problem: its worked answer ends in ``#### N``.
        where: which problem it is, for the message.

    Raises:
        ValueError: if what stands there is not one number.
    """
    result = result_of(problem.answer)
    found = _NUMBER.fullmatch(result.rstrip(".%"))
    if found is None:
        raise ValueError(f"{where}: the result, {result[:50]!r}, is not a number")
    return plain_number(found[0])


def plain_number(written: str) -> str:
    """Returns a number without signs of currency, commas, and zeros that change nothing.

    Decimals are compared as digits, not as floats: 0.1 is not 0.10000000000000001.

    Args:
        written: as `extract_answer` finds it; a fraction keeps both parts.
    """
    return "/".join(_plain(part) for part in written.translate(_NOT_OF_THE_VALUE).split("/"))


def _plain(number: str) -> str:
    whole, _, decimals = number.lstrip("-").partition(".")
    digits = ".".join(filter(None, (whole.lstrip("0") or "0", decimals.rstrip("0"))))
    return digits if digits == "0" or not number.startswith("-") else f"-{digits}"
