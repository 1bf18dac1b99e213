"""``python -m studies.tune NAME``: searches hyperparameters of a study's runs with Optuna.

The study's YAML declares the search (``studies.study.Search``). Each run, the plain decoder's too,
has as many trials of as many tokens, drawn by one sampler and pruned by successive halving. A trial
is a training like the study's, in a folder of its own, with the schedule of its whole length: rungs
compare points of one schedule. It validates on a split that the study's report does not score.
"""

import argparse
import hashlib
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import pandas as pd
import yaml

from callbacks import NonFiniteError
from evaluation.runs import read_scalars
from lightning_models.checkpoint import read_checkpoint
from studies.__main__ import add_study_arguments, configured, run_guarded
from studies.runner import (
    CommandError,
    Execute,
    RunFolder,
    clock,
    executor,
    in_parallel,
    sole_user,
    train_run,
)
from studies.study import Run, Search, Settings, Study, StudyError

if TYPE_CHECKING:
    import optuna

DECLARATION, JOURNAL = "search.yaml", "journal.log"
STARTUP = 5
"""Trials that are drawn evenly, before the sampler learns from their values."""
SCORED = {"perplexity": "val", "reason": "test"}
"""Split that a verb of ``evaluate.py`` scores unless its options name one."""
REASON, PREFIX = "reason", "model.init_args."


class TrialPrunedError(Exception):
    """A trial is not among the best at a rung."""


class OutOfTimeError(Exception):
    """The minutes of the search are over; the trial goes on when it is started again."""


# ---- what is declared


def declared_search(study: Study) -> Search:
    """Returns the search of a study.

    Raises:
        StudyError: if it declares none, or its trials are too short for its rungs.
    """
    search = study.search
    if search is None:
        raise StudyError(
            f"{study.name} declares no search; add search: {{trials: ..., tokens: ..., space: ...}}"
        )
    if search.tokens < search.validations * study.units_per_step:
        raise StudyError(
            f"search.tokens ({search.tokens}) must be at least "
            f"{search.validations * study.units_per_step}: a step of {study.units_per_step} "
            f"{study.unit} for each of {search.validations} validations"
        )
    return search


def steps_of_trial(study: Study) -> int:
    """Returns the optimiser steps of a whole trial, as many between any two validations."""
    search = declared_search(study)
    return search.validations * round(search.tokens / study.units_per_step / search.validations)


def validation_split(study: Study) -> Literal["val", "test"]:
    """Returns the held-out documents that trials are judged by: those the report does not score.

    The report scores what the columns show; of a study without columns, the split of ``compare``.

    Raises:
        StudyError: if it scores both.
    """
    scored = {study.compare.get("split", "val")}
    if study.columns:
        named = {column.evaluation for column in study.columns}
        options = [v for run in study.runs for k, v in run.evaluations.items() if k in named]
        splits = (o.get("split", SCORED.get(o.get("command", "perplexity"))) for o in options)
        scored = {split for split in splits if split is not None}
    if {"val", "test"} <= scored:
        raise StudyError(
            f"{study.name} reports scores of val and of test, which leaves no documents to choose "
            "by; have its evaluations score one of them"
        )
    return "test" if "val" in scored else "val"


def as_trials(study: Study) -> Study:
    """Returns the study whose runs are trained as trials: their length, validations and data."""
    split, search = validation_split(study), declared_search(study)
    own = {} if split == "val" else {"validation_split": split}
    runs = []
    for run in study.runs:
        data = run.data and {**run.data, "init_args": {**run.data.get("init_args", {}), **own}}
        runs.append(replace(run, data=data, length=1.0))
    return replace(
        study,
        runs=tuple(runs),
        data={**study.data, **own},
        steps=steps_of_trial(study),
        epochs=None,
        seeds=study.seeds[:1],
        validations=search.validations,
    )


def space_of(study: Study, run: Run) -> dict[str, Settings]:
    """Returns the ranges and choices of a run by the keys of its config.

    Raises:
        StudyError: if one is malformed, its model has no such key, or there is none.
    """
    search = declared_search(study)
    space = {key: entry for key, entry in {**search.space, **run.search}.items() if entry}
    where = f"{study.name}: search of {run.name}"
    for key, entry in space.items():
        _check_entry(f"{where}: {key}", entry)
        value_at(run.model, key, where)
    if not space:
        raise StudyError(f"{where} draws nothing; add keys to search.space")
    return space


