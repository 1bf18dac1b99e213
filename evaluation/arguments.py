"""Options that commands share: checkpoint, device, data, files; and what they name.

A command declares options with the ``add_`` functions, and opens what they name with
``open_with_data`` or ``load_with_tokenizer``; `evaluation.output` checks and writes its files.
"""

import dataclasses
import itertools
from argparse import ArgumentParser as PlainParser
from argparse import Namespace as PlainNamespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from jsonargparse import ArgumentParser, Namespace

from datamodules import LanguageDataModule, LocalText, Tokenizer, load_tokenizer
from datamodules.recipe import public_path
from datamodules.store import Split
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
from lightning_models.recipe import PACKAGES_HELP, import_packages
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

FILES = ("data_files", "val_files", "test_files")
"""Arguments of ``LocalText``: the files of each split."""

LEAST = {
    "batch_size": 1,
    "context": 1,
    "continuations": 1,
    "latents": 0,
    "limit": 1,
    "limit_batches": 1,
    "max_gen_toks": 1,
    "max_new_tokens": 1,
    "new_tokens": 1,
    "num_fewshot": 0,
    "pairs": 1,
    "prompt_tokens": 1,
    "prompts": 2,
    "rounds": 1,
    "sample_tokens": 1,
    "samples": 1,
    "seed": 0,
    "stride": 1,
    "timing_batch_size": 1,
    "timing_batches": 1,
}
"""Least values of options that are whole numbers, or several; one name means one thing.

MAUVE compares distributions, of two prompts at least.
"""


def check_numbers(settings: Namespace | Mapping[str, Any]) -> None:
    """Raises a ValueError if an option of a command is below ``LEAST``."""
    for key, least in LEAST.items():
        value = settings.get(key)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number < least:
                raise ValueError(f"{key} ({number}) must be at least {least}")


def split_words(typed: str) -> list[str]:
    """Returns words that an option separates by commas, maybe in brackets, each once."""
    words = (word.strip() for word in typed.strip("[]").split(","))
    return list(dict.fromkeys(word for word in words if word))


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
        parser: of the command.
        **files: the help of each option.
    """
    for name, help in files.items():
        parser.add_argument(f"--{name}", type=str | None, default=None, help=help)


# ---- options: data


def first_look(argv: Sequence[str], key: str = "ckpt") -> PlainNamespace | None:
    """Returns options that are needed before the command line can be parsed.

    A checkpoint has the defaults of further options. ``--packages`` are imported: it may need them.

    Args:
        argv: the command line.
        key: the option that names checkpoints, one or several.

    Returns:
        The options ``key`` (a list) and ``which``; None if no checkpoint is named, or
        only help is asked for.
    """
    scan = PlainParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scan.add_argument(f"--{key}", nargs="+")
    scan.add_argument("--which", default="last")
    scan.add_argument("--packages", default="")
    found, _ = scan.parse_known_args(list(argv))
    if not getattr(found, key) or {"-h", "--help"} & set(argv):
        return None
    import_packages(found.packages)
    return found


def checkpoint_in(argv: Sequence[str]) -> Checkpoint | None:
    """Returns the checkpoint that a command line names, or None; needed before it can be parsed."""
    found = first_look(argv)
    return None if found is None else read_checkpoint(found.ckpt[0], found.which)


def add_data_arguments(
    parser: ArgumentParser,
    argv: Sequence[str],
    find: Callable[[Sequence[str]], Checkpoint | None] = checkpoint_in,
) -> None:
    """Declares which data to score, and how much; see ``add_corpus_arguments``."""
    add_corpus_arguments(parser, argv, find)
    parser.add_argument(
        "--batch_size", type=int | None, default=None, help="Windows per batch (null: as trained)."
    )
    parser.add_argument(
        "--limit_batches", type=int | None, default=None, help="Score that many batches only."
    )


def add_corpus_arguments(
    parser: ArgumentParser,
    argv: Sequence[str],
    find: Callable[[Sequence[str]], Checkpoint | None] = checkpoint_in,
) -> None:
    """Declares which data to read; data options default to those in the checkpoint.

    Args:
        parser: of the command.
        argv: the command line.
        find: returns the checkpoint that it names, or None; by default that of ``--ckpt``.
    """
    parser.add_subclass_arguments(
        LanguageDataModule,
        "data",
        required=False,
        help="Corpus to read. What is not given is taken from the checkpoint's own data.",
    )
    parser.add_argument("--split", type=Split, default="val", help="Documents to read.")
    checkpoint = find(argv)
    if checkpoint is not None and checkpoint.data_recipe is not None:
        parser.set_defaults({"data": default_recipe(checkpoint.data_recipe, argv)})


def carried(arguments: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Returns the init arguments of the checkpoint's data that other data take over.

    Args:
        arguments: Init arguments of the checkpoint's data.
        *more: Names to take besides ``CARRIED``.
    """
    return {key: arguments[key] for key in (*CARRIED, *more) if key in arguments}


