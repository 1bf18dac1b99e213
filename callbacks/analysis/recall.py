"""Accuracy of the answers within a text, by distance or by difficulty."""

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
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
    scalars_of,
    shades,
)
from callbacks.analysis.token_text import PART, pieces
from callbacks.dials import dialled, has_dial

FIRST_AND_LAST_WORD = r"(?P<key>\w+).*\b(?P<answer>\w+)"


class RecallAnalysis(Analysis):
    """Measures the accuracy of answers within texts, by distance or by level.

    Every match of ``pattern`` may be a question, whose ``answer`` is correct if each of its tokens
    is the most likely one. Questions are grouped in one of two ways:

    - ``key``, in models that read sentences: the first sentence of a document about a key states a
      fact; each later one is a question, at the distance in sentences.
    - ``level``, in models that read windows: the text gives the difficulty of the question, as a
      number or by the number of characters.

    Scalars are ``recall/accuracy`` and ``recall/nats`` (of an answer, all its tokens) over all
    questions, and with a memory of M sentences ``recall/within_memory`` and
    ``recall/beyond_memory``, the accuracies up to M sentences and later, left out if there is no
    such question. For models whose tokens take additional steps (streams beyond the first in
    Thoughtbubbles, averaged over the blocks), ``recall/steps`` is their mean at the tokens that
    predict an answer's beginning, by level in the table, and ``recall/steps_correlation`` is
    Pearson's correlation between steps and level, left out if all steps are the same.
    ``recall/level<l>/accuracy`` and ``recall/level<l>/steps`` are the means of a level. Files are
    in ``recall``.
    ``callbacks.analysis`` describes what all analyses share.

    Args:
        output: Folder of the files. If null, ``recall`` in the run's log folder.
        num_batches: Number of validation batches to analyse.
        every_n_validations: Analyse every n-th validation during training. If 0, analyse only under
            the verb validate.
        pattern: Regular expression with the groups ``answer`` and either ``key`` or ``level``, for
            the text of each sentence (``key``) or of a window (``level``). By default the first and
            the last word of a sentence are its key and answer.
        dial: Field of the model's config, e.g. ``thinking_steps``; the answers are also predicted
            with each of ``values`` (table ``dial``). It is ignored by models without this field.
        values: Values of ``dial``.

    Raises:
        ValueError: If the pattern is invalid or lacks a group, or ``dial`` has no ``values``.
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
        dial: str | None = None,
        values: Sequence[int | float] = (),
    ) -> None:
        super().__init__(every_n_validations, num_batches, output)
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern ({pattern}) is not a regular expression: {error}") from error
        groups = self._pattern.groupindex.keys()
        missing = {"answer"} - groups or ({"key"} if not groups & {"key", "level"} else set())
        if missing:
            raise ValueError(
                f"pattern ({pattern}) must have a group (?P<{min(missing)}>...), as in "
                f"{FIRST_AND_LAST_WORD}"
            )
        if (dial is None) != (not values):
            raise ValueError(f"dial ({dial}) and values ({list(values)}) go together; set both")
        self._by = "level" if "level" in groups else "distance"
        self._dial, self._values = dial, tuple(values)

    def _collect(
        self, tokenizer: Any, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        if self._by == "distance" and "lengths" not in batch:
            raise NothingToAnalyseError(
                f"{type(pl_module).__name__} reads no sentences, so there is nothing to analyse; a "
                "pattern with (?P<level>...) finds questions in windows"
            )
        if self._by == "level" and (getattr(pl_module, "reads", "windows") != "windows"):
            raise NothingToAnalyseError(
                f"{type(pl_module).__name__} reads no windows, so there is nothing to analyse; a "
                "pattern with (?P<key>...) finds questions in sentences"
            )
        questions = self._distances if self._by == "distance" else self._levels
        all_questions = list(questions(tokenizer, batch))
        if all_questions:
            findings.add("questions", self._answers(pl_module, batch, all_questions))
        if all_questions and self._dial is not None and has_dial(pl_module, self._dial):
            for value in self._values:
                rows = self._answers(pl_module, batch, all_questions, value)
                findings.add("dial", [{self._dial: value, **row} for row in rows])

    def _answers(
        self,
        pl_module: Any,
        batch: dict[str, Any],
        all_questions: list[tuple[int, Any]],
        value: float | None = None,
    ) -> list[dict[str, Any]]:
        """Returns one row per question, predicted with a value of the dial."""
        recorder = Recorder("greedy", "thinking_steps")
        with nullcontext() if value is None else dialled(pl_module, str(self._dial), value):
            scores = pl_module.recorded(batch, **recorder.consumers())
        greedy = recorder.latest("greedy")["greedy"].cpu().numpy()  # shape of the targets
        nats = -as_float64(scores.log_prob)
        lines = [
            {self._by: group, "right": bool(greedy[slots].all()), "nats": float(nats[slots].sum())}
            for group, slots in all_questions
        ]
        executed = recorder.latest("thinking_steps").get("executed")  # (B, T)
        if executed is not None and self._by == "level":
            for line, (_, (row, columns)) in zip(lines, all_questions, strict=True):
                line["steps"] = float(executed[row, columns[0]])  # of the token before the answer
        return lines

    def _distances(self, tokenizer: Any, batch: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """Yields the distance of each question in a batch of sentences, and its answer's slots."""
        tokens = batch["tokens"].cpu().numpy()
        lengths = batch["lexical"].sum(dim=-1).cpu().numpy()  # (B, S), words of each sentence
        for row in range(len(tokens)):
            stated: dict[str, int] = {}
            for sentence in np.flatnonzero(lengths[row]):
                # slot 0 is BOS: slot u predicts word u, which is in slot u + 1
                ids = tokens[row, sentence, 1 : 1 + lengths[row, sentence]].tolist()
                texts = _texts(tokenizer, ids, begins=sentence == 0)
                match = self._pattern.search("".join(texts))
                if match is None:
                    continue
                if (key := match["key"]) in stated:
                    slots = row, sentence, _covering(texts, *match.span("answer"))
                    yield int(sentence) - stated[key], slots
                stated.setdefault(key, int(sentence))

    def _levels(self, tokenizer: Any, batch: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """Yields the level of each question in a batch of windows, and the slots of its answer."""
        tokens, targets = batch["tokens"].cpu().numpy(), batch["targets"].cpu().numpy()  # (B, T)
        for row, is_target in enumerate(targets >= 0):
            length = int(is_target.nonzero()[0].max(initial=-1)) + 1  # padding has no target
            if not length:
                continue
            # slot t predicts token t + 1, and the last one its target
            ids = [*tokens[row, :length], targets[row, length - 1]]
            texts = _texts(tokenizer, ids, begins=False)
            for match in self._pattern.finditer("".join(texts)):
                slots = _covering(texts, *match.span("answer")) - 1
                if (slots >= 0).all() and is_target[slots].all():
                    level = match["level"]
                    yield int(level) if level.isdecimal() else len(level), (row, slots)

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> AnalysisReport:
        questions = findings["questions"]
        accuracy = questions["right"].mean()
        scalars = {"recall/accuracy": accuracy, "recall/nats": questions["nats"].mean()}
        memory = getattr(pl_module.config, "memory_size", None)
        if memory is not None and self._by == "distance":
            within = questions["distance"] <= memory
            parts = {"within_memory": within, "beyond_memory": ~within}
            for name, part in parts.items():
                if part.any():
                    scalars[f"recall/{name}"] = questions["right"][part].mean()
        if "steps" in questions:
            scalars["recall/steps"] = questions["steps"].mean()
            if questions["steps"].nunique() > 1 and questions["level"].nunique() > 1:
                correlation = questions["level"].corr(questions["steps"])
                scalars["recall/steps_correlation"] = correlation
        tables = {self._by: accuracies(questions, [self._by])}
        if self._by == "level":
            measures = [name for name in ("accuracy", "steps") if name in tables["level"]]
            scalars |= scalars_of(tables["level"], "recall/level{level}/{name}", measures)
        if "dial" in findings:
            assert self._dial is not None
            tables["dial"] = accuracies(findings["dial"], [self._dial, self._by])
        draws = FIGURES | LEVEL_FIGURES
        figures = {name: draws[name] for name in tables}
        return AnalysisReport(scalars=scalars, tables=tables, figures=figures)


def _texts(tokenizer: Any, ids: list[int], *, begins: bool) -> list[str]:
    """Returns the text of each token, or its id and a space without a tokenizer."""
    if tokenizer is None:
        return [f"{i} " for i in ids]
    return ["" if text == PART else text for text in pieces(tokenizer, ids, begins=begins)]


def _covering(texts: list[str], start: int, stop: int) -> np.ndarray:
    """Returns the indices of the texts that overlap the characters [start, stop) of their join."""
    ends = np.cumsum([len(text) for text in texts])
    begins = ends - [len(text) for text in texts]
    return np.flatnonzero((begins < stop) & (ends > start))


def accuracies(questions: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Returns the columns ``by``, ``questions``, ``accuracy`` and means of an answer's measures.

    Args:
        questions: Rows with the columns ``by``, ``right``, ``nats`` and, for models whose tokens
            take additional steps, ``steps``.
        by: Columns to group rows by.
    """
    grouped = questions.groupby(by)
    measures = [name for name in ("right", "nats", "steps") if name in questions]
    table = grouped[measures].mean().rename(columns={"right": "accuracy"})
    table.insert(0, "questions", grouped.size())
    return table.reset_index()


def distance_figure(tables: Tables) -> Any:
    """Draws the accuracy of recalled answers over the sentences since their facts."""
    return _accuracy_figure(tables["distance"], "sentences since the fact was stated")


def level_figure(tables: Tables) -> Any:
    """Draws the accuracy of answers over the level of their questions."""
    return _accuracy_figure(tables["level"], "level of the question")


def dial_figure(tables: Tables) -> Any:
    """Draws the accuracy of answers over the values of a dial, a line for each level."""
    table = tables["dial"]
    dial, by = table.columns[:2]
    pivoted = table.pivot_table(index=dial, columns=by, values="accuracy").reset_index()
    levels = [column for column in pivoted.columns if column != dial]
    figure, (ax,) = panels(6.4, 3.6, 1)
    for level, shade in zip(levels, shades(len(levels)), strict=True):
        draw_lines(ax, pivoted, dial, {level: (f"{by} {level}", shade)})
    ax.set_ylim(-0.02, 1.02)
    finish(ax, dial.replace("_", " "), "accuracy", whole=True)
    return figure


def _accuracy_figure(table: pd.DataFrame, label: str) -> Any:
    figure, (ax,) = panels(6.4, 3.6, 1)
    draw_lines(ax, table, table.columns[0], {"accuracy": (None, BLUE)})
    ax.axhline(table["accuracy"].mean(), color=GREY, linewidth=0.8)
    ax.set_ylim(-0.02, 1.02)
    finish(ax, label, "accuracy", whole=True)
    return figure


FIGURES: dict[str, Draw] = {"distance": distance_figure}
LEVEL_FIGURES: dict[str, Draw] = {"level": level_figure, "dial": dial_figure}