def _check_entry(where: str, entry: Any) -> None:
    match entry:
        case {"choices": [_, *_] as choices, **rest} if not rest and all(
            isinstance(each, str | int | float | None) for each in choices
        ):
            return
        case {"low": int() | float() as low, "high": int() | float() as high, **rest} if (
            low < high and set(rest) <= {"log"} and (low > 0 or not rest.get("log"))
        ):
            return
    raise StudyError(
        f"{where} ({entry}) must have numbers low and high (and log: true, where low is above 0), "
        "or a list of choices"
    )


def value_at(model: Settings, key: str, where: str) -> Any:
    """Returns what a model is declared with at a key, else the default of its class.

    Args:
        model: class path and init arguments.
        key: as in a config, ``model.init_args.config.NAME`` or ``model.init_args.optimizer.NAME``.
        where: for the message.

    Raises:
        StudyError: if the class has no such key.
    """
    module, _, kind = model["class_path"].rpartition(".")
    group, _, name = key.removeprefix(PREFIX).partition(".")
    owner = get_type_hints(getattr(import_module(module), kind).__init__).get(group)
    known = {each.name: each.default for each in fields(owner)} if is_dataclass(owner) else {}
    if not key.startswith(PREFIX) or name not in known:
        keys = ", ".join(known) or f"{PREFIX}config... and {PREFIX}optimizer..."
        raise StudyError(f"{where}: {key} is no key of {kind}; there are {keys}")
    return model["init_args"].get(group, {}).get(name, known[name])


def put(content: dict[str, Any], values: Settings) -> dict[str, Any]:
    """Returns a nested mapping with values at dotted keys."""
    changed = deepcopy(content)
    for key, value in values.items():
        *path, last = key.split(".")
        place = changed
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return changed


# ---- trials


