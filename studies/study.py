"""What a study declares: runs, what is measured on each, and what is tabulated."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Settings = Mapping[str, Any]


class StudyError(ValueError):
    """A study cannot be done as asked; the message names the cure."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A command of ``evaluate.py`` on a trained run, whose JSON file is the result."""

    name: str
    """Names the JSON file, and is what columns refer to."""
    command: str = "perplexity"
    """Command of ``evaluate.py``."""
    options: Settings = field(default_factory=dict)
    """Its options without dashes, e.g. ``{"set.eval_allocation": "threshold"}``."""


@dataclass(frozen=True)
class CheckpointOf:
    """Stands among an analysis' options for the checkpoint of another run with the same seed.

    Null where that run is not trained.
    """

    run: str
    """Its name."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A callback that writes files while ``train.py validate`` scores a trained run."""

    name: str
    """Names the folder of its files."""
    callback: str
    """Class path, e.g. ``callbacks.ForkAnalysis``."""
    options: Settings = field(default_factory=dict)
    """The callback's arguments; values may be ``CheckpointOf``."""
    files: tuple[str, ...] = ("*.png", "*.svg", "*.csv")
    """Which of its files go beside the report, as globs."""
    quoting: tuple[str, ...] = ()
    """Which of these quote the text: they stay behind where it is the user's own."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model to train. Runs of a study differ in model, length and seed only."""

    name: str
    """Names its folder; without spaces."""
    title: str
    """What tables call it."""
    model: Settings
    """Class path and init arguments, as in a YAML file."""
    data: Settings | None = None
    """Class path and init arguments of a data module that takes the study's text, with the study's
    ``data`` arguments, as its ``corpus``; None: the module of the text itself."""
    paced: Mapping[str, Callable[[float], Any]] = field(default_factory=dict)
    """Entries of the model's config that follow from how often the run reads its questions, e.g. a
    curriculum that is to end before the training does, however long that is."""
    callbacks: tuple[Settings, ...] = ()
    """Callbacks that watch the training, class paths and init arguments."""
    length: float = 1.0
    """How many times the study's steps it trains."""
    repeated: bool = True
    """Whether every seed is run; else the first alone."""
    extra: bool = False
    """Whether it is left out unless ``only`` names it."""
    seed: int = 0
    """Of everything random but the data order, which is the same for all."""
    cost: float = 1.0
    """Expected time relative to the other runs, for the time left."""
    evaluations: tuple[Evaluation, ...] = ()
    """What is measured when it is trained."""
    analyses: tuple[Analysis, ...] = ()
    """What is looked into when it is trained, for the first seed only."""

    @property
    def folder(self) -> str:
        """Name of the folder of this run and seed."""
        return f"{self.name}-seed{self.seed}"


