"""Formats of a checkpoint on disk: a file, a file with shards, and a model folder.

Only tensors and plain values are ever unpickled.
"""

import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_models.atomic_files import whole_file, write_whole
from lightning_models.checkpoint import shards
from lightning_models.checkpoint.content import Checkpoint, CheckpointError


def read_file(path: Path, *, mapped: bool = True) -> Any:
    """Reads a checkpoint file or a model folder without running any code in it.

    Checksums are not compared, see `verified`.

    Args:
        path: The file or folder.
        mapped: Whether a file's tensors are memory-mapped and read when used, so that optimiser
            state stays on disk.

    Raises:
        CheckpointError: If it is missing, damaged, or holds more than tensors and plain values.
    """
    if path.is_dir():
        return _load_folder(path)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}")
    mapped = mapped and not is_torn(path)  # the older format cannot be mapped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on pickles of other programs, refused below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        needed = re.search(r"GLOBAL (\S+)|Unsupported class (\S+)", str(error))
        if needed is None:
            raise _damaged(path) from error
        raise CheckpointError(
            f"{path} is refused: besides tensors and plain values it contains "
            f"{needed[1] or needed[2]}, which could run any code while loading. Load it only in "
            "the program that wrote it, and save plain values from there"
        ) from error
    except Exception as error:  # arbitrary bytes can raise anything in the unpickler
        raise _damaged(path) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint in a file or model folder without reading tensors; see `verified`."""
    status, content = file_status(path), read_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    return Checkpoint(path, content, status=status)


def verified(checkpoint: Checkpoint, *, parts: bool = True) -> Checkpoint:
    """Compares a checkpoint with its checksums; torch does not notice missing bytes in a tensor.

    Args:
        checkpoint: The result of `open_checkpoint`.
        parts: Whether shards are compared as well.

    Returns:
        The checkpoint with all weights. Sharded ones are read on demand.

    Raises:
        CheckpointError: If data is missing or damaged.
    """
    path, content = checkpoint.path, checkpoint.content
    if path.is_dir():
        _check_weights(path)
    else:
        _check_records(path)
    if shards.KEY not in content:
        return checkpoint
    stored = shards.Shards(path, content)
    stored.check()
    if parts:
        stored.verify()
    weights = shards.TensorsInShards(stored, "state_dict", content["state_dict"])
    return replace(checkpoint, content={**content, "state_dict": weights})


def read_whole(path: str | Path) -> dict[str, Any]:
    """Returns the full content of the checkpoint at ``path``, with sharded tensors assembled.

    Args:
        path: A file or a model folder.

    Raises:
        CheckpointError: If data is missing or damaged.
    """
    return shards.whole(Path(path), dict(open_checkpoint(Path(path)).content))


def write_file(path: Path, content: Mapping[str, Any], *, sole: bool = False) -> None:
    """Writes a checkpoint file atomically.

    Args:
        path: The file, in an existing folder.
        content: Tensors and plain values.
        sole: See `whole_file`.

    Raises:
        OSError: If it cannot be written.
    """
    with whole_file(path, sole=sole) as file:
        torch.save(content, file)


def file_status(path: Path) -> tuple[int, ...] | None:
    """Returns a file's inode, size and time, which change if it is replaced; None for folders."""
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_torn(path: Path) -> bool:
    """Whether a file lacks the record index at its end, as files of torch's old format also do."""
    return not zipfile.is_zipfile(path)


def record_checksums(path: Path) -> list[tuple[str, int, int]]:
    """Returns name, CRC and size of each record of a file; torch's older format has none."""
    if is_torn(path):
        return []
    with zipfile.ZipFile(path) as archive:
        # the names begin with the file's name when it was saved, which may have changed
        return [(e.filename.partition("/")[2], e.CRC, e.file_size) for e in archive.infolist()]


def _check_records(path: Path) -> None:
    if is_torn(path):  # read by torch.load as the older format, which has no checksums
        return
    with zipfile.ZipFile(path) as file:
        try:
            record = file.testzip()
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise _damaged(path) from error
    if record is not None:
        raise CheckpointError(
            f"{path} is damaged: the checksum of {record} is wrong; copy it again"
        )


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is truncated or not a checkpoint; copy it again"
    )


# ---- model folders: weights as safetensors, the rest as JSON, without training state

RECIPE, WEIGHTS = "recipe.json", "model.safetensors"
_SUM = "sha256"
"""Key in the recipe file of the weight file's digest."""
_OF_TRAINING: dict[str, Any] = {
    "callbacks": {},
    "optimizer_states": [],
    "lr_schedulers": [],
}
"""Entries that Lightning expects in every checkpoint."""
_LEFT_OUT = (
    *_OF_TRAINING,
    "loops",
    "state_dict",
    "hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
    "resume_state",
    "pending_validation",
    shards.KEY,
)


def is_model_folder(path: Path) -> bool:
    """Whether the folder at ``path`` was written by ``write_model_folder``."""
    return (path / RECIPE).is_file()


def write_model_folder(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the weights, recipes and other plain values of a checkpoint, without training state.

    Args:
        folder: An empty folder.
        content: The checkpoint's content, with unsharded weights.

    Raises:
        CheckpointError: If the recipe or the data's state has values that JSON cannot represent.
    """
    from safetensors.torch import save_file

    checkpoint = Checkpoint(folder, content)
    kept = {key: value for key, value in content.items() if key not in _LEFT_OUT}
    not_json = [key for key, value in kept.items() if not _is_json(value)]
    if "recipe" in not_json or any(kept[key] is checkpoint.data_state for key in not_json):
        raise CheckpointError(f"{', '.join(not_json)}: not plain enough for {RECIPE}")
    weights = {key: tensor.contiguous() for key, tensor in content["state_dict"].items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    plain_values = {key: value for key, value in kept.items() if key not in not_json}
    plain_values[_SUM] = shards.digest(folder / WEIGHTS)
    text = json.dumps(plain_values, indent=2, allow_nan=False)
    write_whole(folder / RECIPE, f"{text}\n")


def _load_folder(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        content = json.loads((path / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / RECIPE} cannot be read ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path / RECIPE} holds a {type(content).__name__}, not an object")
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}; copy that file as well")
    try:
        weights = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _damaged(path / WEIGHTS) from error
    recipe = content.get("recipe")
    model = recipe.get("model") if isinstance(recipe, dict) else None
    arguments = model.get("init_args") if isinstance(model, dict) else None
    kept = {key: value for key, value in content.items() if key not in _LEFT_OUT}
    return {**_OF_TRAINING, **kept, "hyper_parameters": arguments, "state_dict": weights}


def _check_weights(path: Path) -> None:
    """Raises a CheckpointError if the digest of the weights is not the one in the recipe file."""
    expected = json.loads((path / RECIPE).read_text(encoding="utf-8")).get(_SUM)
    if expected is not None and expected != shards.digest(path / WEIGHTS):
        raise CheckpointError(
            f"{path / WEIGHTS} is damaged, or not the file that {RECIPE} was written with (another "
            f"{_SUM}); copy both again"
        )


def _is_json(value: Any) -> bool:
    """Whether JSON represents a value exactly, apart from tuples, which become lists."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)
