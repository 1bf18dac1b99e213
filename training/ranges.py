"""Values that the trainer's arguments may have, where Lightning itself does not check them."""

import math
import re
from collections.abc import Callable, Collection
from typing import Any

from jsonargparse import Namespace

from training.conflicts import ABSENT, LINKED_KEYS
from training.errors import UserError

LARGEST_SEED = 2**32 - 1  # of numpy
LARGEST_DATA_SEED = 2**63  # of numpy's generators, as C integers
DEVICES = r"auto|-1|[1-9]\d*|\d+,|\d+(,\d+)+"

PARTS_OF_MODEL = ("model.init_args", "model.init_args.config", "model.init_args.optimizer")
CURES = {
    "vocab_size": "choose the tokenizer with data.tokenizer",
    "block_size": "set data.block_size",
}


def _from(least: float) -> Callable[[Any], bool]:
    return lambda value: least <= value < math.inf


def _is_interval(value: Any) -> bool:
    """Whether it is a duration, or a number above 0; Lightning looks at the upper end."""
    return not isinstance(value, int | float) or 0 < value < math.inf


def _is_place(value: Any) -> bool:
    return bool(str(value).strip())


def _are_devices(value: Any) -> bool:
    if isinstance(value, int):
        return value >= -1 and value != 0
    if isinstance(value, str):
        return re.fullmatch(DEVICES, value.replace(" ", "")) is not None
    return all(isinstance(number, int) and number >= 0 for number in value)


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
    "trainer.default_root_dir": (_is_place, "is empty; name a folder (is a variable not set?)"),
    "data.init_args.seed": (lambda value: value < LARGEST_DATA_SEED, "must be below 2**63"),
    "checkpoint.dirpath": (_is_place, "is empty; name a folder, or null (is a variable not set?)"),
}
"""Key -> whether a value (null apart) is one that works, and what it must be."""


def check_values(config: Namespace, sections: Collection[str]) -> None:
    """Checks the arguments of a verb: sections, ``RULES``, and that no number is a nan.

    Args:
        config: the parsed arguments.
        sections: keys that hold arguments of their own, and so are never null or a number.

    Raises:
        UserError: if one is wrong; the message names key, value and what it must be.
    """
    for key in (*sections, *PARTS_OF_MODEL):
        value = config.get(key, ABSENT)
        if value != ABSENT and not isinstance(value, Namespace | dict):
            shown = "null" if value is None else value
            name = _short(key)
            raise UserError(f"{name} ({shown}) holds arguments; leave {name} out for its defaults")
    values = config.as_dict()
    nan = _find_nan(values)
    if nan is not None:
        raise UserError(f"{_short(nan)} (nan) is not a number; write one, or leave it out")
    for key, (works, words) in RULES.items():
        value = config.get(key)
        if value is not None and not works(value):
            raise UserError(f"{key} ({value}) {words}")


def check_linked(typed: Namespace, saved: Namespace | None, data: Any) -> None:
    """Checks that nothing typed is overwritten by what the data decide (``LINKED_KEYS``).

    Args:
        typed: the parsed arguments.
        saved: those of the checkpoint, which are what is parsed where nothing was typed.
        data: the datamodule.

    Raises:
        UserError: if a typed value is another one than the data's.
    """
    for key in LINKED_KEYS:
        name, value = key.rpartition(".")[2], typed.get(key)
        own = getattr(data, name, value)
        if value not in (None, own) and (saved is None or value != saved.get(key)):
            raise UserError(
                f"{_short(key)} ({value}) is decided by the data, which have {own}; leave it out "
                f"and {CURES[name]}"
            )


def _short(key: str) -> str:
    """Returns a key as it may be typed, without ``init_args``."""
    return key.replace(".init_args", "")


def _find_nan(value: Any, key: str = "") -> str | None:
    """Returns the key of the first nan within nested values."""
    if isinstance(value, float):
        return key.lstrip(".") if math.isnan(value) else None
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list | tuple) else []
    found = (_find_nan(item, f"{key}.{name}") for name, item in items)
    return next((name for name in found if name is not None), None)
