"""lm-evaluation-harness: loading and running tasks, and a file of cached answers."""

import contextlib
import difflib
import hashlib
import json
import logging
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval import tasks as harness_tasks
from lm_eval.api.model import CachingLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from evaluation.tasks.adapter import HarnessModel
from evaluation.tasks.local_data import TaskDataError
from lightning_models import LanguageModel

PROJECT = Path(__file__).resolve().parents[2]
OWN_TASKS = PROJECT / "configs" / "tasks"
"""Task files of the project: local copies of datasets, and the rules of papers."""

FEWSHOT_SEED = 1234
"""Seed of the drawn examples, the harness' default."""

_IDENTITY = "identity"


# ---- environment of the harness


@contextlib.contextmanager
def quiet(*, silent: bool = False) -> Iterator[None]:
    """Silences warnings of the harness and the hub's client in this process within the context.

    Printed text goes to stderr, apart from results, or nowhere with ``silent``.
    """
    disabled, forks = logging.root.manager.disable, os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # other processes of the bootstrap would need the model
    logging.disable(logging.WARNING)
    try:
        with contextlib.ExitStack() as stack:
            if silent:
                devnull = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stderr(devnull))
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            yield
    finally:
        logging.disable(disabled)
        os.environ.pop("DISABLE_MULTIPROC")
        if forks is not None:
            os.environ["DISABLE_MULTIPROC"] = forks


# ---- loading