class RunSearch:
    """Search of one run: an Optuna study in a journal file, and a folder for each trial."""

    def __init__(self, study: Study, run: Run, folder: Path, execute: Execute) -> None:
        """Opens the search, or goes on with it.

        Args:
            study: as `as_trials` returns it.
            run: one of its runs, with the seed of its trials.
            folder: of all its trials.
            execute: runs a training.

        Raises:
            StudyError: if the folder has a search that is declared in another way.
        """
        self.run, self.folder, self._execute = run, folder, execute
        self.search = declared_search(study)
        self.unit, self._units_per_step = study.unit, study.units_per_step
        self.space, self.settings = space_of(study, run), study.train_config(run)
        self._interval = study.steps // self.search.validations
        self.steps = study.steps
        self._check_declaration()
        self._study = self._open()
        state = _optuna().trial.TrialState
        self._unfinished = list(self._study.get_trials(states=[state.RUNNING]))

    def _check_declaration(self) -> None:
        """Compares with the file of an earlier process, or writes it."""
        keys = ("tokens", "metric", "direction", "rungs", "reduction", "seed")
        own: dict[str, Any] = {key: getattr(self.search, key) for key in keys}
        own = {**own, "space": self.space, **self.settings}
        own = yaml.safe_load(yaml.safe_dump(own, sort_keys=False))
        file = self.folder / DECLARATION
        if not file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            partial_file = file.with_suffix(".partial")
            partial_file.write_text(yaml.safe_dump(own, sort_keys=False))
            partial_file.replace(file)
            return
        before = yaml.safe_load(file.read_text()) or {}
        changed = [key for key in {**before, **own} if before.get(key) != own.get(key)]
        if changed:
            raise StudyError(
                f"{self.folder} was begun with another {', '.join(changed)} (see its "
                f"{DECLARATION}); remove it, or choose another folder with --folder"
            )

    def _open(self) -> Any:
        """Returns the Optuna study, its first trial that of the declared values."""
        optuna = _optuna()
        backend = optuna.storages.journal.JournalFileBackend(str(self.folder / JOURNAL))
        study: Any = optuna.create_study(
            study_name=self.run.name,
            storage=optuna.storages.JournalStorage(backend),
            direction=self.search.direction,
            pruner=optuna.pruners.SuccessiveHalvingPruner(
                min_resource=1, reduction_factor=self.search.reduction
            ),
            load_if_exists=True,
        )
        if not study.get_trials(deepcopy=False):
            found = {k: value_at(self.run.model, k, self.run.name) for k in self.space}
            study.enqueue_trial({k: v for k, v in found.items() if _inside(v, self.space[k])})
        return study

    @property
    def finished(self) -> int:
        """Number of trials that are not to be trained any more."""
        return sum(trial.state.is_finished() for trial in self._study.get_trials(deepcopy=False))

    def next_trial(self) -> "optuna.Trial":
        """Returns the next unfinished trial of an earlier process, else a new one."""
        optuna = _optuna()
        waiting = optuna.trial.TrialState.WAITING
        asked = [t for t in self._study.get_trials(deepcopy=False) if t.state != waiting]
        old = self._unfinished.pop(0) if self._unfinished else None
        number = len(asked) if old is None else old.number
        # draws are a function of the trial's number and of what is known, not of restarts
        digest = hashlib.sha256(f"{self.search.seed} {number}".encode()).digest()
        self._study.sampler = optuna.samplers.TPESampler(
            seed=int.from_bytes(digest[:4], "big"), n_startup_trials=STARTUP
        )
        # there is no public way to a trial that was asked for by another process
        trial = self._study.ask() if old is None else optuna.Trial(self._study, old._trial_id)
        for key, entry in self.space.items():  # returns what was drawn before, if it was
            if "choices" in entry:
                trial.suggest_categorical(key, entry["choices"])
                continue
            whole = all(isinstance(entry[end], int) for end in ("low", "high"))
            suggest = trial.suggest_int if whole else trial.suggest_float
            suggest(key, entry["low"], entry["high"], log=entry.get("log", False))
        return trial

    def place(self, number: int) -> RunFolder:
        """Returns the folder of a trial."""
        return RunFolder(self.folder / f"trial-{number:03d}")

    def train(self, trial: "optuna.Trial", deadline: float = math.inf) -> str:
        """Trains a trial to its end, unless it is pruned or diverges; returns what came of it.

        Args:
            trial: drawn.
            deadline: time by ``time.monotonic`` at which it is stopped, with a checkpoint.

        Raises:
            CommandError: if training fails for another reason than values that are not finite.
            OutOfTimeError: at the deadline; the trial then goes on another time.
            StudyError: if the metric is not logged.
        """
        place = self.place(trial.number)

        def watch() -> None:
            """Prunes, and looks at the time."""
            self._look(trial, place)
            if time.monotonic() > deadline:
                raise OutOfTimeError

        try:
            self._look(trial, place)  # what an earlier process has logged without looking at it
            settings = put(self.settings, trial.params)
            train_run(settings, place, partial(self._execute, watch=watch))
            value = self._look(trial, place)
        except TrialPrunedError:
            return f"pruned after {self._steps_done(trial.number)} of {self.steps} steps"
        except CommandError as error:
            if error.code != NonFiniteError.exit_code:
                raise
            lines = error.log.read_text(encoding="utf-8", errors="replace").splitlines()
            return self._diverged(trial, lines[-1].removeprefix("error: ") if lines else "")
        if not math.isfinite(value):
            return self._diverged(trial, f"{self.search.metric} is {value}")
        self._study.tell(trial, value)
        return f"{value:.4f}"

    def _diverged(self, trial: "optuna.Trial", reason: str) -> str:
        """Gives the trial the worst value there is, for the sampler to keep away from there."""
        trial.set_user_attr(REASON, reason)
        self._study.tell(trial, math.inf if self.search.direction == "minimize" else -math.inf)
        return f"diverged: {reason}"

    def _look(self, trial: "optuna.Trial", place: RunFolder) -> float:
        """Reports the logged validations; returns the last one's value, nan where there is none.

        Which trials are pruned is decided by these values alone: one that has ended before it was
        looked at is no exception.

        Raises:
            TrialPrunedError: at a rung, if it is not among the best there.
            StudyError: if the training has ended without the metric.
        """
        values = self._validations(place)
        known = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        latest = max(known, default=0)
        for number, value in values.items():
            if number > latest:
                trial.report(value, number)
            if latest <= number < self.search.validations and trial.should_prune():
                self._study.tell(trial, state=_optuna().trial.TrialState.PRUNED)
                raise TrialPrunedError
        return values.get(self.search.validations, math.nan)

    def _validations(self, place: RunFolder) -> dict[int, float]:
        """Returns the metric by the number of the validation, from 1, as far as it is logged."""
        if place.checkpoint is None:
            return {}
        scalars, metric = read_scalars(place.checkpoint.parent.parent), self.search.metric
        if place.trained and metric not in scalars:
            known = ", ".join(tag for tag in scalars if tag.startswith("val/"))
            raise StudyError(
                f"search.metric ({metric}): {self.run.name} logs no such value; {known}"
            )
        return {
            (step + 1) // self._interval: value
            for step, value in sorted(scalars.get(metric, {}).items())
            if (step + 1) % self._interval == 0
        }

    # ---- results

    def _steps_done(self, number: int) -> int:
        checkpoint = self.place(number).checkpoint
        return 0 if checkpoint is None else read_checkpoint(checkpoint).step

    def table(self) -> pd.DataFrame:
        """Returns a row for each trial; values of a pruned one are those of its last rung."""
        rows = []
        for trial in self._study.get_trials(deepcopy=False):
            if not trial.params:
                continue
            value = max(trial.intermediate_values.items(), default=(0, math.nan))[1]
            steps = self._steps_done(trial.number)
            state = "diverged" if REASON in trial.user_attrs else trial.state.name.lower()
            rows.append(
                {
                    "run": self.run.name,
                    "trial": trial.number,
                    **trial.params,
                    self.search.metric: trial.value if state == "complete" else value,
                    "state": "unfinished" if state == "running" else state,
                    "steps": steps,
                    self.unit: None if self.run.data is not None else steps * self._units_per_step,
                    "seconds": self.place(trial.number).record.get("train", {}).get("seconds"),
                    REASON: trial.user_attrs.get(REASON),
                }
            )
        return pd.DataFrame(rows)

    def best(self) -> dict[str, Any] | None:
        """Returns the parameters of the best trial that was trained to its end, if one was."""
        sign = 1 if self.search.direction == "minimize" else -1
        ended = [
            trial
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state.name == "COMPLETE" and REASON not in trial.user_attrs
        ]
        return min(ended, key=lambda trial: sign * (trial.value or 0.0)).params if ended else None


