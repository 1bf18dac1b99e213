"""The analysed text as one HTML file, each token shaded by its executed steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from callbacks.analysis.page import document, number, table, token
from callbacks.step_allocation.findings import TextRow

HEAD = ("executed steps", "tokens", "share", "step-0 loss (nats)", "loss after all steps (nats)")


def page(title: str, steps: Sequence[Mapping[str, Any]], rows: Sequence[TextRow]) -> str:
    """Returns the page: a table of executed steps, and each token shaded by its own.

    Args:
        title: of the page.
        steps: see ``measures.steps``.
        rows: the rows to show.
    """
    numbers = ("share", "step0_loss", "loss")
    lines = (
        [str(line["steps"]), str(line["tokens"]), *(number(line[name]) for name in numbers)]
        for line in steps
    )
    return document(
        title,
        table(HEAD, lines),
        "Additional steps that a token executes",
        range(len(steps)),
        [_tokens(row) for row in rows],
    )


def _tokens(row: TextRow) -> list[str]:
    spans = []
    for i, text in enumerate(row.texts):
        tip = [f"token {i}, id {row.ids[i]}", f"steps {row.executed[i]}"]
        if math.isfinite(row.losses[i, 0]):
            tip.append(f"step-0 loss {number(row.losses[i, 0])} nats")
            tip.append(f"loss after all steps {number(row.losses[i, -1])} nats")
        if row.tail is not None:
            tip.append(f"w {', '.join(map(number, row.tail[i]))}")
        spans.append(token(int(row.executed[i]), tip, text))
    return spans