def default_recipe(trained: Recipe, argv: Sequence[str]) -> Recipe:
    """Returns what ``--data`` begins with: the checkpoint's data, or what other data take of them.

    The parser hands arguments of one name on to another class; that would read the training's
    files as another corpus. Of data made of a corpus, that may be the one that is another.

    Args:
        trained: recipe of the checkpoint's data.
        argv: the command line.
    """
    arguments = trained["init_args"]
    inner = arguments.get("corpus")
    nested = isinstance(inner, Mapping) and "class_path" in inner
    if _names_another(argv, "--data", trained["class_path"]):
        of_corpus = carried(inner.get("init_args", {})) if nested else {}
        # a model writes steps with the separator of its training; the parser drops the argument for
        # data without steps
        own = carried(arguments, "step_separator")
        return {**trained, "init_args": {**of_corpus, **own}}
    if not nested:
        return _without_training_files(trained, argv, "--data")
    if _names_another(argv, "--data.corpus", inner["class_path"]):
        corpus = {**inner, "init_args": carried(inner.get("init_args", {}))}
    else:
        corpus = _without_training_files(inner, argv, "--data.corpus")
    return {**trained, "init_args": {**arguments, "corpus": corpus}}


def _without_training_files(recipe: Recipe, argv: Sequence[str], option: str) -> Recipe:
    """Returns the recipe of text files for a command line that names only the files to score.

    Those of the training would be read, tokenised and stored once more next to them.

    Args:
        recipe: of the checkpoint's corpus; one that is no ``LocalText`` stays as it is.
        argv: the command line.
        option: that the corpus' options begin with.
    """
    options = {word.partition("=")[0].replace(".init_args.", ".") for word in argv}
    split = (_typed(argv, "--split") or ["val"])[-1]
    named = {key for key in FILES if f"{option}.{key}" in options}
    if f"{split}_files" not in named or "data_files" in named:
        return recipe
    if recipe["class_path"] != public_path(LocalText):
        return recipe
    kept = {key: value for key, value in recipe["init_args"].items() if key not in FILES}
    return {**recipe, "init_args": {**kept, "data_files": None}}


def _names_another(argv: Sequence[str], option: str, class_path: str) -> bool:
    """Whether a command line names another class than that of ``class_path``."""
    own = class_path.rpartition(".")[2]
    typed = _typed(argv, option, f"{option}.class_path")
    return any(_class_name(value) not in (None, own) for value in typed)


def _typed(argv: Sequence[str], *options: str) -> list[str]:
    """Returns the values that a command line gives options, as another word or after ``=``."""
    typed = [value for word, value in itertools.pairwise(argv) if word in options]
    parts = [word.partition("=") for word in argv]
    return typed + [value for name, sign, value in parts if sign and name in options]


def _class_name(typed: str) -> str | None:
    """Returns the name of the class in the value of an option; None where there is none.

    The value may also be YAML, or a file of it.
    """
    path = Path(typed)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8") if path.is_file() else typed)
    except (OSError, ValueError, yaml.YAMLError):  # for the parser to complain of
        return None
    if isinstance(content, Mapping):
        content = content.get("class_path")
    return None if content is None else str(content).rpartition(".")[2]


