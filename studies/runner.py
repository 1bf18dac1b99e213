"""Resumable runner: executes the commands of a study whose results are missing."""

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from lightning_models.atomic_files import write_whole
from studies.study import ROOT, AnalysisSettings, Run, Settings, Study, StudyError

CONFIG, LOG, RECORD = "config.yaml", "train.log", "record.json"
LAST = "*/version_*/checkpoints/last.ckpt"
"""Checkpoint for resuming and for evaluation."""
LAST_LINES = 15
STEP = re.compile(r"^step \d+/.*$", re.MULTILINE)
"""Progress line of a training run."""
REPORT_SECONDS = 30.0
PR_SET_PDEATHSIG = 1

_end_with_the_study = (  # on Linux, SIGTERMs a command when its study is killed
    partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    if sys.platform == "linux"
    else None
)
_running: set["subprocess.Popen[bytes]"] = set()


# ---- commands


class CommandError(Exception):
    """Raised if a command fails; the message has the command and its last lines."""

    def __init__(self, command: Sequence[str], code: int, log: Path) -> None:
        self.code, self.log = code, log
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        super().__init__(
            f"this command exited with code {code} (its output: {log}):\n"
            f"  {shlex.join(command)}\n" + "".join(f"  | {line}\n" for line in lines)
        )


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Starts a command with its output in a file, and waits for its end on exit.

    If the block is left early, the command receives SIGTERM, on which training saves a checkpoint.
    """
    with log.open("wb") as output:
        # a new session: Ctrl-C reaches only the study, which then ends the command
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_end_with_the_study,
        )
    _running.add(process)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
        _running.discard(process)


def execute(command: Sequence[str], log: Path, label: str = "") -> None:
    """Runs a command to its end, see `started`.

    Args:
        command: The arguments.
        log: File of its output.
        label: If given, the newest progress line of the log is printed with it every half minute.

    Raises:
        CommandError: If its exit code is not 0.
    """
    printed = ""
    with started(command, log) as process:
        while process.poll() is None:
            try:
                process.wait(REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                step = (STEP.findall(log.read_text(encoding="utf-8", errors="replace")) or [""])[-1]
                if label and step != printed:
                    print(f"{label}: {step}", flush=True)
                    printed = step
    if process.returncode:
        raise CommandError(command, process.returncode, log)


def share_processors(jobs: int) -> None:
    """Gives each of several concurrent commands an equal share of the processors."""
    if jobs > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))


def train_command(config: Path, folder: Path, *, resume: bool) -> list[str]:
    """Returns the command that trains in ``folder``, or resumes training there."""
    command = [sys.executable, str(ROOT / "train.py"), "fit", "-c", str(config)]
    command += ["--trainer.default_root_dir", str(folder)]
    return command + (["--ckpt_path", "last"] if resume else [])


def analyse_command(config: Path, checkpoint: Path | None) -> list[str]:
    """Returns the command that runs an analysis on a checkpoint."""
    command = [sys.executable, str(ROOT / "train.py"), "validate", "-c", str(config)]
    return [*command, "--ckpt_path", str(checkpoint)]


def evaluate_command(checkpoint: Path | None, output: Path, options: Settings) -> list[str]:
    """Returns the command of ``evaluate.py`` that writes a result; `options` have no dashes."""
    options = dict(options)
    verb = options.pop("command", "perplexity")
    typed: list[str] = []
    for key, value in {"ckpt": checkpoint, "output": output, **options}.items():
        values = value if isinstance(value, list) else [value]
        typed += [f"--{key}", *("null" if each is None else str(each) for each in values)]
    return [sys.executable, str(ROOT / "evaluate.py"), verb, *typed]


# ---- runs


class RunFolder:
    """Folder of a run: config, training, results, and the record of finished steps.

    The record has each step with its settings. Unfinished training resumes; an evaluation or
    analysis is run unless the record has it with the same settings.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.training = path, path / "train"

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint, or None."""
        return next(iter(sorted(self.training.glob(LAST))), None)

    @property
    def record(self) -> dict[str, Any]:
        """Finished steps by name."""
        path = self.path / RECORD
        content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return content

    @property
    def trained(self) -> bool:
        """Whether training is finished."""
        return bool(self.record.get("train", {}).get("finished"))

    def output(self, evaluation: str) -> Path:
        """Returns the JSON file of an evaluation."""
        return self.path / f"{evaluation}.json"

    def note(self, step: str, value: Settings) -> None:
        """Adds a step to the record, in one atomic write."""
        write_whole(self.path / RECORD, json.dumps({**self.record, step: value}, indent=2) + "\n")

    def has(self, step: str, settings: Settings) -> bool:
        """Returns whether the record has a step with these settings."""
        return bool(self.record.get(step, {}).get("settings") == settings)

    def write_config(self, settings: Settings) -> Path:
        """Writes the training config and returns its path."""
        self.path.mkdir(parents=True, exist_ok=True)
        config = self.path / CONFIG
        write_whole(config, yaml.safe_dump(settings, sort_keys=False))
        return config


def train_run(settings: Settings, run_dir: RunFolder) -> None:
    """Trains a run, or resumes its training, unless it is finished.

    Args:
        settings: The config of ``train.py``.
        run_dir: Folder of the run. Its record has the total seconds of all processes.

    Raises:
        StudyError: If its folder was started with different settings, or its checkpoint is missing.
    """
    config = run_dir.path / CONFIG
    if config.is_file() and yaml.safe_load(config.read_text()) != settings:
        raise StudyError(
            f"{run_dir.path} was started with different settings (see its {CONFIG}); remove it, or "
            "choose another folder with --folder"
        )
    resume = run_dir.checkpoint is not None
    if run_dir.trained:
        if not resume:
            raise StudyError(
                f"{run_dir.path} no longer has a checkpoint; remove it and start again"
            )
        return
    if not resume:  # leftovers of a run without a checkpoint would be mistaken for results
        shutil.rmtree(run_dir.training, ignore_errors=True)
    command = train_command(run_dir.write_config(settings), run_dir.training, resume=resume)
    earlier = run_dir.record.get("train", {}).get("seconds", 0.0) if resume else 0.0
    start, finished = time.monotonic(), False
    try:
        execute(command, run_dir.path / LOG, label=run_dir.path.name)
        finished = True
    finally:
        seconds = earlier + time.monotonic() - start
        run_dir.note("train", {"finished": finished, "seconds": seconds})


def evaluate_run(run: Run, run_dir: RunFolder) -> None:
    """Executes the evaluations that have no result file for their settings."""
    for name, options in run.evaluations.items():
        output = run_dir.output(name)
        if not (run_dir.has(name, options) and output.is_file()):
            command = evaluate_command(run_dir.checkpoint, output, options)
            execute(command, run_dir.path / f"{name}.log")
            run_dir.note(name, {"settings": options})


def analyse_run(run: Run, run_dir: RunFolder) -> None:
    """Executes the analyses that are not recorded with their settings."""
    for name, analysis in run.analyses.items():
        inside = RunFolder(run_dir.path / name)
        settings = analysis_config(analysis, inside.path, run.seed)
        if not run_dir.has(name, settings):
            shutil.rmtree(inside.path, ignore_errors=True)
            command = analyse_command(inside.write_config(settings), run_dir.checkpoint)
            execute(command, run_dir.path / f"{name}.log")
            run_dir.note(name, {"settings": settings})


def analysis_config(analysis: AnalysisSettings, folder: Path, seed: int) -> Settings:
    """Returns the config of ``train.py validate`` with the callback.

    Args:
        analysis: The callback and its arguments.
        folder: Folder of its output, in the folder of its run.
        seed: Seed of the run and of its reference. An untrained reference becomes null.
    """
    arguments = dict(analysis.init_args)
    if analysis.reference is not None:
        reference = RunFolder(folder.parents[1] / f"{analysis.reference}-seed{seed}")
        trained = reference.checkpoint is not None and reference.trained
        arguments["reference_ckpt"] = str(reference.checkpoint) if trained else None
    callback = {"class_path": analysis.class_path, "init_args": arguments}
    return {"trainer": {"default_root_dir": str(folder), "callbacks": [callback]}}


def run_study(study: Study, folder: Path, *, only: Sequence[str] = (), jobs: int = 1) -> None:
    """Executes all missing training runs, evaluations and analyses, printing a line per run.

    Args:
        study: The declared runs.
        folder: Parent folder of the runs.
        only: Names of the runs to execute. Defaults to all but the extra ones.
        jobs: Number of concurrent runs.

    Raises:
        CommandError: If a command fails; finished steps are kept.
        StudyError: If a run exists with different settings, or another process uses the folder.
    """

    def train_and_evaluate(run: Run) -> None:
        run_dir, start = RunFolder(folder / run.folder), time.monotonic()
        print(f"{run.name}, seed {run.seed} ... (output: {run_dir.path}/*.log)", flush=True)
        train_run(study.train_config(run), run_dir)
        evaluate_run(run, run_dir)
        print(f"{run.name}, seed {run.seed}: done in {clock(time.monotonic() - start)}", flush=True)

    def analyse(run: Run) -> None:
        analyse_run(run, RunFolder(folder / run.folder))

    runs = study.seeded(only)
    share_processors(jobs)
    with sole_user(folder):
        in_parallel(train_and_evaluate, runs, jobs)
        in_parallel(analyse, runs, jobs)  # an analysis may refer to any run


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Locks a folder of runs.

    Raises:
        StudyError: If another process uses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise StudyError(
            f"{folder} is in use by another study; wait for it, or choose another folder "
            "with --folder"
        ) from error


def in_parallel(work: Callable[[Any], None], items: Sequence[Any], jobs: int) -> None:
    """Processes items in order, several at a time; an error stops all commands."""
    if jobs == 1:
        for item in items:
            work(item)
        return
    failed = threading.Event()

    def work_unless_failed(item: Any) -> None:
        if not failed.is_set():
            try:
                work(item)
            except BaseException:
                failed.set()  # set here, because this thread takes the next item immediately
                raise

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work_unless_failed, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            failed.set()
            for process in list(_running):
                process.terminate()
            raise


def clock(seconds: float) -> str:
    """Returns hours, minutes and seconds, e.g. ``0:12:05``."""
    return str(timedelta(seconds=round(seconds)))
