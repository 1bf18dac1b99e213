"""``evaluate.py perplexity``: likelihood of a corpus under a checkpoint's model."""

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt

from datamodules import BatchLoader, BatchSource, LanguageDataModule, TextDataModule
from datamodules.store import Split
from evaluation.arguments import (
    add_budget_argument,
    add_data_arguments,
    add_file_arguments,
    add_model_arguments,
    open_with_data,
)
from evaluation.autoregressive import PairedScores, draw_targets, score_pairs
from evaluation.cost import ComputeCounter, non_embedding_parameters, price
from evaluation.devices import Device, Precision, pick_device
from evaluation.load import build_model, build_outline
from evaluation.output import check_targets, format_table, report_result
from evaluation.provenance import count_train_tokens, describe_data, describe_model
from evaluation.results import cached_result
from evaluation.scoring import Totals, score_batches
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint

Mode = Literal["blockwise", "autoregressive"]

NO_BLOCKWISE = "none (a part belongs to whole windows)"
"""Cell of the table if the likelihood of a window has a term that belongs to no target."""


def perplexity_table(result: Mapping[str, Any]) -> str:
    """Formats a result of ``measure_perplexity`` as a table."""
    values = {**result, **result["data"]}
    values |= {key: f"{values[key]:.4g}" for key in values if "flops_per_token" in key}
    if values["trained_on"] in (None, values["fingerprint"]):
        values.pop("trained_on")
    if result["mode"] == "autoregressive" and result["blockwise"] is None:
        values |= dict.fromkeys(("blockwise", "difference"), NO_BLOCKWISE)
    settings = result["settings"]
    values |= {key: settings[key] for key in ("budget", "seed") if key in settings}
    hidden = ["data", "settings", "recipe", "model", "parameters", "train_tokens"]
    if values.get("text_changes") is None:
        hidden.append("text_changes")
    else:
        values["text_changes"] = f"the tokenizer {values['text_changes']}; bytes are of the source"
    visible = _flat({key: value for key, value in values.items() if key not in hidden})
    return format_table({k.replace("_", " "): _readable(v) for k, v in visible.items()})


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Flattens inner dicts: their keys follow the dict's name."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = value if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else {f"{key}_{k}": v for k, v in inner.items()}
    return flat


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# ---- the command


DEFAULT_POSITIONS = 2048
"""Number of targets that autoregressive mode draws by default."""


def measure_perplexity(
    checkpoint: Checkpoint,
    model: LanguageModel,
    data: LanguageDataModule,
    *,
    mode: Mode = "blockwise",
    positions: int | None = DEFAULT_POSITIONS,
    seed: int = 0,
    split: Split = "val",
    precision: Precision = "32",
    limit_batches: int | None = None,
) -> dict[str, Any]:
    """Computes the model's likelihood of a split of prepared data.

    The result has everything needed to repeat it, under the keys of the JSON file: the entries of
    ``Totals`` and ``PairedScores``; ``likelihood`` (exact, lower_bound, estimate or noncausal) and
    ``causal``; the cost of scoring a window, or a document of average length, in one pass;
    ``parameters``, N, without embeddings and output matrix; ``text_changes``, a note if the
    tokenizer cannot reproduce every text, else None; ``train_tokens``, D, lexical tokens of the
    training text, or None if unknown.

    Args:
        checkpoint: The checkpoint of the model.
        model: The model in eval mode.
        data: Datamodule, prepared and set up.
        mode: Whole windows in one pass, or sampled tokens, each given its prefix only.
        positions: Number of tokens that autoregressive mode draws, or None for all.
        seed: Seed of the draw.
        split: Split to score.
        precision: Precision of matrix products.
        limit_batches: Number of batches to score, or to draw from. Defaults to all.

    Raises:
        ValueError: If the split is empty.
    """
    source = data.evaluation_source(split)
    count = len(source) if limit_batches is None else min(limit_batches, len(source))
    uses_budget = getattr(model.config, "uses_budget", False)
    options = {"budget": model.config.budget} if uses_budget else {}  # also if it is as trained
    pairs: PairedScores | None = None
    compute, start = ComputeCounter(), time.perf_counter()
    if mode == "blockwise":
        totals = _score_blockwise(model, data, source, count, precision, compute)
    else:
        options |= {"positions": positions, "seed": seed}
        pairs = _score_prefixes(model, data, source, count, positions, seed, precision, compute)
        totals = pairs.totals
    seconds = time.perf_counter() - start
    cost = price(
        model,
        data.row_tokens(split),
        compute.mean,
        seconds,
        compute.flops_per_token,
        rows_per_target=data.rows_per_target(split, count) if pairs is None else 1.0,
        expected=compute.expected,
    )
    likelihood = model.likelihood if pairs is None else pairs.prefix_likelihood
    return {
        "mode": mode,
        **totals.as_dict(likelihood),
        "likelihood": likelihood,
        "causal": model.causal if pairs is None else True,
        **({} if pairs is None else pairs.as_dict()),
        **cost,
        "model": type(model).__name__,
        "parameters": non_embedding_parameters(model),
        "text_changes": data.tokenizer.text_changes,
        "train_tokens": count_train_tokens(checkpoint, data),
        "checkpoint": str(checkpoint.path),
        "data": describe_data(checkpoint, data, split),
        "settings": {
            "batches": count,
            "of_batches": len(source),
            "batch_size": data.eval_batch_size,
            "precision": precision,
            **describe_model(checkpoint, model),
            **options,
        },
    }


