"""Declarations of studies: runs, evaluations and tables, read from YAML with OmegaConf."""

import hashlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "configs" / "studies"
LOGGED = "logged"
"""Stands in columns for an evaluation: the last values that training logged, by their tags."""
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
    "round": round,
}
"""Resolvers of the YAML files: ``${add:${operations},1}``."""

Settings = dict[str, Any]


class StudyError(ValueError):
    """A study cannot be done as asked; the message names the cure."""


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    """A callback that writes files while ``train.py validate`` scores a trained run."""

    class_path: str
    init_args: Settings = field(default_factory=dict)
    reference: str | None = None
    """Run whose checkpoint with the same seed is the callback's ``reference_ckpt``."""
    files: tuple[str, ...] = ("*.png", "*.svg", "*.csv")
    """Globs of its files that are copied to the report."""
    quoting: tuple[str, ...] = ()
    """Globs of files that quote the text: not copied where it is the user's own."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A line for each run that has an analysis, drawn from the tables of its files."""

    analysis: str
    """Name of the analysis in ``Run.analyses``."""
    table: str
    """Glob of one of its CSV files."""
    x: str
    """Column over which lines are drawn."""
    y: str
    x_label: str = ""
    y_label: str = ""
    marked: float | None = None
    """Value of x with a vertical line, such as the size of a memory."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Hyperparameter search of ``python -m studies.tune``, of equal size for each run.

    Raises:
        StudyError: If a number is out of its range.
    """

    trials: int
    """Trials of each run; the first has the declared values."""
    tokens: int
    """Tokens of a trial that is not pruned; questions, where the study has a task."""
    space: dict[str, Settings] = field(default_factory=dict)
    """Keys of all runs' models, such as ``model.init_args.optimizer.lr``, each with ``low`` and
    ``high`` (and ``log``), or ``choices``; runs may have further ones."""
    rungs: int = 3
    """Validations at which trials are compared, the last of them at the end."""
    reduction: int = 3
    """Factor between the lengths of trials at two rungs; one of so many trials goes on."""
    metric: str = "val/loss"
    """Tag of a logged validation value."""
    direction: Literal["minimize", "maximize"] = "minimize"
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        for key, least in {"trials": 1, "tokens": 1, "rungs": 1, "reduction": 2, "seed": 0}.items():
            if getattr(self, key) < least:
                raise StudyError(f"search.{key} ({getattr(self, key)}) must be at least {least}")

    @property
    def validations(self) -> int:
        """Validations of a trial, at equal distances."""
        return int(self.reduction ** (self.rungs - 1))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model to train. Runs of a study differ in model, reading, length and seed only."""

    name: str
    """Names its folder."""
    title: str
    """Its name in tables."""
    model: Settings
    """Class path and init arguments, as in a YAML file of ``train.py``."""
    data: Settings | None = None
    """A data module that takes the study's text as its ``corpus``, instead of the text's own."""
    callbacks: tuple[Settings, ...] = ()
    """Callbacks of the training, class paths and init arguments."""
    length: float = 1.0
    """Steps of its training, in multiples of the study's."""
    seeds: Literal["all", "first"] = "all"
    """``first`` trains it with the study's first seed alone."""
    extra: bool = False
    """Whether it is left out unless ``--only`` names it."""
    evaluations: dict[str, Settings] = field(default_factory=dict)
    """Options of ``evaluate.py`` by the name of the result; ``command`` is its verb, by default
    perplexity."""
    analyses: dict[str, AnalysisSettings] = field(default_factory=dict)
    """By the name of the folder of their files; of the first seed only."""
    search: dict[str, Settings | None] = field(default_factory=dict)
    """Keys of its model that a search draws besides ``Search.space``; null takes a key out."""
    seed: int = 0
    """Seed of everything random but the data order, which is the same for all."""

    @property
    def folder(self) -> str:
        """Name of the folder of this run and seed."""
        return f"{self.name}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs on the same text in the same order, and their report.

    Raises:
        StudyError: If a number is out of its range, or names do not match.
    """

    name: str
    """Name of its file, of its folder and of its report."""
    title: str
    """Heading of the report."""
    runs: dict[str, Run]
    data: Settings
    """Arguments of the data module that are not the text's: tokenizer, block and batch size."""
    introduction: str = ""
    """Description of the comparison, in Markdown."""
    columns: dict[str, str] = field(default_factory=dict)
    """Title -> number in the table of docs/results/NAME.md: ``EVALUATION.KEY`` of a result file
    (``logged.TAG`` of the training's log), or a pandas expression with such names in backticks.
    Without columns the report is the comparison alone."""
    figure: Figure | None = None
    """The report's figure of all runs."""
    compare: Settings = field(default_factory=dict)
    """Options of ``evaluate.py compare``, e.g. its split."""
    trainer: Settings = field(default_factory=dict)
    """Trainer arguments of all runs, except those that follow from the length."""
    steps: int = 750
    """Optimiser steps of each run, unless ``epochs`` is set."""
    epochs: int | None = None
    """Passes over the training text of each run."""
    seeds: tuple[int, ...] = (0,)
    validations: int = 10
    """Validations of a training, about; each epoch has at least one."""
    corpus: Settings | None = None
    """Data module of the text, by default the user's files, or Python's documentation."""
    task: Settings | None = None
    """Data module that makes up questions, in place of a text; lengths then count questions."""
    operations: int | None = None
    """Most operations of made-up training texts, for studies whose values depend on it."""
    max_operations: int = 0
    """Largest value of ``--operations``."""
    files: tuple[str, ...] = ()
    """Paths and globs of the user's text, in place of ``corpus``."""
    separator: str = r"\n{4,}"
    """Regular expression between documents of txt files, as between chapters."""
    text_name: str = ""
    """The text's name in the report, which has no paths."""
    search: Search | None = None
    """Search of ``python -m studies.tune``."""

    def __post_init__(self) -> None:
        for key in ("steps", "epochs"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise StudyError(f"{key} ({value}) must be at least 1")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise StudyError(f"seeds ({list(self.seeds)}) must be different numbers from 0")
        for key in ("block_size", "batch_size"):
            if not isinstance(self.data.get(key), int):
                raise StudyError(f"{self.name}: data.{key} ({self.data.get(key)!r}) must be int")
        if self.operations is not None and not 1 <= self.operations <= self.max_operations:
            raise StudyError(
                f"operations ({self.operations}) must be from 1 to {self.max_operations}"
            )
        if self.task is not None and self.files:
            raise StudyError(f"text: {self.name} makes up its questions; leave the text out")
        for run in self.runs.values():
            if "=" in run.title or "/" in run.title:  # compare reads TITLE=PATH
                raise StudyError(f"runs.{run.name}.title ({run.title}) must not contain = or /")
            if self.epochs is not None and run.length != 1:
                raise StudyError(
                    f"epochs ({self.epochs}): runs.{run.name} has a length of its own, which "
                    "counts steps; use --steps"
                )

    @property
    def unit(self) -> str:
        """Unit of lengths: tokens, or the questions of a task."""
        return "tokens" if self.task is None else "questions"

    @property
    def units_per_step(self) -> int:
        """Tokens, or questions, of an optimiser step."""
        rows = _rows_per_step(self.data, self.trainer)
        return int(rows if self.task is not None else rows * self.data["block_size"])

    @property
    def length(self) -> str:
        """How long a run trains, in words."""
        if self.epochs is not None:
            return "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        if any(run.data is not None for run in self.runs.values()):  # whose rows differ in length
            return f"{self.steps} steps"
        units = f"{self.steps * self.units_per_step:,} {self.unit}"
        return f"{units} ({self.steps} steps of {self.units_per_step:,})"

    @property
    def source(self) -> dict[str, Any]:
        """Class path and init arguments of the data module, without ``data``."""
        if self.files:
            text = {"data_files": list(self.files), "separator": self.separator}
            return {"class_path": "datamodules.LocalText", "init_args": text}
        python_docs = {"class_path": "datamodules.PythonDocs", "init_args": {}}
        return dict(self.task or self.corpus or python_docs)

    @property
    def source_name(self) -> str:
        """Name of the text in the report."""
        if self.task is not None:
            return "questions that are made up"
        return self.text_name or ("own text" if self.files else "Python's documentation")

    @property
    def folder(self) -> str:
        """Name of the folder that sets of runs with another text or length do not share."""
        text = "python_docs"
        if self.files:
            text = f"local_text-{_digest(chr(10).join((*self.files, self.separator)))}"
        elif self.task or self.corpus:
            kind = "corpus" if self.task is None else "task"
            text = f"{kind}-{_digest(json.dumps(self.source, sort_keys=True))}"
        length = f"{self.steps}-steps" if self.epochs is None else f"{self.epochs}-epochs"
        return f"{self.name}/{text}-{length}"

    def seeded(self, only: Sequence[str] = ()) -> list[Run]:
        """Returns every run with every seed, all runs of a seed before the next.

        Args:
            only: Names of runs to take, by default all but the extra ones.

        Raises:
            StudyError: If a name is not known.
        """
        unknown = [name for name in only if name not in self.runs]
        if unknown:
            raise StudyError(f"only ({', '.join(unknown)}): the runs are {', '.join(self.runs)}")
        first = self.seeds[0]
        return [
            replace(run, seed=seed, analyses=run.analyses if seed == first else {})
            for seed in self.seeds
            for run in self.runs.values()
            if (run.name in only if only else not run.extra)
            and (run.seeds == "all" or seed == first)
        ]

    def train_config(self, run: Run) -> dict[str, Any]:
        """Returns the config of a run for ``train.py fit``, as nested plain values."""
        data = {**self.source, "init_args": {**self.source.get("init_args", {}), **self.data}}
        if run.data is not None:
            data = {**run.data, "init_args": {**run.data.get("init_args", {}), "corpus": data}}
        watching = {"callbacks": [dict(each) for each in run.callbacks]} if run.callbacks else {}
        length, saving = self._length(run)
        return {
            "seed_everything": run.seed,
            "model": dict(run.model),
            "data": data,
            "trainer": {**self.trainer, "num_sanity_val_steps": 0, **length, **watching},
            "checkpoint": {"save_top_k": 0, **saving},
            "samples": {"every_n_validations": 0},  # their time would count as training
        }

    def settings_digest(self, run: Run) -> str:
        """Returns 8 hex digits of all that decides a run's values but the code."""
        settings = [self.train_config(run), run.evaluations]
        return _digest(json.dumps(settings, sort_keys=True))

    def _length(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns arguments of the trainer and of checkpoints, written as often as validations."""
        if self.epochs is not None:
            checks = math.ceil(self.validations / self.epochs)
            validated = {"val_check_interval": 1 / checks, "log_every_n_steps": 10}
            return {"max_epochs": self.epochs, **validated}, {"train_time_interval": "0:00:30"}
        steps = max(1, round(self.steps * run.length))
        interval = max(1, steps // self.validations)
        length = {
            "max_steps": steps,
            "val_check_interval": interval,
            "check_val_every_n_epoch": None,
            "log_every_n_steps": min(10, interval),
        }
        return length, {"every_n_train_steps": interval}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# ---- files


def _passes(length: float, *, _root_: DictConfig) -> float:
    """Returns how often a run of this length reads the questions of its study."""
    if _root_.get("epochs"):
        return float(_root_.epochs)
    steps, rows = (
        max(1, round(_root_.steps * length)),
        _rows_per_step(_root_.data, _root_.get("trainer") or {}),
    )
    return float(steps * rows / _root_.data.train_examples)


def _rows_per_step(data: Mapping[Any, Any], trainer: Mapping[Any, Any]) -> int:
    """Returns the rows of an optimiser step, on one device unless ``data.global_batch`` says it."""
    one_device = data["batch_size"] * (trainer.get("accumulate_grad_batches") or 1)
    return int(data.get("global_batch") or one_device)


for resolver, function in {**ARITHMETIC, "passes": _passes}.items():
    OmegaConf.register_resolver(resolver, function, replace=True)


def study_names() -> list[str]:
    """Returns the names of the studies of the project."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_study(name: str, **typed: Any) -> Study:
    """Returns a study as declared, changed by options of the command line.

    Args:
        name: Name of a study of the project, or a file.
        typed: Fields of ``Study``; None keeps the declared value.

    Raises:
        StudyError: If there is none, or it is malformed; the message names the key.
    """
    typed = {key: value for key, value in typed.items() if value is not None}
    if "steps" in typed:  # of steps and epochs, the one that was typed counts
        typed = {"epochs": None, **typed}
    if "files" in typed:
        typed["corpus"] = None
    path = _find(name, FOLDER)
    content = _read(path)
    if "operations" in typed and "operations" not in content:
        raise StudyError(
            f"operations ({typed['operations']}): {path.stem} declares none; leave them out"
        )
    try:
        declared: Any = OmegaConf.to_container(OmegaConf.merge(content, typed), resolve=True)
        plain = _with_names(path.stem, declared)
        return cast(Study, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), plain)))
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise StudyError(f"{path.stem}: {getattr(error, 'full_key', '')}: {message}") from error


