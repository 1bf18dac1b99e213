"""Metrics of the Thoughtbubbles paper (arXiv 2510.00219, Appendix E) for ``configs/tasks``.

Task files name these functions, and the harness calls them.
"""

from collections.abc import Sequence
from typing import Any

from evaluation.tasks.adapter import LogLikelihood


def hellaswag_sequences(doc: dict[str, Any]) -> list[str]:
    """Returns whole texts: the premise followed by each continuation."""
    return [f"{doc['query']} {ending}" for ending in doc["choices"]]


def piqa_sequences(doc: dict[str, Any]) -> list[str]:
    """Returns whole texts: the goal followed by each solution."""
    return [f"{doc['goal']} {doc[key]}" for key in ("sol1", "sol2")]


def lowest_perplexity(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """Returns ``acc``, whether the right sequence has the lowest perplexity.

    The first one wins ties. The right sequence is ``gold`` in HellaSwag, ``label`` in PIQA, and the
    first one in BLiMP.

    Raises:
        ValueError: If the scores have no number of tokens.
    """
    if not all(isinstance(result, LogLikelihood) for result in results):
        raise ValueError(
            "tasks: the paper's rules compare perplexities per token, and these scores have no "
            "number of tokens; run the task with evaluate.py tasks"
        )
    nats = [-result[0] / result.facts.scored for result in results]
    return {"acc": float(nats.index(min(nats)) == int(doc.get("gold", doc.get("label", 0))))}
