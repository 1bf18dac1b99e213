"""How many questions of GSM8K a model answers rightly, from what it wrote."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.gsm8k import Problem
from evaluation.console import format_table
from evaluation.cost import Cost
from evaluation.gsm8k.answers import extract_answer
from evaluation.gsm8k.prompts import Prompt


@dataclass(frozen=True)
class Judged:
    """The candidates of one question.

    Attributes:
        gold: The right answer.
        texts: What the model wrote.
        found: The number of each text; None where it has none.
    """

    gold: str
    texts: list[str]
    found: list[str | None]

    @property
    def right(self) -> list[bool]:
        """Whether each candidate is right."""
        return [answer == self.gold for answer in self.found]


def judge(texts: Sequence[str], gold: str) -> Judged:
    """Returns the candidates of a question with the numbers that they give.

    Args:
        texts: what the model wrote.
        gold: the right answer, in the form of `gsm8k_answers.plain_number`.
    """
    return Judged(gold, list(texts), [extract_answer(text) for text in texts])


@dataclass(frozen=True)
class GSM8KReport:
    """Right answers of one model, and everything needed to repeat the count."""

    problems: list[Problem]
    """The questions, at least one."""
    prompts: list[Prompt]
    """The same as the model read them."""
    judged: list[Judged]
    """What it answered, equally many candidates each."""
    shots: int
    """Demonstrations that were asked for."""
    checkpoint: str
    data: dict[str, Any]
    settings: dict[str, Any]
    cost: Cost | None = None
    """Of writing the candidates, at the length of a prompt with the longest candidate."""

    @property
    def candidates(self) -> int:
        """Candidates per question: the k of pass@k."""
        return len(self.judged[0].texts)

    def pass_at_k(self) -> tuple[float, float]:
        """Returns the share of questions with a right candidate, in [0, 1], and its error.

        The standard error is that of independent questions.
        """
        share = statistics.fmean(any(question.right) for question in self.judged)
        return share, math.sqrt(share * (1 - share) / len(self.judged))

    def pass_at_1(self) -> tuple[float, float]:
        """Returns the share of right candidates, in [0, 1], and its standard error.

        Over the questions: candidates of one are not independent; nan of one question.
        """
        shares = [statistics.fmean(question.right) for question in self.judged]
        if len(shares) == 1:
            return shares[0], math.nan
        return statistics.fmean(shares), statistics.stdev(shares) / math.sqrt(len(shares))

    def counts(self) -> dict[str, Any]:
        """Returns what the shares are of, and what did not go as asked for."""
        return {
            "questions": len(self.judged),
            "shots": self.shots,
            "mean_shots": statistics.fmean(prompt.shots for prompt in self.prompts),
            "shortened_prompts": sum(prompt.shots < self.shots for prompt in self.prompts),
            "cut_questions": sum(prompt.cut for prompt in self.prompts),
            "without_number": sum(question.found.count(None) for question in self.judged),
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file."""
        (share, error), (mean, mean_error) = self.pass_at_k(), self.pass_at_1()
        return {
            "k": self.candidates,
            "pass_at_k": share,
            "pass_at_k_standard_error": error,
            "pass_at_1": mean,
            "pass_at_1_standard_error": mean_error,
            **self.counts(),
            **({} if self.cost is None else self.cost.as_dict()),
            "checkpoint": self.checkpoint,
            "data": self.data,
            "settings": self.settings,
        }

    def as_table(self) -> str:
        """Returns the result for people."""
        counts, k = self.counts(), self.candidates
        shares = {f"pass@{k}": self.pass_at_k(), "pass@1": self.pass_at_1()}
        rows = {name: f"{share:.4f} +- {error:.4f}" for name, (share, error) in shares.items()}
        rows["questions"] = f"{counts['questions']:,}"
        rows["shots"] = f"{self.shots} ({counts['mean_shots']:.2f} on average)"
        rows["questions with fewer shots"] = f"{counts['shortened_prompts']:,}"
        rows["questions cut"] = f"{counts['cut_questions']:,}"
        of = f"of {k * len(self.judged):,}"
        rows["candidates without a number"] = f"{counts['without_number']:,} {of}"
        rows |= {} if self.cost is None else self.cost.as_cells()
        return format_table({**rows, "checkpoint": self.checkpoint})

    def texts(self) -> list[dict[str, Any]]:
        """Returns one row a candidate, for a jsonl file."""
        questions = zip(self.problems, self.prompts, self.judged, strict=True)
        return [
            {
                "number": number,
                "candidate": candidate,
                "right": judged.right[candidate],
                "gold": judged.gold,
                "found": judged.found[candidate],
                "text": text,
                "shots": prompt.shots,
                "cut": prompt.cut,
                "question": problem.question,
            }
            for number, (problem, prompt, judged) in enumerate(questions)
            for candidate, text in enumerate(judged.texts)
        ]
