"""A look at the few arguments that must be known before the command line can be parsed."""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_models.recipe import split_names
from training.errors import UserError

SUBCOMMANDS = ("fit", "validate", "test", "predict")
CONFIG_FLAGS = ("-c", "--config")
DEFAULT_ROOT = "runs"
LONGEST_PATH = 4095  # a longer --config is YAML itself
LONGEST_NAME = 80  # of a config or its content in a message
OWN_PACKAGES = {"model": "lightning_models", "data": "datamodules"}
CLASS_KEYS = ("model", "model.class_path", "data", "data.class_path")
KEYS = ("ckpt_path", "packages", "trainer.default_root_dir", "checkpoint.dirpath", *CLASS_KEYS)


@dataclass
class Given:
    """What the user gave.

    Attributes:
        subcommand: the verb, None if there is none (or a wrong one).
        values: those of ``KEYS`` that were given, the last one of each.
    """

    subcommand: str | None = None
    values: dict[str, str] = field(default_factory=dict)

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint asked for: a path, ``last``, ``best``, or None."""
        return self.values.get("ckpt_path")

    @property
    def classes(self) -> set[str]:
        """Class paths of model and data that the user has named."""
        return {self.values[key] for key in CLASS_KEYS if key in self.values}

    @property
    def packages(self) -> list[str]:
        """Packages to import, whose classes the arguments in a checkpoint may name."""
        return split_names(self.values.get("packages", ""))

    def own_class(self, key: str) -> str | None:
        """Returns the class path given for ``model`` or ``data``, if it is one of this project's.

        Short names such as ``TransformerLM`` are completed. Others are left to the parser.
        """
        name = self.values.get(f"{key}.class_path") or self.values.get(key, "")
        package = OWN_PACKAGES[key]
        short = name.removeprefix(f"{package}.")
        known = hasattr(importlib.import_module(package), short)
        return f"{package}.{short}" if short.isidentifier() and known else None

    @property
    def folders(self) -> list[Path]:
        """Where checkpoints of this project's runs are looked for."""
        folders = [Path(self.values.get("trainer.default_root_dir", DEFAULT_ROOT))]
        if "checkpoint.dirpath" in self.values:
            folders.append(Path(self.values["checkpoint.dirpath"]))
        return folders


def look(argv: Sequence[str]) -> Given:
    """Returns the verb and ``KEYS`` as the command line and its config files give them.

    The model's own arguments can only be parsed once its class is known, and that may stand in the
    checkpoint. Whatever is malformed here is left for the real parser to report.
    """
    given = Given(next((argument for argument in argv if argument in SUBCOMMANDS), None))
    previous = ""
    for argument in argv:
        name, equals, value = argument.partition("=")
        if (source := _config(previous, argument)) is not None:
            _from_config(given, source)
        elif previous.startswith("--") and previous[2:] in KEYS:
            _note(given, previous[2:], argument)
        elif name.startswith("--") and name[2:] in KEYS and equals:
            _note(given, name[2:], value)
        previous = "" if previous in CONFIG_FLAGS else argument
    return given


def _config(previous: str, argument: str) -> str | None:
    """Returns the config that an argument names, if it does."""
    if previous in CONFIG_FLAGS:
        return argument
    name, equals, value = argument.partition("=")
    return value if equals and name in CONFIG_FLAGS else None


def check_configs(argv: Sequence[str]) -> None:
    """Checks that the configs can be read; the parser would not say which one cannot.

    Raises:
        UserError: if one is not UTF-8, not YAML (the message has the line), or has no keys.
    """
    for previous, argument in zip(["", *argv], argv, strict=False):
        source = _config(previous, argument)
        if source is None:
            continue
        is_file = len(source) <= LONGEST_PATH and Path(source).is_file()
        name = f"the config {source if is_file else source[:LONGEST_NAME]}"
        try:
            text = Path(source).read_text(encoding="utf-8") if is_file else source
            content = yaml.safe_load(text)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name} is not UTF-8 at byte {error.start}; is it a YAML file?"
            ) from error
        except yaml.YAMLError as error:
            where = " ".join(str(error).replace("<unicode string>", source).split())
            raise UserError(f"{name} is not YAML: {where}. Correct that line") from error
        except RecursionError as error:
            raise UserError(f"{name} is nested too deep to be read; flatten it") from error
        if not isinstance(content, Mapping) and (is_file or not isinstance(content, str)):
            raise UserError(
                f"{name} holds {json.dumps(content, default=str)[:LONGEST_NAME]} and not keys with "
                "values; write e.g. trainer: {max_steps: 100}"
            )


def _note(given: Given, key: str, value: Any) -> None:
    if value in (None, "null") or (value == "" and key != "ckpt_path"):
        given.values.pop(key, None)
    else:
        given.values[key] = str(value)


def _from_config(given: Given, source: str) -> None:
    """Notes the keys of a config file (or a config given in place)."""
    try:
        path = Path(source)
        text = path.read_text() if len(source) <= LONGEST_PATH and path.is_file() else source
        config: Any = OmegaConf.create(text)
        for scope in ("", f"{given.subcommand}."):
            for key in KEYS:
                value = OmegaConf.select(config, scope + key, default="absent")
                if value != "absent":
                    _note(given, key, value)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return
