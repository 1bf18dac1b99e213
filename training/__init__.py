"""Command line of ``train.py``.

| File | Content |
|---|---|
| ``program`` | ``main``: the verbs, and their exit codes |
| ``cli`` | ``LatentCLI``, which builds model, data and trainer, and runs a verb |
| ``parsing`` | its command line, overriding the values of a checkpoint |
| ``arguments`` | first look at the command line, ranges of values, conflicts with a checkpoint |
| ``run_folder`` | the folder of a run, which one process at a time writes to |
| ``plan`` | ``train.py plan``: parameters, tokens, FLOPs, memory and hours of a run |
| ``synthetic`` | models without files, and batches of random tokens, for plans and benchmarks |
| ``sizes`` | checks of sizes against the machine |
| ``listing`` | ``train.py list``: configs with parameters and tokens |
| ``processes`` | ranks, checks of launchers, and the end of all ranks |
| ``loggers`` | TensorBoard, CSV, W&B and MLflow logs of a run that may be resumed |
| ``strategies`` | FSDP2 over all processes of a run |
| ``signals`` | Ctrl-C, and filters of unhelpful messages |
| ``help`` | the verbs, and their ``--help`` |
| ``errors`` | user errors, and their one-line messages |
"""

from training.cli import LatentCLI
from training.errors import UserError
from training.program import main
from training.strategies import FullySharded

__all__ = ["FullySharded", "LatentCLI", "UserError", "main"]
