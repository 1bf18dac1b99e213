"""The analysed text as one HTML file, each token shaded by its number of streams."""

import math
from collections.abc import Mapping, Sequence

from callbacks.analysis.page import document, number, table, token
from callbacks.fork_analysis.statistics import MEASURES, TokenRow

ARROW = " \N{RIGHTWARDS ARROW} "


def page(
    title: str,
    measures: Sequence[Mapping[str, float]],
    rows: Sequence[TokenRow],
    texts: Sequence[Sequence[str]],
) -> str:
    """Returns the page: a table of measures, and each token shaded by its number of streams.

    Args:
        title: of the page.
        measures: of each fork layer, see ``statistics.MEASURES``.
        rows: the rows to show.
        texts: what each of their tokens stands for.
    """
    most = max((int(row.streams[-1].max()) for row in rows), default=1)
    return document(
        title,
        _table(measures),
        "Streams of a token after the last fork layer",
        range(1, most + 1),
        [_tokens(row, text) for row, text in zip(rows, texts, strict=True)],
    )


def _table(measures: Sequence[Mapping[str, float]]) -> str:
    found = {
        meaning: [layer[name] for layer in measures]
        for name, meaning in MEASURES.items()
        if any(math.isfinite(layer[name]) for layer in measures)
    }
    return table(
        ["fork layer", *map(str, range(1, len(measures) + 1))],
        ([meaning, *map(number, values)] for meaning, values in found.items()),
    )


def _tokens(row: TokenRow, texts: Sequence[str]) -> list[str]:
    spans = []
    for i, text in enumerate(texts):
        streams = row.streams[:, i]
        tip = [
            f"token {i}, id {row.ids[i]}",
            f"streams {ARROW.join(map(str, streams))}",
            f"P {number(row.original_score[i])} (original)",
        ]
        if math.isfinite(row.fork_score[i]):
            tip[-1] += f", {number(row.fork_score[i])} (forks)"
        tip.append(f"entropy {number(row.entropy[i])} nats")
        if row.reference_entropy is not None:
            tip.append(f"reference entropy {number(row.reference_entropy[i])} nats")
        spans.append(token(streams[-1], tip, text))
    return spans
