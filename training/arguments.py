"""Arguments: pre-parsing of the command line, ranges of values, conflicts with a checkpoint."""

import contextlib
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from datamodules.sentences import parse_splitter
from lightning_models.recipe import split_names
from training.errors import PROJECT, UserError, suggest

SUBCOMMANDS = ("fit", "validate", "test", "predict")
YAML_ENDINGS = (".yaml", ".yml")
CONFIG_FLAGS = ("-c", "--config")
DEFAULT_ROOT = "runs"
LONGEST_NAME = 80  # maximum characters of a config in a message
OWN_PACKAGES = {"model": "lightning_models", "data": "datamodules"}
CLASS_KEYS = ("model", "model.class_path", "data", "data.class_path")
KEYS = (
    "ckpt_path",
    "loggers",
    "name",
    "packages",
    "trainer.default_root_dir",
    "trainer.devices",
    "checkpoint.dirpath",
    *CLASS_KEYS,
)


@dataclass
class EarlyArguments:
    """Arguments that must be known before the command line is parsed.

    Attributes:
        subcommand: The verb, or None.
        values: The last given value of each of ``KEYS``.
        names_config: Whether a config was given.
    """

    subcommand: str | None = None
    values: dict[str, str] = field(default_factory=dict)
    names_config: bool = False

    @property
    def ckpt_path(self) -> str | None:
        """A path, ``last``, ``best``, ``auto``, or None."""
        return self.values.get("ckpt_path")

    @property
    def names_model(self) -> bool:
        """Whether a model or a config, which may name one, was given."""
        return self.names_config or not {"model", "model.class_path"}.isdisjoint(self.values)

    @property
    def classes(self) -> set[str]:
        """Given class paths of model and data."""
        return {self.values[key] for key in CLASS_KEYS if key in self.values}

    @property
    def packages(self) -> list[str]:
        """Packages to import, whose classes a checkpoint may use."""
        return split_names(self.values.get("packages", ""))

    def own_class(self, key: str) -> str | None:
        """Returns the class path given for ``model`` or ``data`` if this project exports the class.

        Short names such as ``TransformerLM`` are completed.
        """
        name = self.values.get(f"{key}.class_path") or self.values.get(key, "")
        package = OWN_PACKAGES[key]
        short = name.removeprefix(f"{package}.")
        exported = short in importlib.import_module(package).__all__
        return f"{package}.{short}" if short.isidentifier() and exported else None

    @property
    def folders(self) -> list[Path]:
        """Folders to search for checkpoints."""
        root = Path(self.values.get("trainer.default_root_dir", DEFAULT_ROOT))
        folders = [root / self.values.get("name", "")]
        if "checkpoint.dirpath" in self.values:
            folders.append(Path(self.values["checkpoint.dirpath"]))
        return folders


def look(argv: Sequence[str]) -> EarlyArguments:
    """Reads the verb and ``KEYS`` from the command line and its config files.

    The model's arguments can only be parsed once its class is known, and the checkpoint may
    determine it. The parser reports malformed options; unreadable configs are reported here,
    because the parser would not name them.

    Raises:
        UserError: If a config is not UTF-8, not YAML (the message has the line), or has no keys.
    """
    arguments = EarlyArguments(
        next((argument for argument in argv if argument in SUBCOMMANDS), None)
    )
    previous = ""
    for argument in argv:
        name, equals, value = argument.partition("=")
        if (source := _config(previous, argument)) is not None:
            _note_config(arguments, _read_config(source))
            arguments.names_config = True
        elif previous.startswith("--") and (key := previous[2:].removesuffix("+")) in KEYS:
            _note(arguments, key, argument)
        elif name.startswith("--") and (key := name[2:].removesuffix("+")) in KEYS and equals:
            _note(arguments, key, value)
        previous = "" if previous in CONFIG_FLAGS else argument
    return arguments


