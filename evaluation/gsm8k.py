"""``evaluate.py gsm8k``: share of word problems that a model solves in k tries (pass@k).

The protocol of the Latent-Thought paper (arXiv 2502.01567, section 3.3 and appendix A.3): five
candidates of up to 50 tokens, each a multinomial sample after an inference of the latent vectors
of its own; a question counts as solved if any is right; solved problems, drawn from the training
set, may stand before it. Any model that continues text can be asked, sentence models included.

NOTE(paper): the paper names "the 1K test set"; we take all 1,319 test problems. It publishes
neither its prompt nor how answers are read: ours are in `prompt_text` and `extract_answer`. Its
GPT-2 baselines answer by beam search with five beams; here every model is sampled alike.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jsonargparse import ArgumentParser, Namespace
from tqdm import tqdm

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
from datamodules.readers import read_lines
from datamodules.reasoning.gsm8k import BAR
from evaluation.arguments import (
    add_model_arguments,
    add_tokenizer_argument,
    chosen,
    load_checkpoint,
    load_model,
    load_own_tokenizer,
)
from evaluation.cost import Cost, GeneratedSteps, Stopwatch, price
from evaluation.load import Precision, autocast, describe_model
from evaluation.output import check_targets, format_table, write_json, write_jsonl
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint
from lightning_models.generation import SamplingConfig, generate
from lightning_models.layers import recording
from lightning_models.runtime import seeded_generator

# ---- the number that a text gives as its answer


_MINUS = "[-\u2212]"
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
# A minus after a word, a number or a bracket subtracts, or joins: "10-4" has no -4. A number over
# a number is one thing, so that "1/2" is not taken for 2.
_SIGNS = rf"(?:(?<![\w.)%]){_MINUS})?(?:[$\u20ac\u00a3]{_MINUS}?)?"
_NUMBER = re.compile(rf"{_SIGNS}{_DIGITS}(?:/{_DIGITS})*")
_MARKED = re.compile(r"####([^\n]*)")
_NOT_OF_THE_VALUE = str.maketrans({"\u2212": "-", "$": "", "\u20ac": "", "\u00a3": "", ",": ""})


def extract_answer(text: str) -> str | None:
    """Returns the number that a continuation of a prompt gives, in its plainest form.

    That is the first number after the first ``####``, on its line; if there is none, the last
    number of the text. What follows the next "Question:" is not part of the answer: models go on
    to ask themselves. Currency signs, percent signs, thousands' commas, a period after the number
    and decimals of zero do not count; a fraction is not worked out.

    Args:
        text: what a model wrote after "Answer:".

    Returns:
        E.g. "18" for "$18.00.", "-1200" for "-1,200", "1/2" for "1/2"; None without any number.
    """
    own = text.partition(QUESTION)[0]
    marked = _MARKED.search(own)
    found = _NUMBER.search(marked[1]) if marked else None
    if found is not None:
        return plain_number(found[0])
    numbers = _NUMBER.findall(own)
    return plain_number(numbers[-1]) if numbers else None


def gold_answer(problem: Problem, where: str) -> str:
    """Returns the right answer of a problem, in the form of `extract_answer`.

    Args:
        problem: its worked answer ends in ``#### N``.
        where: which problem it is, for the message.

    Raises:
        ValueError: if what stands there is not one number.
    """
    result = result_of(problem.answer)
    found = _NUMBER.fullmatch(result.rstrip(".%"))
    if found is None:
        raise ValueError(f"{where}: the result, {result[:50]!r}, is not a number")
    return plain_number(found[0])


def plain_number(written: str) -> str:
    """Returns a number without signs of currency, commas, and zeros that change nothing.

    Decimals are compared as digits, not as floats: 0.1 is not 0.10000000000000001.

    Args:
        written: as `extract_answer` finds it; a fraction keeps both parts.
    """
    return "/".join(_plain(part) for part in written.translate(_NOT_OF_THE_VALUE).split("/"))


def _plain(number: str) -> str:
    whole, _, decimals = number.lstrip("-").partition(".")
    digits = ".".join(filter(None, (whole.lstrip("0") or "0", decimals.rstrip("0"))))
    return digits if digits == "0" or not number.startswith("-") else f"-{digits}"


# ---- candidates: several answers to each question, each with a random stream of its own


def sample_candidates(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    candidates: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
    batch_size: int = 32,
    precision: Precision = "32",
) -> list[list[str]]:
    """Returns the candidates of each prompt.

    Candidate c of prompt q is row q * candidates + c of the decoding, and all that is drawn for it
    comes from the stream of (seed, row): what it is depends on prompt, row and seed, not on
    `batch_size` (up to rounding). A model that infers latent vectors infers those of each row.

    Args:
        model: on its device, in eval mode.
        tokenizer: the one it was trained with.
        prompts: token ids, at least one each.
        candidates: per prompt.
        max_new_tokens: upper bound on each candidate.
        sampling: how tokens are chosen.
        batch_size: rows decoded at once.
        precision: of the matrix products.
    """
    texts: list[str] = []
    rows = range(len(prompts) * candidates)
    starts = rows[::batch_size]
    for start in tqdm(starts, desc="answering", unit=" batches", disable=None):
        with autocast(model.device, precision):
            written = generate(
                model,
                [prompts[row // candidates] for row in rows[start : start + batch_size]],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                eos_id=tokenizer.stop_id,
                vocab_size=tokenizer.vocab_size,
                device=model.device,
                first_row=start,
            )
        texts += [tokenizer.decode([i for i in ids if i != tokenizer.stop_id]) for ids in written]
    return [texts[first : first + candidates] for first in rows[::candidates]]


# ---- prompts


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
    """Returns different problems, drawn again for each question.

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


