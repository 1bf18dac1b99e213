"""Checkpoints: their content, how they are found, and how they are read without running code.

| file | content |
|---|---|
| `content` | `Checkpoint`: recipes, weights and the run that wrote it, checked |
| `formats` | reading, verifying and exporting a file, a file with shards or a model folder |
| `shards` | tensors in shards, which each process writes and reads its share of |
| `finding` | search by path, `last`, `best` or `auto`; the runs in a folder |
| `restoring` | `RestoresItself`: models that write their recipe and are rebuilt from it |

Callbacks decide when checkpoints are written, and write them: `callbacks.checkpoint_io`.
"""

from lightning_models.checkpoint.content import Checkpoint as Checkpoint
from lightning_models.checkpoint.content import CheckpointError as CheckpointError
from lightning_models.checkpoint.content import Recipe as Recipe
from lightning_models.checkpoint.content import Which as Which
from lightning_models.checkpoint.finding import AUTO as AUTO
from lightning_models.checkpoint.finding import LOGS as LOGS
from lightning_models.checkpoint.finding import RESULTS as RESULTS
from lightning_models.checkpoint.finding import WITHIN as WITHIN
from lightning_models.checkpoint.finding import find_checkpoint as find_checkpoint
from lightning_models.checkpoint.finding import has_log as has_log
from lightning_models.checkpoint.finding import newest_checkpoint as newest_checkpoint
from lightning_models.checkpoint.finding import parse_path as parse_path
from lightning_models.checkpoint.finding import read_checkpoint as read_checkpoint
from lightning_models.checkpoint.finding import started_runs as started_runs
from lightning_models.checkpoint.formats import file_status as file_status
from lightning_models.checkpoint.formats import is_model_folder as is_model_folder
from lightning_models.checkpoint.formats import is_torn as is_torn
from lightning_models.checkpoint.formats import read_file as read_file
from lightning_models.checkpoint.formats import read_whole as read_whole
from lightning_models.checkpoint.formats import record_checksums as record_checksums
from lightning_models.checkpoint.formats import write_file as write_file
from lightning_models.checkpoint.formats import write_model_folder as write_model_folder
from lightning_models.checkpoint.restoring import RestoresItself as RestoresItself
