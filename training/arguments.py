"""A look at the few arguments that must be known before the command line can be parsed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

SUBCOMMANDS = ("fit", "validate", "test", "predict")
CONFIG_FLAGS = ("-c", "--config")
DEFAULT_ROOT = "runs"
KEYS = ("ckpt_path", "trainer.default_root_dir", "checkpoint.dirpath")


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
        if previous in CONFIG_FLAGS:
            _from_config(given, argument)
        elif name in CONFIG_FLAGS and equals:
            _from_config(given, value)
        elif previous.startswith("--") and previous[2:] in KEYS:
            _note(given, previous[2:], argument)
        elif name.startswith("--") and name[2:] in KEYS and equals:
            _note(given, name[2:], value)
        previous = "" if previous in CONFIG_FLAGS else argument
    return given


def _note(given: Given, key: str, value: Any) -> None:
    if value is None or value in ("null", ""):
        given.values.pop(key, None)
    else:
        given.values[key] = str(value)


def _from_config(given: Given, source: str) -> None:
    """Notes the keys of a config file (or a config given in place)."""
    try:
        path = Path(source)
        text = path.read_text() if len(source) < 4096 and path.is_file() else source
        config: Any = OmegaConf.create(text)
        for scope in ("", f"{given.subcommand}."):
            for key in KEYS:
                value = OmegaConf.select(config, scope + key, default="absent")
                if value != "absent":
                    _note(given, key, value)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return