def _with_names(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Returns the content without what only other values refer to; runs get their names."""
    runs, evaluations = content.get("runs"), content.pop("evaluations", {})
    if not isinstance(runs, dict) or not runs:
        raise StudyError(f"{name}: runs ({runs!r}) must be a mapping of names, each with a model")
    for key in ("common", "values"):
        content.pop(key, None)
    named = {
        key: {"name": key, "title": key, "evaluations": evaluations, **run}
        if isinstance(run, dict)
        else run
        for key, run in runs.items()
    }
    return {**content, "name": name, "runs": named}


def _find(name: str, near: Path, but: Path | None = None) -> Path:
    """Returns the file of a study: of a folder, of the project, or by its path."""
    for path in (near / f"{name}.yaml", FOLDER / f"{name}.yaml", near / name, Path(name)):
        if path.is_file() and path.resolve() != but:
            return path
    names = ", ".join(study_names())
    raise StudyError(f"there is no study {name!r}; there are {names}, or name a file")


def _read(path: Path) -> DictConfig:
    """Returns the content of a file, merged into the file that it ``extends``."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StudyError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise StudyError(f"{path} is no study: it must be a mapping with title, data and runs")
    base, content = loaded.pop("extends", None), OmegaConf.create(loaded)
    if base is None:
        return content
    extended = _read(_find(str(base), path.parent, but=path.resolve()))
    return cast(DictConfig, OmegaConf.merge(extended, content))