def load_tasks(
    names: Sequence[str], include_path: str | Path | None, num_fewshot: int | None
) -> dict[str, Any]:
    """Loads tasks like the harness' ``TaskManager.load``, and sets their number of examples.

    Args:
        names: Names of tasks, groups or tags of the harness, ``configs/tasks`` and
            ``include_path``; files of the latter take precedence.
        include_path: Folder of the user's task files, if any.
        num_fewshot: Number of examples before each question. Defaults to the task's own. Tasks
            that set 0 keep it, as in the harness.

    Raises:
        ValueError: If a name is unknown, or the data or a metric of a task are not available.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path ({include_path}) is not a folder; name one with task files")
    folders = [OWN_TASKS, *([] if include_path is None else [Path(include_path)])]
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    with quiet():
        manager = _manager(names, folders)
        for name in names:
            if name not in manager.task_index:
                raise ValueError(_unknown(name, manager.all_tasks))
        for name in names:
            part = _load(manager, name)
            loaded["tasks"] |= part["tasks"]
            loaded["groups"] |= part.get("groups", {})
        for task in loaded["tasks"].values():
            _check_metrics(task)
            _set_shots(task, num_fewshot)
    return loaded


def _manager(names: Sequence[str], folders: Sequence[Path]) -> TaskManager:
    """Returns a task manager that knows the names, with as few task files as possible.

    Reading the harness' thousands of files takes a minute, so folders whose names begin a task's
    name are tried first.
    """
    root = Path(harness_tasks.__file__).parent
    likely = [
        path
        for path in sorted(root.iterdir())
        if path.is_dir() and any(name.startswith(path.name) for name in names)
    ]
    manager = TaskManager(include_path=[*likely, *folders], include_defaults=False)
    if all(name in manager.task_index for name in names):
        return manager
    return TaskManager(include_path=list(folders))


def _unknown(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return (
        f"tasks ({name}) is not a task, group or tag of the harness, of configs/tasks or of "
        f"--include_path{hint}"
    )


def _load(manager: TaskManager, name: str) -> Any:
    """Loads the tasks of a name.

    Raises:
        ValueError: If they cannot be loaded.
    """
    try:
        return manager.load([name])
    except TaskDataError:
        raise
    except Exception as error:  # any error of datasets, the hub's client or task files
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"tasks ({name}) cannot be loaded ({reason}). Its data come from the Hugging Face hub: "
            "set HF_HOME to a cache that holds them, or copy them into a folder, name it with "
            "DATA=folder, and use the tasks of configs/tasks (lambada_local, hellaswag_local, "
            "piqa_local, blimp_local, arc_easy_local, arc_challenge_local; see docs/tasks.md)"
        ) from error


def _check_metrics(task: Any) -> None:
    """Raises a ValueError if the harness could not load a metric of a task."""
    if task.get_config("output_type") != "generate_until" or task.get_config("process_results"):
        return  # the harness computes these without the functions
    functions = getattr(task, "_metric_fn_list", {})  # a user's class may have none
    unknown = [str(name) for name, function in functions.items() if function is None]
    if unknown:
        raise ValueError(
            f"tasks ({task.task_name}): metrics ({', '.join(unknown)}): the harness does not "
            "define them, and `evaluate` could not load them; name the path of a metric's script"
        )


def _set_shots(task: Any, num_fewshot: int | None) -> None:
    default = task.get_config("num_fewshot")
    if default is None or (num_fewshot is not None and default != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    shots, pool = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    available = len(getattr(pool, "df", None) or ())
    if shots and available <= shots:  # one of them may be the question itself
        raise ValueError(
            f"num_fewshot ({shots}): {task.task_name} has only {available} documents to draw them "
            "from; set a smaller number"
        )


# ---- running


def score_tasks(
    lm: HarnessModel,
    tasks: dict[str, Any],
    *,
    limit: int | None = None,
    cache: Path | None = None,
    identity: str = "",
    bootstrap_iters: int = 1000,
    silent: bool = False,
) -> dict[str, Any] | None:
    """Runs the harness' ``evaluate`` and returns its result with examples; None on ranks above 0.

    Args:
        lm: The model.
        tasks: Tasks from ``load_tasks``.
        limit: Number of examples of each task, from the first. Defaults to all.
        cache: File of cached answers, which are reused; new answers are added.
        identity: Digest of everything that determines answers; it must match the cache's.
        bootstrap_iters: Number of bootstrap samples for the standard errors of perplexities; 0 for
            none.
        silent: Whether to hide the harness' progress.

    Raises:
        ValueError: If the cache belongs to another model or other settings, or is not a cache.
    """
    for task in tasks["tasks"].values():  # reset, as an earlier scoring has drawn from it
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    answering: Any = lm if cache is None else open_cache(lm, cache, identity)
    try:
        with quiet(silent=silent):
            results: Any = evaluate(
                lm=answering,
                task_dict=tasks,
                limit=limit,
                bootstrap_iters=bootstrap_iters,
                log_samples=True,
            )
    finally:
        if cache is not None:
            answering.dbdict.close()
    return results


class AnswerFile(CachingLM):
    """The model with a file of answers, in which each repeat of a request has an entry.

    The harness' class keeps one text per request, which all repeats would get, and skips requests
    that are repeated with other draws.
    """

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Returns the continuations, which ``HarnessModel`` caches by their random stream."""
        texts = self.lm.generate_until(requests)
        self.dbdict.commit()
        return texts


def open_cache(lm: HarnessModel, path: Path, identity: str) -> AnswerFile:
    """Opens the file of answers of a model.

    Raises:
        ValueError: See ``score_tasks``.
    """
    if path.is_file() and path.stat().st_size:
        _check_whole(path)
    caching = AnswerFile(lm, str(path))
    cached = caching.dbdict.setdefault(_IDENTITY, identity)
    if cached != identity:
        caching.dbdict.close()
        raise ValueError(
            f"cache ({path}) holds answers of another model, or under other settings; name another "
            "file, or delete it"
        )
    return caching


def _check_whole(path: Path) -> None:
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        state = str(error)
    if state != "ok":
        raise ValueError(
            f"cache ({path}) is damaged, or not a file of answers ({state}); delete it, or name "
            "another file"
        )


def identity_of(model: LanguageModel, tokenizer_state: Any, settings: dict[str, Any]) -> str:
    """Returns a digest of weights, configuration, tokenizer and settings."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).float().numpy().tobytes())
    decisive = {"recipe": model.recipe(), "tokenizer": tokenizer_state, "settings": settings}
    digest.update(json.dumps(decisive, sort_keys=True, default=str).encode())
    return digest.hexdigest()
