"""Options that commands share: checkpoint, device, data and files.

A command declares options with the ``add_`` functions, and loads the models and data that they
select with ``open_with_data`` or ``load_with_tokenizer``; `evaluation.output` checks and writes
its files.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from datamodules import LanguageDataModule, LocalText, Tokenizer, load_tokenizer
from datamodules.local_corpora import FILE_KEYS
from datamodules.store import Split
from evaluation.cli import ExactParser
from evaluation.devices import Device, Precision, pick_device
from evaluation.load import (
    build_data,
    build_model,
    build_outline,
    build_tokenizer,
    check_fit,
    check_meaning,
    prepare,
)
from lightning_models import LanguageModel
from lightning_models.checkpoint import Checkpoint, Recipe, Which, read_checkpoint
from lightning_models.recipe import PACKAGES_HELP, complete, import_packages, public_path
from lightning_models.recipe_options import import_public_classes, lay_over, parse_over
from lightning_models.runtime import CUDNN_ATTENTION_HELP

_Config = TypeVar("_Config")
Budget = Literal["fixed", "dynamic"]

CARRIED = (
    "tokenizer",
    "cache_dir",
    "num_proc",
    "num_workers",
    "block_size",
    "batch_size",
    "eval_batch_size",
)
"""Arguments of the checkpoint's data that other data inherit: how text is read, not which text."""


# ---- options: checkpoint, device, files


def add_model_arguments(parser: ArgumentParser, *, required: bool = True) -> None:
    """Declares the options of a checkpoint and its model."""
    parser.add_argument(
        "--ckpt",
        type=str if required else str | None,
        required=required,
        help="Checkpoint file (.ckpt), or the folder of a run.",
    )
    add_which_argument(parser)
    add_run_arguments(parser)


def add_labelled_checkpoints(parser: ArgumentParser, note: str) -> None:
    """Declares the options of several labelled checkpoints and their models.

    Args:
        parser: Parser of the command.
        note: Sentence for the help about the checkpoints of this command.
    """
    parser.add_argument(
        "--ckpt",
        type=str,
        nargs="+",
        required=True,
        help="Checkpoints, folders of runs, or patterns in quotes, each with a label if it begins "
        f"with NAME=. {note}",
    )
    add_which_argument(parser)
    add_run_arguments(parser)


def add_which_argument(parser: ArgumentParser) -> None:
    """Declares ``--which``, the checkpoint to take from the folder of a run."""
    parser.add_argument(
        "--which",
        type=Which,
        default="last",
        help="Checkpoint to take from a run's folder: the one with the most steps (last), or the "
        "best by the value monitored in training (best). Files cannot be named with best.",
    )


def add_run_arguments(parser: ArgumentParser) -> None:
    """Declares the options of running any model: device, ``--set`` and ``--packages``."""
    add_device_arguments(parser)
    parser.add_argument(
        "--set",
        type=dict[str, Any],
        default={},
        help="Fields of the model's config to change, e.g. --set.attention_backend math.",
    )
    add_packages_argument(parser)


def add_packages_argument(parser: ArgumentParser) -> None:
    """Declares ``--packages``, the user's packages with classes that checkpoints name."""
    parser.add_argument("--packages", type=list[str] | str, default=[], help=PACKAGES_HELP)


def add_device_arguments(parser: ArgumentParser) -> None:
    """Declares the device and the precision of models."""
    parser.add_argument(
        "--device",
        type=Device,
        default="auto",
        help="Device to run on; auto uses a GPU if there is one.",
    )
    parser.add_argument(
        "--precision",
        type=Precision,
        default="32",
        help="Precision of matrix products; weights stay float32. On GPUs since Ampere tf32 is "
        "several times faster than 32, with relative errors up to 1e-3; bf16 is faster still, "
        "with 1e-2.",
    )
    parser.add_argument("--cudnn_attention", type=bool, default=False, help=CUDNN_ATTENTION_HELP)


def add_tokenizer_argument(
    parser: ArgumentParser, help: str = "Tokenizer name, for checkpoints without one."
) -> None:
    """Declares ``--tokenizer``, see ``load_own_tokenizer``."""
    parser.add_argument("--tokenizer", type=str | None, default=None, help=help)


def add_budget_argument(parser: ArgumentParser, help: str) -> None:
    """Declares ``--budget``, see ``load_model``."""
    parser.add_argument("--budget", type=Budget | None, default=None, help=help)


