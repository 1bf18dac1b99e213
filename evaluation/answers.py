"""``evaluate.py answers``: accuracy on questions with one right answer.

Works on batches of any data module that marks answers in them (``answer`` and ``group``, see
`datamodules.answers`), through the contract that every method keeps.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor
from tqdm import tqdm

from datamodules import AnswerDataModule, BatchLoader, Tokenizer, answer_batch
from datamodules.text import IGNORE
from evaluation.arguments import (
    Split,
    add_data_arguments,
    add_model_arguments,
    data_recipe,
    load_checkpoint,
    load_model,
)
from evaluation.cost import ComputeCounter, Cost, GeneratedSteps, Stopwatch, price
from evaluation.load import (
    Precision,
    autocast,
    build_data,
    check_fit,
    describe_data,
    describe_settings,
    prepare,
)
from evaluation.output import check_target, format_table, write_json
from evaluation.scoring import Share, score_batch, share_of_counts
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint
from lightning_models.generation import SamplingConfig, generate
from lightning_models.layers import recording
from lightning_models.outputs import Likelihood


@dataclass(frozen=True)
class Question:
    """A question of a batch, as tokens.

    Attributes:
        prompt: EOS and the question.
        answer: The right answer and the EOS after it.
        group: What accuracies are grouped by.
        number: Stable across batch composition.
    """

    prompt: list[int]
    answer: list[int]
    group: int
    number: int


class Judged(NamedTuple):
    """What became of questions.

    Attributes:
        right: Whether each is answered rightly.
        likelihood: Kind of the likelihood that decided it; None where none did.
    """

    right: list[bool]
    likelihood: Likelihood | None


Judge = Callable[[Sequence[Question]], Judged]
"""From questions to whether each is answered rightly."""


def questions_in(batch: dict[str, Any]) -> list[Question]:
    """Returns the questions of a batch; rows that only fill it up are left out."""
    found = []
    for row, marks in enumerate(batch["answer"]):
        answer = batch["targets"][row][marks].tolist()
        if answer:
            first = int(marks.int().argmax())  # the input here is the question's last token
            found.append(
                Question(
                    prompt=batch["tokens"][row, : first + 1].tolist(),
                    answer=answer,
                    group=int(batch["group"][row]),
                    number=int(batch["sequence_id"][row]),
                )
            )
    return found


def rank_judge(
    model: LanguageModel,
    tokenizer: Tokenizer,
    candidates: Sequence[str],
    *,
    batch_size: int,
    precision: Precision = "32",
    compute: ComputeCounter | None = None,
) -> Judge:
    """Returns a judge: right is whose true answer has the highest likelihood of all candidates.

    The likelihood is that of the answer with the EOS after it: without the EOS, "son" could never
    be less likely than "son-in-law". It comes from ``LanguageModel.score``, so this works for
    methods that only bound or estimate it.

    Args:
        model: On its device, in eval mode.
        tokenizer: Encodes the candidates.
        candidates: All possible answers.
        batch_size: Rows to score at once; each question takes as many rows as there are candidates.
        precision: Of the matrix products.
        compute: Counts what scoring the candidates computes.
    """
    compute = ComputeCounter() if compute is None else compute
    encoded = [[*tokenizer.encode(text), tokenizer.eos_id] for text in candidates]

    def judge(questions: Sequence[Question]) -> Judged:
        if not questions:
            return Judged([], None)
        pairs = [(question, answer) for question in questions for answer in encoded]
        parts = [pairs[i : i + batch_size] for i in range(0, len(pairs), batch_size)]
        batches = compute.watch(_batch_of(tokenizer, part) for part in parts)
        with compute.recording():
            scored = [_likelihoods(model, batch, precision) for batch in batches]
        totals = torch.cat([nats for nats, _ in scored]).view(len(questions), len(encoded))
        right = [
            encoded[best] == question.answer
            for question, best in zip(questions, totals.argmax(dim=1).tolist(), strict=True)
        ]
        return Judged(right, scored[0][1])

    return judge


def _batch_of(tokenizer: Tokenizer, pairs: Sequence[tuple[Question, list[int]]]) -> dict[str, Any]:
    """Returns a batch of questions, each with an answer."""
    width = max(len(question.prompt) + len(answer) for question, answer in pairs)
    rows = np.full((len(pairs), width), IGNORE, dtype=np.int64)
    for row, (question, answer) in zip(rows, pairs, strict=True):
        row[: len(question.prompt) + len(answer)] = [*question.prompt, *answer]
    batch = answer_batch(
        rows,
        # One number for all answers of a question: what a method draws is the same for each.
        np.array([question.number for question, _ in pairs]),
        first_answers=np.array([len(question.prompt) - 1 for question, _ in pairs]),
        groups=np.array([question.group for question, _ in pairs]),
        loss_on="answer",
        eos_id=tokenizer.eos_id,
        token_bytes=tokenizer.token_bytes,
    )
    batch["context"] = torch.tensor([len(question.prompt) for question, _ in pairs])
    return batch


def _likelihoods(
    model: LanguageModel, batch: dict[str, Any], precision: Precision
) -> tuple[Tensor, Likelihood]:
    """Returns the log-likelihood of each answer after its question, (N,) float64 in nats.

    And its kind: a method that infers something from the question alone makes estimates.
    """
    scores = score_batch(model, batch, precision)
    totals = scores.log_prob.double().sum(dim=1) + scores.sequence_term.double()
    return totals.cpu().detach(), scores.kind


def generate_judge(
    model: LanguageModel, tokenizer: Tokenizer, *, precision: Precision = "32"
) -> Judge:
    """Returns a judge: right is whose greedy continuation is the true answer, then EOS.

    Texts are compared without the spaces around them.

    Args:
        model: On its device, in eval mode.
        tokenizer: The one the model was trained with.
        precision: Of the matrix products.
    """

    def judge(questions: Sequence[Question]) -> Judged:
        if not questions:
            return Judged([], None)
        with autocast(model.device, precision):
            written = generate(
                model,
                [question.prompt for question in questions],
                max_new_tokens=max(len(question.answer) for question in questions),
                sampling=SamplingConfig(temperature=0),
                eos_id=tokenizer.eos_id,
                vocab_size=tokenizer.vocab_size,
                device=model.device,
                # Numbers in a batch follow upon one another, filling rows being last: each question
                # has its own as its stream, whatever the batch size.
                first_row=questions[0].number,
            )
        right = [
            ids[-1:] == [tokenizer.eos_id] and _text(tokenizer, ids) == _text(tokenizer, q.answer)
            for ids, q in zip(written, questions, strict=True)
        ]
        return Judged(right, None)

    return judge


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode([i for i in ids if i != tokenizer.eos_id]).strip()


# ---- the command


Mode = Literal["rank", "generate"]


@dataclass(frozen=True)
class AnswerReport:
    """Right answers of one model, and everything needed to repeat the count."""

    group_name: str
    """What a group is, e.g. hops."""
    asked: dict[int, int]
    """Questions of each group, by group."""
    right: dict[int, int]
    """Right answers of each group."""
    candidates: int | None
    """Answers to choose from; None where the model writes its own."""
    likelihood: Likelihood | None
    """Kind of the likelihood of answers after their questions; None where none is computed."""
    causal: bool | None
    """Whether no token's likelihood depends on later ones; None where none is computed."""
    cost: Cost
    """FLOPs, steps and seconds of the answers."""
    checkpoint: str
    data: dict[str, Any]
    settings: dict[str, Any]

    def share(self, group: int | None = None) -> Share:
        """Returns the share of right answers, of one group or of all."""
        groups = list(self.asked) if group is None else [group]
        right, asked = (sum(counts[g] for g in groups) for counts in (self.right, self.asked))
        return share_of_counts(right, asked)

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file."""
        return {
            **self.share().as_dict(),
            "by_group": [
                {self.group_name: group, **self.share(group).as_dict()} for group in self.asked
            ],
            "candidates": self.candidates,
            "likelihood": self.likelihood,
            "causal": self.causal,
            **self.cost.as_dict(),
            "checkpoint": self.checkpoint,
            "data": self.data,
            "settings": self.settings,
        }

    def as_table(self) -> str:
        """Returns the result for people."""
        rows = {"accuracy": str(self.share())}
        rows |= {f"{self.group_name} {group}": str(self.share(group)) for group in self.asked}
        if self.candidates is not None:
            rows["by chance"] = f"{1 / self.candidates:.4f}"
        rows |= {"mode": str(self.settings["mode"]), "split": str(self.data["split"])}
        if self.likelihood is not None:
            rows |= {"likelihood": self.likelihood, "causal": "yes" if self.causal else "no"}
        return format_table({**rows, **self.cost.as_cells(), "checkpoint": self.checkpoint})


def measure_answers(
    checkpoint: Checkpoint,
    model: LanguageModel,
    data: AnswerDataModule,
    *,
    mode: Mode = "rank",
    split: Split = "test",
    precision: Precision = "32",
    limit_batches: int | None = None,
) -> AnswerReport:
    """Returns the right answers to the questions of a split of prepared data, by group.

    Args:
        checkpoint: where the model comes from.
        model: on its device, in eval mode.
        data: prepared and set up.
        mode: 'rank' takes the likeliest of all possible answers (`rank_judge`);
            'generate' decodes greedily (`generate_judge`).
        split: which questions.
        precision: of the matrix products.
        limit_batches: ask only so many batches; None: all.

    Raises:
        ValueError: if the split is empty, or 'rank' has no list of answers.
    """
    candidates = _candidates(data) if mode == "rank" else None
    source = data.evaluation_source(split)
    count = len(source) if limit_batches is None else min(limit_batches, len(source))
    batches = islice(BatchLoader(source, start=lambda: 0, num_workers=data.num_workers), count)
    steps, compute, watch = GeneratedSteps(), ComputeCounter(), Stopwatch()
    with recording(generated_steps=steps.count):
        asked, right, kind = _count(
            _judge(model, data, candidates, precision, compute),
            tqdm(batches, total=count, desc="asking", unit=" batches", disable=None),
        )
    taken = steps.mean if candidates is None else compute.mean
    spent = taken, watch.seconds, compute.flops_per_token
    settings = describe_settings(
        checkpoint, model, data, batches=count, of_batches=len(source), precision=precision
    )
    return AnswerReport(
        group_name=data.group_name,
        asked=asked,
        right=right,
        candidates=None if candidates is None else len(candidates),
        likelihood=kind,
        # an estimate after the question is inferred from that alone
        causal=None if kind is None else model.causal or kind == "estimate",
        cost=price(model, data.row_tokens(split), *spent),
        checkpoint=str(checkpoint.path),
        data=describe_data(checkpoint, data, split),
        settings={"mode": mode, **settings},
    )


def _count(
    judge: Judge, batches: Iterable[dict[str, Any]]
) -> tuple[dict[int, int], dict[int, int], Likelihood | None]:
    """Returns questions and right answers of each group, groups ascending, and by what likelihood.

    None where no likelihood decided.
    """
    asked: Counter[int] = Counter()
    right: Counter[int] = Counter()
    kind: Likelihood | None = None
    for batch in batches:
        questions = questions_in(batch)
        judged = judge(questions)
        kind = kind or judged.likelihood
        for question, is_right in zip(questions, judged.right, strict=True):
            asked[question.group] += 1
            right[question.group] += is_right
    groups = sorted(asked)
    return (
        {group: asked[group] for group in groups},
        {group: right[group] for group in groups},
        kind,
    )


def _candidates(data: AnswerDataModule) -> list[str]:
    candidates = data.candidates()
    if candidates is None:
        raise ValueError(
            f"mode (rank) chooses among all possible answers, which {type(data).__name__} does not "
            "list; use --mode generate"
        )
    return candidates


def _judge(
    model: LanguageModel,
    data: AnswerDataModule,
    candidates: Sequence[str] | None,
    precision: Precision,
    compute: ComputeCounter,
) -> Judge:
    if candidates is None:
        return generate_judge(model, data.tokenizer, precision=precision)
    size = data.eval_batch_size
    return rank_judge(
        model, data.tokenizer, candidates, batch_size=size, precision=precision, compute=compute
    )


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options; data options default to those in the checkpoint."""
    add_model_arguments(parser)
    add_data_arguments(parser, argv)
    parser.set_defaults({"split": "test"})
    parser.add_argument(
        "--mode",
        type=Mode,
        default="rank",
        help="rank: the likeliest of all possible answers; generate: greedy text must be right.",
    )
    parser.add_argument("--output", type=str | None, default=None, help="JSON file to write.")


def run(settings: Namespace) -> None:
    """Asks the questions, prints a table and writes the JSON file if one is asked for."""
    target = None if settings.output is None else check_target(settings.output)
    checkpoint = load_checkpoint(settings)
    data = build_data(checkpoint, data_recipe(settings))
    if not isinstance(data, AnswerDataModule):
        raise ValueError(
            f"data ({type(data).__name__}) has no questions with one right answer; name such data, "
            "e.g. --data datamodules.Kinship"
        )
    model = load_model(settings, checkpoint)
    check_fit(model, data)
    prepare(data, checkpoint)
    report = measure_answers(
        checkpoint,
        model,
        data,
        mode=settings.mode,
        split=settings.split,
        precision=settings.precision,
        limit_batches=settings.limit_batches,
    )
    print(report.as_table())
    if target is not None:
        write_json(target, report.as_dict())
