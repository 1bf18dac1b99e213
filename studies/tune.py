"""``python -m studies.tune NAME``: searches hyperparameters of a study's runs with Optuna.

The study's YAML declares the search (``studies.study.Search``). All runs, including the plain
decoder, have the same number of trials of the same number of tokens, with the same sampler and
successive halving. A trial is a training run like the study's, in a separate folder, with the
schedule of its full length, so rungs compare points of one schedule. It validates on a split that
the study's report does not score.
"""

import argparse
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import yaml
from omegaconf import OmegaConf

from callbacks import NonFiniteError
from lightning_models.atomic_files import write_whole
from studies.__main__ import add_study_arguments, configured, run_guarded
from studies.results_page import logged
from studies.runner import (
    LOG,
    CommandError,
    RunFolder,
    clock,
    in_parallel,
    share_processors,
    sole_user,
    started,
    train_command,
)
from studies.study import Run, Search, Settings, Study, StudyError

if TYPE_CHECKING:
    import optuna

JOURNAL, DECLARATION, REASON = "journal.log", "declaration", "reason"
ENDED = ("COMPLETE", "PRUNED")
"""States of finished trials; a diverged trial is complete."""
UNDECLARED = "???"
STARTUP = 5
"""Number of uniformly drawn trials before the sampler uses their values."""
POLL = 1.0
"""Seconds between reads of a trial's log."""
SCORED = {"perplexity": "val", "reason": "test"}
"""Split that each verb of ``evaluate.py`` scores by default."""


# ---- declarations


def declared_search(study: Study) -> Search:
    """Returns the search of a study.

    Raises:
        StudyError: If it does not declare one.
    """
    if study.search is None:
        raise StudyError(
            f"{study.name} declares no search; add search: {{trials: ..., tokens: ..., space: ...}}"
        )
    return study.search


def steps_of_trial(study: Study) -> int:
    """Returns the optimiser steps of a whole trial, a multiple of its validations.

    Raises:
        StudyError: If trials are shorter than a step for each validation.
    """
    search = declared_search(study)
    min_tokens = search.validations * study.units_per_step
    if search.tokens < min_tokens:
        raise StudyError(
            f"search.tokens ({search.tokens}) must be at least {min_tokens}, a step for each of "
            f"the {search.validations} validations"
        )
    return search.validations * round(search.tokens / min_tokens)


def validation_split(study: Study) -> Literal["val", "test"]:
    """Returns the split for judging trials, which the report does not score.

    The report scores the splits of the columns or, without columns, the split of ``compare``.

    Raises:
        StudyError: If it scores both.
    """
    scored = {study.compare.get("split", "val")}
    if study.columns:
        named = set(re.findall(r"(?:^|`)(\w+)\.", "\n".join(study.columns.values()), re.MULTILINE))
        evaluations = [item for run in study.runs.values() for item in run.evaluations.items()]
        options = [option for name, option in evaluations if name in named]
        splits = (o.get("split", SCORED.get(o.get("command", "perplexity"))) for o in options)
        scored = {split for split in splits if split is not None}
    if {"val", "test"} <= scored:
        raise StudyError(
            f"{study.name} reports scores of val and of test, which leaves no documents for the "
            "search; let its evaluations score only one of them"
        )
    return "test" if "val" in scored else "val"


def as_trials(study: Study) -> Study:
    """Returns the study with the length, validations and data of trials."""
    split, search = validation_split(study), declared_search(study)
    changed = {} if split == "val" else {"validation_split": split}
    runs = {}
    for name, run in study.runs.items():
        data = run.data and {**run.data, "init_args": {**run.data.get("init_args", {}), **changed}}
        runs[name] = replace(run, data=data, length=1.0)
    return replace(
        study,
        runs=runs,
        data={**study.data, **changed},
        steps=steps_of_trial(study),
        epochs=None,
        seeds=study.seeds[:1],
        validations=search.validations,
    )