def add_file_arguments(parser: ArgumentParser, **files: str) -> None:
    """Declares optional output files of a command; ``output`` is the file of the result.

    ``evaluation.output.check_targets`` checks their folders before the work starts.

    Args:
        parser: Parser of the command.
        **files: Help of each option, by its name.
    """
    for name, help in files.items():
        parser.add_argument(f"--{name}", type=str | None, default=None, help=help)


# ---- options: data


def add_data_arguments(parser: ArgumentParser) -> None:
    """Declares the data to score, and their amount; see ``add_corpus_arguments``."""
    add_corpus_arguments(parser)
    add_batch_arguments(parser)


def add_batch_arguments(parser: ArgumentParser) -> None:
    """Declares the size and the number of the batches that are scored."""
    parser.add_argument(
        "--batch_size",
        type=PositiveInt | None,
        default=None,
        help="Rows per batch. Null means as trained.",
    )
    parser.add_argument(
        "--limit_batches",
        type=PositiveInt | None,
        default=None,
        help="Number of batches to score. Null means all.",
    )


def add_corpus_arguments(parser: ArgumentParser) -> None:
    """Declares the data to read, see ``data_recipe``."""
    parser.add_subclass_arguments(
        LanguageDataModule,
        "data",
        required=False,
        help="Corpus to read. Options left out default to the checkpoint's data.",
    )
    parser.add_argument("--split", type=Split, default="val", help="Documents to read.")


