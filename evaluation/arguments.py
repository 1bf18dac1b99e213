"""Options that commands share: checkpoint, device, data, files; and what they name.

A command declares options with the ``add_`` functions, and opens what they name with
``open_with_data`` or ``load_with_tokenizer``; `evaluation.output` checks and writes its files.
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
"""Arguments of the checkpoint's own data that other data take over: how text is read, not which."""


# ---- options: checkpoint, device, files


def add_model_arguments(parser: ArgumentParser, *, required: bool = True) -> None:
    """Declares which checkpoint to load, and how."""
    parser.add_argument(
        "--ckpt",
        type=str if required else str | None,
        required=required,
        help="Checkpoint file (.ckpt), or the folder of a run.",
    )
    add_which_argument(parser)
    add_run_arguments(parser)


def add_labelled_checkpoints(parser: ArgumentParser, note: str) -> None:
    """Declares the options that name several checkpoints with labels, and how they are read.

    Args:
        parser: Parser of the command.
        note: Sentence of the help about the checkpoints of this command.
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
    """Declares which checkpoint of a run is taken, where its folder is named."""
    parser.add_argument(
        "--which",
        type=Which,
        default="last",
        help="Of a folder's run the furthest checkpoint (last), or the best one by the value that "
        "the training ranked them by (best). Files cannot be named with best.",
    )


def add_run_arguments(parser: ArgumentParser) -> None:
    """Declares how models run, whichever they are."""
    add_device_arguments(parser)
    parser.add_argument(
        "--set",
        type=dict[str, Any],
        default={},
        help="Fields of the model's config to change, e.g. --set.attention_backend math.",
    )
    add_packages_argument(parser)


def add_packages_argument(parser: ArgumentParser) -> None:
    """Declares which packages of the user hold classes of checkpoints."""
    parser.add_argument("--packages", type=list[str] | str, default=[], help=PACKAGES_HELP)


def add_device_arguments(parser: ArgumentParser) -> None:
    """Declares where models run, and in which precision."""
    parser.add_argument(
        "--device", type=Device, default="auto", help="Where to run; auto takes a GPU if any."
    )
    parser.add_argument(
        "--precision",
        type=Precision,
        default="32",
        help="Of matrix products; weights stay float32. On GPUs since Ampere tf32 is several times "
        "faster than 32, with relative errors up to 1e-3; bf16 is faster still, with 1e-2.",
    )
    parser.add_argument("--cudnn_attention", type=bool, default=False, help=CUDNN_ATTENTION_HELP)


def add_tokenizer_argument(
    parser: ArgumentParser, help: str = "Tokenizer name, where the checkpoint names none."
) -> None:
    """Declares ``--tokenizer``, see ``load_own_tokenizer``."""
    parser.add_argument("--tokenizer", type=str | None, default=None, help=help)


def add_budget_argument(parser: ArgumentParser, help: str) -> None:
    """Declares ``--budget``, see ``load_model``."""
    parser.add_argument("--budget", type=Budget | None, default=None, help=help)


def add_file_arguments(parser: ArgumentParser, **files: str) -> None:
    """Declares the files that a command writes where they are named; ``output`` is the result.

    ``evaluation.output.check_targets`` checks their places before the work starts.

    Args:
        parser: Parser of the command.
        **files: Name and help of each option.
    """
    for name, help in files.items():
        parser.add_argument(f"--{name}", type=str | None, default=None, help=help)


# ---- options: data


def add_data_arguments(parser: ArgumentParser) -> None:
    """Declares which data to score, and how much; see ``add_corpus_arguments``."""
    add_corpus_arguments(parser)
    add_batch_arguments(parser)


def add_batch_arguments(parser: ArgumentParser) -> None:
    """Declares the size and the number of the batches that are scored."""
    parser.add_argument(
        "--batch_size",
        type=PositiveInt | None,
        default=None,
        help="Rows per batch (null: as trained).",
    )
    parser.add_argument(
        "--limit_batches",
        type=PositiveInt | None,
        default=None,
        help="Score that many batches only.",
    )


def add_corpus_arguments(parser: ArgumentParser) -> None:
    """Declares which data to read, see ``data_recipe``."""
    parser.add_subclass_arguments(
        LanguageDataModule,
        "data",
        required=False,
        help="Corpus to read. What is not given is taken from the checkpoint's own data.",
    )
    parser.add_argument("--split", type=Split, default="val", help="Documents to read.")


def carried(arguments: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Returns the init arguments of the checkpoint's data that other data take over.

    Args:
        arguments: Init arguments of the checkpoint's data.
        *more: Names to take besides ``CARRIED``.
    """
    return {key: arguments[key] for key in (*CARRIED, *more) if key in arguments}


