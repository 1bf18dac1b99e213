"""``evaluate.py zero_shot``: likelihood of sets of out-of-domain texts.

Table 1 of the Latent-Thought paper: each set is scored in non-overlapping blocks, with the
checkpoint's tokenizer, like a corpus in ``evaluate.py perplexity``.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from datamodules import ZeroShotText
from datamodules.zero_shot import ZERO_SHOT_SETS
from evaluation.arguments import (
    add_batch_arguments,
    add_file_arguments,
    add_model_arguments,
    carried,
    load_checkpoint,
    model_changes,
)
from evaluation.cost import cost_cells, mean_cost
from evaluation.load import build_data, build_outline, check_fit, prepare
from evaluation.output import check_targets, format_table, report_result
from evaluation.perplexity import score_checkpoint
from evaluation.scoring import PERPLEXITY_KEYS
from evaluation.tables import FOUR, TWO, WHOLE, TableColumn, as_aligned, show_columns, title_of
from lightning_models.checkpoint import Checkpoint, CheckpointError, Recipe
from lightning_models.recipe import public_path, split_names


def zero_shot_result(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the results of one model on one or more sets under the keys of the JSON file.

    They are the perplexity of each set, the cost of all sets, and the full results under ``sets``.
    """
    first = next(iter(sets.values()))
    key = PERPLEXITY_KEYS[first["likelihood"]]
    shared = ("model", "parameters", "train_tokens", "checkpoint")
    return {
        **{f"{name}_{key}": result[key] for name, result in sets.items()},
        "likelihood": first["likelihood"],
        "causal": first["causal"],
        **mean_cost(list(sets.values()), [result["tokens"] for result in sets.values()]),
        **{key: first[key] for key in shared},
        "sets": sets,
    }


def zero_shot_table(result: Mapping[str, Any]) -> str:
    """Formats a row for each set, and the values that all sets share."""
    key = PERPLEXITY_KEYS[result["likelihood"]]
    columns = {
        key: TableColumn(title_of(key), TWO),
        "bits_per_byte": TableColumn("bits per byte", FOUR),
        "tokens": TableColumn("tokens", WHOLE),
        "batches": TableColumn("batches"),
        "of_batches": TableColumn("of"),
    }
    rows = {name: {**scores, **scores["settings"]} for name, scores in result["sets"].items()}
    sets = pd.DataFrame(rows, index=[*columns], dtype=object).T.rename_axis("set")
    common = {
        "likelihood": result["likelihood"],
        "causal": "yes" if result["causal"] else "no",
        **cost_cells(result),
        "checkpoint": result["checkpoint"],
    }
    return f"{as_aligned(show_columns(sets, columns))}\n\n{format_table(common)}"


# ---- the command


def set_recipe(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> Recipe:
    """Returns the recipe of a set with the tokenizer, windows and batches of the training run.

    If the training run split a corpus into sentences, the set is split in the same way. ``changes``
    are arguments of `ZeroShotText`.

    Raises:
        CheckpointError: If the checkpoint was trained without a datamodule.
    """
    trained = checkpoint.data_recipe
    if trained is None:
        raise CheckpointError(
            f"{checkpoint.path} was trained without a datamodule, so it names no tokenizer; score "
            "one set at a time with evaluate.py perplexity --data datamodules.ZeroShotText "
            "--data.set_name ptb --data.tokenizer ..."
        )
    arguments = trained["init_args"]
    inner = arguments.get("corpus")
    nested = isinstance(inner, Mapping) and "class_path" in inner
    trained_args = inner.get("init_args", {}) if nested else arguments
    init_args = {**carried(trained_args), **changes}
    recipe = {"class_path": public_path(ZeroShotText), "init_args": init_args}
    if not nested:
        return recipe
    if "block_size" in changes and "block_size" not in arguments:
        raise ValueError(
            f"block_size ({changes['block_size']}) is an option of windows, and {checkpoint.path} "
            "reads sentences; leave out --block_size"
        )
    batches = {key: changes[key] for key in ("block_size", "eval_batch_size") if key in changes}
    return {**trained, "init_args": {**arguments, **batches, "corpus": recipe}}


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the command's options."""
    add_model_arguments(parser)
    parser.add_argument(
        "--sets",
        type=str,
        default=",".join(ZERO_SHOT_SETS),
        help="Sets to score, separated by commas.",
    )
    for name, text_set in ZERO_SHOT_SETS.items():
        parser.add_argument(
            f"--files.{name}",
            type=str | list[str] | None,
            default=None,
            help=f"Local copy of {name}, files or patterns: {text_set.local_format}. Null means "
            "the hub's copy.",
        )
    parser.add_argument(
        "--text_field",
        type=str | None,
        default=None,
        help="Field or column of local files with the text. Null means the set's default, or text.",
    )
    parser.add_argument(
        "--cache_dir",
        type=str | None,
        default=None,
        help="Folder of the tokenised sets. Null means the folder of the training data.",
    )
    parser.add_argument(
        "--block_size",
        type=PositiveInt | None,
        default=None,
        help="Length of a block in tokens. Null means as trained.",
    )
    add_batch_arguments(parser)
    add_file_arguments(parser, output="JSON file to write.")


def chosen_sets(settings: Namespace) -> dict[str, dict[str, Any]]:
    """Returns the arguments of `ZeroShotText` on the command line for each set to score.

    Raises:
        ValueError: If a set is unknown, there are none, or files are given for a set not to score.
    """
    names, files = split_names(settings.sets), settings.files
    if not names or not set(names) <= set(ZERO_SHOT_SETS):
        raise ValueError(
            f"sets ({settings.sets}) must name some of {', '.join(ZERO_SHOT_SETS)}, by commas"
        )
    with_files = [name for name in ZERO_SHOT_SETS if files[name] is not None]
    for name in with_files:
        if name not in names:
            raise ValueError(f"files.{name} is given, but {name} is not scored; add it to --sets")
    field = settings.text_field
    if field is not None and not with_files:
        raise ValueError(f"text_field ({field}) is a field of local files; name them with --files")
    sizes = {"block_size": settings.block_size, "eval_batch_size": settings.batch_size}
    shared = {**sizes, "cache_dir": settings.cache_dir}
    shared = {key: value for key, value in shared.items() if value is not None}
    return {
        name: {
            "set_name": name,
            "data_files": files[name],
            "text_field": None if files[name] is None else field,
            **shared,
        }
        for name in names
    }


def run(settings: Namespace) -> None:
    """Scores the sets, prints a table, and writes the output file if requested."""
    chosen = chosen_sets(settings)
    (target,) = check_targets(output=settings.output)
    checkpoint = load_checkpoint(settings)
    changes = model_changes(settings, checkpoint)
    outline = build_outline(checkpoint, changes)
    recipes = {name: set_recipe(checkpoint, arguments) for name, arguments in chosen.items()}
    sets = {name: build_data(checkpoint, recipe) for name, recipe in recipes.items()}
    for data in sets.values():  # all sets, before hours of scoring
        check_fit(outline, data)
        prepare(data, checkpoint)
    options = {key: settings[key] for key in ("precision", "limit_batches", "device")}
    scores = {}
    for name, data in sets.items():
        scores[name], path = score_checkpoint(checkpoint, data, changes, **options)
        if path is not None:
            print(f"{name} was measured before: {path}")
    result = zero_shot_result(scores)
    report_result(zero_shot_table(result), result, target)
