"""What a model reads before it answers a question of GSM8K."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from datamodules import Tokenizer
from datamodules.gsm8k import Problem
from lightning_models.runtime import seeded_generator

QUESTION, ANSWER = "Question:", "Answer:"

_DEMONSTRATIONS = 1  # of the random keys: these draws are others than those of row q


@dataclass(frozen=True)
class Prompt:
    """A question as a model reads it.

    Attributes:
        ids: Tokens, at least one.
        shots: Demonstrations in front of the question.
        cut: Whether the question itself has lost its beginning.
    """

    ids: list[int]
    shots: int
    cut: bool


def prompt_text(question: str, demonstrations: Sequence[Problem] = ()) -> str:
    """Returns the text that the answer continues.

    NOTE(paper): the papers do not say what their prompts look like. Ours::

        Question: How many legs have two cats?
        Answer: 2 * 4 = 8
        #### 8

        Question: ...
        Answer:

    Args:
        question: what is asked.
        demonstrations: solved problems that stand in front, in that order.
    """
    solved = (f"{QUESTION} {p.question}\n{ANSWER} {p.answer}\n\n" for p in demonstrations)
    return "".join([*solved, f"{QUESTION} {question}\n{ANSWER}"])


def make_prompts(
    problems: Sequence[Problem],
    training: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    shots: int = 0,
    seed: int = 0,
    room: int | None = None,
) -> list[Prompt]:
    """Returns the prompt of each question.

    Args:
        problems: the questions.
        training: problems to draw demonstrations from, with answers as they shall be shown.
        tokenizer: the model's.
        shots: demonstrations per question.
        seed: of the draws.
        room: most tokens of a prompt, at least 1; None: no limit.

    Raises:
        ValueError: if there are fewer than `shots` to draw from, or some are asked, too.
    """
    both = {problem.question for problem in problems} & {problem.question for problem in training}
    if both:
        raise ValueError(
            f"files.train has {len(both)} of the questions that are asked, answers included; name "
            "the training file of GSM8K"
        )
    prompts = []
    for number, problem in enumerate(problems):
        shown = draw_demonstrations(training, shots, seed=seed, question=number)
        prompts.append(fit_prompt(problem.question, shown, tokenizer, room=room))
    return prompts


def draw_demonstrations(
    problems: Sequence[Problem], count: int, *, seed: int, question: int
) -> list[Problem]:
    """Returns different problems, drawn anew for each question.

    They depend on the problems, the seed and the number of the question only; fewer are the first
    of more.

    Args:
        problems: to draw from.
        count: how many.
        seed: of the draw.
        question: number of the question in its file.

    Raises:
        ValueError: if there are not as many.
    """
    if count > len(problems):
        raise ValueError(
            f"shots ({count}) is more than the {len(problems)} training problems; lower it"
        )
    generator = seeded_generator(seed, _DEMONSTRATIONS, question)
    order = torch.randperm(len(problems), generator=generator)
    return [problems[i] for i in order[:count].tolist()]


def fit_prompt(
    question: str, demonstrations: Sequence[Problem], tokenizer: Tokenizer, *, room: int | None
) -> Prompt:
    """Returns the prompt with as many demonstrations as there is room for.

    They are dropped one by one from the front; of a question that is too long by itself the end
    stays.

    Args:
        question: what is asked.
        demonstrations: solved problems that should stand in front.
        tokenizer: the model's; it puts the start of a document in front.
        room: most tokens, at least 1; None: no limit.
    """
    for first in range(len(demonstrations) + 1):
        shown = demonstrations[first:]
        ids = tokenizer.prompt_ids(prompt_text(question, shown))
        if room is None or len(ids) <= room:
            return Prompt(ids, shots=len(shown), cut=False)
    assert room is not None  # else there would have been room for all
    return Prompt(ids[-room:], shots=0, cut=True)
