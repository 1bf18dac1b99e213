"""Checkpoints: what they hold, how they are read without running code, and where they are found.

| file | what it holds |
|---|---|
| `content` | `Checkpoint`: recipes, weights and the run that wrote it, checked |
| `formats` | a file, a file with parts or a model folder: read, verified, exported |
| `shards` | tensors in parts, which processes write and read each their share of |
| `finding` | by path, `last`, `best` or `auto`; the runs below a folder |
| `restoring` | `RestoresItself`: models that write and follow their recipe |

Callbacks decide when checkpoints are written, and write them: `callbacks.checkpoint_io`.
"""

from lightning_models.checkpoint.content import Checkpoint, CheckpointError, Recipe, Which
from lightning_models.checkpoint.finding import (
    AUTO,
    LOGS,
    RESULTS,
    find_checkpoint,
    has_log,
    newest_checkpoint,
    place_of,
    read_checkpoint,
    started_runs,
)
from lightning_models.checkpoint.formats import (
    file_status,
    is_model_folder,
    is_torn,
    read_file,
    read_whole,
    record_checksums,
    write_file,
    write_model_folder,
)
from lightning_models.checkpoint.restoring import RestoresItself

__all__ = [
    "AUTO",
    "LOGS",
    "RESULTS",
    "Checkpoint",
    "CheckpointError",
    "Recipe",
    "RestoresItself",
    "Which",
    "file_status",
    "find_checkpoint",
    "has_log",
    "is_model_folder",
    "is_torn",
    "newest_checkpoint",
    "place_of",
    "read_checkpoint",
    "read_file",
    "read_whole",
    "record_checksums",
    "started_runs",
    "write_file",
    "write_model_folder",
]
