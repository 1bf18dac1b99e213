"""Lightning callbacks: progress, speed, samples, checkpoints and exact resumption.

Callbacks use the base contract of ``LanguageModel`` only, never a particular method.

| Callback | Function |
|---|---|
| ``SaveCheckpoints`` | writes ``last.ckpt`` and the best checkpoint by validation |
| ``PendingValidation`` | repeats a validation during which the previous process ended |
| ``ResumeState`` | restores random states and unfinished steps, for bit-exact resumption |
| ``KeepOptimizerSettings`` | applies configured optimiser settings instead of restored ones |
| ``Validation`` | sets the interval of validations in optimiser steps, and their size |
| ``LastStageStopping`` | early stopping that waits for a curriculum's last stage; added by hand |
| ``ScheduleChange`` | warns if a resumed run's schedule has a different learning rate |
| ``Progress`` | bar or lines: loss, tokens per second, time left |
| ``ModelOverview`` | parameters, FLOPs per token and global batch, before training |
| ``Throughput`` | tokens per second, FLOPs per token, MFU, peak memory |
| ``GradientNorm`` | gradient norm of the whole step before clipping |
| ``NonFinite`` | stops, or skips, a step whose loss or gradient is nan or infinite |
| ``Termination`` | SIGTERM, SIGUSR1, Ctrl-C: ends after a checkpoint; ends stalled runs |
| ``AnswerAccuracy`` | accuracy of answers to questions, to select checkpoints; added by hand |
| ``ForkAnalysis`` | forks by layer, entropy and attention; added by hand |
| ``GateAnalysis`` | use of a memory of sentences; added by hand |
| ``PosteriorAnalysis`` | inference of latent vectors, and a sweep over T_fast; added by hand |
| ``RecallAnalysis`` | accuracy of answers within texts, by distance or level; added by hand |
| ``StepAllocation`` | steps of a pondering model by token; added by hand |
| ``ThoughtTrace`` | thoughts along queries, compared with the data's; added by hand |
| ``TaskScores`` | scores on tasks of lm-evaluation-harness, every n steps; added by hand |
| ``Samples`` | text samples after validations |
| ``Predictions`` | output files of ``predict`` |

Modules without callbacks:

| File or folder | Contents |
|---|---|
| ``analysis/`` | the analyses, their base and their reports: files and figures |
| ``recorded_thoughts`` | thoughts recorded while a model reads, as values and as text |
| ``hooks`` | one set of hooks for validations and tests; communication between ranks |
| ``trainer_state`` | state of the trainer that Lightning does not declare |
| ``logging`` | pending values, Markdown and images for loggers |
| ``random_state`` | random states, and evaluation during training without side effects |
| ``checkpoint_io`` | writing and loading of checkpoints by one or several processes |
| ``resume_position`` | batch and step that follow a checkpoint |
| ``run_record`` | ``config.yaml`` of a run with commit and versions; the run's id |
| ``dials`` | temporary settings of a model's configuration |
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callbacks.analysis.forks import ForkAnalysis as ForkAnalysis
    from callbacks.analysis.gates import GateAnalysis as GateAnalysis
    from callbacks.analysis.posterior import PosteriorAnalysis as PosteriorAnalysis
    from callbacks.analysis.recall import RecallAnalysis as RecallAnalysis
    from callbacks.analysis.steps import StepAllocation as StepAllocation
    from callbacks.analysis.thought_trace import ThoughtTrace as ThoughtTrace
    from callbacks.answer_accuracy import AnswerAccuracy as AnswerAccuracy
    from callbacks.nonfinite import GradientNorm as GradientNorm
    from callbacks.nonfinite import NonFinite as NonFinite
    from callbacks.nonfinite import NonFiniteError as NonFiniteError
    from callbacks.optimizer_settings import KeepOptimizerSettings as KeepOptimizerSettings
    from callbacks.optimizer_settings import ScheduleChange as ScheduleChange
    from callbacks.overview import ModelOverview as ModelOverview
    from callbacks.predictions import Predictions as Predictions
    from callbacks.progress import Progress as Progress
    from callbacks.resume import PendingValidation as PendingValidation
    from callbacks.resume import ResumeState as ResumeState
    from callbacks.samples import Samples as Samples
    from callbacks.save_checkpoints import SaveCheckpoints as SaveCheckpoints
    from callbacks.termination import Terminated as Terminated
    from callbacks.termination import Termination as Termination
    from callbacks.throughput import Throughput as Throughput
    from callbacks.validation import LastStageStopping as LastStageStopping
    from callbacks.validation import Validation as Validation

_NAMES = {
    "callbacks.analysis.forks": "ForkAnalysis",
    "callbacks.analysis.gates": "GateAnalysis",
    "callbacks.analysis.posterior": "PosteriorAnalysis",
    "callbacks.analysis.recall": "RecallAnalysis",
    "callbacks.analysis.steps": "StepAllocation",
    "callbacks.analysis.thought_trace": "ThoughtTrace",
    "callbacks.answer_accuracy": "AnswerAccuracy",
    "callbacks.nonfinite": "GradientNorm NonFinite NonFiniteError",
    "callbacks.optimizer_settings": "KeepOptimizerSettings ScheduleChange",
    "callbacks.overview": "ModelOverview",
    "callbacks.predictions": "Predictions",
    "callbacks.progress": "Progress",
    "callbacks.resume": "PendingValidation ResumeState",
    "callbacks.samples": "Samples",
    "callbacks.save_checkpoints": "SaveCheckpoints",
    "callbacks.termination": "Terminated Termination",
    "callbacks.throughput": "Throughput",
    "callbacks.validation": "LastStageStopping Validation",
    "evaluation.tasks.callback": "TaskScores",
}
"""Public names by module; a module is imported on the first use of one of its names."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