def _config(previous: str, argument: str) -> str | None:
    if previous in CONFIG_FLAGS:
        return argument
    name, equals, value = argument.partition("=")
    return value if equals and name in CONFIG_FLAGS else None


def with_own_configs(argv: Sequence[str]) -> list[str]:
    """Resolves configs that the working folder lacks to this project's configs.

    ``-c configs/transformer/tiny.yaml`` then works from any folder, and with an installed package.
    """
    result = []
    for previous, argument in zip(["", *argv], argv, strict=False):
        source = _config(previous, argument) or ""
        project_config = PROJECT / source
        if (
            source.startswith("configs/")
            and not os.path.exists(source)
            and project_config.is_file()
        ):
            argument = argument.removesuffix(source) + str(project_config)
        result.append(argument)
    return result


def _read_config(source: str) -> str:
    """Returns the YAML of a config file or an inline config."""
    is_file = os.path.isfile(source)
    if source.endswith(YAML_ENDINGS) and not os.path.exists(source):
        paths = [str(path.relative_to(PROJECT)) for path in PROJECT.glob("configs/*/*.yaml")]
        hint = suggest(source, paths) or " `python train.py list` shows the configs."
        raise UserError(f"the config {source}: there is no such file.{hint}")
    name = f"the config {source if is_file else source[:LONGEST_NAME]}"
    try:
        text = Path(source).read_text(encoding="utf-8") if is_file else source
        content = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 at byte {error.start}; is it a YAML file?") from error
    except yaml.YAMLError as error:
        problem = " ".join(str(error).replace("<unicode string>", source).split())
        raise UserError(f"{name} is not YAML: {problem}. Correct that line") from error
    except RecursionError as error:
        raise UserError(f"{name} is nested too deep to be read; flatten it") from error
    if not isinstance(content, Mapping) and (is_file or not isinstance(content, str)):
        raise UserError(
            f"{name} holds {json.dumps(content, default=str)[:LONGEST_NAME]} and not keys with "
            "values; write e.g. trainer: {max_steps: 100}"
        )
    return text


def _note(arguments: EarlyArguments, key: str, value: Any) -> None:
    if key in CLASS_KEYS and not isinstance(value, Mapping | DictConfig):
        # The last of the two forms counts.
        section, _, rest = key.partition(".")
        arguments.values.pop(section if rest else f"{section}.class_path", None)
    if value in (None, "null") or (value == "" and key != "ckpt_path"):
        arguments.values.pop(key, None)
    else:
        arguments.values[key] = str(value)


def _note_config(arguments: EarlyArguments, text: str) -> None:
    # the parser reports dangling references and duplicate keys
    with contextlib.suppress(OmegaConfBaseException, ValueError, yaml.YAMLError):
        config: Any = OmegaConf.create(text)
        for scope in ("", f"{arguments.subcommand}."):
            for key in KEYS:
                value = OmegaConf.select(config, scope + key, default="absent")
                if value != "absent":
                    _note(arguments, key, value)


# ---- conflicts between typed values and a checkpoint


OPTIMIZER_PREFIX = "model.init_args.optimizer."

# Data arguments that must agree because the model depends on them; the text may differ.
SPLITTER_KEY = "data.init_args.splitter"
DATA_KEYS = (
    "data.init_args.block_size",
    "data.init_args.tokenizer",
    "data.init_args.corpus.init_args.tokenizer",  # of sentences
    "data.init_args.max_sentence_tokens",
    SPLITTER_KEY,
)

# Determined by the data, never typed.
LINKED_KEYS = ("model.init_args.config.vocab_size", "model.init_args.config.block_size")

ABSENT = "(none)"


@dataclass(frozen=True)
class Conflict:
    """One argument with two values.

    Attributes:
        key: Full name of the argument.
        typed: Value on the command line or in a config file.
        checkpoint: Value in the checkpoint.
    """

    key: str
    typed: Any
    checkpoint: Any

    @property
    def one_sided(self) -> bool:
        """Whether only one of the two has this argument."""
        return ABSENT in (self.typed, self.checkpoint)


