"""``evaluate.py tasks``: scores of a checkpoint on tasks of lm-evaluation-harness."""

from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt

from datamodules import SentenceTokenizer, Tokenizer
from evaluation.arguments import (
    add_budget_argument,
    add_file_arguments,
    add_model_arguments,
    add_tokenizer_argument,
    load_with_tokenizer,
)
from evaluation.cost import non_embedding_parameters
from evaluation.devices import autocast
from evaluation.output import check_targets, format_table, write_json, write_jsonl
from evaluation.provenance import describe_model
from evaluation.results import save_result
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint
from lightning_models.recipe import split_names

DEFAULT_BATCH = 16
DEFAULT_GENERATED = 256
"""Maximum number of new tokens unless a task sets one, as in the harness."""

PACKAGES = ("lm_eval", "datasets", "torch")


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    add_model_arguments(parser)
    parser.add_argument(
        "--tasks",
        type=str,
        required=True,
        help="Tasks, groups or tags, separated by commas: from the harness (lambada_openai, "
        "hellaswag, blimp) or configs/tasks (lambada_local), which read the folder DATA names.",
    )
    parser.add_argument(
        "--include_path",
        type=str | None,
        default=None,
        help="Folder of your task files. They are code: the harness runs their !function and "
        "Jinja, so name only folders that you trust.",
    )
    parser.add_argument(
        "--limit",
        type=PositiveInt | None,
        default=None,
        help="Number of examples of a task to score. Null means all.",
    )
    parser.add_argument(
        "--num_fewshot",
        type=NonNegativeInt | None,
        default=None,
        help="Worked examples before each question. Null means as the task sets it, or none.",
    )
    parser.add_argument(
        "--batch_size", type=PositiveInt, default=DEFAULT_BATCH, help="Rows per batch."
    )
    parser.add_argument(
        "--mode",
        type=Literal["blockwise", "autoregressive"],
        default="blockwise",
        help="blockwise: context and continuation in one pass; autoregressive: each token given "
        "its prefix only, causal for every method. They differ for models that are not causal.",
    )
    add_budget_argument(
        parser,
        "Number of streams of Thoughtbubbles: in proportion to a text's length, as in the paper "
        "(the default), or as for a whole window.",
    )
    parser.add_argument(
        "--max_gen_toks",
        type=PositiveInt,
        default=DEFAULT_GENERATED,
        help="Maximum number of new tokens, unless the task sets one.",
    )
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="Seed of sampled texts.")
    add_tokenizer_argument(parser)
    parser.add_argument(
        "--cache",
        type=str | None,
        default=None,
        help="File of cached answers (sqlite), from which an interrupted run continues.",
    )
    add_file_arguments(
        parser, output="JSON file to write.", samples="JSONL file to write, one example per line."
    )


def run(settings: Namespace) -> None:
    """Scores the tasks, prints the table, and writes the requested files."""
    targets = check_targets(output=settings.output, samples=settings.samples, cache=settings.cache)
    output, samples, cache = targets
    names = split_names(settings.tasks)
    if not names:
        raise ValueError(f"tasks ({settings.tasks}) must name some, by commas, e.g. lambada_openai")
    # Texts are shorter than training windows: App. E.1 of the Thoughtbubbles paper.
    checkpoint, model, tokenizer = load_with_tokenizer(settings, budget="dynamic")
    # The harness takes seconds to import: not before the input is checked.
    from evaluation.tasks import harness
    from evaluation.tasks.adapter import HarnessModel
    from evaluation.tasks.task_scores import as_table, headlines, samples_of, task_scores

    lm = HarnessModel(
        model,
        tokenizer,
        batch_size=settings.batch_size,
        mode=settings.mode,
        context=partial(autocast, model.device, settings.precision),
        max_gen_toks=settings.max_gen_toks,
        seed=settings.seed,
    )
    tasks = harness.load_tasks(names, settings.include_path, settings.num_fewshot)
    options = describe(settings, checkpoint, model, names)
    options["counted"] = "lexical" if isinstance(tokenizer, SentenceTokenizer) else "all"
    identity = "" if cache is None else _identity(model, tokenizer, options)
    results = harness.score_tasks(lm, tasks, limit=settings.limit, cache=cache, identity=identity)
    assert results is not None  # a single process is the first rank
    scores = task_scores(results, model, lm.usage)
    summary = {"model": type(model).__name__, "checkpoint": str(checkpoint.path)}
    summary |= {key: str(options[key]) for key in ("mode", "budget") if key in options}
    print(f"{as_table(results, scores)}\n\n{format_table(summary)}")
    if samples is not None:
        write_jsonl(samples, samples_of(results))
    result = {
        **headlines(scores),
        "model": type(model).__name__,
        "parameters": non_embedding_parameters(model),
        "checkpoint": str(checkpoint.path),
        "tasks": scores,
        "settings": options,
        "versions": {name: version(name) for name in PACKAGES},
    }
    save_result(checkpoint, result, {"command": "tasks", "tokenizer": tokenizer.state(), **options})
    if output is not None:
        write_json(output, result)


def describe(
    settings: Namespace, checkpoint: Checkpoint, model: LanguageModel, names: list[str]
) -> dict[str, Any]:
    """Returns the settings for scoring as plain values."""
    keys = ("include_path", "limit", "num_fewshot", "batch_size", "mode", "max_gen_toks", "seed")
    budget = getattr(model.config, "uses_budget", False)
    return {
        "tasks": names,
        **{key: settings[key] for key in keys},
        **({"budget": getattr(model.config, "budget", None)} if budget else {}),
        "precision": settings.precision,
        **describe_model(checkpoint, model),
    }


def _identity(model: LanguageModel, tokenizer: Tokenizer, options: dict[str, Any]) -> str:
    """Returns a digest of everything that determines answers, so not of tasks or batch size."""
    from evaluation.tasks.harness import identity_of

    keys = ("mode", "max_gen_toks", "seed", "precision")
    decisive = {key: options[key] for key in keys}
    if model.adaptive:  # answers of older caches lack the executed FLOPs
        decisive["flops"] = "counted"
    return identity_of(model, tokenizer.state(), decisive)
