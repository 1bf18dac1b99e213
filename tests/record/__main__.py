"""Records what a commit does, and compares it with what was recorded.

    python -m tests.record make v0.9 --output tests/record/before.json
    python -m tests.record compare                  # the working tree with before.json
    python -m tests.record compare --part verbs

Each part runs in a process of its own, on the packages of a checkout of that commit: resolved
configurations, runs and command lines of studies, weights and metrics of one run a method,
results of the commands on their checkpoints, tables of the analyses, token files of the corpora,
and the outcome of bad and hostile input. Numbers are kept; files are digests.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ("configs", "studies", "runs", "stores", "bad", "hostile")
SIGNIFICANT = 9
"""Digits of numbers that are kept."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=__doc__)
    parser.add_argument("action", choices=("make", "compare", "part"))
    parser.add_argument("commit", nargs="?", help="A commit; left out, the working tree.")
    parser.add_argument("--part", choices=PARTS, action="append", help="Only these parts.")
    parser.add_argument("--output", default=HERE / "before.json", type=Path)
    options = parser.parse_args()
    if options.action == "part":  # within the process of the part
        return _run_part(options.part[0], Path(options.commit))
    record = record_of(options.commit, options.part or PARTS)
    if options.action == "make":
        options.output.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")
        return 0
    before = json.loads(options.output.read_text())
    lines = [line for part in record for line in differences(before[part], record[part], part)]
    print("\n".join(lines) or "equal")
    return int(bool(lines))


def record_of(commit: str | None, parts: list[str]) -> dict[str, Any]:
    """Runs the parts on a commit, or on the working tree, and returns what they did."""
    with tempfile.TemporaryDirectory() as folder:
        tree = ROOT
        if commit:
            tree = Path(folder, "tree")
            _git("worktree", "add", "--detach", str(tree), commit)
        try:
            return {part: _part_of(tree, part) for part in parts}
        finally:
            if commit:
                _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True)


def _part_of(tree: Path, part: str) -> Any:
    """The part's record, from a process that imports the packages of that checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE), "part", folder, "--part", part]
        with Path(folder, "log").open("w") as log:
            code = subprocess.run(
                command, cwd=folder, env=_environment(tree), stdout=log, stderr=log
            ).returncode
        if code:
            raise SystemExit(Path(folder, "log").read_text()[-5000:])
        print(Path(folder, "log").read_text(), file=sys.stderr)
        return json.loads(Path(folder, "record.json").read_text())


def _environment(tree: Path) -> dict[str, str]:
    """One thread, no network, and packages of that checkout."""
    import os

    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    paths = {"PYTHONPATH": str(tree), "RECORD_TREE": str(tree)}
    return {**os.environ, **offline, **paths, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def _run_part(part: str, folder: Path) -> int:
    sys.path.insert(0, str(HERE))
    record = getattr(importlib.import_module("parts"), part)(folder)
    (folder / "record.json").write_text(json.dumps(_rounded(record), sort_keys=True))
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.{SIGNIFICANT}g}") if isinstance(value, float) else value


def differences(before: Any, after: Any, path: str) -> list[str]:
    """One line for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        pairs = [(key, before.get(key, "absent"), after.get(key, "absent")) for key in keys]
        return [line for key, a, b in pairs for line in differences(a, b, f"{path}/{key}")]
    return [] if before == after else [f"{path}: {before} -> {after}"]


if __name__ == "__main__":
    sys.exit(main())