def space_of(study: Study, run: Run) -> dict[str, Settings]:
    """Returns the ranges and choices of a run by key of its config.

    Raises:
        StudyError: If one is malformed, the run's model does not declare its key, or there is none.
    """
    search = declared_search(study)
    space = {key: entry for key, entry in {**search.space, **run.search}.items() if entry}
    where, model = f"{study.name}: search of {run.name}", OmegaConf.create({"model": run.model})
    for key, entry in space.items():
        if OmegaConf.select(model, key, default=UNDECLARED) == UNDECLARED:
            raise StudyError(f"{where}: {key} is not declared; set its value in the run's model")
        try:
            distribution(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise StudyError(
                f"{where}: {key} ({entry}) must have numbers low and high (and log: true), or a "
                f"list of choices: {error}"
            ) from error
    if not space:
        raise StudyError(f"{where} has nothing to vary; add keys to search.space")
    return space


def distribution(entry: Settings) -> Any:
    """Returns Optuna's distribution for a range or choices; integer bounds yield integers."""
    kinds = _optuna().distributions
    if "choices" in entry:
        return kinds.CategoricalDistribution(**entry)
    whole = isinstance(entry["low"], int) and isinstance(entry["high"], int)
    return (kinds.IntDistribution if whole else kinds.FloatDistribution)(**entry)


def put(content: Settings, values: Settings) -> dict[str, Any]:
    """Returns a nested mapping with values at dotted keys."""
    changed = OmegaConf.create(content)
    for key, value in values.items():
        OmegaConf.update(changed, key, value, force_add=True)
    plain: Any = OmegaConf.to_container(changed)
    return dict(plain)


# ---- trials


class RunSearch:
    """Search of one run: an Optuna study in a journal file, and a folder for each trial.

    Args:
        study: A study from `as_trials`.
        run: One of its runs, with the seed of its trials.
        folder: Folder of all its trials.

    Raises:
        StudyError: If the folder has a search with a different declaration.
    """

    def __init__(self, study: Study, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.search, self.steps = declared_search(study), study.steps
        self.space, self.settings = space_of(study, run), study.train_config(run)
        self._interval = study.steps // self.search.validations
        self._study = self._open()
        self._check_declaration()
        self._enqueue()

    def _open(self) -> Any:
        optuna = _optuna()
        self.folder.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(self.folder / JOURNAL))
        return optuna.create_study(
            study_name=self.run.name,
            storage=optuna.storages.JournalStorage(backend),
            direction=self.search.direction,
            pruner=optuna.pruners.SuccessiveHalvingPruner(
                min_resource=1, reduction_factor=self.search.reduction
            ),
            load_if_exists=True,
        )

    def _check_declaration(self) -> None:
        """Compares the declaration with an earlier process's, or records it."""
        keys = ("tokens", "metric", "direction", "rungs", "reduction", "seed")
        current: dict[str, Any] = {key: getattr(self.search, key) for key in keys}
        current = {**current, "space": self.space, **self.settings}
        current = yaml.safe_load(yaml.safe_dump(current))
        declared = self._study.user_attrs.get(DECLARATION, {} if self._study.trials else current)
        changed = [key for key in {**declared, **current} if declared.get(key) != current.get(key)]
        if changed:
            raise StudyError(
                f"{self.folder} was started with a different {', '.join(changed)}; remove it, or "
                "choose another folder with --folder"
            )
        self._study.set_user_attr(DECLARATION, current)

    def _enqueue(self) -> None:
        """Enqueues the declared values first, and killed trials again."""
        if not self._study.trials:
            declared = OmegaConf.create(self.settings)
            values = {key: OmegaConf.select(declared, key) for key in self.space}
            inside = {k: v for k, v in values.items() if _inside(v, self.space[k])}
            self._study.enqueue_trial(inside)
        state = _optuna().trial.TrialState
        for trial in self._study.get_trials(states=[state.RUNNING]):
            shutil.rmtree(self._trial_folder(trial.number).path, ignore_errors=True)
            self._study.tell(trial.number, state=state.FAIL)
            self._study.enqueue_trial(trial.params)

    @property
    def finished(self) -> int:
        """Number of ended trials, including pruned and diverged ones."""
        return sum(trial.state.name in ENDED for trial in self._study.trials)

    def next_trial(self) -> "optuna.Trial":
        """Returns a new trial; with one job, its draws depend only on the trials before it."""
        num_trials = sum(trial.state.name != "FAIL" for trial in self._study.trials)
        seed = 1000 * self.search.seed + num_trials
        sampler = _optuna().samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        self._study.sampler = sampler
        trial: optuna.Trial = self._study.ask(
            {key: distribution(entry) for key, entry in self.space.items()}
        )
        return trial

    def _trial_folder(self, idx: int) -> RunFolder:
        return RunFolder(self.folder / f"trial-{idx:03d}")

    def train(self, trial: "optuna.Trial") -> str:
        """Trains a trial to its end, unless it is pruned or diverges; returns its outcome.

        Raises:
            CommandError: If training fails for a reason other than non-finite values.
            StudyError: If the metric is not logged.
        """
        run_dir, pruned = self._trial_folder(trial.number), False
        config = run_dir.write_config(put(self.settings, trial.params))
        command, log = (
            train_command(config, run_dir.training, resume=False),
            run_dir.path / LOG,
        )
        with started(command, log) as process:
            while process.poll() is None and not (pruned := self._is_pruned(trial, run_dir)):
                time.sleep(POLL)
        # A trial that ended before it was polled is judged by the same values.
        if pruned or self._is_pruned(trial, run_dir):
            self._study.tell(trial, state=_optuna().trial.TrialState.PRUNED)
            return "pruned"
        if process.returncode not in (0, NonFiniteError.exit_code):
            raise CommandError(command, process.returncode, log)
        value = self._validations(run_dir).get(self.search.validations, math.nan)
        reason = self._divergence(run_dir, value, process.returncode)
        if reason:  # the worst possible value, so that the sampler avoids this region
            trial.set_user_attr(REASON, reason)
            value = math.inf if self.search.direction == "minimize" else -math.inf
        self._study.tell(trial, value)
        return f"diverged: {reason}" if reason else f"{value:.4f}"

    def _divergence(self, run_dir: RunFolder, value: float, code: int) -> str:
        """Returns why a trial with this last value and exit code has diverged, or ""."""
        if code:
            log = (run_dir.path / LOG).read_text(encoding="utf-8", errors="replace")
            return log.strip().rpartition("\n")[2].removeprefix("error: ") or "not finite"
        tags = logged(run_dir)
        if self.search.metric not in tags:
            names = ", ".join(tag for tag in tags if tag.startswith("val/"))
            raise StudyError(
                f"search.metric ({self.search.metric}): {self.run.name} does not log it; {names}"
            )
        return "" if math.isfinite(value) else f"{self.search.metric} is {value}"

    def _is_pruned(self, trial: "optuna.Trial", run_dir: RunFolder) -> bool:
        """Reports new validations; returns whether the trial should be pruned."""
        reported = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for idx, value in self._validations(run_dir).items():
            if idx not in reported:
                trial.report(value, idx)
                if idx < self.search.validations and trial.should_prune():
                    return True
        return False

    def _validations(self, run_dir: RunFolder) -> dict[int, float]:
        """Returns the logged metric by the index of the validation, from 1."""
        values = logged(run_dir).get(self.search.metric, {})
        return {
            (step + 1) // self._interval: value
            for step, value in sorted(values.items())
            if (step + 1) % self._interval == 0
        }

    # ---- results

    def table(self) -> pd.DataFrame:
        """Returns one row per ended trial; a pruned trial has the value of its last rung.

        Returns:
            ``run``, ``trial``, the parameters, the metric, ``state``, ``steps`` and ``reason``.
        """
        rows = [
            {
                "run": self.run.name,
                "trial": trial.number,
                **trial.params,
                self.search.metric: trial.value,
                "state": "diverged" if REASON in trial.user_attrs else trial.state.name.lower(),
                "steps": (trial.last_step or 0) * self._interval,
                "seconds": trial.duration.total_seconds(),
                REASON: trial.user_attrs.get(REASON),
            }
            for trial in self._study.trials
            if trial.state.name in ENDED
        ]
        return pd.DataFrame(rows)

    def best(self) -> dict[str, Any] | None:
        """Returns the parameters of the best complete trial, or None."""
        try:
            trial = self._study.best_trial
        except ValueError:  # none is complete
            return None
        return dict(trial.params) if math.isfinite(trial.value) else None


def _inside(value: Any, entry: Settings) -> bool:
    if "choices" in entry:
        return value in entry["choices"]
    return isinstance(value, int | float) and entry["low"] <= value <= entry["high"]


def _optuna() -> Any:
    """Returns the library, with its verbosity set to warnings."""
    try:
        import optuna
    except ImportError as error:
        raise StudyError(
            f"a search needs the package optuna ({error}): run pip install -e '.[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


# ---- all runs


def run_searches(
    searches: Sequence[RunSearch], *, jobs: int = 1, deadline: float = math.inf
) -> int:
    """Runs the missing trials, alternating between runs.

    Args:
        searches: Searches of the runs.
        jobs: Number of concurrent trials.
        deadline: Time by ``time.monotonic`` after which no trial starts.

    Returns:
        Number of missing trials.
    """
    drawing = threading.Lock()

    def turn(search: RunSearch) -> None:
        if time.monotonic() > deadline:
            return
        with drawing:
            trial = search.next_trial()
        drawn = ", ".join(f"{key.rpartition('.')[2]} {v}" for key, v in trial.params.items())
        title, start = f"{search.run.name}, trial {trial.number} ({drawn})", time.monotonic()
        print(f"{title} ...", flush=True)
        print(f"{title}: {search.train(trial)}; {clock(time.monotonic() - start)}", flush=True)

    max_trials = max(search.search.trials for search in searches)
    turns = [entry for idx in range(max_trials) for entry in searches if idx >= entry.finished]
    in_parallel(turn, turns, jobs)
    return sum(max(0, search.search.trials - search.finished) for search in searches)


def write_results(study: Study, searches: Sequence[RunSearch], folder: Path, base: str) -> str:
    """Writes and returns a table of all trials, and writes a study with the best values.

    Args:
        study: The searched study.
        searches: Searches of its runs.
        folder: Folder for ``search.csv``, ``search.md`` and ``NAME_tuned.yaml``.
        base: Name or file of the study that the tuned one extends.
    """
    search, table = declared_search(study), pd.concat([entry.table() for entry in searches])
    if not table.empty:
        write_whole(folder / "search.csv", table.to_csv(index=False))
    short = table.rename(columns=lambda key: key.removeprefix("model.init_args."))
    short = short.astype(object).fillna("-")
    text = f"""# Search

{study.title}: up to {study.length} per trial, {search.metric} on the split \
`{validation_split(study)}`, which the study's report does not score; the learning rate's schedule \
spans a whole trial; successive halving over {search.rungs} rungs by {search.reduction}.

{short.to_markdown(index=False, floatfmt=".5g")}
"""
    write_whole(folder / "search.md", text)
    best = {entry.run.name: values for entry in searches if (values := entry.best()) is not None}
    if best:
        runs = {name: put({}, values) for name, values in best.items()}
        content = {"extends": base, "title": f"{study.title}, tuned", "runs": runs}
        tuned = yaml.safe_dump(content, sort_keys=False)
        write_whole(folder / f"{study.name}_tuned.yaml", tuned)
    return text


# ---- the command line


def main(args: Sequence[str] | None = None) -> int:
    """Runs the search and returns the exit code, see `studies.__main__.run_guarded`.

    Args:
        args: The command line, by default ``sys.argv``.
    """
    return run_guarded(lambda: _run(parser().parse_args(args)))


def _run(options: argparse.Namespace) -> None:
    # reload with the length of a trial, because values of runs may depend on it
    options.steps = steps_of_trial(configured(options))
    study = configured(options)
    search = declared_search(study)
    trials = search.trials if options.trials is None else options.trials
    study = as_trials(replace(study, search=replace(search, trials=trials)))
    folder = Path(options.folder or Path("runs", "searches", study.folder)).resolve()
    deadline = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    runs = study.seeded(options.only)
    share_processors(options.jobs)
    for run in runs:
        space_of(study, run)
    with sole_user(folder):
        searches = [RunSearch(study, run, folder / run.name) for run in runs]
        print(f"{trials} trials of {study.length} for each of {len(runs)} runs in {folder}")
        try:
            left = run_searches(searches, jobs=options.jobs, deadline=deadline)
        finally:
            file = Path(options.study)
            base = str(file.resolve()) if file.suffix == ".yaml" else study.name
            text = write_results(study, searches, folder, base)
    print(f"\n{text}\nreport: {folder / 'search.md'}")
    if left:
        print(f"{left} trials are left; run the command again to continue")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.tune", description=__doc__, allow_abbrev=False
    )
    add_study_arguments(parser)
    parser.add_argument("--trials", type=int, help="Trials of each run (default: as declared).")
    parser.add_argument("--minutes", type=float, help="Minutes after which no trial starts.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
