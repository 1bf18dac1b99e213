"""How well a model recalls what a text has stated once, by the distance in sentences."""

import re
from typing import Any

import lightning as L
import numpy as np
import pandas as pd

from callbacks.analysis.base import Analysis, Findings, NothingToAnalyseError, Recorder, as_float64
from callbacks.analysis.report import (
    BLUE,
    GREY,
    AnalysisReport,
    Draw,
    Tables,
    draw_lines,
    finish,
    panels,
)
from callbacks.analysis.token_text import PART, pieces

FIRST_AND_LAST_WORD = r"(?P<key>\w+).*\b(?P<answer>\w+)"


class RecallAnalysis(Analysis):
    """Shows how well facts are recalled by the number of sentences since they were stated.

    A sentence that ``pattern`` matches is about its ``key``. The first one in a document states a
    fact; in every later one with this key the ``answer`` is a question, at a distance of as many
    sentences. It is right if every token of it is the most likely one.

    Scalars are ``recall/accuracy`` and ``recall/nats`` (of an answer, all its tokens) over all
    questions, and with a memory of M sentences ``recall/within_memory`` and
    ``recall/beyond_memory``, the accuracies up to M sentences and later; files are in ``recall``.
    ``callbacks.analysis`` describes what all analyses share.

    Args:
        output: Folder of the files. If null, ``recall`` in the run's log folder.
        num_batches: Number of validation batches to analyse.
        every_n_validations: Analyse every n-th validation of a training. If 0, analyse only those
            of the verb validate.
        pattern: Regular expression with the groups ``key`` and ``answer``, searched for in the text
            of each sentence. By default these are the first and the last word.

    Raises:
        ValueError: If the pattern is none, or lacks a group.
    """

    tag = "recall"
    reads = "sentences"
    image_tag = "recall_figures"

    def __init__(
        self,
        output: str | None = None,
        num_batches: int = 4,
        every_n_validations: int = 1,
        pattern: str = FIRST_AND_LAST_WORD,
    ) -> None:
        super().__init__(every_n_validations, num_batches, output)
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern ({pattern}) is no regular expression: {error}") from error
        if missing := {"key", "answer"} - self._pattern.groupindex.keys():
            raise ValueError(
                f"pattern ({pattern}) must have a group (?P<{min(missing)}>...), as in "
                f"{FIRST_AND_LAST_WORD}"
            )

    def _collect(
        self, tokenizer: Any, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        if "lengths" not in batch:
            raise NothingToAnalyseError(
                f"{type(pl_module).__name__} reads no sentences, so there is nothing to analyse"
            )
        recorder = Recorder("greedy")
        scores = pl_module.recorded(batch, **recorder.consumers())
        greedy = recorder.latest("greedy")["greedy"].cpu().numpy()  # (B, S, U)
        nats = -as_float64(scores.log_prob)  # (B, S, U)
        tokens = batch["tokens"].cpu().numpy()
        words = batch["lexical"].sum(dim=-1).cpu().numpy()  # (B, S), words of each sentence
        lines = []
        for row in range(len(tokens)):
            stated: dict[str, int] = {}
            for sentence in np.flatnonzero(words[row]):
                # slot 0 is BOS: slot u predicts word u, which stands in slot u + 1
                ids = tokens[row, sentence, 1 : 1 + words[row, sentence]].tolist()
                texts = _texts(tokenizer, ids, begins=sentence == 0)
                match = self._pattern.search("".join(texts))
                if match is None:
                    continue
                key = match["key"]
                if key not in stated:
                    stated[key] = int(sentence)
                    continue
                slots = row, sentence, _covering(texts, *match.span("answer"))
                line = {"distance": int(sentence) - stated[key], "right": bool(greedy[slots].all())}
                lines.append({**line, "nats": float(nats[slots].sum())})
        if lines:
            findings.add("questions", lines)

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> AnalysisReport:
        questions = findings["questions"]
        accuracy = questions["right"].mean()
        scalars = {"recall/accuracy": accuracy, "recall/nats": questions["nats"].mean()}
        memory = getattr(pl_module.config, "memory_size", None)
        if memory is not None:
            within = questions["distance"] <= memory
            scalars["recall/within_memory"] = questions["right"][within].mean()
            scalars["recall/beyond_memory"] = questions["right"][~within].mean()
        tables = {"distance": by_distance(questions)}
        return AnalysisReport(scalars=scalars, tables=tables, figures=FIGURES)


def _texts(tokenizer: Any, ids: list[int], *, begins: bool) -> list[str]:
    """Returns the text of each token; of numbers with a space, where there is no tokenizer."""
    if tokenizer is None:
        return [f"{i} " for i in ids]
    return ["" if text == PART else text for text in pieces(tokenizer, ids, begins=begins)]


def _covering(texts: list[str], start: int, stop: int) -> np.ndarray:
    """Returns which texts of a joined sequence reach into its characters [start, stop)."""
    ends = np.cumsum([len(text) for text in texts])
    begins = ends - [len(text) for text in texts]
    return np.flatnonzero((begins < stop) & (ends > start))


def by_distance(questions: pd.DataFrame) -> pd.DataFrame:
    """Returns ``distance`` in sentences, ``questions``, ``accuracy``, mean ``nats`` of an answer.

    Args:
        questions: Lines with ``distance``, ``right`` and ``nats``.
    """
    grouped = questions.groupby("distance")
    table = grouped[["right", "nats"]].mean().rename(columns={"right": "accuracy"})
    table.insert(0, "questions", grouped.size())
    return table.reset_index()


def distance_figure(tables: Tables) -> Any:
    """Draws the accuracy of recalled answers over the sentences since their facts."""
    table = tables["distance"]
    figure, (ax,) = panels(6.4, 3.6, 1)
    draw_lines(ax, table, "distance", {"accuracy": (None, BLUE)})
    ax.axhline(table["accuracy"].mean(), color=GREY, linewidth=0.8)
    ax.set_ylim(-0.02, 1.02)
    finish(ax, "sentences since the fact was stated", "share of right answers", whole=True)
    return figure


FIGURES: dict[str, Draw] = {"distance": distance_figure}
