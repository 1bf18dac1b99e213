"""What ``train.py`` calls: the command line and its parts.

| File | What it holds |
|---|---|
| ``cli`` | ``LatentCLI`` and ``main`` |
| ``arguments`` | the first look at the command line: verb, checkpoint, folders |
| ``checkpoints`` | finding, checking, reading and writing checkpoint files |
| ``ranges`` | values that arguments may have |
| ``conflicts`` | typed arguments against those of a checkpoint |
| ``run_record`` | ``config.yaml`` beside the logs, with commit and versions; the run's id |
| ``event_log`` | TensorBoard files that survive a kill |
| ``strategies`` | sharding over all devices |
| ``quiet`` | messages of other libraries that are left out |
| ``interrupts`` | Ctrl-C: where it counts, and its exit code |
| ``errors`` | which errors are the user's, and their one line |
"""

from training.cli import LatentCLI, main
from training.errors import UserError
from training.strategies import FullySharded

__all__ = ["FullySharded", "LatentCLI", "UserError", "main"]
