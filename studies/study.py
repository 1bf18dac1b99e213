"""Declarations of studies: runs, evaluations and tables, read from YAML with OmegaConf."""

import hashlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "configs" / "studies"
LOGGED = "logged"
RESERVED = {"train", "record", "run", LOGGED}
"""Names of the other parts of a run's folder and of its results."""
"""Pseudo-evaluation for columns: the last values logged in training, by tag."""
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
    """Raised if a study cannot run as requested; the message names the cure."""


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    """An analysis callback that writes files while ``train.py validate`` scores a trained run."""

    class_path: str
    init_args: Settings = field(default_factory=dict)
    reference: str | None = None
    """Run whose checkpoint with the same seed is the callback's ``reference_ckpt``."""
    files: tuple[str, ...] = ("*.png", "*.svg", "*.csv")
    """Globs of the analysis files to copy to the report."""
    quoting: tuple[str, ...] = ()
    """Globs of files that quote the text, which are not copied for a user's text."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with a line per run, drawn from the tables of an analysis of each seed."""

    analysis: str
    """Name of the analysis in ``Run.analyses``."""
    table: str
    """Glob of one of its CSV files."""
    x: str
    """Column of the x axis."""
    y: str
    x_label: str = ""
    y_label: str = ""
    marked: float | None = None
    """Position of a vertical line on the x axis, such as the size of a memory."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Hyperparameter search by ``python -m studies.tune``, with the same budget for each run.

    Raises:
        StudyError: If a number is out of range.
    """

    trials: int
    """Number of trials per run; the first has the declared values."""
    tokens: int
    """Number of tokens of an unpruned trial, or of questions if the study has a task."""
    space: dict[str, Settings] = field(default_factory=dict)
    """Ranges by key of all runs' models, such as ``model.init_args.optimizer.lr``, each with
    ``low`` and ``high`` (and ``log``), or ``choices``; runs may have further keys."""
    rungs: int = 3
    """Number of validations at which trials are compared, including the last."""
    reduction: int = 3
    """Factor between the lengths of trials at successive rungs; one in this many continues."""
    metric: str = "val/loss"
    """Tag of a logged validation metric."""
    direction: Literal["minimize", "maximize"] = "minimize"
    seed: int = 0
    """Seed of the sampler."""

    def __post_init__(self) -> None:
        for key, bound in {"trials": 1, "tokens": 1, "rungs": 1, "reduction": 2, "seed": 0}.items():
            if getattr(self, key) < bound:
                raise StudyError(f"search.{key} ({getattr(self, key)}) must be at least {bound}")

    @property
    def validations(self) -> int:
        """Number of equidistant validations per trial."""
        return int(self.reduction ** (self.rungs - 1))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model to train. Runs of a study differ only in model, data module, length and seed."""

    name: str
    """Name of the run's folder."""
    title: str
    """Name of the run in tables."""
    model: Settings
    """Class path and init arguments, as in a YAML file of ``train.py``."""
    data: Settings | None = None
    """Data module that wraps the text's data module as its ``corpus``."""
    callbacks: tuple[Settings, ...] = ()
    """Training callbacks, as class paths and init arguments."""
    length: float = 1.0
    """Factor for the study's number of steps."""
    seeds: Literal["all", "first"] = "all"
    """Seeds of the run; ``first`` trains it only with the study's first seed."""
    extra: bool = False
    """Whether to skip it unless ``--only`` names it."""
    evaluations: dict[str, Settings] = field(default_factory=dict)
    """Options of ``evaluate.py`` by the name of the result; ``command`` is the verb and defaults to
    perplexity."""
    analyses: dict[str, AnalysisSettings] = field(default_factory=dict)
    """Analyses by the name of their folder: of the first seed, the figure's of each seed."""
    search: dict[str, Settings | None] = field(default_factory=dict)
    """Keys of the run's model to search in addition to ``Search.space``; null removes a key."""
    seed: int = 0
    """Seed of all randomness but the data order, which all runs share."""

    @property
    def folder(self) -> str:
        """Name of the folder of this run and seed."""
        return f"{self.name}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs on the same text in the same order, and their report.

    Raises:
        StudyError: If a number is out of range, or names do not match.
    """

    name: str
    """Name of its file, of its folder and of its report."""
    title: str
    """Heading of the report."""
    runs: dict[str, Run]
    data: Settings
    """Arguments of the data module besides the text: tokenizer, block and batch size."""
    introduction: str = ""
    """Description of the comparison, in Markdown."""
    protocol: str = ""
    """Split of the scores, and how hyperparameters were chosen."""
    columns: dict[str, str] = field(default_factory=dict)
    """Title -> value in the tables of docs/results/NAME: ``EVALUATION.KEY`` of a result file
    (``logged.TAG`` of the training log), or a pandas expression with such names in backticks.
    Without columns the report consists of the comparison."""
    page_columns: tuple[str, ...] = ()
    """Titles of the columns in the table of docs/results/NAME.md; `means.csv` has the others too.
    Defaults to all. A study that extends another inherits them."""
    paired: dict[str, str] = field(default_factory=dict)
    """Title of a column -> the run from whose values the differences of each seed are taken."""
    figure: Figure | None = None
    """Figure from an analysis. None draws the scores of each run and seed."""
    compare: Settings = field(default_factory=dict)
    """Options of ``evaluate.py compare``, e.g. its split."""
    trainer: Settings = field(default_factory=dict)
    """Trainer arguments of all runs; the length implies further ones."""
    steps: int = 750
    """Number of optimiser steps per run, unless ``epochs`` is set."""
    epochs: int | None = None
    """Number of passes over the training text per run."""
    seeds: tuple[int, ...] = (0,)
    budget: int | None = None
    """Budget of all runs in core-minutes, which the report states."""
    validations: int = 10
    """Approximate number of validations per run; each epoch has at least one."""
    corpus: Settings | None = None
    """Data module of the text. Defaults to the user's files, or Python's documentation."""
    task: Settings | None = None
    """Data module that generates questions, instead of a text; lengths then count questions."""
    operations: int | None = None
    """Maximum number of operations in generated training texts, if the study depends on it."""
    max_operations: int = 0
    """Largest value of ``--operations``."""
    files: tuple[str, ...] = ()
    """Paths and globs of the user's text, instead of ``corpus``."""
    separator: str = r"\n{4,}"
    """Regular expression between the documents of txt files, such as chapters."""
    text_name: str = ""
    """Name of the text in the report, which has no paths."""
    search: Search | None = None
    """Hyperparameter search by ``python -m studies.tune``."""

    def __post_init__(self) -> None:
        for key in ("steps", "epochs", "budget", "validations"):
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
            raise StudyError(f"text: {self.name} generates its questions; leave the text out")
        for title, baseline in self.paired.items():
            if self.columns and not (title in self.columns and baseline in self.runs):
                raise StudyError(f"paired ({title}: {baseline}) must be a column and a run")
        if unknown := set(self.page_columns) - set(self.columns):
            raise StudyError(f"page_columns ({', '.join(sorted(unknown))}) must be columns")
        analyses = sorted({name for run in self.runs.values() for name in run.analyses})
        if self.figure is not None and self.figure.analysis not in analyses:
            raise StudyError(
                f"figure.analysis ({self.figure.analysis}) must be an analysis of a run: "
                f"{', '.join(analyses) or 'there is none'}"
            )
        titles = [run.title for run in self.runs.values()]
        for key, run in self.runs.items():
            if run.name != key:
                raise StudyError(f"runs.{key}.name ({run.name}) must be {key}, or left out")
            if run.length <= 0:
                raise StudyError(f"runs.{key}.length ({run.length}) must be above 0")
            if titles.count(run.title) > 1:  # rows of a title are its seeds
                raise StudyError(f"runs.{key}.title ({run.title}) is the title of another run too")
            # evaluations and analyses share the folder and the record of their run
            names = [*run.evaluations, *run.analyses]
            if taken := {name for name in names if name in RESERVED or names.count(name) > 1}:
                raise StudyError(
                    f"runs.{key}: evaluations and analyses need names of their own, other than "
                    f"{', '.join(sorted(RESERVED))}: {', '.join(sorted(taken))}"
                )
            if "=" in run.title or "/" in run.title:  # compare reads TITLE=PATH
                raise StudyError(f"runs.{run.name}.title ({run.title}) must not contain = or /")
            if self.epochs is not None and run.length != 1:
                raise StudyError(
                    f"epochs ({self.epochs}): runs.{run.name} sets its length in steps; use --steps"
                )

    @property
    def unit(self) -> str:
        """Unit of lengths: tokens, or the questions of a task."""
        return "tokens" if self.task is None else "questions"

    @property
    def units_per_step(self) -> int:
        """Number of tokens, or questions, per optimiser step."""
        rows = _rows_per_step(self.data, self.trainer)
        return int(rows if self.task is not None else rows * self.data["block_size"])

    @property
    def length(self) -> str:
        """Description of the length of a run."""
        if self.epochs is not None:
            return "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        if any(run.data is not None for run in self.runs.values()):  # rows may differ in length
            return f"{self.steps} steps"
        units = f"{self.steps * self.units_per_step:,} {self.unit}"
        return f"{units} ({self.steps} steps of {self.units_per_step:,})"

    @property
    def source(self) -> dict[str, Any]:
        """Class path and init arguments of the text's data module, without ``data``."""
        if self.files:
            text = {"data_files": list(self.files), "separator": self.separator}
            return {"class_path": "datamodules.LocalText", "init_args": text}
        python_docs = {"class_path": "datamodules.PythonDocs", "init_args": {}}
        return dict(self.task or self.corpus or python_docs)

    @property
    def source_name(self) -> str:
        """Name of the text in the report."""
        if self.task is not None:
            return "generated questions"
        return self.text_name or ("own text" if self.files else "Python's documentation")

    @property
    def folder(self) -> str:
        """Name of the folder, unique to the text and the length."""
        text = "python_docs"
        if self.files:
            text = f"local_text-{_digest(chr(10).join((*self.files, self.separator)))}"
        elif self.task or self.corpus:
            origin = "corpus" if self.task is None else "task"
            text = f"{origin}-{_digest(json.dumps(self.source, sort_keys=True))}"
        length = f"{self.steps}-steps" if self.epochs is None else f"{self.epochs}-epochs"
        return f"{self.name}/{text}-{length}"

    def seeded(self, only: Sequence[str] = ()) -> list[Run]:
        """Returns every run with every seed, ordered by seed.

        Seeds after the first only have the analysis of the figure.

        Args:
            only: Names of the runs to return. Defaults to all but the extra ones.

        Raises:
            StudyError: If a name is unknown.
        """
        unknown = [name for name in only if name not in self.runs]
        if unknown:
            raise StudyError(f"only ({', '.join(unknown)}): the runs are {', '.join(self.runs)}")
        first = self.seeds[0]
        drawn = None if self.figure is None else self.figure.analysis

        def analyses(run: Run, seed: int) -> dict[str, AnalysisSettings]:
            return {key: run.analyses[key] for key in run.analyses if seed == first or key == drawn}

        return [
            replace(run, seed=seed, analyses=analyses(run, seed))
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
        watching = (
            {"callbacks": [dict(callback) for callback in run.callbacks]} if run.callbacks else {}
        )
        length, saving = self._length(run)
        return {
            "seed_everything": run.seed,
            "model": dict(run.model),
            "data": data,
            "trainer": {**self.trainer, "num_sanity_val_steps": 0, **length, **watching},
            "checkpoint": {"save_top_k": 0, **saving},
            "samples": {"every_n_validations": 0},  # their time would count as training time
        }

    def settings_digest(self, run: Run) -> str:
        """Returns 8 hex digits that identify the settings behind a run's values.

        The user's text is identified by its files' names and sizes, wherever they are.
        """
        settings: list[Any] = [replace(self, files=()).train_config(run), run.evaluations]
        paths = [
            Path(path) for pattern in self.files for path in sorted(glob(pattern, recursive=True))
        ]
        if self.files:
            settings.append([self.separator, *((path.name, path.stat().st_size) for path in paths)])
        return _digest(json.dumps(settings, sort_keys=True))

    def _length(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arguments of the trainer and of checkpoints, given the validations."""
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
    """Returns how often a run of this length passes over the questions."""
    if _root_.get("epochs"):
        return float(_root_.epochs)
    steps, rows = (
        max(1, round(_root_.steps * length)),
        _rows_per_step(_root_.data, _root_.get("trainer") or {}),
    )
    return float(steps * rows / _root_.data.train_examples)


def _rows_per_step(data: Mapping[Any, Any], trainer: Mapping[Any, Any]) -> int:
    """Returns the rows of an optimiser step: ``data.global_batch``, or the rows of one device."""
    one_device = data["batch_size"] * (trainer.get("accumulate_grad_batches") or 1)
    return int(data.get("global_batch") or one_device)


for resolver, function in {**ARITHMETIC, "passes": _passes}.items():
    OmegaConf.register_resolver(resolver, function, replace=True)


def study_names() -> list[str]:
    """Returns the names of the project's studies."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_study(name: str, **typed: Any) -> Study:
    """Loads a study, with its fields overridden by options of the command line.

    Args:
        name: Name of one of the project's studies, or path of a file.
        **typed: Fields of ``Study``; None keeps the declared value.

    Raises:
        StudyError: If it does not exist or is malformed; the message names the key.
    """
    typed = {key: value for key, value in typed.items() if value is not None}
    if "steps" in typed:  # typed steps replace declared epochs
        typed = {"epochs": None, **typed}
    if "files" in typed:
        typed["corpus"] = None
    path = _find(name, FOLDER)
    content = _read(path)
    if "operations" in typed and "operations" not in content:
        raise StudyError(
            f"operations ({typed['operations']}): {path.stem} does not use it; leave the option out"
        )
    try:
        declared: Any = OmegaConf.to_container(OmegaConf.merge(content, typed), resolve=True)
        plain = _with_names(path.stem, declared)
        return cast(Study, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), plain)))
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise StudyError(f"{path.stem}: {getattr(error, 'full_key', '')}: {message}") from error


