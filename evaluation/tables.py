"""Readable tables of frames: titles, formats, means over seeds; as text or Markdown."""

import html
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pandas as pd

KINDS = {
    "exact": "exact",
    "lower_bound": "bound",
    "estimate": "estimate",
    "noncausal": "not causal",
}
"""Displayed names of the kinds of likelihood, in the order of rows."""
WHOLE, TWO, THREE, FOUR = "{:,.0f}".format, "{:.2f}".format, "{:.3f}".format, "{:.4f}".format
"""Formats of numbers: with thousands separators, or by digits after the point."""
FOUR_DIGITS, FIVE_DIGITS = "{:.4g}".format, "{:.5g}".format
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def show_value(value: Any) -> str:
    """Formats a value: floats with five digits, booleans as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return FIVE_DIGITS(value) if isinstance(value, float) else str(value)


class TableColumn(NamedTuple):
    """Title and format of a column of a frame."""

    title: str
    show: Callable[[Any], str] = show_value
    """Formats a value that is not missing."""
    part: str = ""
    """Heading of its table in a report; empty if only the CSV files have the column."""


def title_of(key: str) -> str:
    """Returns the default title of a key."""
    return key.replace("_", " ")


def si(value: float) -> str:
    """Formats a number with three digits and a prefix, such as 12.3 G."""
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {PREFIXES[power]}".rstrip()


def show_mean(values: pd.Series, show: Callable[[float], str]) -> str:
    """Formats the mean and the range of the seeds; empty without a number."""
    if not len(values := values.dropna()):
        return ""
    low, high, mean = (show(statistic(values)) for statistic in (min, max, statistics.mean))
    return mean if low == high else f"{mean} ({low} to {high})"


def show_columns(frame: pd.DataFrame, columns: Mapping[str, TableColumn]) -> pd.DataFrame:
    """Formats the columns that a frame has, under their titles; None and nan are empty.

    ``columns`` has the keys of the frame, in the order of the result.
    """
    return pd.DataFrame(
        {
            column.title: ["" if _missing(value) else column.show(value) for value in frame[key]]
            for key, column in columns.items()
            if key in frame
        },
        index=frame.index,
    )


def _missing(value: Any) -> bool:
    return value is None or value != value


def as_aligned(table: pd.DataFrame) -> str:
    """Formats a table of texts in aligned columns, with ``-`` for empty cells."""
    return table.replace("", "-").to_markdown(
        tablefmt="plain", disable_numparse=True, stralign="left"
    )


def as_markdown(table: pd.DataFrame) -> str:
    """Formats a table of texts in Markdown."""
    texts = table.rename(index=escape_markdown, columns=escape_markdown).map(escape_markdown)
    return texts.to_markdown(disable_numparse=True, stralign="left")


def escape_markdown(text: str) -> str:
    """Escapes text for a heading, cell or list item: no HTML, links, images or column breaks."""
    escaped = re.sub(r"[\\`|\[\]]", r"\\\g<0>", " ".join(text.splitlines()))
    return html.escape(escaped, quote=False)
