"""``evaluate.py gsm8k``: how many word problems a model solves in k tries (pass@k).

The protocol of the Latent-Thought paper (arXiv 2502.01567, section 3.3 and appendix A.3): five
candidates of up to 50 tokens, each a multinomial sample behind an inference of the latent vectors
of its own; a question counts as solved if any is right; solved problems, drawn from the training
set, may stand in front. Any model that continues text can be asked, sentence models included.

NOTE(paper): the paper names "the 1K test set"; we take all 1,319 test problems. It publishes
neither its prompt nor how answers are read: ours are in `gsm8k_prompts.prompt_text` and
`gsm8k_answers.extract_answer`. Its GPT-2 baselines answer by beam search with five beams; here
every model is sampled alike.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jsonargparse import ArgumentParser, Namespace

from datamodules import Tokenizer, load_tokenizer
from datamodules.gsm8k import (
    GSM8KSplit,
    Problem,
    Problems,
    fetch_problems,
    read_problems,
    without_annotations,
)
from evaluation.arguments import add_model_arguments
from evaluation.checkpoint.corpus import build_tokenizer
from evaluation.checkpoint.device import Precision, pick_device
from evaluation.checkpoint.rebuild import build_model, changed_fields
from evaluation.cost import GeneratedSteps, Stopwatch, price
from evaluation.gsm8k.answers import gold_answer
from evaluation.gsm8k.candidates import sample_candidates
from evaluation.gsm8k.prompts import make_prompts
from evaluation.gsm8k.report import GSM8KReport, judge
from evaluation.output import check_targets, write_json, write_jsonl
from evaluation.samples import check_vocabulary
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, read_checkpoint
from lightning_models.generation import SamplingConfig
from lightning_models.layers import recording
from lightning_models.recipe import import_packages

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
            **_describe(checkpoint, model, tokenizer),
        },
        cost=price(model, longest, steps.mean, watch.seconds),
    )


def _demonstrations(shown: Problems | None, keep_annotations: bool) -> list[Problem]:
    if shown is None or keep_annotations:
        return [] if shown is None else shown.rows
    return [Problem(p.question, without_annotations(p.answer)) for p in shown.rows]


def _describe(checkpoint: Checkpoint, model: LanguageModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns who was asked, and where."""
    return {
        "model": type(model).__name__,
        "tokenizer": tokenizer.name,
        "device": str(model.device),
        "set": changed_fields(checkpoint, model),
        "which": checkpoint.which,
        "trained_on": checkpoint.data_state.get("fingerprint"),
    }


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
    if file is not None:
        return read_problems(file, f"files.{split}")
    return fetch_problems(split, cure=f"Pass your copy with --files.{split} {split}.jsonl")


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
    parser.add_argument(
        "--tokenizer",
        type=str | None,
        default=None,
        help="Tokenizer name, where the checkpoint names none.",
    )
    parser.add_argument("--output", type=str | None, default=None, help="JSON file to write.")
    parser.add_argument(
        "--texts", type=str | None, default=None, help="JSONL file to write, a candidate a line."
    )


def run(settings: Namespace) -> None:
    """Asks the questions, prints a table and writes the files that are asked for."""
    config, sampling = _chosen(settings, GSM8KConfig), _chosen(settings, SamplingConfig)
    target, written = check_targets(output=settings.output, texts=settings.texts)
    import_packages(settings.packages)
    checkpoint = read_checkpoint(settings.ckpt, settings.which)
    device, name = pick_device(settings.device), settings.tokenizer
    tokenizer = build_tokenizer(checkpoint) if name is None else load_tokenizer(name)
    model = build_model(checkpoint, settings["set"]).to(device)
    check_vocabulary(model, tokenizer)
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


def _chosen(settings: Namespace, kind: type[_Config]) -> _Config:
    """Returns a dataclass of what the command line says of its fields."""
    return kind(**{field.name: settings[field.name] for field in dataclasses.fields(kind)})
