"""``python -m datamodules.check FOLDER``: whether text stores hold what was written.

Every block of every file is compared with its checksum, every id with the vocabulary, and every
document end with the EOS before it. A store of an older version has no checksums: of it only
the latter two.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from datamodules.reasoning.preparation import ExampleStore
from datamodules.store import SPLITS, Store, StoreError, verify_store


def find_stores(folder: Path) -> list[Path]:
    """Returns the folder where it is a store, else the stores in it; unfinished ones are left out.

    Raises:
        ValueError: There are none.
    """
    if (folder / "meta.json").exists() or _is_name(folder):
        return [folder]
    inner = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [path for path in inner if path.is_dir() and _is_name(path)]
    if not found:
        raise ValueError(
            f"{folder} is no text store, nor a folder of text stores. Name a store, or the "
            "cache_dir of the data."
        )
    return found


def _is_name(folder: Path) -> bool:
    """Returns whether a folder is named as `store.fingerprint` names stores."""
    return re.fullmatch(r".+-[0-9a-f]{16}", folder.name) is not None and folder.is_dir()


def check(folder: Path) -> str:
    """Returns what was checked of a store, in one line.

    Raises:
        StoreError: It is damaged.
    """
    store = Store(folder)
    if any("examples" in store.meta["splits"][split] for split in SPLITS):
        store = ExampleStore(folder)
    verify_store(store)
    tokens = sum(store.counts(split).tokens for split in SPLITS)
    how = "no checksums, prepared by an older version; ids and document ends are sound"
    how = "checksums, ids and document ends agree" if store.has_checksums else how
    return f"{folder}: {how} ({tokens} tokens, {store.size} bytes)"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a store; returns 0, or 2 if one is damaged or there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m datamodules.check", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("folders", nargs="+", type=Path, help="Stores, or folders of stores.")
    status = 0
    for folder in parser.parse_args(argv).folders:
        try:
            stores = find_stores(folder)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
            continue
        for store in stores:
            try:
                print(check(store))
            except (StoreError, OSError) as error:
                print(f"error: {error}", file=sys.stderr)
                status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
