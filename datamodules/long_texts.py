"""Finds cuts in long texts that leave the tokens of the whole text unchanged.

A text is cut between a letter and a mark: a space, a newline or punctuation. Letters and marks are
chosen for each tokenizer, by one of two rules:

- The pre-tokenizer splits there in any context. Models see one pre-token at a time, so the tokens
on both sides are independent.
- Nothing splits there, but no entry of a BPE or Unigram vocabulary has the two characters next to
each other, so no merge and no piece crosses the cut. This holds for SentencePiece files, whose
words start with their spaces.

Both rules are verified on texts that mix known special cases: runs of whitespace, digits,
contractions, combining characters, quotes, brackets, several scripts. A pair that fails on any of
them is not used.
"""

import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

PART = 2**17
"""Longer texts are encoded in parts of about this many characters."""
TOGETHER = 8  # parts to encode at once, on all cores
HUGE = 2**24  # characters of a part that takes gigabytes

# Letters of widely used scripts. All have been in Unicode since version 1.1, so every library
# treats them as letters; pre-tokenizers treat each row alike.
LETTERS = (
    "A-Za-z",
    "\u00df-\u00f6\u00f8-\u00ff",
    "\u0391-\u03a1\u03b1-\u03c9",
    "\u0410-\u044f",
    "\u05d0-\u05ea",
    "\u0621-\u063a",
    "\u0905-\u0939",
    "\u0e01-\u0e2e",
    "\u3041-\u3093",
    "\u30a1-\u30f6",
    "\u4e00-\u9fa5",
    "\uac00-\ud7a3",
)
MARKS = (" ", "\n", ".", ",", "\u3002", "\uff0c", "\u3001")

_AROUND = (
    *("a", "B", "the", "\u00e9", "\u0434", "\u05d0", "\u0e01", "\u304b", "\u4f60", "\ud55c"),
    *("1", "23", "4567", "\u0663", "\u00bd", " ", "  ", "\t", "\n", "\n\n", "\r\n", "\r"),
    *("\u00a0", "\u3000", "\u200b", "'", "'s", "'LL", "\u2019t", ".", ",", "!?", "-", "--", "/"),
    *('"', "(", ")", "<", ">", "</s>", "{", "}", "[", "]", "`", "#", "##", "_", "=", "@", "\\"),
    *("\u201c", "\u201d", "\u3002", "\uff0c", "\u2581", "\u0120", "\u0301", "\u093f", "\u3099"),
    *("\U0001f642", "\U0001f469\u200d\U0001f52c", "\x00", "\u00ad", "\ufb01", "\uff21", "$", "%"),
)
_BRACKETS = ('""', "''", "()", "<>", "[]", "{}", "``", "\u201c\u201d", "**", "__", "$$", "%%", "||")
_PROBES = 48


def members(letters: str) -> Iterator[str]:
    """Yields the characters of a row of `LETTERS`."""
    for first, last in re.findall("(.)-(.)", letters):
        yield from map(chr, range(ord(first), ord(last) + 1))


PreTokens = Callable[[str], Sequence[str]]


def sure_cuts(
    pre_tokens: PreTokens,
    *,
    allowed: Callable[[str, str], bool] = lambda letters, mark: True,
    apart: Callable[[str, set[str]], bool] = lambda letters, firsts: False,
) -> re.Pattern[str] | None:
    """Returns a pattern of the positions at which a text may be cut, or None if there are none.

    Args:
        pre_tokens: Returns the parts of a text that the model sees one by one, normalised.
        allowed: Returns whether a row of `LETTERS` and one of `MARKS` may be tried at all.
        apart: Returns whether no token has a letter of a row of `LETTERS` directly before one of
            the given characters. Called if the pre-tokenizer does not split.
    """
    rules = []
    for letters in LETTERS:
        marks = [
            mark
            for mark in MARKS
            if allowed(letters, mark) and _is_sure(pre_tokens, letters, mark, apart)
        ]
        if marks:
            rules.append(f"(?<=[{letters}])(?=[{re.escape(''.join(marks))}])")
    return re.compile("|".join(rules)) if rules else None


def _is_sure(
    pre_tokens: PreTokens, letters: str, mark: str, apart: Callable[[str, set[str]], bool]
) -> bool:
    firsts: set[str] = set()  # characters after the letters at which nothing splits
    for left, right in _probes(letters, mark):
        before, after = list(pre_tokens(left)), _continued(pre_tokens, left[-1], right)
        whole = list(pre_tokens(left + right))
        if after is None or not before:
            return False
        if whole == before + after:
            continue
        joined = [*before[:-1], before[-1] + after[0], *after[1:]] if after else before
        if whole != joined:
            return False
        firsts.add(after[0][:1])
    return not firsts or apart(letters, firsts)


def _continued(pre_tokens: PreTokens, letter: str, right: str) -> list[str] | None:
    """Returns the pre-tokens of `right` after a letter; None if the letter is not separable."""
    alone, both = list(pre_tokens(letter)), list(pre_tokens(letter + right))
    if both[: len(alone)] == alone:
        return both[len(alone) :]
    if len(alone) == 1 and both and both[0].startswith(alone[0]):
        return [both[0][len(alone[0]) :], *both[1:]]
    return None


@cache
def _probes(letters: str, mark: str) -> tuple[tuple[str, str], ...]:
    """Returns pairs of a text that ends with a letter and a text that starts with the mark."""
    draw = random.Random(f"{letters}{mark}")
    bounds = [c for pair in re.findall("(.)-(.)", letters) for c in pair]

    def some(limit: int) -> str:
        return "".join(draw.choices(_AROUND, k=draw.randrange(limit)))

    mixed = tuple(
        (some(9) + draw.choice(bounds), mark + draw.choice(("", " ", mark)) + some(9))
        for _ in range(_PROBES)
    )
    within = tuple((f" {pair[0]}{bounds[0]}", f"{mark}b{pair[1]} ") for pair in _BRACKETS)
    return mixed + within


def parts_of(text: str, cuts: re.Pattern[str] | None, name: str) -> Iterator[tuple[int, int]]:
    """Yields start and end of each part of a text; warns if a part is huge.

    Args:
        text: Text to cut.
        cuts: See `sure_cuts`.
        name: The tokenizer's name, for the message.
    """
    start, last = 0, len(text)
    while last and not text[last - 1].isalnum():  # a remainder of whitespace might have no tokens
        last -= 1
    while start < len(text):
        match = None
        if cuts is not None and len(text) - start > PART:
            match = cuts.search(text, start + PART // 2 + 1, last)
        stop = match.start() if match else len(text)
        if stop - start > HUGE:
            warnings.warn(
                f"tokenizer={name!r} encodes {stop - start} characters of a document at once, "
                "which may take gigabytes: no cut is known to leave the tokens unchanged. Cut the "
                "document, e.g. with data.separator.",
                stacklevel=2,
            )
        yield start, stop
        start = stop


def word_parts(texts: Iterable[str], pre_tokenizer: Any, name: str) -> Iterator[str]:
    """Yields texts, with long ones cut into parts that have the same pre-tokens.

    Args:
        texts: Texts to cut.
        pre_tokenizer: A pre-tokenizer of the ``tokenizers`` library.
        name: The tokenizer's name, for messages.
    """
    cuts = None
    for text in texts:
        if len(text) > PART and cuts is None:
            cuts = sure_cuts(lambda text: [p for p, _ in pre_tokenizer.pre_tokenize_str(text)])
        yield from (text[start:stop] for start, stop in parts_of(text, cuts, name))