# ---- report


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
        gold: the right answer, in the form of `plain_number`.
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


# ---- the command


_LEAST = {"pass_at": 1, "shots": 0, "max_new_tokens": 1, "limit_questions": 1, "batch_size": 1}


@dataclass(frozen=True, kw_only=True)
class GSM8KConfig:
    """How questions are asked.

    Raises:
        ValueError: if a value is out of its range.
    """

    pass_at: int = 5
    """Candidates per question: the k of pass@k."""
    shots: int = 0
    """Solved problems in front of each question, drawn from the training set."""
    max_new_tokens: int = 50
    """Longest candidate, in tokens."""
    keep_annotations: bool = False
    """Leave calculator annotations, <<2*3=6>>, in the solved problems."""
    limit_questions: int | None = None
    """Ask the first so many questions only; null: all."""
    batch_size: int = 32
    """Candidates decoded at once."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key, least in _LEAST.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"{key} ({value}) must be at least {least}")


_Config = TypeVar("_Config", GSM8KConfig, SamplingConfig)


def measure_gsm8k(
    checkpoint: Checkpoint,
    model: LanguageModel,
    tokenizer: Tokenizer,
    asked: Problems,
    shown: Problems | None = None,
    *,
    config: GSM8KConfig = GSM8KConfig(),
    sampling: SamplingConfig = SamplingConfig(),
    precision: Precision = "32",
) -> GSM8KReport:
    """Returns which questions a model answers rightly.

    Args:
        checkpoint: where the model comes from.
        model: on its device, in eval mode.
        tokenizer: the one it was trained with.
        asked: the questions.
        shown: problems to draw demonstrations from; None: none are shown.
        config: how they are asked.
        sampling: how tokens are chosen; its seed is that of the demonstrations, too.
        precision: of the matrix products.

    Raises:
        ValueError: if there is no room for a question, there are too few problems to show, some of
            them are asked, too, or a right answer is not a number.
    """
    problems = asked.rows[: config.limit_questions]
    gold = [gold_answer(p, f"question {number}") for number, p in enumerate(problems, start=1)]
    prompts = make_prompts(
        problems,
        _demonstrations(shown, config.keep_annotations),
        tokenizer,
        shots=config.shots,
        seed=sampling.seed,
        room=room_for_prompts(model, config.max_new_tokens),
    )
    steps, watch = GeneratedSteps(), Stopwatch()
    with recording(generated_steps=steps.count):
        texts = sample_candidates(
            model,
            tokenizer,
            [prompt.ids for prompt in prompts],
            candidates=config.pass_at,
            max_new_tokens=config.max_new_tokens,
            sampling=sampling,
            batch_size=config.batch_size,
            precision=precision,
        )
    longest = round(statistics.fmean(len(prompt.ids) for prompt in prompts)) + config.max_new_tokens
    return GSM8KReport(
        problems=problems,
        prompts=prompts,
        judged=[judge(*pair) for pair in zip(texts, gold, strict=True)],
        shots=config.shots,
        checkpoint=str(checkpoint.path),
        data={"test": asked.origin, "train": None if shown is None else shown.origin},
        settings={
            **dataclasses.asdict(config),
            **dataclasses.asdict(sampling),
            "precision": precision,
            "model": type(model).__name__,
            "tokenizer": tokenizer.name,
            **describe_model(checkpoint, model),
            "trained_on": checkpoint.data_state.get("fingerprint"),
        },
        cost=price(model, longest, steps.mean, watch.seconds),
    )


def _demonstrations(shown: Problems | None, keep_annotations: bool) -> list[Problem]:
    if shown is None or keep_annotations:
        return [] if shown is None else shown.rows
    return [Problem(p.question, without_annotations(p.answer)) for p in shown.rows]


def room_for_prompts(model: LanguageModel, max_new_tokens: int) -> int | None:
    """Returns the tokens of the model's context that are left for a prompt; None: no limit.

    Raises:
        ValueError: if there are none.
    """
    limit = model.context_limit
    if limit is not None and max_new_tokens >= limit:
        raise ValueError(
            f"max_new_tokens ({max_new_tokens}) leaves no room for a question in the model's "
            f"context of {limit} tokens; lower it"
        )
    return None if limit is None else limit - max_new_tokens


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
        if not _is_augmented(Path(file).expanduser()):
            raise
        raise ValueError(
            f"{error} Lines of GSM8K-Aug (question{BAR}steps) are read by evaluate.py reason "
            "--task gsm8k, as --data.data_files and --data.test_files."
        ) from error


def _is_augmented(file: Path) -> bool:
    """Whether the first line of a file is one of GSM8K-Aug."""
    return file.is_file() and BAR in next(read_lines(file), "")


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
    parser.add_argument("--output", type=str | None, default=None, help="JSON file to write.")
    parser.add_argument(
        "--texts", type=str | None, default=None, help="JSONL file to write, a candidate a line."
    )


def run(settings: Namespace) -> None:
    """Asks the questions, prints a table and writes the files that are asked for."""
    config, sampling = chosen(settings, GSM8KConfig), chosen(settings, SamplingConfig)
    target, written = check_targets(output=settings.output, texts=settings.texts)
    checkpoint = load_checkpoint(settings)
    model = load_model(settings, checkpoint)
    tokenizer = load_own_tokenizer(settings, checkpoint, model)
    report = measure_gsm8k(
        checkpoint,
        model,
        tokenizer,
        load_problems("test", settings["files"]["test"]),
        load_problems("train", settings["files"]["train"]) if config.shots else None,
        config=config,
        sampling=sampling,
        precision=settings.precision,
    )
    print(report.as_table())
    if target is not None:
        write_json(target, report.as_dict())
    if written is not None:
        write_jsonl(written, report.texts())
