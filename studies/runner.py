"""Resumable runner: executes the commands of a study that its records do not have."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from filelock import FileLock, Timeout

from studies.study import CHECKPOINT_OF, ROOT, AnalysisSettings, Run, Settings, Study, StudyError

CONFIG, RECORD = "config.yaml", "record.json"
LAST = "*/version_*/checkpoints/last.ckpt"
"""The checkpoint that a training resumes from and that is evaluated."""
PATIENCE = 60.0
"""Seconds that a command has to save its state when the study is stopped."""
POLL = 1.0
"""Seconds between two looks at a command that is watched."""
LAST_LINES = 15

_running: set["subprocess.Popen[bytes]"] = set()

Execute = Callable[..., None]
"""Runs a command with a log file, or raises ``CommandError``, as `execute` does."""


# ---- commands


class CommandError(Exception):
    """A command ended with an error; the message has the command and its last lines."""

    def __init__(self, command: Sequence[str], code: int, log: Path) -> None:
        """Takes the command, its exit code and its log."""
        self.code, self.log = code, log
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        super().__init__(
            f"this command ended with code {code} (its output: {log}):\n"
            f"  {shlex.join(command)}\n" + "".join(f"  | {line}\n" for line in lines)
        )


def execute(
    command: Sequence[str],
    log: Path,
    threads: int | None = None,
    watch: Callable[[], None] | None = None,
) -> None:
    """Runs a command with its output in a file.

    When the study is stopped, the command receives SIGTERM first: training then saves a checkpoint.

    Args:
        command: program and arguments.
        log: file for its output.
        threads: that it computes with; None: as many as the machine has.
        watch: called every ``POLL`` seconds meanwhile; what it raises stops the command.

    Raises:
        CommandError: if it ends with another code than 0.
        StudyError: if a command that has outlived its study still writes to the file.
    """
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    environment = {**os.environ, **limit}
    with log.open("ab") as output:
        _claim(output, log)
        # in a session of its own: Ctrl-C reaches the study alone, which then ends the command
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=environment
        )
        _running.add(process)
        try:
            code = _wait(process, watch)
        except BaseException:
            _stop(process)
            raise
        finally:
            _running.discard(process)
    if code:
        raise CommandError(command, code, log)


def _claim(output: BinaryIO, log: Path) -> None:
    """Locks a log and empties it; the lock is the command's too, and so held until that ends.

    A study that is killed outright cannot end its command, which then goes on.
    """
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StudyError(
                f"{log} is still written to by a command of a killed process; wait until it ends, "
                "or end it"
            ) from error
    output.truncate(0)


def _wait(process: "subprocess.Popen[bytes]", watch: Callable[[], None] | None) -> int:
    """Returns the exit code."""
    while watch is not None:
        try:
            return process.wait(POLL)
        except subprocess.TimeoutExpired:
            watch()
    return process.wait()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def stop_running() -> None:
    """Sends SIGTERM to the commands of other threads."""
    for process in list(_running):
        process.terminate()


def executor(jobs: int) -> Execute:
    """Returns `execute` with an equal share of the processors for each of several jobs."""
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    return partial(execute, threads=threads)


def train_command(config: Path, folder: Path, *, resume: bool) -> list[str]:
    """Returns the command that trains in ``folder``, or resumes the training there."""
    command = [sys.executable, str(ROOT / "train.py"), "fit", "-c", str(config)]
    command += ["--trainer.default_root_dir", str(folder)]
    return command + (["--ckpt_path", "last"] if resume else [])


def analyse_command(config: Path, checkpoint: Path) -> list[str]:
    """Returns the command that runs an analysis on a checkpoint."""
    command = [sys.executable, str(ROOT / "train.py"), "validate", "-c", str(config)]
    return [*command, "--ckpt_path", str(checkpoint)]


def evaluate_command(verb: str, words: Sequence[str], options: Settings) -> list[str]:
    """Returns a command line of ``evaluate.py``; options without dashes."""
    typed: list[str] = []
    for key, value in options.items():
        typed += [f"--{key}", "null" if value is None else str(value)]
    return [sys.executable, str(ROOT / "evaluate.py"), verb, *words, *typed]


def analysis_config(
    analysis: AnalysisSettings, folder: Path, checkpoint_of: Callable[[str], Path | None]
) -> dict[str, Any]:
    """Returns the config of ``train.py validate`` with the callback, which writes in ``folder``.

    Args:
        analysis: the callback and its arguments.
        folder: where it writes.
        checkpoint_of: the checkpoint of another run by its name; None where it is not trained.
    """
    arguments = dict(analysis.init_args)
    for key, value in arguments.items():
        if isinstance(value, dict) and set(value) == {CHECKPOINT_OF}:
            path = checkpoint_of(value[CHECKPOINT_OF])
            arguments[key] = None if path is None else str(path)
    callback = {"class_path": analysis.class_path, "init_args": arguments}
    return {"trainer": {"default_root_dir": str(folder), "callbacks": [callback]}}


# ---- runs


class RunFolder:
    """Folder of a run: config, training, results, and the record of finished steps.

    The record has each step with its settings. A training that is not finished in it resumes; an
    evaluation or analysis that it does not have with these settings is done (again).
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
        """The last checkpoint; None before there is one."""
        return next(iter(sorted(self.training.glob(LAST))), None)

    @property
    def record(self) -> dict[str, Any]:
        """Finished steps, by their names."""
        path = self.path / RECORD
        content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return content

    @property
    def trained(self) -> bool:
        """Whether the training has reached its end."""
        return bool(self.record.get("train", {}).get("finished"))

    def last_checkpoint(self) -> Path:
        """Returns the last checkpoint of a trained run.

        Raises:
            StudyError: if it was removed.
        """
        if self.checkpoint is None:
            raise StudyError(f"{self.path} has no checkpoint any more; remove it and start again")
        return self.checkpoint

    def output(self, evaluation: str) -> Path:
        """Returns the JSON file of an evaluation."""
        return self.path / f"{evaluation}.json"

    def note(self, step: str, value: dict[str, Any]) -> None:
        """Adds a step to the record, in one atomic write."""
        partial_file = self.path / f".{RECORD}"
        partial_file.write_text(json.dumps({**self.record, step: value}, indent=2) + "\n")
        partial_file.replace(self.path / RECORD)

    def has(self, step: str, settings: dict[str, Any]) -> bool:
        """Returns whether the record has a step with these settings."""
        return self.record.get(step, {}).get("settings") == settings


