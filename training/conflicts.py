"""Where what the user typed and what a checkpoint holds do not agree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from datamodules.sentences import parse_splitter

OPTIMIZER_PREFIX = "model.init_args.optimizer."

# Of the data, only what the model is built for must agree; other text is a fair choice.
SPLITTER_KEY = "data.init_args.splitter"
DATA_KEYS = (
    "data.init_args.block_size",
    "data.init_args.tokenizer",
    "data.init_args.corpus.init_args.tokenizer",  # of sentences
    "data.init_args.max_sentence_tokens",
    SPLITTER_KEY,
)

# The data decide these; they are not typed.
LINKED_KEYS = ("model.init_args.config.vocab_size", "model.init_args.config.block_size")

ABSENT = "(none)"


@dataclass(frozen=True)
class Conflict:
    """One argument with two values.

    Attributes:
        key: its full name.
        typed: what the command line or a config file says.
        checkpoint: what the checkpoint says.
    """

    key: str
    typed: Any
    checkpoint: Any

    @property
    def one_sided(self) -> bool:
        """Whether only one of the two has this argument at all."""
        return ABSENT in (self.typed, self.checkpoint)


def find_conflicts(typed: Namespace, saved: Namespace) -> list[Conflict]:
    """Returns the model's arguments, and ``DATA_KEYS``, that differ, in the order of the config.

    Args:
        typed: the parsed ``model`` and ``data``, the checkpoint's values where none were typed.
        saved: the checkpoint's, parsed in the same way.

    Raises:
        ValueError: a typed splitter is not known.
    """
    ours, theirs = dict(_leaves(typed)), dict(_leaves(saved))
    return [
        Conflict(key, ours.get(key, ABSENT), theirs.get(key, ABSENT))
        for key in dict.fromkeys([*ours, *theirs])
        if _matters(key)
        and _meaning(key, ours.get(key, ABSENT)) != _meaning(key, theirs.get(key, ABSENT))
    ]


def _matters(key: str) -> bool:
    return key in DATA_KEYS or (key.startswith("model.") and key not in LINKED_KEYS)


def _meaning(key: str, value: Any) -> Any:
    """Returns what a value stands for: ``sat``, and a relative folder, are short names."""
    splits = key == SPLITTER_KEY and isinstance(value, str) and value != ABSENT
    return parse_splitter(value).name if splits else value


def _leaves(namespace: Namespace, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (full key, value) of all values that are not groups themselves."""
    for key, value in vars(namespace).items():
        if isinstance(value, Namespace):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def as_table(conflicts: Sequence[Conflict]) -> str:
    """Returns the conflicts in three aligned columns."""
    rows = [("key", "typed", "checkpoint")]
    rows += [(c.key.replace(".init_args", ""), str(c.typed), str(c.checkpoint)) for c in conflicts]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"  {key:<{widths[0]}}  {typed:<{widths[1]}}  {saved}" for key, typed, saved in rows
    )


def report(conflicts: Sequence[Conflict], path: Path) -> str:
    """Returns the message that stops the program, with the table and the ways out."""
    return (
        f"what was typed does not agree with the checkpoint {path}\n\n{as_table(conflicts)}\n\n"
        "Remove these arguments, or choose: --on_conflict typed (follow the typed values) or "
        "--on_conflict checkpoint (follow the checkpoint)."
    )