def data_recipe(settings: Namespace, checkpoint: Checkpoint) -> Recipe | None:
    """Returns the recipe of the typed data, completed by the checkpoint's data.

    Args:
        settings: Of the command; ``data`` holds the words of ``--data`` and of options below it.
        checkpoint: Its data are the default.

    Returns:
        The recipe, or None where no data are typed and the checkpoint has none.

    Raises:
        ArgumentError: If the words name no data, or options that the data do not have.
    """
    recipe = checkpoint.data_recipe
    if settings.data:
        recipe = _parse_data(settings.data, recipe, settings.split)
    if recipe is None or settings.batch_size is None:
        return recipe
    sizes = {"eval_batch_size": settings.batch_size}
    return {**recipe, "init_args": {**recipe["init_args"], **sizes}}


def _parse_data(words: Sequence[str], trained: Recipe | None, split: Split) -> Recipe | None:
    """Returns the recipe of the data that words name, see ``data_recipe``; null names none."""
    import_public_classes("datamodules")  # the parser knows the short names of imported classes
    parser = ExactParser(exit_on_error=False)
    parser.add_subclass_arguments(LanguageDataModule, "data")
    if trained is None:
        chosen = parser.parse_args(words).data
        return None if chosen is None else chosen.as_dict()
    typed = parse_over(parser, {"data": trained}, words).data
    if typed is None:
        return trained
    recipe = _default_recipe(trained, typed, split)
    return complete(lay_over(recipe, typed.items(), parser), "data")


def _default_recipe(trained: Recipe, typed: Namespace, split: Split) -> Recipe:
    """Returns the part of the checkpoint's recipe that the typed options are laid over.

    Another class begins with its own defaults, and takes over only how text is read. Where text
    files to score are typed alone, the files of the training are left out, as they would be
    tokenised once more with them.

    Args:
        trained: Recipe of the checkpoint's data, or of the corpus that they are made of.
        typed: The same with the typed options alone.
        split: The documents to read.
    """
    arguments = trained.get("init_args", {})
    inner = arguments.get("corpus")
    nested = isinstance(inner, Mapping) and "class_path" in inner
    if typed.class_path.rpartition(".")[2] != trained["class_path"].rpartition(".")[2]:
        of_corpus = carried(inner.get("init_args", {})) if nested else {}
        # a model writes steps with the separator of its training
        arguments = {**of_corpus, **carried(arguments, "step_separator")}
    elif nested:
        arguments = {
            **arguments,
            "corpus": _default_recipe(inner, typed.init_args.corpus, split),
        }
    elif trained["class_path"] == public_path(LocalText):
        given = typed.get("init_args", Namespace())
        files = {
            key for key in FILE_KEYS.values() if key in given and given[key] != arguments.get(key)
        }
        if FILE_KEYS[split] in files and FILE_KEYS["train"] not in files:
            arguments = {key: v for key, v in arguments.items() if key not in FILE_KEYS.values()}
    return {"class_path": trained["class_path"], "init_args": arguments}


# ---- what the options name


def chosen(settings: Namespace, kind: type[_Config]) -> _Config:
    """Returns a dataclass with the fields that the command line gives."""
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: settings[field.name] for field in fields})


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
        settings: Options of the command, which may have no ``--budget``.
        checkpoint: Its config is changed.
        budget: The budget of models that have one, where none is typed; None keeps the trained one.

    Raises:
        ValueError: If a budget is typed that has no effect, or differs from ``--set``.
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
        ValueError: If there is none, or its ids mean other text than in training.
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
    """Returns the checkpoint that the options name, changes of its config, and prepared data.

    Raises:
        ValueError: If the data do not fit the model; where possible, before text is prepared.
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