def train_run(settings: dict[str, Any], place: RunFolder, execute: Execute) -> None:
    """Trains a run, or continues its training; a trained run is left as it is.

    Args:
        settings: its config.
        place: its folder; the record gets the time, added to that of earlier processes.
        execute: runs a command.

    Raises:
        StudyError: if its folder was begun with other settings.
    """
    config = place.path / CONFIG
    if config.is_file() and yaml.safe_load(config.read_text()) != settings:
        raise StudyError(
            f"{place.path} was begun with other settings (see its {CONFIG}); remove it, or "
            "choose another folder with --folder"
        )
    if place.trained:
        return
    resume = place.checkpoint is not None
    if not resume:  # files of a run without a checkpoint would be taken for this one's
        shutil.rmtree(place.training, ignore_errors=True)
    place.path.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    before = place.record.get("train", {}) if resume else {}
    done = {"sittings": before.get("sittings", 0) + 1, "finished": False}
    earlier, start = before.get("seconds", 0.0), time.monotonic()
    place.note("train", {**done, "seconds": earlier})
    try:
        execute(train_command(config, place.training, resume=resume), place.path / "train.log")
        done["finished"] = True
    finally:
        place.note("train", {**done, "seconds": earlier + time.monotonic() - start})


def run_study(
    study: Study,
    folder: Path,
    *,
    only: Sequence[str] = (),
    jobs: int = 1,
    execute: Execute = execute,
) -> None:
    """Trains, evaluates and analyses what is not done yet, with a line on the console for each run.

    Args:
        study: which runs.
        folder: a folder for each run is made in it.
        only: names of runs to take; none: all but the extra ones.
        jobs: number of runs at a time.
        execute: runs a command.

    Raises:
        CommandError: if a command fails; finished steps are kept.
        StudyError: if a run is there with other settings, or another process works there.
    """
    runs = study.seeded(only)
    progress = StudyProgress(runs, jobs)
    steps = [_Steps(study, run, folder, execute, progress) for run in runs]
    with sole_user(folder):
        if jobs == 1:
            for each in steps:
                each.do_all()
        else:
            _run_parallel(steps, jobs)


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Locks a folder of runs.

    Raises:
        StudyError: if another process works there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StudyError(
            f"{folder} is in use by another study that runs; wait for it, or choose another "
            "folder with --folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _run_parallel(steps: Sequence["_Steps"], jobs: int) -> None:
    # the longest first: the last runs to end are then short ones
    ordered = sorted(steps, key=lambda each: each.run.cost, reverse=True)
    in_parallel([each.do_all for each in ordered], jobs)
    for each in steps:  # a run that an analysis refers to may have ended later
        each.analyse()


def in_parallel(tasks: Sequence[Callable[[], None]], jobs: int) -> None:
    """Does tasks in their order, several at a time; an error stops the commands of all."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_running()
            raise


class _Steps:
    """The steps of one run, each executed unless the record has it."""

    def __init__(
        self, study: Study, run: Run, folder: Path, execute: Execute, progress: "StudyProgress"
    ) -> None:
        self.run = run
        self._study, self._place = study, RunFolder(folder / run.folder)
        self._execute, self._progress = execute, progress
        self._executed = False

    def do_all(self) -> None:
        """Trains, evaluates and analyses, with the time on the console."""
        self._progress.begin(self.run)
        try:
            self.train()
            self.evaluate()
            self.analyse()
        except BaseException:
            print(flush=True)
            raise
        self._progress.end(self.run, executed=self._executed)

    def train(self) -> None:
        """Trains the run, see `train_run`."""
        settings = self._study.train_config(self.run)
        train_run(settings, self._place, lambda command, log: self._command("train", command))

    def evaluate(self) -> None:
        """Executes the evaluations that have no result file of these settings."""
        for name, settings in self.run.evaluations.items():
            output, options = self._place.output(name), dict(settings)
            if self._place.has(name, options) and output.is_file():
                continue
            verb = options.pop("command", "perplexity")
            options = {"ckpt": self._place.last_checkpoint(), "output": output, **options}
            self._command(name, evaluate_command(verb, (), options))
            self._place.note(name, {"settings": dict(settings)})

    def analyse(self) -> None:
        """Executes the analyses that the record has not with these settings."""
        for name, analysis in self.run.analyses.items():
            folder = self._place.path / name
            settings = analysis_config(analysis, folder, self._checkpoint_of)
            if self._place.has(name, settings):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            config = folder / CONFIG
            config.write_text(yaml.safe_dump(settings, sort_keys=False))
            self._command(name, analyse_command(config, self._place.last_checkpoint()))
            self._place.note(name, {"settings": settings})

    def _command(self, name: str, command: Sequence[str]) -> None:
        self._executed = True
        self._progress.step(self.run, name)
        self._execute(command, self._place.path / f"{name}.log")

    def _checkpoint_of(self, name: str) -> Path | None:
        """Returns the checkpoint of another run with this seed, if that is trained."""
        other = RunFolder(self._place.path.parent / replace(self.run, name=name).folder)
        return other.checkpoint if other.trained else None


# ---- console


class StudyProgress:
    """Prints ``[2/8] name, seed 0 ... train ... test: 1:35; about 12 min left``.

    With several runs at a time, each of their steps has a line of its own.
    """

    def __init__(self, runs: Sequence[Run], jobs: int = 1) -> None:
        """Takes the runs in their order, and how many are done at a time."""
        self._coming = list(runs)
        self._jobs = jobs
        self._titles = {
            run.folder: f"[{number}/{len(runs)}] {run.name}, seed {run.seed}"
            for number, run in enumerate(runs, start=1)
        }
        self._starts: dict[str, float] = {}
        self._measured: dict[str, tuple[float, float]] = {}
        """Seconds and declared cost of finished runs, by name."""

    def begin(self, run: Run) -> None:
        """Starts the clock of a run."""
        self._starts[run.folder] = time.monotonic()
        if self._jobs == 1:
            print(self._titles[run.folder], end="", flush=True)

    def step(self, run: Run, name: str) -> None:
        """Prints the step that a run begins."""
        if self._jobs == 1:
            print(f" ... {name}", end="", flush=True)
        else:
            print(f"{self._titles[run.folder]} ... {name}", flush=True)

    def end(self, run: Run, *, executed: bool) -> None:
        """Prints the time of a finished run, and the time left."""
        title = "" if self._jobs == 1 else self._titles[run.folder]
        self._coming.remove(run)
        if not executed:
            print(f"{title}: done before", flush=True)
            return
        seconds = time.monotonic() - self._starts[run.folder]
        self._measured[run.name] = seconds, run.cost
        left = self.left()
        rest = "" if left is None else f"; about {max(1, round(left / 60))} min left"
        print(f"{title}: {clock(seconds)}{rest}", flush=True)

    def left(self) -> float | None:
        """Returns the seconds that the remaining runs will take; None where nothing is known.

        A run takes as long as it did with another seed, else in proportion to its declared cost.
        """
        if not self._coming or not self._measured:
            return None
        seconds, costs = (sum(values) for values in zip(*self._measured.values(), strict=True))
        known = {run.name: run.cost * seconds / costs for run in self._coming}
        known |= {name: value for name, (value, _) in self._measured.items()}
        return sum(known[run.name] for run in self._coming) / self._jobs


def clock(seconds: float) -> str:
    """Returns minutes and seconds, e.g. ``12:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