def find_conflicts(typed: Mapping[str, Any], saved: Mapping[str, Any]) -> list[Conflict]:
    """Returns the differing arguments among the model's and ``DATA_KEYS``, in config order.

    Args:
        typed: Recipes of ``model`` and ``data``, with the checkpoint's values for untyped
            arguments.
        saved: Recipes in the checkpoint, with defaults.

    Raises:
        ValueError: If a typed splitter is unknown.
    """
    new, old = dict(_leaves(typed)), dict(_leaves(saved))
    return [
        Conflict(key, new.get(key, ABSENT), old.get(key, ABSENT))
        for key in dict.fromkeys([*new, *old])
        if _matters(key)
        and _meaning(key, new.get(key, ABSENT)) != _meaning(key, old.get(key, ABSENT))
    ]


def _matters(key: str) -> bool:
    return key in DATA_KEYS or (key.startswith("model.") and key not in LINKED_KEYS)


def _meaning(key: str, value: Any) -> Any:
    """Normalises a value: ``sat`` and relative folders are short names of splitters."""
    splits = key == SPLITTER_KEY and isinstance(value, str) and value != ABSENT
    return parse_splitter(value).name if splits else value


def without(recipe: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns a recipe without the value at a dotted key, if it has one."""
    first, _, rest = key.partition(".")
    if rest and isinstance(recipe.get(first), Mapping):
        return {**recipe, first: without(recipe[first], rest)}
    return {name: value for name, value in recipe.items() if name != key}


def as_namespace(value: Any) -> Any:
    """Converts a recipe to nested namespaces; mappings with non-identifier keys stay mappings."""
    if isinstance(value, Mapping) and all(str(key).isidentifier() for key in value):
        return Namespace({str(key): as_namespace(item) for key, item in value.items()})
    return value


def _leaves(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def as_table(conflicts: Sequence[Conflict]) -> str:
    """Returns the conflicts in three aligned columns."""
    rows = [("key", "typed", "checkpoint")]
    cells = [(c.key.replace(".init_args", ""), c.typed, c.checkpoint) for c in conflicts]
    rows += [(_printable(key), _printable(typed), _printable(saved)) for key, typed, saved in cells]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"  {key:<{widths[0]}}  {typed:<{widths[1]}}  {saved}" for key, typed, saved in rows
    )


def _printable(cell: Any) -> str:
    """Returns a cell as text, escaping control characters that a checkpoint may have."""
    return text if (text := str(cell)).isprintable() else repr(text)


def report(conflicts: Sequence[Conflict], path: Path) -> str:
    """Returns the error message with the table and the options to resolve it."""
    return (
        f"the typed values do not match the checkpoint {path}\n\n{as_table(conflicts)}\n\n"
        "Remove these arguments, or choose: --on_conflict typed (follow the typed values) or "
        "--on_conflict checkpoint (follow the checkpoint)."
    )


# ---- ranges of values that Lightning does not check


LARGEST_SEED = 2**32 - 1  # of numpy
LARGEST_DATA_SEED = 2**63  # of numpy's generators, as C integers
DEVICES = r"auto|-1|[1-9]\d*|\d+,|\d+(,\d+)+"

PARTS_OF_MODEL = ("model.init_args", "model.init_args.config", "model.init_args.optimizer")
CURES = {
    "vocab_size": "choose the tokenizer with data.tokenizer",
    "block_size": "set data.block_size",
}


def _from(minimum: float) -> Callable[[Any], bool]:
    return lambda value: minimum <= value < math.inf


def _is_interval(value: Any) -> bool:
    """Returns whether it is a duration or a positive number; Lightning checks the upper end."""
    return not isinstance(value, int | float) or 0 < value < math.inf


def _is_path(value: Any) -> bool:
    return bool(str(value).strip())


def _are_devices(value: Any) -> bool:
    if isinstance(value, int):
        return value >= -1 and value != 0
    if isinstance(value, str):
        return re.fullmatch(DEVICES, value.replace(" ", "")) is not None
    return all(isinstance(index, int) and index >= 0 for index in value)


Rule = tuple[Callable[[Any], bool], str]
RULES: dict[str, Rule] = {
    "seed_everything": (
        lambda value: 0 <= value <= LARGEST_SEED,
        f"must be from 0 to {LARGEST_SEED}, or true to draw one, or false for none",
    ),
    "trainer.accumulate_grad_batches": (_from(1), "must be at least 1"),
    "trainer.val_check_interval": (
        _is_interval,
        "must be above 0; trainer.limit_val_batches=0 turns validation off",
    ),
    "trainer.check_val_every_n_epoch": (
        _from(1),
        "must be at least 1, or null to count batches over epochs; trainer.limit_val_batches=0 "
        "turns validation off",
    ),
    "trainer.devices": (
        _are_devices,
        "must be a number of devices, -1 for all, their indices such as 0,2, or auto",
    ),
    "trainer.gradient_clip_val": (_from(0), "must be finite and at least 0; null clips nothing"),
    "trainer.log_every_n_steps": (_from(0), "must be at least 1, or 0 to log no steps"),
    "trainer.num_sanity_val_steps": (_from(-1), "must be at least 0, or -1 for all batches"),
    "trainer.min_epochs": (_from(0), "must be at least 0, or null"),
    "trainer.min_steps": (_from(0), "must be at least 0, or null"),
    "trainer.default_root_dir": (_is_path, "is empty; name a folder (is a variable not set?)"),
    "data.init_args.seed": (lambda value: value < LARGEST_DATA_SEED, "must be below 2**63"),
    "checkpoint.dirpath": (_is_path, "is empty; name a folder, or null (is a variable not set?)"),
}
"""Key -> predicate for valid values other than null, and requirement for the message."""


def check_values(config: Namespace, sections: Collection[str]) -> None:
    """Checks the arguments of a verb: sections, ``RULES``, and the absence of nan.

    Args:
        config: The parsed arguments.
        sections: Keys that hold arguments, which must not be null or a number.

    Raises:
        UserError: If a value is wrong; the message has key, value and requirement.
    """
    for key in (*sections, *PARTS_OF_MODEL):
        value = config.get(key, ABSENT)
        if value != ABSENT and not isinstance(value, Namespace | dict):
            text = "null" if value is None else value
            name = _short(key)
            raise UserError(f"{name} ({text}) holds arguments; leave {name} out for its defaults")
    values = config.as_dict()
    nan = _find_nan(values)
    if nan is not None:
        raise UserError(f"{_short(nan)} (nan) is not a number; write one, or leave it out")
    for key, (works, requirement) in RULES.items():
        value = config.get(key)
        if value is not None and not works(value):
            raise UserError(f"{key} ({value}) {requirement}")


def check_linked(typed: Namespace, data: Any) -> None:
    """Checks that the data do not override a typed value (``LINKED_KEYS``).

    Args:
        typed: The parsed arguments, without the checkpoint's ``LINKED_KEYS``.
        data: The data module.

    Raises:
        UserError: If a typed value differs from the data's.
    """
    for key in LINKED_KEYS:
        name, value = key.rpartition(".")[2], typed.get(key)
        actual = getattr(data, name, value)
        if value not in (None, actual):
            raise UserError(
                f"{_short(key)} ({value}) is decided by the data, which have {actual}; leave it "
                f"out and {CURES[name]}"
            )


def _short(key: str) -> str:
    return key.replace(".init_args", "")


def _find_nan(value: Any, key: str = "") -> str | None:
    """Returns the key of the first nan in nested values."""
    if isinstance(value, float):
        return key.lstrip(".") if math.isnan(value) else None
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list | tuple) else []
    keys = (_find_nan(item, f"{key}.{name}") for name, item in items)
    return next((name for name in keys if name is not None), None)