def score_checkpoint(
    checkpoint: Checkpoint,
    data: LanguageDataModule,
    changes: Mapping[str, Any] | None = None,
    *,
    device: Device = "auto",
    **options: Any,
) -> tuple[dict[str, Any], Path | None]:
    """Returns a checkpoint's likelihood of a split, see ``measure_perplexity``, cached on disk.

    ``perplexity``, ``zero_shot``, ``compare`` and ``sweep`` score text with this function. A
    result of the same checkpoint, text, code and settings is read from the folder of the run
    (``evaluation.results``), with the seconds of its measurement.

    Args:
        checkpoint: The checkpoint to score.
        data: Datamodule, prepared and set up.
        changes: Fields of the model's config with other values than in training.
        device: Device to run on.
        **options: Options of ``measure_perplexity``.

    Returns:
        The result, and the file that it was read from, or None if it was computed now.

    Raises:
        ValueError: If the split is empty or the weights do not fit.
    """
    outline, target_device = build_outline(checkpoint, changes), pick_device(device)
    count = len(data.evaluation_source(options.get("split", "val")))
    limit = options.pop("limit_batches", None)
    settings = {"mode": "blockwise", "split": "val", "precision": "32", **options}
    if settings["mode"] == "blockwise":
        settings = {k: v for k, v in settings.items() if k not in ("positions", "seed")}
    facts = {
        "command": "perplexity",
        "text": data.fingerprint,
        "data": data.recipe(),
        "config": outline.recipe()["init_args"]["config"],
        "batches": count if limit is None else min(limit, count),
        "device": torch.cuda.get_device_name(target_device)
        if target_device.type == "cuda"
        else target_device.type,
        **settings,
    }

    def measure() -> dict[str, Any]:
        """Loads the weights and scores the split."""
        model = build_model(checkpoint, changes).to(target_device)
        return measure_perplexity(checkpoint, model, data, limit_batches=limit, **settings)

    classes = {type(outline).__module__, type(data).__module__}
    classes |= set(_class_paths([checkpoint.model_recipe, data.recipe()]))
    packages = sorted(path.partition(".")[0] for path in classes)
    result, path = cached_result(checkpoint, facts, packages, measure)
    if path is not None:
        # the same content may be in another folder, or next to other text
        result["checkpoint"] = str(checkpoint.path)
        result["settings"]["which"] = checkpoint.which
        result["train_tokens"] = count_train_tokens(checkpoint, data)
    return result, path


def _class_paths(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(path := value.get("class_path"), str):
            yield path
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _class_paths(item)


def _score_blockwise(
    model: LanguageModel,
    data: LanguageDataModule,
    source: BatchSource,
    count: int,
    precision: Precision,
    compute: ComputeCounter,
) -> Totals:
    on_gpu = model.device.type == "cuda"
    loader = BatchLoader(source, start=lambda: 0, num_workers=data.num_workers, pin_memory=on_gpu)
    batches = compute.watch(islice(loader, count))
    with compute.recording():
        return score_batches(model, batches, precision=precision, num_batches=count)


def _score_prefixes(
    model: LanguageModel,
    data: LanguageDataModule,
    source: BatchSource,
    count: int,
    positions: int | None,
    seed: int,
    precision: Precision,
    compute: ComputeCounter,
) -> PairedScores:
    if not isinstance(data, TextDataModule):
        raise ValueError(
            f"mode (autoregressive) draws from windows, and {type(data).__name__} has none; score "
            "it blockwise"
        )
    drawn = draw_targets(source, batches=count, positions=positions, seed=seed)
    size = data.eval_batch_size
    return score_pairs(
        model, drawn, data.tokenizer, batch_size=size, precision=precision, compute=compute
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    add_model_arguments(parser)
    add_data_arguments(parser)
    parser.add_argument(
        "--mode",
        type=Mode,
        default="blockwise",
        help="blockwise: windows in one pass; autoregressive: each target given its prefix only, "
        "strictly causal for every method, in batches of at most that many tokens.",
    )
    add_budget_argument(
        parser,
        "Shorthand for --set.budget: streams of a prefix as for a whole window, or in proportion.",
    )
    parser.add_argument(
        "--positions",
        type=PositiveInt | Literal["auto"] | None,
        default="auto",
        help="Number of targets to draw in autoregressive mode, the same for every model. Null "
        f"means all, auto {DEFAULT_POSITIONS}.",
    )
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="Seed of the draw.")
    add_file_arguments(parser, output="JSON file to write.")


def _positions(settings: Namespace) -> int | None:
    positions = settings.positions
    if positions == "auto":
        return DEFAULT_POSITIONS
    if settings.mode == "blockwise":
        raise ValueError(
            f"positions ({positions}) are drawn in autoregressive mode only; add --mode "
            "autoregressive, or score less with --limit_batches"
        )
    return positions


def run(settings: Namespace) -> None:
    """Scores the corpus, prints a table, and writes the output file if requested."""
    positions = _positions(settings)
    (target,) = check_targets(output=settings.output)
    checkpoint, changes, data = open_with_data(settings)
    keys = ("mode", "seed", "split", "precision", "limit_batches", "device")
    options = {key: settings[key] for key in keys}
    result, path = score_checkpoint(checkpoint, data, changes, positions=positions, **options)
    report_result(perplexity_table(result), result, target)
    if path is not None:
        print(f"measured before: {path}")
