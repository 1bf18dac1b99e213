"""What a preparation counts, in words for people: the keys of a split's report."""

from collections import Counter
from collections.abc import Mapping

from datamodules.store import Split

READ, KEPT, STEPS = "examples read", "examples kept", "steps"
UNRESTORED = "left out, a text is not what its tokens decode to"
TOO_LONG = "left out, longer than max_length"
NO_STEPS = "kept without steps, a text is not what its tokens decode to"
MOVED = "steps moved on, their token has one already"
JOINED = "steps joined at the end of their query"

Reports = dict[Split, Counter[str]]


def in_words(reports: Mapping[Split, Mapping[str, int]]) -> str:
    """Returns the counts of all splits that have any, in a line."""
    parts = [
        f"{split}: " + ", ".join(f"{count} {what}" for what, count in report.items() if count)
        for split, report in reports.items()
        if report.get(READ)
    ]
    return "; ".join(parts) + "."


def why_empty(split: Split, report: Mapping[str, int], tokenizer: str) -> str | None:
    """Returns why no example of a split was kept, and the cure; None where none was read.

    Args:
        split: Which split.
        report: Its counts.
        tokenizer: The tokenizer's name.
    """
    if not report[READ]:
        return None
    if report[UNRESTORED]:
        return (
            f"The {split} split has no examples left: of {report[UNRESTORED]} of its "
            f"{report[READ]} examples tokenizer={tokenizer!r} does not give back the text, so that "
            "steps cannot be aligned with it. Use a byte-level tokenizer: 'bytes', 'gpt2', "
            "'bpe:N', or that of Qwen2.5."
        )
    return (
        f"The {split} split has no examples left: all {report[READ]} are longer than max_length. "
        "Raise it, or set it to null."
    )
