"""Lightning callbacks: progress, speed, samples, checkpoints and exact resumption.

Callbacks use the base contract of ``LanguageModel`` only, never a particular method.

| Callback | What it does |
|---|---|
| ``SaveCheckpoints`` | writes ``last.ckpt`` and the best by validation |
| ``PendingValidation`` | a run that ended within a validation begins with it when resumed |
| ``ResumeState`` | random states and unfinished steps: a resumed run equals the uninterrupted one |
| ``KeepOptimizerSettings`` | lets configured optimiser settings win over restored ones |
| ``ScheduleChange`` | warns where a resumed run's schedule has another learning rate |
| ``Progress`` | bar or lines: loss, tokens per second, time left |
| ``Throughput`` | tokens per second, FLOPs per token, MFU, peak memory |
| ``GradientNorm`` | norm of the whole step's gradient before clipping |
| ``NonFinite`` | stops, or skips, a step whose loss or gradient is nan or infinite |
| ``Termination`` | SIGTERM, Ctrl-C: a checkpoint, then the end |
| ``AnswerAccuracy`` | share of questions answered rightly, to choose runs by; added by hand |
| ``ForkAnalysis`` | where a model forks, by layer, entropy and attention; added by hand |
| ``GateAnalysis`` | how a model uses its memory of sentences; added by hand |
| ``PosteriorAnalysis`` | how latent vectors are inferred, and T_fast swept; added by hand |
| ``StepAllocation`` | where a pondering model spends its steps; added by hand |
| ``ThoughtTrace`` | thoughts along queries, next to the data's; added by hand |
| ``TaskScores`` | scores on tasks of lm-evaluation-harness, every n steps; added by hand |
| ``Samples`` | text samples after validations |
| ``Predictions`` | what ``predict`` writes |

What they are made of, no callbacks:

| File or folder | What it holds |
|---|---|
| ``analysis/`` | what all analyses have in common: turns, batches, files, figures, pages |
| ``reasoning/`` | questions, what is right, thoughts; for ``evaluate.py reason``, too |
| ``hooks`` | one set of hooks for validations and tests, the trainer's state, random states |
"""

import importlib
from typing import Any

from callbacks.answer_accuracy import AnswerAccuracy
from callbacks.checkpointing import PendingValidation, SaveCheckpoints
from callbacks.fork_analysis import ForkAnalysis
from callbacks.gate_analysis import GateAnalysis
from callbacks.nonfinite import GradientNorm, NonFinite, NonFiniteError
from callbacks.posterior_analysis import PosteriorAnalysis
from callbacks.predictions import Predictions
from callbacks.progress import Progress
from callbacks.resume import KeepOptimizerSettings, ResumeState, ScheduleChange
from callbacks.samples import Samples
from callbacks.step_allocation import StepAllocation
from callbacks.termination import Terminated, Termination
from callbacks.thought_trace import ThoughtTrace
from callbacks.throughput import Throughput

__all__ = [
    "AnswerAccuracy",
    "ForkAnalysis",
    "GateAnalysis",
    "GradientNorm",
    "KeepOptimizerSettings",
    "NonFinite",
    "NonFiniteError",
    "PendingValidation",
    "PosteriorAnalysis",
    "Predictions",
    "Progress",
    "ResumeState",
    "Samples",
    "SaveCheckpoints",
    "ScheduleChange",
    "StepAllocation",
    "TaskScores",
    "Terminated",
    "Termination",
    "ThoughtTrace",
    "Throughput",
]

_ELSEWHERE = {"TaskScores": "evaluation.tasks.callback"}
"""Public callbacks of other packages, imported on first use: no module here imports those."""


def __getattr__(name: str) -> Any:
    """Returns a public callback of another package.

    Raises:
        AttributeError: if there is none of that name.
    """
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE[name]), name)
