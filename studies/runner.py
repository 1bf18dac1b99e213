"""Runs a study: what is done is not done again, what was stopped goes on."""

import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from studies.commands import (
    LAST,
    analyse_command,
    analysis_settings,
    evaluate_command,
    train_command,
    training_settings,
)
from studies.console import Progress
from studies.processes import Execute, execute, stop_running
from studies.study import Analysis, Evaluation, Run, Study, StudyError

CONFIG, RECORD = "config.yaml", "record.json"


class RunFolder:
    """The folder of a run: its config, its training, its results, and the record of them.

    The record says what was done with which settings; a training that is not in it goes on, or
    begins, an evaluation or analysis that is not in it with these settings is done (again).
    """

    def __init__(self, path: Path) -> None:
        """Takes the folder, which need not exist."""
        self.path = path

    @property
    def training(self) -> Path:
        """Where ``train.py`` writes."""
        return self.path / "train"

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint to go on from or to evaluate; None before there is one."""
        return next(iter(sorted(self.training.glob(LAST))), None)

    @property
    def record(self) -> dict[str, Any]:
        """What was done so far."""
        path = self.path / RECORD
        content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return content

    @property
    def trained(self) -> bool:
        """Whether the training has reached its end."""
        return bool(self.record.get("train", {}).get("finished"))

    def output(self, evaluation: Evaluation) -> Path:
        """Returns the JSON file of an evaluation."""
        return self.path / f"{evaluation.name}.json"

    def analysis(self, analysis: Analysis) -> Path:
        """Returns the folder that an analysis writes below."""
        return self.path / analysis.name

    def log(self, name: str) -> Path:
        """Returns the file for the output of a command."""
        return self.path / f"{name}.log"

    def note(self, key: str, value: dict[str, Any]) -> None:
        """Adds to the record, which is at any time whole."""
        partial = self.path / f".{RECORD}"
        partial.write_text(json.dumps({**self.record, key: value}, indent=2) + "\n")
        partial.replace(self.path / RECORD)

    def has(self, key: str, settings: dict[str, Any]) -> bool:
        """Returns whether the record has this step with these settings."""
        return self.record.get(key, {}).get("settings") == settings


def run_study(
    study: Study,
    folder: Path,
    *,
    only: Sequence[str] = (),
    jobs: int = 1,
    execute: Execute = execute,
) -> None:
    """Trains, evaluates and analyses what is not done yet, a line on the console for each run.

    Args:
        study: what to run.
        folder: a folder for each run is made in it.
        only: names of runs to take; none: all.
        jobs: how many runs are under way at a time.
        execute: runs a command.

    Raises:
        CommandError: if a command fails; what was done before is kept.
        StudyError: if a run is there with other settings, or another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            _Runner(study, folder, study.seeded(only), jobs, execute).run()
    except Timeout as error:
        raise StudyError(
            f"{folder} is in use by another study that runs; wait for it, or choose another "
            "folder with --folder"
        ) from error


class _Runner:
    """The runs of a study, so many at a time."""

    def __init__(
        self, study: Study, folder: Path, runs: Sequence[Run], jobs: int, execute: Execute
    ) -> None:
        self._study, self._folder, self._runs = study, folder, runs
        self._jobs, self._execute = jobs, execute
        self._progress = Progress(runs, jobs)

    def run(self) -> None:
        if self._jobs == 1:
            for run in self._runs:
                self._do(run)
            return
        with ThreadPoolExecutor(self._jobs) as pool:
            # the longest first, so that none of them is left over for one worker alone
            ordered = sorted(self._runs, key=lambda run: run.cost, reverse=True)
            futures = [pool.submit(self._do, run) for run in ordered]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                stop_running()
                raise
        for run in self._runs:  # a run that an analysis refers to may have ended later
            self._steps(run).analyse_all()

    def _do(self, run: Run) -> None:
        self._progress.begin(run)
        steps = self._steps(run)
        try:
            steps.train()
            for evaluation in run.evaluations:
                steps.evaluate(evaluation)
            steps.analyse_all()
        except BaseException:
            print(flush=True)
            raise
        self._progress.end(run, did_nothing=not steps.did)

    def _steps(self, run: Run) -> "_Steps":
        place = RunFolder(self._folder / run.folder)
        return _Steps(self._study, run, place, self._execute, self._progress)


class _Steps:
    """The steps of one run, each done unless it was."""

    def __init__(
        self, study: Study, run: Run, place: RunFolder, execute: Execute, progress: Progress
    ) -> None:
        self._study, self._run, self._place = study, run, place
        self._execute, self._progress = execute, progress
        self.did = False
        """Whether anything was done."""

    def train(self) -> None:
        settings, place = training_settings(self._study, self._run), self._place
        config = place.path / CONFIG
        if config.is_file() and yaml.safe_load(config.read_text()) != settings:
            raise StudyError(
                f"{place.path} was begun with other settings (see its {CONFIG}); remove it, or "
                "choose another folder with --folder"
            )
        if place.trained:
            return
        resume = place.checkpoint is not None
        if not resume:  # what a run without a checkpoint has left would be taken for this one's
            shutil.rmtree(place.training, ignore_errors=True)
        place.path.mkdir(parents=True, exist_ok=True)
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        before = place.record.get("train", {}) if resume else {}
        command = train_command(config, place.training, resume=resume)
        self._sit(command, before)

    def _sit(self, command: Sequence[str], before: dict[str, Any]) -> None:
        """Trains, and adds up the time of all sittings."""
        name = "train"
        self._begin(name)
        done = {"sittings": before.get("sittings", 0) + 1, "finished": False}
        earlier, start = before.get("seconds", 0.0), time.monotonic()
        self._place.note(name, {**done, "seconds": earlier})
        try:
            self._execute(command, self._place.log(name))
            done["finished"] = True
        finally:
            self._place.note(name, {**done, "seconds": earlier + time.monotonic() - start})

    def evaluate(self, evaluation: Evaluation) -> None:
        output, settings = self._place.output(evaluation), dict(evaluation.options)
        if not (self._place.has(evaluation.name, settings) and output.is_file()):
            command = evaluate_command(evaluation, self._trained(), output)
            self._once(evaluation.name, command, settings)

    def analyse_all(self) -> None:
        for analysis in self._run.analyses:
            self.analyse(analysis)

    def analyse(self, analysis: Analysis) -> None:
        folder = self._place.analysis(analysis)
        settings = analysis_settings(analysis, folder, self._checkpoint_of)
        if self._place.has(analysis.name, settings):
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        config = folder / CONFIG
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        self._once(analysis.name, analyse_command(config, self._trained()), settings)

    def _once(self, name: str, command: Sequence[str], settings: dict[str, Any]) -> None:
        self._begin(name)
        self._execute(command, self._place.log(name))
        self._place.note(name, {"settings": settings})

    def _begin(self, name: str) -> None:
        self.did = True
        self._progress.step(self._run, name)

    def _checkpoint_of(self, name: str) -> Path | None:
        """Returns the checkpoint of another run with this seed, if that is trained."""
        other = RunFolder(self._place.path.parent / replace(self._run, name=name).folder)
        return other.checkpoint if other.trained else None

    def _trained(self) -> Path:
        checkpoint = self._place.checkpoint
        if checkpoint is None:
            raise StudyError(
                f"{self._place.path} has no checkpoint any more; remove it and start again"
            )
        return checkpoint