def _with_names(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Removes auxiliary values from the content, and names the runs."""
    runs, evaluations = content.get("runs"), content.pop("evaluations", {})
    if not isinstance(runs, dict) or not runs:
        raise StudyError(
            f"{name}: runs ({runs!r}) must be a mapping from names to runs with a model"
        )
    for key in ("common", "values"):
        content.pop(key, None)
    names = {
        key: {"name": key, "title": key, "evaluations": evaluations, **run}
        if isinstance(run, dict)
        else run
        for key, run in runs.items()
    }
    return {**content, "name": name, "runs": names}


def _find(name: str, near: Path, exclude: Path | None = None) -> Path:
    """Finds a study's file in a folder, in the project, or by its path."""
    for path in (near / f"{name}.yaml", FOLDER / f"{name}.yaml", near / name, Path(name)):
        if path.is_file() and path.resolve() != exclude:
            return path
    names = ", ".join(study_names())
    raise StudyError(f"the study {name!r} does not exist; choose from {names}, or name a file")


def _read(path: Path) -> DictConfig:
    """Reads a file, merged over the file that it ``extends``."""
    try:
        content = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StudyError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, DictConfig):
        raise StudyError(f"{path} is not a study: it must be a mapping with title, data and runs")
    base = content.pop("extends", None)
    if base is None:
        return content
    extended = _read(_find(str(base), path.parent, exclude=path.resolve()))
    extended.pop("budget", None)  # of other runs
    return cast(DictConfig, OmegaConf.merge(extended, content))
