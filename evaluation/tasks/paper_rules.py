"""How the Thoughtbubbles paper decides what is right (arXiv 2510.00219, Appendix E).

For ``configs/tasks``: each function is named in a task file, and takes what the harness hands over.
"""

from collections.abc import Sequence
from typing import Any

from evaluation.tasks.adapter import LogLikelihood


def hellaswag_sequences(doc: dict[str, Any]) -> list[str]:
    """Returns each continuation after the premise, as whole texts."""
    return [f"{doc['query']} {ending}" for ending in doc["choices"]]


def piqa_sequences(doc: dict[str, Any]) -> list[str]:
    """Returns each solution after the goal, as whole texts."""
    return [f"{doc['goal']} {doc[key]}" for key in ("sol1", "sol2")]


def lowest_perplexity(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, float]:
    """Returns ``acc``: whether the right sequence has the lowest perplexity, the first of equals.

    The right one is ``gold`` of HellaSwag, ``label`` of PIQA, and of BLiMP the first.

    Raises:
        ValueError: if the scores do not say how many tokens they are of.
    """
    if not all(isinstance(result, LogLikelihood) for result in results):
        raise ValueError(
            "tasks: the paper's rules compare perplexities of a token, and these scores do not "
            "say how many tokens they are of; run the task with evaluate.py tasks"
        )
    nats = [-result[0] / result.facts.scored for result in results]
    return {"acc": float(nats.index(min(nats)) == int(doc.get("gold", doc.get("label", 0))))}
