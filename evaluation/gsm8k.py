"""``evaluate.py gsm8k``: share of word problems that a model solves in k tries (pass@k).

The protocol of the Latent-Thought paper (arXiv 2502.01567, section 3.3 and appendix A.3): five
candidates of up to 50 tokens, each a multinomial sample after an inference of the latent vectors
of its own; a question counts as solved if any is right; solved problems, drawn from the training
set, may stand before it. Any model that continues text can be asked, sentence models included.

It is the task ``configs/tasks/gsm8k_pass_at_k.yaml`` of lm-evaluation-harness, whose functions are
here: the harness repeats each question k times, one filter reads the numbers, one metric counts.

NOTE(paper): the paper names "the 1K test set"; we take all 1,319 test problems. It publishes
neither its prompt nor how answers are read: ours are in `prompt_text` and `extract_answer`. Its
GPT-2 baselines answer by beam search with five beams; here every model is sampled alike.
"""

import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from datamodules import Tokenizer
from datamodules.gsm8k import (
    GSM8KSplit,
    Problem,
    Problems,
    fetch_problems,
    read_problems,
    result_of,
    without_annotations,
)
from datamodules.numbers import numbers_in, read_number
from datamodules.readers import read_lines
from datamodules.reasoning.gsm8k import BAR
from evaluation.arguments import (
    add_file_arguments,
    add_model_arguments,
    add_tokenizer_argument,
    chosen,
    load_with_tokenizer,
)
from evaluation.cost import Cost, cost_cells, price
from evaluation.devices import Precision, autocast
from evaluation.generate import left_for_prompt
from evaluation.output import check_targets, format_table, report_result, write_jsonl
from evaluation.provenance import describe_asked
from lightning_models import LanguageModel
from lightning_models.generation import SamplingConfig
from lightning_models.runtime import seeded_generator

TASK = "gsm8k_pass_at_k"

Document = dict[str, Any]
"""A question as the task asks it: ``question``, ``gold`` (the right answer), ``prompt``, ``shots``
(demonstrations in it), ``cut`` (whether the question itself loses its beginning)."""

# ---- the number that a text gives as its answer


_MARKED = re.compile(r"####([^\n]*)")


def extract_answer(text: str) -> str | None:
    r"""Returns the number that a continuation of a prompt gives, in its plainest form.

    That is the first number after the first ``####``, on its line; if there is none, the number
    in the last ``\boxed{}``; if there is none either, the last number of the text. Text from the
    next "Question:" on is not part of the answer: models go on to ask themselves. Spellings of
    numbers, such as "$18.00", "18%" and "1 1/2", are read by `datamodules.numbers`.

    The text is what a model wrote after "Answer:".

    Returns:
        E.g. "18" for "$18.00.", "-1200" for "-1,200", "0.5" for "1/2"; None without any number.
    """
    own = text.partition(QUESTION)[0]
    marked = _MARKED.search(own)
    if marked:
        found = read_number(marked[1]) or next(iter(numbers_in(marked[1])), None)
        if found is not None:
            return found
    return read_number(own) or next(reversed(numbers_in(own)), None)


def gold_answer(problem: Problem, where: str) -> str:
    """Returns the right answer of a problem, in the form of `extract_answer`.

    The worked answer ends in ``#### N``; ``where`` names the problem in the message.

    Raises:
        ValueError: if what stands there is not one number.
    """
    result = result_of(problem.answer)
    found = read_number(result)
    if found is None:
        raise ValueError(f"{where}: the result, {result[:50]!r}, is not a number")
    return found


# ---- what the task file names


def documents(rows: Sequence[Document] | None = None, **metadata: Any) -> dict[str, Any]:
    """Returns the task's data: ``rows`` as the split test.

    Args:
        rows: as ``make_documents`` returns them; None: the questions of ``gsm8k/test.jsonl`` in the
            folder that the environment variable ``DATA`` names, or of the hub where that is not set
            or there is no such file, without demonstrations.
        **metadata: what else the harness hands over.
    """
    from datasets import Dataset

    if rows is None:
        data = os.environ.get("DATA")
        own = Path(data).expanduser() / "gsm8k" / "test.jsonl" if data else None
        found = str(own) if own is not None and own.is_file() else None
        rows = make_documents(load_problems("test", found).rows)
    return {"test": Dataset.from_list(list(rows))}