def _inside(value: Any, entry: Settings) -> bool:
    if "choices" in entry:
        return value in entry["choices"]
    return isinstance(value, int | float) and entry["low"] <= value <= entry["high"]


def _optuna() -> Any:
    """Returns the library, which warns but reports nothing by itself."""
    try:
        import optuna
    except ImportError as error:
        raise StudyError(
            f"a search needs the package optuna ({error}): pip install -e '.[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


# ---- all runs


def run_searches(
    searches: Sequence[RunSearch], *, jobs: int = 1, deadline: float = math.inf
) -> int:
    """Trains what is not finished yet, a trial of each run before the next one of any.

    Args:
        searches: of the runs.
        jobs: number of trials at a time.
        deadline: time by ``time.monotonic`` at which trials are stopped.

    Returns:
        Number of trials that are left.
    """
    drawing = threading.Lock()

    def turn(search: RunSearch) -> None:
        """Trains the next trial of a run."""
        if time.monotonic() > deadline:
            return
        with drawing:
            trial = search.next_trial()
        drawn = ", ".join(f"{k.rpartition('.')[2]} {_short(v)}" for k, v in trial.params.items())
        title = f"{search.run.name}, trial {trial.number} of {search.search.trials} ({drawn})"
        print(title, end=" ... " if jobs == 1 else " ...\n", flush=True)
        start = time.monotonic()
        try:
            result = search.train(trial, deadline)
        except OutOfTimeError:
            result = "stopped, with a checkpoint"
        except BaseException:
            print(flush=True)
            raise
        head = "" if jobs == 1 else f"{title}: "
        print(f"{head}{result}; {clock(time.monotonic() - start)}", flush=True)

    turns = [
        partial(turn, search)
        for number in range(max(search.search.trials for search in searches))
        for search in searches
        if number >= search.finished
    ]
    if jobs == 1:
        for each in turns:
            each()
    else:
        in_parallel(turns, jobs)
    return sum(max(0, search.search.trials - search.finished) for search in searches)


def write_results(
    study: Study, searches: Sequence[RunSearch], folder: Path, base: str | None = None
) -> str:
    """Writes tables of all trials, and a study with the best values; returns the tables.

    Args:
        study: which.
        searches: of its runs.
        folder: gets ``search.csv``, ``search.md`` and ``NAME_tuned.yaml``.
        base: name or file of the study that the tuned one extends; None: the study's name.
    """
    tables = {search: table for search in searches if len(table := search.table())}
    if tables:
        pd.concat(tables.values()).to_csv(folder / "search.csv", index=False)
    text = "\n\n".join(["# Search", *_sections(study, tables)]) + "\n"
    (folder / "search.md").write_text(text, encoding="utf-8")
    found = {search.run.name: search.best() for search in searches}
    runs = {name: put({}, values) for name, values in found.items() if values is not None}
    if runs:
        content = {"extends": base or study.name, "title": f"{study.title}, tuned", "runs": runs}
        (folder / f"{study.name}_tuned.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return text


def _sections(study: Study, tables: Mapping[RunSearch, pd.DataFrame]) -> Iterator[str]:
    """Yields what was done, then heading, table and best values of each run."""
    search = declared_search(study)
    yield (
        f"{study.title}: up to {study.length} a trial, {search.metric} on the split "
        f"`{validation_split(study)}`, which the study's report does not score; the learning "
        f"rate's schedule is that of a whole trial; successive halving over {search.rungs} rungs "
        f"by {search.reduction}."
    )
    for each, table in tables.items():
        yield f"## {each.run.title}"
        shown = table.drop(columns=["run"]).dropna(axis="columns", how="all").map(_short)
        shown.columns = [str(key).removeprefix(PREFIX) for key in shown.columns]
        yield shown.to_markdown(index=False, disable_numparse=True)
        best = each.best()
        if best is not None:
            typed = " ".join(f"--{key} {_short(value)}" for key, value in best.items())
            yield f"Best: `{typed}`"


def _short(value: Any) -> str:
    """Returns a number with as many digits as matter."""
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.5g}"
    return "-" if value is None else str(value)


# ---- the command line


def main(args: Sequence[str] | None = None) -> int:
    """Searches and returns the exit code, see `studies.__main__.run_guarded`.

    Args:
        args: the command line; None: that of the process.
    """
    return run_guarded(lambda: _run(parser().parse_args(args)))


def _run(options: argparse.Namespace) -> None:
    # read again with the length of a trial, which values of runs may depend on
    options.steps = steps_of_trial(configured(options))
    study = configured(options)
    search = declared_search(study)
    trials = search.trials if options.trials is None else options.trials
    study = as_trials(replace(study, search=replace(search, trials=trials)))
    folder = Path(options.folder or Path("runs", "searches", study.folder)).resolve()
    deadline = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    execute, runs = executor(options.jobs), study.seeded(options.only)
    for run in runs:
        space_of(study, run)
    with sole_user(folder):
        searches = [RunSearch(study, run, folder / run.name, execute) for run in runs]
        print(f"{trials} trials of {study.length} for each of {len(runs)} runs in {folder}")
        try:
            left = run_searches(searches, jobs=options.jobs, deadline=deadline)
        finally:
            file = Path(options.study)
            base = str(file.resolve()) if file.suffix == ".yaml" else study.name
            text = write_results(study, searches, folder, base)
    print(f"\n{text}\nreport: {folder / 'search.md'}")
    if left:
        print(f"{left} trials are left; start it again to go on")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.tune", description=__doc__, allow_abbrev=False
    )
    add_study_arguments(parser)
    parser.add_argument("--trials", type=int, help="Trials of each run (default: as declared).")
    parser.add_argument("--minutes", type=float, help="Stop after these; started again it resumes.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