def data_recipe(settings: Namespace) -> Recipe | None:
    """Returns the recipe that the command line and the checkpoint make together."""
    if settings.data is None:
        return None
    recipe: Recipe = settings.data.as_dict()
    if settings.batch_size is not None:
        recipe["init_args"]["eval_batch_size"] = settings.batch_size
    return recipe


# ---- what the options name


def chosen(settings: Namespace, kind: type[_Config]) -> _Config:
    """Returns a dataclass with the fields that the command line gives."""
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: settings[field.name] for field in fields})


def load_checkpoint(settings: Namespace) -> Checkpoint:
    """Returns the checkpoint of ``--ckpt`` and ``--which``, with ``--packages`` imported first.

    Raises:
        ValueError: if it cannot be read.
    """
    import_packages(settings.packages)
    return read_checkpoint(settings.ckpt, settings.which)


def load_model(
    settings: Namespace, checkpoint: Checkpoint, *, budget: Budget | None = None
) -> LanguageModel:
    """Returns a checkpoint's model on ``--device``, in eval mode, its config changed by ``--set``.

    Args:
        settings: of the command; ``budget``, where it has that, is one of the config's fields.
        checkpoint: where the model comes from.
        budget: of models that have one, where the command line gives none; None: as trained.

    Raises:
        ValueError: if the model cannot be rebuilt, or a budget is given that has no effect.
    """
    device = pick_device(settings.device)
    return build_model(checkpoint, model_changes(settings, checkpoint, budget=budget)).to(device)


def model_changes(
    settings: Namespace, checkpoint: Checkpoint, *, budget: Budget | None = None
) -> dict[str, Any]:
    """Returns the fields of the model's config that the command line changes; see ``load_model``.

    Raises:
        ValueError: if a budget is given that has no effect.
    """
    typed, changes = settings.get("budget"), dict(settings["set"])
    if typed is None and budget is None:
        return changes
    changes = _with_budget(checkpoint, changes, typed, budget)
    config = build_outline(checkpoint, changes).config
    if typed is not None and not getattr(config, "uses_budget", True):
        raise ValueError(
            f"budget ({typed}) has no effect on the allocation of this model when it is evaluated; "
            "leave --budget out"
        )
    return changes


def _with_budget(
    checkpoint: Checkpoint, changes: dict[str, Any], typed: Budget | None, default: Budget | None
) -> dict[str, Any]:
    """Returns the config fields to change, with the budget of models that have one.

    Raises:
        ValueError: if a budget is typed and the model has none, or differs from ``--set``.
    """
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
    return {"budget": typed or default, **changes}


def load_own_tokenizer(
    settings: Namespace, checkpoint: Checkpoint, model: LanguageModel
) -> Tokenizer:
    """Returns the tokenizer of ``--tokenizer``, or the checkpoint's.

    Raises:
        ValueError: if there is none, or its ids mean other text than in training.
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
        ValueError: if one cannot be had, or the data do not fit the model; before text is prepared
            wherever that can be known.
    """
    checkpoint = load_checkpoint(settings)
    data = build_data(checkpoint, data_recipe(settings))
    changes = model_changes(settings, checkpoint)
    check_fit(build_outline(checkpoint, changes), data)
    prepare(data, checkpoint)
    return checkpoint, changes, data


def load_with_tokenizer(
    settings: Namespace, *, budget: Budget | None = None
) -> tuple[Checkpoint, LanguageModel, Tokenizer]:
    """Returns the checkpoint that the options name, its model and tokenizer; data are not needed.

    Args:
        settings: of the command.
        budget: see ``load_model``.

    Raises:
        ValueError: if one cannot be had, or the tokenizer does not fit.
    """
    checkpoint = load_checkpoint(settings)
    model = load_model(settings, checkpoint, budget=budget)
    return checkpoint, model, load_own_tokenizer(settings, checkpoint, model)
