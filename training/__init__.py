"""Command line of ``train.py``.

| File | What it holds |
|---|---|
| ``program`` | ``main``: the verbs, and their exit codes |
| ``cli`` | ``LatentCLI``, which builds model, data and trainer, and runs a verb |
| ``parsing`` | its command line, laid over the checkpoint that it names |
| ``arguments`` | first look at the command line, ranges of values, conflicts with a checkpoint |
| ``run_folder`` | the folder of a run, which one process at a time writes to |
| ``plan`` | ``train.py plan``: parameters, tokens, FLOPs, memory and hours of a run |
| ``synthetic`` | models without files, and batches of random tokens, for plans and benchmarks |
| ``sizes`` | refuses sizes that the machine cannot hold |
| ``listing`` | ``train.py list``: configs with parameters and tokens |
| ``processes`` | ranks, what launchers have started, and that no rank is left over |
| ``loggers`` | TensorBoard, CSV, W&B and MLflow logs of a run that may be resumed |
| ``strategies`` | FSDP2 over all processes of a run |
| ``signals`` | Ctrl-C, and messages that are left out |
| ``help`` | the verbs, and how ``--help`` describes them |
| ``errors`` | which errors are the user's, and their one line |
"""

from training.cli import LatentCLI
from training.errors import UserError
from training.program import main
from training.strategies import FullySharded

__all__ = ["FullySharded", "LatentCLI", "UserError", "main"]