def carried(arguments: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Returns the init arguments of the checkpoint's data that other data inherit.

    Args:
        arguments: Init arguments of the checkpoint's data.
        *more: Further names to inherit, in addition to ``CARRIED``.
    """
    return {key: arguments[key] for key in (*CARRIED, *more) if key in arguments}


def data_recipe(settings: Namespace, checkpoint: Checkpoint) -> Recipe | None:
    """Returns the recipe of the data on the command line, completed by the checkpoint's data.

    Args:
        settings: Settings of the command; ``data`` holds the arguments of ``--data`` and of the
            options below it.
        checkpoint: Checkpoint whose data are the default.

    Returns:
        The recipe, or None if no data are given and the checkpoint has none.

    Raises:
        ArgumentError: If the arguments name no data class, or options that it does not have.
    """
    recipe = checkpoint.data_recipe
    if settings.data:
        recipe = _parse_data(settings.data, recipe, settings.split)
    if recipe is None or settings.batch_size is None:
        return recipe
    sizes = {"eval_batch_size": settings.batch_size}
    return {**recipe, "init_args": {**recipe["init_args"], **sizes}}


def _parse_data(argv: Sequence[str], trained: Recipe | None, split: Split) -> Recipe | None:
    """Parses the arguments of ``--data``, see ``data_recipe``; null stands for no data."""
    import_public_classes("datamodules")  # the parser knows the short names of imported classes
    parser = ExactParser(exit_on_error=False)
    parser.add_subclass_arguments(LanguageDataModule, "data")
    if trained is None:
        chosen = parser.parse_args(argv).data
        return None if chosen is None else chosen.as_dict()
    typed = parse_over(parser, {"data": trained}, argv).data
    if typed is None:
        return trained
    recipe = _default_recipe(trained, typed, split)
    return complete(lay_over(recipe, typed.items(), parser), "data")


def _default_recipe(trained: Recipe, typed: Namespace, split: Split) -> Recipe:
    """Returns the part of the checkpoint's recipe that the typed options are laid over.

    A different class starts from its defaults and inherits only how text is read. If only text
    files to score are typed, the training files are dropped, since they would be tokenised again
    together with them.

    Args:
        trained: Recipe of the checkpoint's data, or the corpus inside it.
        typed: The typed options at the same level.
        split: Split to read.
    """
    arguments = trained.get("init_args", {})
    inner = arguments.get("corpus")
    nested = isinstance(inner, Mapping) and "class_path" in inner
    if typed.class_path.rpartition(".")[2] != trained["class_path"].rpartition(".")[2]:
        of_corpus = carried(inner.get("init_args", {})) if nested else {}
        # a model writes steps with the separator it was trained with
        arguments = {**of_corpus, **carried(arguments, "step_separator")}
    elif nested:
        arguments = {
            **arguments,
            "corpus": _default_recipe(inner, typed.init_args.corpus, split),
        }
    elif trained["class_path"] == public_path(LocalText):
        init_args = typed.get("init_args", Namespace())
        files = {
            key
            for key in FILE_KEYS.values()
            if key in init_args and init_args[key] != arguments.get(key)
        }
        if FILE_KEYS[split] in files and FILE_KEYS["train"] not in files:
            arguments = {key: v for key, v in arguments.items() if key not in FILE_KEYS.values()}
    return {"class_path": trained["class_path"], "init_args": arguments}


# ---- models, tokenizers and data that the options select


def chosen(settings: Namespace, cls: type[_Config]) -> _Config:
    """Builds a dataclass from the options of the same names."""
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{field.name: settings[field.name] for field in fields})


def load_checkpoint(settings: Namespace) -> Checkpoint:
    """Returns the checkpoint of ``--ckpt`` and ``--which``, after importing ``--packages``."""
    import_packages(settings.packages)
    return read_checkpoint(settings.ckpt, settings.which)


def load_model(
    settings: Namespace, checkpoint: Checkpoint, *, budget: Budget | None = None
) -> LanguageModel:
    """Returns a checkpoint's model on ``--device``, in eval mode; see ``model_changes``."""
    device = pick_device(settings.device)
    return build_model(checkpoint, model_changes(settings, checkpoint, budget=budget)).to(device)


def model_changes(
    settings: Namespace, checkpoint: Checkpoint, *, budget: Budget | None = None
) -> dict[str, Any]:
    """Returns the fields of the model's config that ``--set`` and ``--budget`` change.

    Args:
        settings: Options of the command, with or without ``--budget``.
        checkpoint: Checkpoint whose config is changed.
        budget: Default for models with a budget if none is typed; None keeps the trained one.

    Raises:
        ValueError: If the typed budget has no effect, or contradicts ``--set``.
    """
    typed, changes = settings.get("budget"), dict(settings["set"])
    recipe = checkpoint.model_recipe
    if "budget" not in recipe["init_args"].get("config", {}):
        if typed is not None:
            name = recipe["class_path"].rpartition(".")[2]
            raise ValueError(f"budget ({typed}): {name} has no budget to set; leave --budget out")
        return changes
    if typed is not None and changes.get("budget", typed) != typed:
        raise ValueError(
            f"budget ({typed}) and set.budget ({changes['budget']}) are the same field; give one"
        )
    if typed is not None or budget is not None:
        changes = {"budget": typed or budget, **changes}
    if typed is not None and not build_outline(checkpoint, changes).config.uses_budget:
        raise ValueError(
            f"budget ({typed}) has no effect on the allocation of this model when it is evaluated; "
            "leave --budget out"
        )
    return changes


def load_own_tokenizer(
    settings: Namespace, checkpoint: Checkpoint, model: LanguageModel
) -> Tokenizer:
    """Returns the tokenizer of ``--tokenizer``, or the checkpoint's.

    Raises:
        ValueError: If there is none, or its ids do not mean the same text as in training.
    """
    name = settings.get("tokenizer")
    tokenizer = build_tokenizer(checkpoint) if name is None else load_tokenizer(name)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the tokenizer ({tokenizer.name}) has {tokenizer.vocab_size} entries, the "
            f"checkpoint's model has a vocabulary of {model.config.vocab_size}; use the tokenizer "
            "it was trained with"
        )
    if name is not None:
        check_meaning(tokenizer, checkpoint, "tokenizer")
    return tokenizer


def open_with_data(
    settings: Namespace,
) -> tuple[Checkpoint, dict[str, Any], LanguageDataModule]:
    """Returns the checkpoint that the options name, the changes to its config, and prepared data.

    Raises:
        ValueError: If the data do not fit the model; if possible, before text is prepared.
    """
    checkpoint = load_checkpoint(settings)
    data = build_data(checkpoint, data_recipe(settings, checkpoint))
    changes = model_changes(settings, checkpoint)
    check_fit(build_outline(checkpoint, changes), data)
    prepare(data, checkpoint)
    return checkpoint, changes, data


def load_with_tokenizer(
    settings: Namespace, *, budget: Budget | None = None
) -> tuple[Checkpoint, LanguageModel, Tokenizer]:
    """Returns the checkpoint that the options name, its model and its tokenizer.

    Args:
        settings: Options of the command.
        budget: See ``model_changes``.
    """
    checkpoint = load_checkpoint(settings)
    model = load_model(settings, checkpoint, budget=budget)
    return checkpoint, model, load_own_tokenizer(settings, checkpoint, model)
