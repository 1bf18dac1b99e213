"""Reading what ``transformers`` has saved, from the hub or a folder, with messages of ours."""

import pickle
from collections.abc import Callable
from typing import TypeVar

Read = TypeVar("Read")


def read_pretrained(read: Callable[[], Read], what: str, named: str, *, other: str) -> Read:
    """Returns what ``read`` does.

    Args:
        read: calls ``from_pretrained``; it must never run code of the model's author.
        what: it reads, for messages: 'model', 'tokenizer'.
        named: the option and its value, for messages.
        other: what else may be named, for messages.

    Raises:
        ValueError: if it fails, whatever damaged files make of the library; in a line.
    """
    try:
        return read()
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{named} is refused: its pickled weights contain more than tensors, which could "
            "run any code while loading. Use a model with .safetensors weights"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{named}: no {what} found (neither in a local folder of that name nor on the "
            f"hub); pass {other}"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{named}: the {what} cannot be read ({reason}); get it again, or pass {other}"
        ) from error
