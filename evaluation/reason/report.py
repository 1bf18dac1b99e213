"""What ``evaluate.py reason`` says: models side by side, for people and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from callbacks.reasoning.thinking import thought_text, told
from evaluation.console import format_columns
from evaluation.reason.answers import Reply
from evaluation.reason.compare import overlap_table, overlaps
from evaluation.reason.result import ReasonResult, Share

COLUMNS = {
    "latents": "latents",
    "written_tokens": "written tokens",
    "seconds_per_question": "s/question",
    "speed_up": "speed-up",
    "rounds": "rounds",
    "chunks": "chunks",
    "nontrivial_chunks": "with a thought",
}
"""Numbers that the printed table has where any model has them, and what it calls them."""


@dataclass(frozen=True)
class ReasonReport:
    """Answers of several models to the same questions, and everything needed to repeat it."""

    results: Sequence[ReasonResult]
    """At least one."""
    group_name: str
    """What a group counts, e.g. operations."""
    baseline: str | None
    """Label of the model that speed-ups are over."""
    data: dict[str, Any]
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file."""
        return {
            "results": [result.as_dict(self.group_name) for result in self.results],
            "overlap": [overlap.as_dict() for overlap in overlaps(self.results)],
            "baseline": self.baseline,
            "data": self.data,
            "settings": self.settings,
        }

    # ---- for people

    def as_table(self) -> str:
        """Returns the result for people."""
        parts = [self._models(), self._groups(), self._question_first(), self._overlap()]
        return "\n\n".join([*filter(None, parts), self._notes()])

    def _models(self) -> str:
        numbers = [result.as_dict(self.group_name) for result in self.results]
        shown = [key for key in COLUMNS if any(own.get(key) is not None for own in numbers)]
        rows = [["", "accuracy", *(COLUMNS[key] for key in shown)]]
        for result, own in zip(self.results, numbers, strict=True):
            rows.append(
                [result.label, _share(result.accuracy), *(_cell(own, key) for key in shown)]
            )
        return format_columns(rows)

    def _groups(self) -> str:
        """Returns accuracies by group; nothing if there is one group only."""
        columns = [result.by_group() for result in self.results]
        groups = list(columns[0])
        if len(groups) < 2:
            return ""
        rows = [[self.group_name, *(result.label for result in self.results)]]
        rows += [[str(group), *(_share(column[group]) for column in columns)] for group in groups]
        return format_columns(rows)

    def _question_first(self) -> str:
        names = ("accuracy", "recovered", "intervention")
        rows = [["question first", "all so", "of those wrong before", "only those so"]]
        for result in self.results:
            found = result.with_question_first()
            if found:
                keys = [f"question_first_{name}" for name in names]
                shares = [Share(found[key], found[f"{key}_standard_error"]) for key in keys]
                rows.append([result.label, *map(_share, shares)])
        return format_columns(rows) if len(rows) > 1 else ""

    def _overlap(self) -> str:
        return overlap_table(self.results) if len(self.results) > 1 else ""

    def _notes(self) -> str:
        count, settings = len(self.results[0].replies), self.settings
        notes = [f"{count:,} questions of the {self.data['split']} split, on {settings['device']}"]
        timed = settings["rounds"] > 0
        if timed:
            notes.append(
                f"times are medians of {settings['rounds']} rounds over the first "
                f"{settings['timed_questions']:,} questions, {settings['timing_batch_size']} at a "
                "time, models in turn"
            )
        if timed and self.baseline is not None:
            notes.append(f"speed-ups are over {self.baseline}")
        if len(self.results) > 1:
            notes.append("overlap: share of what the row's model solves that the column's does not")
        notes += [
            f"with chunks of {found['chunk_size']} tokens {found['questions']:,} of "
            f"{found['of']:,} {found['split']} questions have a step moved out of its chunk"
            for found in self.data.get("moved_steps", ())
        ]
        return "\n".join(notes)

    # ---- answers

    def answers(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Returns one row an answer, for a jsonl file: model after model, in the questions' order.

        Args:
            tokenizer: of the data.
        """
        rows = []
        for result in self.results:
            rows += [_answer(tokenizer, result.label, reply, False) for reply in result.replies]
            again = result.question_first or ()
            rows += [_answer(tokenizer, result.label, reply, True) for reply in again]
        return rows


def _answer(tokenizer: Any, label: str, reply: Reply, question_first: bool) -> dict[str, Any]:
    """Returns an answer as plain values; thoughts are None for models that record none."""
    question, thinking = reply.question, reply.thinking
    row: dict[str, Any] = {
        "model": label,
        "number": question.number,
        "group": question.group,
        "question_first": question_first,
        "query": tokenizer.decode(question.query),
        "gold": tokenizer.decode(question.answer).strip(),
        "text": reply.text.strip(),
        "right": reply.right,
        "written": tokenizer.decode(reply.written),
        "thoughts": None,
    }
    if thinking is not None:
        row["thoughts"] = [
            {"token": thought.end, "text": thought_text(tokenizer, thought.tokens)}
            for thought in thinking.thoughts
            if thought.tokens
        ]
        row["query_with_thoughts"] = told(tokenizer, question.query, thinking)
        row["rounds"] = thinking.rounds
    return row


def _share(share: Share) -> str:
    return f"{share.value:.4f} +- {share.error:.4f}"


def _cell(numbers: dict[str, Any], key: str) -> str:
    value = numbers.get(key)
    return "-" if value is None else f"{value:.4g}"
