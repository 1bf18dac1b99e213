"""``evaluate.py zero_shot``: likelihood of sets of texts of other kinds than the training's.

Table 1 of the Latent-Thought paper: each set is scored in blocks that do not overlap, with the
checkpoint's own tokenizer, by the numbers of ``evaluate.py perplexity``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from jsonargparse import ArgumentParser, Namespace

from datamodules import ZeroShotText
from datamodules.recipe import public_path
from datamodules.zero_shot import ZERO_SHOT_SETS, zero_shot_set
from evaluation.arguments import (
    add_file_arguments,
    add_model_arguments,
    carried,
    load_checkpoint,
    load_model,
    split_words,
)
from evaluation.cost import cost_cells, mean_cost
from evaluation.load import build_data, check_fit, prepare
from evaluation.output import check_targets, format_table, report_result
from evaluation.perplexity import measure_perplexity
from evaluation.scoring import PERPLEXITY_KEYS
from evaluation.tables import FOUR, TableColumn, as_aligned, show_columns, title_of
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, CheckpointError, Recipe


def zero_shot_result(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of one model on some sets under the keys of the JSON file.

    On top, what all sets have in common, a perplexity
    of each, and the cost of all together; under ``sets`` the whole result of each.

    Sets are results of ``measure_perplexity`` by name, at least one.
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
    """Returns a row for each set, and what holds for all of them."""
    key = PERPLEXITY_KEYS[result["likelihood"]]
    sets = pd.DataFrame(
        {
            name: {
                "split": _split(name, one["data"]),
                key: f"{one[key]:.2f}",
                "bits_per_byte": one["bits_per_byte"],
                "tokens": f"{one['tokens']:,}{_part(one['settings'])}",
            }
            for name, one in result["sets"].items()
        },
        dtype=object,
    ).T.rename_axis("set")
    columns = {name: TableColumn(title_of(name), str) for name in sets}
    columns["bits_per_byte"] = TableColumn("bits per byte", FOUR)
    common = {
        "likelihood": result["likelihood"],
        "causal": "yes" if result["causal"] else "no",
        **cost_cells(result),
        "checkpoint": result["checkpoint"],
    }
    return f"{as_aligned(show_columns(sets, columns))}\n\n{format_table(common)}"


def _part(how: Mapping[str, Any]) -> str:
    """Returns a mark where less than all of a set was scored."""
    limited = how["batches"] < how["of_batches"]
    return f" ({how['batches']} of {how['of_batches']} batches)" if limited else ""


def _split(name: str, data: Mapping[str, Any]) -> str:
    """Returns the hub's split, or that the text is of files that may be anything."""
    arguments = data["recipe"]["init_args"]
    inner = arguments.get("corpus")
    if isinstance(inner, Mapping):  # cut into sentences
        arguments = inner["init_args"]
    return zero_shot_set(name).split if arguments.get("data_files") is None else "own file"


# ---- the command


def set_recipe(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> Recipe:
    """Returns the recipe of a set as the checkpoint's model reads it.

    Its tokenizer, windows and batches are those of the training; where that cut another corpus into
    sentences, so is the set.

    ``changes`` are arguments of `ZeroShotText`; ``block_size`` and ``eval_batch_size`` are those of
    the batches.

    Raises:
        CheckpointError: if the checkpoint was trained without a datamodule.
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
    if isinstance(inner, Mapping) and "class_path" in inner:
        batches = {key: changes[key] for key in ("block_size", "eval_batch_size") if key in changes}
        corpus = _recipe({**carried(inner.get("init_args", {})), **changes})
        return {**trained, "init_args": {**arguments, **batches, "corpus": corpus}}
    return _recipe({**carried(arguments), **changes})


def _recipe(arguments: dict[str, Any]) -> Recipe:
    return {"class_path": public_path(ZeroShotText), "init_args": arguments}


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    add_model_arguments(parser)
    parser.add_argument(
        "--sets", type=str, default=",".join(ZERO_SHOT_SETS), help="Sets to score, by commas."
    )
    for name, kind in ZERO_SHOT_SETS.items():
        parser.add_argument(
            f"--files.{name}",
            type=str | list[str] | None,
            default=None,
            help=f"Your copy of {name}, files or patterns: {kind.local_format} (null: the hub's).",
        )
    parser.add_argument(
        "--text_field",
        type=str | None,
        default=None,
        help="Field or column of your files with the text (null: the set's own, or text).",
    )
    parser.add_argument(
        "--cache_dir",
        type=str | None,
        default=None,
        help="Folder of the tokenised sets (null: that of the training's data).",
    )
    parser.add_argument(
        "--block_size", type=int | None, default=None, help="Tokens a block (null: as trained)."
    )
    parser.add_argument(
        "--batch_size", type=int | None, default=None, help="Blocks per batch (null: as trained)."
    )
    parser.add_argument(
        "--limit_batches", type=int | None, default=None, help="Score that many batches of a set."
    )
    add_file_arguments(parser, output="JSON file to write.")


def chosen_sets(settings: Namespace) -> list[str]:
    """Returns the names of the sets to score, in the order given, each once.

    Raises:
        ValueError: if one is not known, there are none, or files are given for another one.
    """
    names = split_words(settings.sets)
    unknown = [name for name in names if name not in ZERO_SHOT_SETS]
    if unknown or not names:
        raise ValueError(
            f"sets ({settings.sets}) must name some of {', '.join(ZERO_SHOT_SETS)}, by commas"
        )
    for name, files in settings.files.as_dict().items():
        if files is not None and name not in names:
            raise ValueError(f"files.{name} is given, but {name} is not scored; add it to --sets")
    if settings.text_field is not None and not any(settings.files[name] for name in names):
        raise ValueError(
            f"text_field ({settings.text_field}) is that of your own files; name them with --files"
        )
    return names


def _changes(settings: Namespace, name: str) -> dict[str, Any]:
    """Returns the arguments of a set that the command line gives."""
    files = settings.files[name]
    given = {
        "block_size": settings.block_size,
        "eval_batch_size": settings.batch_size,
        "cache_dir": settings.cache_dir,
        "text_field": None if files is None else settings.text_field,
    }
    return {
        "set_name": name,
        "data_files": files,
        **{key: value for key, value in given.items() if value is not None},
    }


def _check_block(model: LanguageModel, block_size: int | None) -> None:
    """Raises a ValueError if the block size that was typed is longer than the model can read."""
    learned = model.config.position_limit
    if block_size is not None and learned is not None and block_size > learned:
        raise ValueError(
            f"block_size ({block_size}) is longer than the {learned} positions that the model has "
            f"learned; set --block_size {learned} or less"
        )


def run(settings: Namespace) -> None:
    """Scores the sets, prints a table and writes the JSON file if one is asked for."""
    names = chosen_sets(settings)
    (target,) = check_targets(output=settings.output)
    checkpoint = load_checkpoint(settings)
    recipes = {name: set_recipe(checkpoint, _changes(settings, name)) for name in names}
    sets = {name: build_data(checkpoint, recipe) for name, recipe in recipes.items()}
    model = load_model(settings, checkpoint)
    _check_block(model, settings.block_size)
    for data in sets.values():  # all of them before hours of scoring
        check_fit(model, data)
        prepare(data, checkpoint)
    how = {"precision": settings.precision, "limit_batches": settings.limit_batches}
    result = zero_shot_result(
        {name: measure_perplexity(checkpoint, model, data, **how) for name, data in sets.items()}
    )
    report_result(zero_shot_table(result), result, target)