def extract_answers(
    tries: Sequence[Sequence[str]], docs: Sequence[Document]
) -> list[list[str | None]]:
    """Returns the number of each text, the harness' filter of the task."""
    return [[extract_answer(text) for text in texts] for texts in tries]


def pass_rates(doc: Document, results: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """Returns pass@k and pass@1 of a question, of k tries."""
    (found,) = results
    right = sum(answer == doc["gold"] for answer in found)
    return {"pass_at_k": pass_at(len(found), len(found), right), "pass_at_1": right / len(found)}


def pass_at(k: int, tries: int, right: int) -> float:
    """Returns the unbiased estimate of pass@k from ``tries`` of which some are right.

    The share of sets of k tries with a right one: 1 - C(tries - right, k) / C(tries, k).

    Raises:
        ValueError: if there are fewer tries than k.
    """
    if not 1 <= k <= tries:
        raise ValueError(f"k ({k}) must be from 1 to the {tries} tries")
    return 1 - math.comb(tries - right, k) / math.comb(tries, k)


# ---- prompts


QUESTION, ANSWER = "Question:", "Answer:"

_DEMONSTRATIONS = 1  # of the random keys: these draws are others than those of a candidate


def prompt_text(question: str, demonstrations: Sequence[Problem] = ()) -> str:
    """Returns the text that the answer continues, after the demonstrations in their order.

    NOTE(paper): the papers do not say what their prompts look like. Ours::

        Question: How many legs have two cats?
        Answer: 2 * 4 = 8
        #### 8

        Question: ...
        Answer:
    """
    solved = (f"{QUESTION} {p.question}\n{ANSWER} {p.answer}\n\n" for p in demonstrations)
    return "".join([*solved, f"{QUESTION} {question}\n{ANSWER}"])


def make_documents(
    problems: Sequence[Problem],
    training: Sequence[Problem] = (),
    tokenizer: Tokenizer | None = None,
    *,
    shots: int = 0,
    seed: int = 0,
    room: int | None = None,
) -> list[Document]:
    """Returns the questions as the task asks them.

    Demonstrations that do not fit are dropped one by one from the front; of a question that is too
    long by itself the harness model keeps the end.

    Demonstrations, ``shots`` a question, are drawn from ``training``, with answers as they shall be
    shown. A prompt has at most ``room`` tokens, 1 or more, with the start of a document; None: any.

    Raises:
        ValueError: if there are fewer than `shots` to draw from, some are asked, too, or a right
            answer is not a number.
    """
    both = {problem.question for problem in problems} & {problem.question for problem in training}
    if both:
        raise ValueError(
            f"files.train has {len(both)} of the questions that are asked, answers included; name "
            "the training file of GSM8K"
        )
    rows = []
    for number, problem in enumerate(problems):
        drawn = draw_demonstrations(training, shots, seed=seed, question=number)
        prompts = [prompt_text(problem.question, drawn[first:]) for first in range(shots + 1)]
        fitting = (
            first
            for first, text in enumerate(prompts)
            if room is None or tokenizer is None or len(tokenizer.prompt_ids(text)) <= room
        )
        first = next(fitting, None)
        rows.append(
            {
                "question": problem.question,
                "gold": gold_answer(problem, f"question {number + 1}"),
                "prompt": prompts[-1 if first is None else first],
                "shots": 0 if first is None else shots - first,
                "cut": first is None,
            }
        )
    return rows


def draw_demonstrations(
    problems: Sequence[Problem], count: int, *, seed: int, question: int
) -> list[Problem]:
    """Returns ``count`` different problems, drawn again for each question.

    They depend on the problems, the seed and the number of the question in its file only; fewer are
    the first of more.

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


def load_problems(split: GSM8KSplit, file: str | None) -> Problems:
    """Returns the problems of a split: those of a file, or without one the hub's.

    Raises:
        ValueError: if they cannot be read.
    """
    if file is None:
        return fetch_problems(split, cure=f"Pass your copy with --files.{split} {split}.jsonl")
    try:
        return read_problems(file, f"files.{split}")
    except ValueError as error:
        path = Path(file).expanduser()
        if not (path.is_file() and BAR in next(read_lines(path), "")):
            raise
        raise ValueError(
            f"{error} Lines of GSM8K-Aug (question{BAR}steps) are read by evaluate.py reason "
            "--task gsm8k, as --data.data_files and --data.test_files."
        ) from error


# ---- asking


@dataclass(frozen=True, kw_only=True)
class GSM8KConfig:
    """How questions are asked; the command checks ranges."""

    pass_at: int = 5
    """Candidates per question: the k of pass@k."""
    shots: int = 0
    """Solved problems before each question, drawn from the training set."""
    max_new_tokens: int = 50
    """Longest candidate, in tokens."""
    keep_annotations: bool = False
    """Leave calculator annotations, <<2*3=6>>, in the solved problems."""
    limit_questions: int | None = None
    """Ask only that many questions, the first ones; null: all."""
    batch_size: int = 32
    """Candidates decoded at once."""


def ask(
    model: LanguageModel,
    tokenizer: Tokenizer,
    rows: Sequence[Document],
    *,
    config: GSM8KConfig = GSM8KConfig(),
    sampling: SamplingConfig = SamplingConfig(),
    precision: Precision = "32",
) -> tuple[list[dict[str, Any]], Cost]:
    """Returns the harness' samples of the questions, and what the candidates took.

    Candidate c of question q draws from the stream (seed, q * pass_at + c): what it is depends on
    prompt and seed, not on the batch (up to rounding). A model that infers latent vectors infers
    those of each candidate.
    """
    # The harness takes seconds to import: not before the input is known to be good.
    from evaluation.tasks.adapter import HarnessModel
    from evaluation.tasks.harness import load_tasks, score_tasks
    from evaluation.tasks.readers import WindowReader

    lm = HarnessModel(
        model,
        tokenizer,
        batch_size=config.batch_size,
        context=partial(autocast, model.device, precision),
        seed=sampling.seed,
        reader=WindowReader(tokenizer, model.context_limit),  # nothing is scored: any rows do
    )
    loaded = load_tasks([TASK], None, None, metadata={"rows": list(rows)})
    writing = {
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_gen_toks": config.max_new_tokens,
    }
    for task in loaded["tasks"].values():
        task.set_config("repeats", config.pass_at)
        task.set_config("generation_kwargs", writing, update=True)
    results = score_tasks(lm, loaded, bootstrap_iters=0)
    assert results is not None  # a single process is the first rank
    work = lm.work[TASK]
    steps = None if work.written_steps is None else work.written_steps / work.written_tokens
    longest = round(work.prompt_tokens / work.prompts) + config.max_new_tokens
    return results["samples"][TASK], price(model, longest, steps, work.seconds)


# ---- results


def count(samples: Sequence[dict[str, Any]], shots: int) -> dict[str, Any]:
    """Returns shares of right answers with standard errors, what they are of, and what went amiss.

    Shares are in [0, 1]. The error of pass@k is that of independent questions; that of pass@1 is
    over the questions, since candidates of one are not independent: nan of one question.

    There is at least one sample of the harness; ``shots`` were asked for.
    """
    docs = [sample["doc"] for sample in samples]
    found = [answer for sample in samples for answer in sample["filtered_resps"][0]]
    share = statistics.fmean(sample["pass_at_k"] for sample in samples)
    ones = [sample["pass_at_1"] for sample in samples]
    spread = statistics.stdev(ones) if len(ones) > 1 else math.nan
    return {
        "k": len(found) // len(samples),
        "pass_at_k": share,
        "pass_at_k_standard_error": math.sqrt(share * (1 - share) / len(samples)),
        "pass_at_1": statistics.fmean(ones),
        "pass_at_1_standard_error": spread / math.sqrt(len(ones)),
        "questions": len(samples),
        "shots": shots,
        "mean_shots": statistics.fmean(doc["shots"] for doc in docs),
        "shortened_prompts": sum(doc["shots"] < shots for doc in docs),
        "cut_questions": sum(doc["cut"] for doc in docs),
        "without_number": found.count(None),
    }


def gsm8k_table(result: Mapping[str, Any]) -> str:
    """Returns a result of the command for people."""
    k, questions = result["k"], result["questions"]
    shares = {f"pass@{k}": "pass_at_k", "pass@1": "pass_at_1"}
    rows = {
        name: f"{result[key]:.4f} +- {result[f'{key}_standard_error']:.4f}"
        for name, key in shares.items()
    }
    rows["questions"] = f"{questions:,}"
    rows["shots"] = f"{result['shots']} ({result['mean_shots']:.2f} on average)"
    rows["questions with fewer shots"] = f"{result['shortened_prompts']:,}"
    rows["questions cut"] = f"{result['cut_questions']:,}"
    rows["candidates without a number"] = f"{result['without_number']:,} of {k * questions:,}"
    return format_table({**rows, **cost_cells(result), "checkpoint": result["checkpoint"]})


def candidate_rows(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row a candidate, for a jsonl file."""
    return [
        {
            "number": number,
            "candidate": candidate,
            "right": found == sample["doc"]["gold"],
            "gold": sample["doc"]["gold"],
            "found": found,
            "text": text,
            **{key: sample["doc"][key] for key in ("shots", "cut", "question")},
        }
        for number, sample in enumerate(samples)
        for candidate, (text, found) in enumerate(
            zip(sample["resps"][0], sample["filtered_resps"][0], strict=True)
        )
    ]


# ---- the command


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    add_model_arguments(parser)
    parser.add_argument(
        "--files.test",
        type=str | None,
        default=None,
        help="Questions: a jsonl file as GSM8K's test.jsonl (null: from the hub).",
    )
    parser.add_argument(
        "--files.train",
        type=str | None,
        default=None,
        help="Solved problems to show, as GSM8K's train.jsonl (null: from the hub).",
    )
    parser.add_class_arguments(GSM8KConfig)
    parser.add_class_arguments(SamplingConfig)
    add_tokenizer_argument(parser)
    add_file_arguments(
        parser, output="JSON file to write.", texts="JSONL file to write, a candidate a line."
    )


def run(settings: Namespace) -> None:
    """Asks the questions, prints a table and writes the files that are asked for."""
    config, sampling = chosen(settings, GSM8KConfig), chosen(settings, SamplingConfig)
    target, written = check_targets(output=settings.output, texts=settings.texts)
    checkpoint, model, tokenizer = load_with_tokenizer(settings)
    asked = load_problems("test", settings["files"]["test"])
    shown = load_problems("train", settings["files"]["train"]) if config.shots else None
    solved = [] if shown is None else shown.rows
    if not config.keep_annotations:
        solved = [Problem(p.question, without_annotations(p.answer)) for p in solved]
    rows = make_documents(
        asked.rows[: config.limit_questions],
        solved,
        tokenizer,
        shots=config.shots,
        seed=sampling.seed,
        room=left_for_prompt(model.context_limit, config.max_new_tokens, "max_new_tokens"),
    )
    samples, cost = ask(
        model, tokenizer, rows, config=config, sampling=sampling, precision=settings.precision
    )
    how = {**vars(config), **vars(sampling), "model": type(model).__name__}
    result = {
        **count(samples, config.shots),
        **cost,
        **describe_asked(checkpoint, model, tokenizer, settings.precision, how),
        "data": {"test": asked.origin, "train": None if shown is None else shown.origin},
    }
    report_result(gsm8k_table(result), result, target)
    if written is not None:
        write_jsonl(written, candidate_rows(samples))
