"""Pass@k on GSM8K: functions of ``configs/tasks/gsm8k_pass_at_k.yaml``.

The protocol of the Latent-Thought paper (arXiv 2502.01567, section 3.3 and appendix A.3): five
candidates of up to 50 tokens, each a multinomial sample after a separate inference of the latent
vectors; a question counts as solved if any candidate is correct.

NOTE(paper): the paper names "the 1K test set"; the task has all 1,319 test problems. The paper
publishes neither its prompt nor its extraction of answers: ours are in the task file and in
`extract_answer`. Its GPT-2 baselines answer by beam search with five beams; here every model is
sampled alike, and ``gsm8k_beam.yaml`` is for the harness' hf model, which has beam search.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from datamodules.numbers import numbers_in, read_number, same_number
from datamodules.word_problems import result_of
from evaluation.tasks.local_data import TaskDataError, load

QUESTION = "Question:"
"""Prefix of a question in the prompt of the task file."""

_MARKED = re.compile(r"####([^\n]*)")


def local_problems(**arguments: Any) -> dict[str, Dataset]:
    """Reads GSM8K from files under ``DATA``, see ``local_data.load``.

    Raises:
        TaskDataError: If a file is not as published, or train contains test questions.
    """
    splits = load(**arguments)
    shared = set(splits["train"]["question"]) & set(splits["test"]["question"])
    if shared:
        raise TaskDataError(
            f"DATA: gsm8k/train.jsonl has {len(shared)} of the test questions with their answers, "
            "which the examples would give away; remove them"
        )
    return splits


def check_answers(problems: Dataset) -> Dataset:
    """Returns the problems unchanged if their answers are numbers.

    Raises:
        TaskDataError: If an answer has no number after ``####``.
    """
    for idx, answer in enumerate(problems["answer"]):
        if read_number(result_of(answer)) is None:
            raise TaskDataError(f"the answer of GSM8K's question {idx} has no number after ####")
    return problems


def extract_answers(
    tries: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]
) -> list[list[str | None]]:
    """Extracts the answer of each text; this is the filter of the task."""
    return [[extract_answer(text) for text in texts] for texts in tries]


def extract_answer(text: str) -> str | None:
    r"""Extracts the answer from a continuation, as a number in its plainest form.

    It is the first number after the first ``####``, on the same line; else the number in the last
    ``\boxed{}``; else the last number of the text. Text from the next "Question:" on is ignored,
    since models continue with further questions.

    Returns:
        E.g. "18" for "$18.00.", "-1200" for "-1,200", "0.5" for "1/2"; None without any number.
    """
    answer = text.partition(QUESTION)[0]
    marked = _MARKED.search(answer)
    if marked:
        result = read_number(marked[1]) or next(iter(numbers_in(marked[1])), None)
        if result is not None:
            return result
    return read_number(answer) or next(reversed(numbers_in(answer)), None)


def pass_rates(doc: dict[str, Any], results: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """Returns pass@k and pass@1 of a question with k tries, the metrics of the task."""
    (answers,) = results
    gold = result_of(doc["answer"])
    right = sum(answer is not None and same_number(answer, gold) for answer in answers)
    tries = len(answers)
    return {"pass_at_k": pass_at(tries, tries, right), "pass_at_1": pass_at(1, tries, right)}


def pass_at(k: int, tries: int, right: int) -> float:
    """Returns the unbiased estimate of pass@k, 1 - C(tries - right, k) / C(tries, k).

    It is the share of the sets of k tries that contain a correct one.
    """
    return 1 - math.comb(tries - right, k) / math.comb(tries, k)
