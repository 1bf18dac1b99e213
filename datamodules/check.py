"""``python -m datamodules.check FOLDER``: verifies text stores against their checksums.

Every block of every file is compared with its checksum, every id with the vocabulary, and every
document end with the EOS before it. Stores written by older versions have no checksums and get only
the last two checks.

For a config of a question dataset, such as ``configs/data/gsm8k_aug.yaml``, it fetches the data,
reads all of it, and compares the number of rows with the published one.
"""

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import yaml

from datamodules.hub import RowsWarning
from datamodules.reasoning.module import ReasoningDataModule
from datamodules.reasoning.preparation import ExampleStore, format_reports
from datamodules.store import SPLITS, Store, verify_store
from lightning_models.recipe import build


def stores_in(folder: Path) -> list[Path]:
    """Returns the finished stores in a folder.

    Raises:
        ValueError: If there are none.
    """
    inner = sorted(folder.iterdir()) if folder.is_dir() else []
    stores = [path for path in inner if _is_named(path)]
    if not stores:
        raise ValueError(
            f"{folder} is neither a text store nor a folder of text stores. Name a store, or the "
            "cache_dir of the data."
        )
    return stores


def _is_named(folder: Path) -> bool:
    """Returns whether a folder's name ends in a fingerprint (`store.fingerprint`)."""
    return re.fullmatch(r".+-[0-9a-f]{16}", folder.name) is not None and folder.is_dir()


def check(folder: Path) -> str:
    """Verifies a store and describes the checks in one line.

    Raises:
        StoreError: If it is damaged.
    """
    store = Store(folder)
    if any("examples" in store.meta["splits"][split] for split in SPLITS):
        store = ExampleStore(folder)
    verify_store(store)
    tokens = sum(store.counts(split).tokens for split in SPLITS)
    result = "ids and document ends are valid; an older version prepared it without checksums"
    result = "checksums, ids and document ends are valid" if store.has_checksums else result
    return f"{folder}: {result} ({tokens} tokens, {store.size} bytes)"


def fetch(config: Path) -> str:
    """Fetches a config's questions from the hub and describes them in one line.

    Raises:
        ValueError: If it is not such a config, or the data cannot be read.
        RowsWarning: If the number of rows differs from the published one.
    """
    content = yaml.safe_load(config.read_text())
    if not isinstance(content, dict) or "data" not in content:
        raise ValueError(
            f"{config} has no 'data' section. Name a file such as configs/data/*.yaml."
        )
    recipe = content["data"]
    with tempfile.TemporaryDirectory() as cache, warnings.catch_warnings():
        warnings.simplefilter("error", RowsWarning)
        settings = {**recipe["init_args"], "cache_dir": cache}
        data = build({**recipe, "init_args": settings}, ReasoningDataModule)
        data.prepare_data()
        return f"{config}: {format_reports(data.report())}; {json.dumps(data.origin)}"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m datamodules.check", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        help="Stores, folders of stores, or configs of question datasets.",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line per store or config; returns 0, or 2 if a check failed."""
    status, paths = 0, list(build_parser().parse_args(argv).folders)
    while paths:
        path = paths.pop(0)
        try:
            if path.suffix == ".yaml":
                print(fetch(path))
            elif (path / "meta.json").exists() or _is_named(path):
                print(check(path))
            else:
                paths = [*stores_in(path), *paths]
        except (ValueError, OSError, RowsWarning) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
