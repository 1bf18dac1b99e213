"""What one model has answered, and at what cost: its numbers."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evaluation.reason.answers import Reply
from evaluation.reason.timing import Timing


class Share(NamedTuple):
    """A share of questions in [0, 1], and its standard error; both nan of none.

    The error is that of independent questions.
    """

    value: float
    error: float


def share_of(flags: Iterable[bool]) -> Share:
    """Returns the share of what is true."""
    values = list(flags)
    if not values:
        return Share(math.nan, math.nan)
    share = sum(values) / len(values)
    return Share(share, math.sqrt(share * (1 - share) / len(values)))


@dataclass(frozen=True)
class ReasonResult:
    """Answers of one model."""

    label: str
    checkpoint: str
    model: str
    """Name of its class."""
    replies: Sequence[Reply]
    """To all questions, at least one, in their order."""
    timing: Timing | None = None
    speed_up: float | None = None
    """Over the baseline; None where it was not timed, or there is none."""
    question_first: Sequence[Reply] | None = None
    """To the same questions with the question in front."""
    latents: int | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    """FLOPs and steps of a token, see ``evaluation.cost``."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it was trained on, and what was changed."""

    @property
    def accuracy(self) -> Share:
        """Of all questions."""
        return share_of(reply.right for reply in self.replies)

    def by_group(self) -> dict[int, Share]:
        """Returns the accuracy of each group, groups ascending."""
        groups = sorted({reply.question.group for reply in self.replies})
        return {
            group: share_of(r.right for r in self.replies if r.question.group == group)
            for group in groups
        }

    @property
    def written_tokens(self) -> float:
        """Tokens written behind a question, on average: chain, answer and EOS."""
        return statistics.fmean(len(reply.written) for reply in self.replies)

    def thinking(self) -> dict[str, float]:
        """Returns means over the questions of what is thought while they are read.

        ``rounds``: passes of the backbone; ``chunks``: all; ``nontrivial_chunks``: with a thought;
        ``thought_tokens``. Empty for models that record nothing.
        """
        rows = [reply.thinking for reply in self.replies if reply.thinking is not None]
        if not rows:
            return {}
        return {
            "rounds": statistics.fmean(row.rounds for row in rows),
            "chunks": statistics.fmean(len(row.thoughts) for row in rows),
            "nontrivial_chunks": statistics.fmean(row.nontrivial for row in rows),
            "thought_tokens": statistics.fmean(row.length for row in rows),
        }

    def with_question_first(self) -> dict[str, float]:
        """Returns what the question in front changes (Fig. 5); empty where it was not asked so.

        ``question_first_accuracy``: of all questions; ``question_first_recovered``: of those
        answered wrongly before; ``question_first_intervention``: of all, had only those been asked
        again (Sec. 4.5).
        """
        if self.question_first is None:
            return {}
        pairs = list(zip(self.replies, self.question_first, strict=True))
        found = {
            "accuracy": share_of(now.right for _, now in pairs),
            "recovered": share_of(now.right for before, now in pairs if not before.right),
            "intervention": share_of(before.right or now.right for before, now in pairs),
        }
        values = {}
        for name, (value, error) in found.items():
            values[f"question_first_{name}"] = value
            values[f"question_first_{name}_standard_error"] = error
        return values

    def speed(self) -> dict[str, Any]:
        """Returns seconds per question and the speed-up; empty where it was not timed."""
        if self.timing is None:
            return {}
        per_question = [seconds / self.timing.questions for seconds in self.timing.rounds]
        return {
            "seconds_per_question": self.timing.seconds,
            "speed_up": self.speed_up,
            "seconds_per_question_by_round": per_question,
        }

    def as_dict(self, group_name: str) -> dict[str, Any]:
        """Returns the numbers under the keys of the JSON file.

        Args:
            group_name: what a group counts.
        """
        share, error = self.accuracy
        latents = {} if self.latents is None else {"latents": self.latents}
        return {
            "label": self.label,
            "model": self.model,
            **latents,
            "accuracy": share,
            "standard_error": error,
            "questions": len(self.replies),
            "written_tokens": self.written_tokens,
            **self.speed(),
            **self.cost,
            **self.thinking(),
            **self.with_question_first(),
            "by_group": self._groups(group_name),
            "checkpoint": self.checkpoint,
            "settings": self.settings,
        }

    def _groups(self, group_name: str) -> list[dict[str, Any]]:
        sizes = [reply.question.group for reply in self.replies]
        return [
            {
                group_name: group,
                "accuracy": share,
                "standard_error": error,
                "questions": sizes.count(group),
            }
            for group, (share, error) in self.by_group().items()
        ]