LOGGED = "logged"
"""In the place of an evaluation's name: the last values that training has logged, by their tags."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of the report's table, in bits per byte unless ``key`` says otherwise."""

    title: str
    evaluation: str
    """Whose result it is; runs without that evaluation have none."""
    key: str = "bits_per_byte"
    """Key in the JSON file; a dot leads into a nested value, a number into a list."""
    digits: int = 4
    """Decimals."""
    unit: float = 1.0
    """What it is shown in multiples of, e.g. 1e6 for millions."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """What all runs of a study are trained and measured on."""

    files: tuple[str, ...] = ()
    """Paths and globs; none: the documentation of Python (``datamodules.PythonDocs``)."""
    separator: str = r"\n{4,}"
    """Regular expression between documents of txt files, as between chapters."""
    name: str = ""
    """What the report calls it; empty: a general name. Paths are never reported."""

    @property
    def label(self) -> str:
        """Name in the report."""
        return self.name or ("own text" if self.files else "Python's documentation")

    @property
    def settings(self) -> dict[str, Any]:
        """Class path and own arguments of the data module."""
        if not self.files:
            return {"class_path": "datamodules.PythonDocs", "init_args": {}}
        own = {"data_files": list(self.files), "separator": self.separator}
        return {"class_path": "datamodules.LocalText", "init_args": own}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs on the same text in the same order, and what the report says about them.

    Raises:
        StudyError: if a number is out of its range, or names do not fit each other.
    """

    method: str
    """Names the study, its folder and its report."""
    title: str
    """Heading of the report."""
    introduction: str
    """What is compared, in Markdown."""
    runs: tuple[Run, ...]
    baseline: str
    """Name of the run that times are relative to."""
    columns: tuple[Column, ...]
    data: Settings
    """Arguments of the data module beside the text: tokenizer, block and batch size."""
    trainer: Settings
    """Trainer arguments of all runs, but those that follow from the number of steps."""
    steps: int = 750
    """Optimiser steps of each run, where ``epochs`` does not say otherwise."""
    epochs: int | None = None
    """Passes over the training text of each run, for runs whose batches differ in size."""
    reading: str = ""
    """How runs read the text, for the report; empty: in windows of ``block_size`` tokens."""
    curve: str = "val/bpb"
    """Scalar of the validation curves: val/bpb, or val/loss (nats per token that is reported)."""
    validations: int = 10
    """Points of the validation curves, about; each epoch has at least one."""
    text: Text = Text()
    corpus: Settings | None = None
    """Class path and init arguments of a data module, where the text is no file of the user's."""
    task: Settings | None = None
    """Class path and init arguments of a data module that makes up questions, in place of a text;
    lengths then count questions."""
    seeds: tuple[int, ...] = (0, 1)
    typed: str = ""
    """Options of the command that made this a variant of the declared study, for the report."""

    def __post_init__(self) -> None:
        """Checks numbers and names."""
        if self.steps < 1:
            raise StudyError(f"steps ({self.steps}) must be at least 1")
        if self.epochs is not None and self.epochs < 1:
            raise StudyError(f"epochs ({self.epochs}) must be at least 1")
        if self.epochs is not None and any(run.length != 1 for run in self.runs):
            raise StudyError(f"epochs ({self.epochs}): runs with a length of their own count steps")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise StudyError(f"seeds ({list(self.seeds)}) must be different numbers from 0")
        if self.task is None and any(run.paced for run in self.runs):
            raise StudyError(
                f"runs of {self.method} are paced, which takes the questions of a task"
            )
        names = [run.name for run in self.runs]
        if len(set(names)) < len(names) or self.baseline not in names:
            raise StudyError(f"runs ({', '.join(names)}) must differ and contain {self.baseline}")
        if self.corpus is not None and (self.task is not None or self.text.files):
            raise StudyError(f"text: {self.method} declares a corpus; leave the other out")
        if self.task is not None and self.text.files:
            raise StudyError(f"text: {self.method} makes up its questions; leave the text out")

    @property
    def source(self) -> Settings:
        """Class path and own arguments of the data module that texts or questions come from."""
        return self.task or self.corpus or self.text.settings

    @property
    def unit(self) -> str:
        """What lengths count: tokens, or the questions of a task."""
        return "tokens" if self.task is None else "questions"

    @property
    def units_per_step(self) -> int:
        """Tokens, or questions, of an optimiser step."""
        rows = int(self.data["batch_size"]) * int(self.trainer.get("accumulate_grad_batches", 1))
        return rows if self.task is not None else rows * int(self.data["block_size"])

    @property
    def length(self) -> str:
        """How long a run trains, in words."""
        if self.epochs is not None:
            return f"{self.epochs} epochs"
        units = self.steps * self.units_per_step
        return f"{units:,} {self.unit} ({self.steps} steps of {self.units_per_step:,})"

    def steps_of(self, run: Run) -> int:
        """Returns the optimiser steps of a run, where those are counted."""
        return max(1, round(self.steps * run.length))

    def passes_of(self, run: Run) -> float:
        """Returns how often a run reads the training questions of the task."""
        if self.epochs is not None:
            return float(self.epochs)
        return self.steps_of(run) * self.units_per_step / int(self.data["train_examples"])

    @property
    def folder(self) -> str:
        """Name of the folder that sets of runs with other text or steps do not share."""
        corpus = "python_docs"
        declared = self.task or self.corpus
        if declared is not None:
            own = json.dumps(declared, sort_keys=True)
            kind = "corpus" if self.task is None else "task"
            corpus = f"{kind}-{hashlib.sha256(own.encode()).hexdigest()[:8]}"
        elif self.text.files:
            own = "\n".join((*self.text.files, self.text.separator))
            corpus = f"local_text-{hashlib.sha256(own.encode()).hexdigest()[:8]}"
        length = f"{self.steps}-steps" if self.epochs is None else f"{self.epochs}-epochs"
        return f"{self.method}/{corpus}-{length}"

    @property
    def names(self) -> list[str]:
        """Names of all runs, in order."""
        return [run.name for run in self.runs]

    def seeded(self, only: Sequence[str] = ()) -> list[Run]:
        """Returns every run with every seed, all runs of a seed before the next.

        Args:
            only: names of runs to take; none: all but the extra ones.

        Raises:
            StudyError: if a name is not known.
        """
        unknown = [name for name in only if name not in self.names]
        if unknown:
            known = ", ".join(self.names)
            raise StudyError(f"only ({', '.join(unknown)}): the runs are {known}")
        return [
            replace(run, seed=seed, analyses=run.analyses if seed == self.seeds[0] else ())
            for seed in self.seeds
            for run in self.runs
            if (run.name in only if only else not run.extra)
            and (run.repeated or seed == self.seeds[0])
        ]
