"""The record of a run: what its ``config.yaml`` says, comments on top included."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

NO_VERSION = ("run", "command")
"""Names on top of a record that are no versions."""


@dataclass(frozen=True)
class Record:
    """What a training run was started with; empty where there is no record."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``config.yaml``: seed_everything, trainer, model, data and so on."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of code and libraries, by name; of a resumed run all of them."""

    def get(self, *keys: str) -> Any:
        """Returns a setting by its path, such as ``("trainer", "precision")``; None without it."""
        value: Any = self.settings
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def read_record(folder: Path | None) -> Record:
    """Returns the record in a log folder.

    A resumed run has several: settings are those of the first, versions those of all.

    Args:
        folder: log folder; None: there is none.
    """
    if folder is None:
        return Record()
    first, files = folder / "config.yaml", sorted(folder.glob("config*.yaml"))
    seen: dict[str, dict[str, None]] = {}
    for file in files:
        for name, version in read_versions(file).items():
            seen.setdefault(name, {})[version] = None
    return Record(_settings(first), {name: " and ".join(found) for name, found in seen.items()})


def read_versions(record: Path) -> dict[str, str]:
    """Returns the versions on top of the ``config.yaml`` of a training run; empty without one."""
    versions = {}
    for line in record.read_text(encoding="utf-8").splitlines() if record.is_file() else []:
        name, colon, value = line.removeprefix("# ").partition(": ")
        if not (colon and line.startswith("# ")):
            break
        if name not in NO_VERSION:
            versions[name] = value
    return versions


def _settings(file: Path) -> dict[str, Any]:
    """Returns the content of a record; empty where it cannot be read."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
