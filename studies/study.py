"""Declarations of studies: runs, evaluations and tables, read from YAML."""

import ast
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "configs" / "studies"
LOGGED = "logged"
"""In the place of an evaluation's name: the last values that training logged, by their tags."""
CHECKPOINT_OF = "checkpoint_of"
"""``{checkpoint_of: RUN}`` among an analysis' arguments: that run's checkpoint with the same seed,
null where it is not trained."""
EXPRESSION = re.compile(r"\{\{(.+?)\}\}")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "round": round}

Settings = Mapping[str, Any]


class StudyError(ValueError):
    """A study cannot be done as asked; the message names the cure."""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Values of ``--operations``, of studies whose runs depend on it."""

    default: int
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    """A callback that writes files while ``train.py validate`` scores a trained run."""

    class_path: str
    init_args: Settings = field(default_factory=dict)
    files: tuple[str, ...] = ("*.png", "*.svg", "*.csv")
    """Globs of its files that are copied to the report."""
    quoting: tuple[str, ...] = ()
    """Globs of those that quote the text: not copied where it is the user's own."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of the report's tables."""

    title: str
    evaluation: str
    """Whose result it is, or ``LOGGED``; runs without that evaluation have none."""
    key: str = "bits_per_byte"
    """Key in the JSON file; a dot leads into a nested value, a number into a list."""
    digits: int = 4
    """Decimals."""
    unit: float = 1.0
    """What it is shown in multiples of, e.g. 1e6 for millions."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """Hyperparameter search of ``python -m studies.tune``, of equal size for each run.

    Raises:
        StudyError: if a number is out of its range.
    """

    trials: int
    """Of each run; the first has the declared values."""
    tokens: int
    """Of a trial that is not pruned; of a task's studies: questions."""
    space: Settings = field(default_factory=dict)
    """Keys of all runs' models, such as ``model.init_args.optimizer.lr``, each with ``low`` and
    ``high`` (and ``log``), or ``choices``; runs may have further ones."""
    rungs: int = 3
    """Validations at which trials are compared, the last of them at the end."""
    reduction: int = 3
    """A trial is as many times longer at a rung as at the one before; one of as many goes on."""
    metric: str = "val/loss"
    """Tag of a logged validation value."""
    direction: str = "minimize"
    """``minimize`` or ``maximize``."""
    seed: int = 0
    """Of what is drawn."""

    def __post_init__(self) -> None:
        """Checks numbers and names."""
        for key, least in {"trials": 1, "tokens": 1, "rungs": 1, "reduction": 2, "seed": 0}.items():
            if getattr(self, key) < least:
                raise StudyError(f"search.{key} ({getattr(self, key)}) must be at least {least}")
        if self.direction not in ("minimize", "maximize"):
            raise StudyError(f"search.direction ({self.direction}) must be minimize or maximize")

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
    """A data module that takes the study's text as its ``corpus``; None: the text's own module."""
    callbacks: tuple[Settings, ...] = ()
    """Callbacks of the training, class paths and init arguments."""
    length: float = 1.0
    """Steps of its training, in multiples of the study's."""
    seeds: str = "all"
    """``all``, or ``first`` for the study's first seed alone."""
    extra: bool = False
    """Whether it is left out unless ``--only`` names it."""
    cost: float = 1.0
    """Expected time relative to the other runs, for the time left."""
    evaluations: Mapping[str, Settings] = field(default_factory=dict)
    """Options of ``evaluate.py`` by the name of the result; ``command``: its verb, else perplexity.
    """
    analyses: Mapping[str, AnalysisSettings] = field(default_factory=dict)
    """By the name of the folder of their files; of the first seed only."""
    search: Settings = field(default_factory=dict)
    """Keys of its model that a search draws next to those of ``Search.space``; null: not this."""
    seed: int = 0
    """Of everything random but the data order, which is the same for all."""

    @property
    def folder(self) -> str:
        """Name of the folder of this run and seed."""
        return f"{self.name}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs on the same text in the same order, and their report.

    Raises:
        StudyError: if a number is out of its range, or names do not match.
    """

    name: str
    """Name of its file, of its folder and of its report."""
    title: str
    """Heading of the report."""
    runs: tuple[Run, ...]
    data: Settings
    """Arguments of the data module that are not the text's: tokenizer, block and batch size."""
    introduction: str = ""
    """What is compared, in Markdown."""
    columns: tuple[Column, ...] = ()
    """Of the table in docs/results/NAME.md; none: the report is the comparison alone."""
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
    """Data module of the text; None: the user's files, or Python's documentation."""
    task: Settings | None = None
    """Data module that makes up questions, in place of a text; lengths then count questions."""
    files: tuple[str, ...] = ()
    """Paths and globs of the user's text, in place of ``corpus``."""
    separator: str = r"\n{4,}"
    """Regular expression between documents of txt files, as between chapters."""
    text_name: str = ""
    """The text's name in the report, which has no paths."""
    search: Search | None = None
    """What ``python -m studies.tune`` draws."""
    options: str = ""
    """Options of the command line that change what is declared, for the report."""

    def __post_init__(self) -> None:
        """Checks numbers and names."""
        for key in ("steps", "epochs"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise StudyError(f"{key} ({value}) must be at least 1")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise StudyError(f"seeds ({list(self.seeds)}) must be different numbers from 0")
        for key in ("block_size", "batch_size"):
            if not _fits(self.data.get(key), int):
                raise StudyError(f"{self.name}: data.{key} ({self.data.get(key)!r}) must be int")
        accumulated = self.trainer.get("accumulate_grad_batches")
        if not _fits(accumulated, int | None):
            raise StudyError(
                f"{self.name}: trainer.accumulate_grad_batches ({accumulated!r}) must be int"
            )
        for key in ("corpus", "task"):
            source = getattr(self, key)
            if source is not None and not isinstance(source.get("init_args"), Mapping):
                raise StudyError(f"{self.name}: {key} must have class_path and init_args")
        if self.task is not None and self.files:
            raise StudyError(f"text: {self.name} makes up its questions; leave the text out")
        for run in self.runs:
            self._check(run)

    def _check(self, run: Run) -> None:
        where = f"{self.name}: runs.{run.name}"
        if run.seeds not in ("all", "first"):
            raise StudyError(f"{where}.seeds ({run.seeds}) must be all or first")
        if self.epochs is not None and run.length != 1:
            raise StudyError(
                f"epochs ({self.epochs}): runs.{run.name} has a length of its own, which counts "
                "steps; use --steps"
            )
        for name, options in run.evaluations.items():
            if not isinstance(options, Mapping):
                raise StudyError(f"{where}.evaluations.{name} ({options}) must be a mapping")
        if "=" in run.title or "/" in run.title:  # compare reads TITLE=PATH
            raise StudyError(f"{where}.title ({run.title}) must not contain = or /")

    @property
    def names(self) -> list[str]:
        """Names of all runs, in order."""
        return [run.name for run in self.runs]

    @property
    def unit(self) -> str:
        """What lengths count: tokens, or the questions of a task."""
        return "tokens" if self.task is None else "questions"

    @property
    def units_per_step(self) -> int:
        """Tokens, or questions, of an optimiser step."""
        rows = self.data["batch_size"] * (self.trainer.get("accumulate_grad_batches") or 1)
        return int(rows if self.task is not None else rows * self.data["block_size"])

    @property
    def length(self) -> str:
        """How long a run trains, in words."""
        if self.epochs is not None:
            return "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        if any(run.data is not None for run in self.runs):  # whose rows differ in length
            return f"{self.steps} steps"
        units = f"{self.steps * self.units_per_step:,} {self.unit}"
        return f"{units} ({self.steps} steps of {self.units_per_step:,})"

    @property
    def source(self) -> dict[str, Any]:
        """Class path and init arguments of the data module, without ``data``."""
        if self.files:
            own = {"data_files": list(self.files), "separator": self.separator}
            return {"class_path": "datamodules.LocalText", "init_args": own}
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

    def steps_of(self, run: Run) -> int:
        """Returns the optimiser steps of a run, where those are counted."""
        return max(1, round(self.steps * run.length))

    def passes_of(self, length: float) -> dict[str, float]:
        """Returns how often a run reads its questions, as the value ``epochs``; empty: not known.

        Args:
            length: that of the run.
        """
        if self.epochs is not None:
            return {"epochs": float(self.epochs)}
        if self.task is None or "train_examples" not in self.data:
            return {}
        steps = max(1, round(self.steps * length))
        return {"epochs": steps * self.units_per_step / int(self.data["train_examples"])}

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
        first = self.seeds[0]
        return [
            replace(run, seed=seed, analyses=run.analyses if seed == first else {})
            for seed in self.seeds
            for run in self.runs
            if (run.name in only if only else not run.extra)
            and (run.seeds == "all" or seed == first)
        ]

    def train_config(self, run: Run) -> dict[str, Any]:
        """Returns the config of a run for ``train.py fit``, as nested plain values."""
        data = {**self.source, "init_args": {**self.source["init_args"], **self.data}}
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

    def _length(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns trainer arguments, and those of checkpoints: saved as often as validated."""
        if self.epochs is not None:
            checks = math.ceil(self.validations / self.epochs)
            validated = {"val_check_interval": 1 / checks, "log_every_n_steps": 10}
            return {"max_epochs": self.epochs, **validated}, {"train_time_interval": "0:00:30"}
        steps = self.steps_of(run)
        interval = max(1, steps // self.validations)
        length = {
            "max_steps": steps,
            "val_check_interval": interval,
            "check_val_every_n_epoch": None,
            "log_every_n_steps": min(10, interval),
        }
        return length, {"every_n_train_steps": interval}


def study_names() -> list[str]:
    """Returns the names of the studies of the project."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_study(name: str, **typed: Any) -> Study:
    """Returns a study as declared, changed by options of the command line.

    Args:
        name: of a study of the project, or its file.
        typed: fields of ``Study``, and ``operations``, of which those that are None are left out.

    Raises:
        StudyError: if there is none, or it is malformed; the message names the key.
    """
    path = next((p for p in (FOLDER / f"{name}.yaml", Path(name)) if p.is_file()), None)
    if path is None:
        known = ", ".join(study_names())
        raise StudyError(f"there is no study {name!r}; there are {known}, or name a file")
    content = _read(path)
    typed = {key: value for key, value in typed.items() if value is not None}
    values = _values(path.stem, content, typed.pop("operations", None))
    content.pop("common", None)
    if "steps" in typed:  # of steps and epochs, the one that was typed counts
        content["epochs"] = None
    if typed.get("files"):
        content["corpus"] = None
    return _study(path.stem, {**content, **typed}, values)


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a file, merged into that of the file that it extends.

    ``extends`` names a study of the same folder or of the project, or a YAML file.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StudyError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise StudyError(f"{path} is no study: it must be a mapping with title, data and runs")
    base = content.pop("extends", None)
    if base == path.stem:
        raise StudyError(f"{path}: extends ({base}) must be another study")
    if base is None:
        return content
    if str(base).endswith(".yaml"):
        return _merge(_read(path.parent / base), content)
    near = path.with_name(f"{base}.yaml")
    return _merge(_read(near if near.is_file() else FOLDER / near.name), content)


def _merge(base: Any, own: Any) -> Any:
    if not (isinstance(base, Mapping) and isinstance(own, Mapping)):
        return own
    return {**base, **{key: _merge(base.get(key), value) for key, value in own.items()}}


def _values(name: str, content: dict[str, Any], operations: int | None) -> dict[str, Any]:
    """Returns the declared values, each computed from those before it, and N as ``operations``."""
    limits = content.pop("operations", None)
    if limits is None and operations is not None:
        raise StudyError(f"operations ({operations}): {name} declares none; leave them out")
    values: dict[str, Any] = {}
    if limits is not None:
        known = _build(Operations, f"{name}: operations", limits)
        values["operations"] = known.default if operations is None else operations
        if not known.least <= values["operations"] <= known.most:
            raise StudyError(
                f"operations ({values['operations']}) must be from {known.least} to {known.most}"
            )
        if values["operations"] != known.default:
            content["options"] = f"--operations {operations}"
    declared = content.pop("values", {})
    if not isinstance(declared, Mapping):
        raise StudyError(f"{name}: values ({declared!r}) must be a mapping")
    for key, value in declared.items():
        values[key] = render(value, values)
    return values


def _study(name: str, content: dict[str, Any], values: dict[str, Any]) -> Study:
    runs, evaluations = content.pop("runs", None), content.pop("evaluations", {})
    if not isinstance(runs, Mapping) or not runs:
        raise StudyError(f"{name}: runs ({runs!r}) must be a mapping of names, each with a model")
    content = render(content, values)
    columns = content.pop("columns", [])
    if not isinstance(columns, list):
        raise StudyError(f"{name}: columns ({columns!r}) must be a list")
    columns = [
        _build(Column, f"{name}: columns.{number}", each) for number, each in enumerate(columns)
    ]
    search = content.pop("search", None)
    if search is not None:
        search = _build(Search, f"{name}: search", search)
    study: Study = _build(
        Study, name, {**content, "name": name, "columns": columns, "runs": [], "search": search}
    )
    built = []
    for key, own in runs.items():
        where = f"{name}: runs.{key}"
        if not isinstance(own, Mapping):
            raise StudyError(f"{where} ({own!r}) must be a mapping with a model")
        check_fields(Run, where, {"name": key, "title": key, **own})
        known = {**values, **study.passes_of(own.get("length", 1.0))}
        one = render({"name": key, "title": key, "evaluations": evaluations, **own}, known)
        one["analyses"] = {
            name: _build(AnalysisSettings, f"{where}.analyses.{name}", each)
            for name, each in one.get("analyses", {}).items()
        }
        built.append(_build(Run, where, one))
    return replace(study, runs=tuple(built))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def render(value: Any, values: Settings) -> Any:
    """Returns nested values with the result of each ``{{ expression }}`` in its place.

    Args:
        value: text that is one expression becomes its result; in other text results are written.
        values: numbers and texts by their names.

    Raises:
        StudyError: if an expression is not arithmetic, min, max or round on these values.
    """
    if isinstance(value, Mapping):
        return {key: render(each, values) for key, each in value.items()}
    if isinstance(value, list):
        return [render(each, values) for each in value]
    if not isinstance(value, str):
        return value
    whole = EXPRESSION.fullmatch(value)
    if whole and "}}" not in whole[1]:
        return calculate(whole[1], values)
    return EXPRESSION.sub(lambda found: str(calculate(found[1], values)), value)


def calculate(expression: str, values: Settings) -> Any:
    """Returns the result of arithmetic, min, max and round on named values.

    Raises:
        StudyError: if it is something else, or a name is not known.
    """

    def value_of(node: ast.AST) -> Any:
        """Returns the value of a subexpression."""
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                return FUNCTIONS[name](*map(value_of, node.args))
        raise ValueError(ast.unparse(node))

    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError) as error:
        known = ", ".join(values) or "none"
        raise StudyError(
            f"{{{{{expression}}}}} cannot be computed ({error}); use + - * / //, min, max, round, "
            f"and the values: {known}"
        ) from error


def _build(kind: Any, where: str, content: Any) -> Any:
    """Returns an instance of a dataclass from a mapping of the file, its lists as tuples."""
    check_fields(kind, where, content)
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in content.items()})


def check_fields(kind: Any, where: str, content: Any) -> None:
    """Checks keys and types of a mapping that a dataclass is built from.

    Raises:
        StudyError: naming the key.
    """
    if not isinstance(content, Mapping):
        raise StudyError(f"{where} ({content!r}) must be a mapping")
    known = {each.name: each for each in fields(kind)}
    for key in content:
        if key not in known:
            raise StudyError(f"{where} has no key {key}; there are {', '.join(known)}")
        if not _fits(content[key], known[key].type):
            wanted = getattr(known[key].type, "__name__", known[key].type)
            raise StudyError(f"{where}.{key} ({content[key]!r}) must be {wanted}")
    for each in known.values():
        required = each.default is MISSING and each.default_factory is MISSING
        if required and each.name not in content:
            raise StudyError(f"{where} has no {each.name}; add it")


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether a value of a YAML file is of a field's type; tuples are lists there."""
    if isinstance(kind, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_fits(each, inner) for each in value)
    return isinstance(value, int | float if kind is float else get_origin(kind) or kind)
