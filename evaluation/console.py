"""What the user sees: errors as one line, results as aligned columns."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

DEBUG_FLAG = "--debug"


def run_with_clear_errors(program: Callable[[], None], argv: Sequence[str]) -> int:
    """Returns the exit code of ``program``: 2 for bad input, reported in one line on stderr.

    With ``--debug`` or the environment variable DEBUG=1 such errors keep their traceback, as
    defects always do. Ctrl-C ends with 130.

    Args:
        program: what to run.
        argv: the command line.
    """
    try:
        program()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from training.errors import explain  # takes seconds, so not before there is an error

        message = explain(error)
        if message is None or DEBUG_FLAG in argv or os.environ.get("DEBUG", "0") not in ("", "0"):
            raise
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        return 2
    return 0


def format_table(rows: Mapping[str, str]) -> str:
    """Returns names and values as two columns, one pair a line."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of equal length as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
