"""lm-evaluation-harness: tasks by name, their scores, and answers kept in a file."""

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
"""Task files of the project: local copies of data sets, and the paper's own rules."""

FEWSHOT_SEED = 1234
"""Seed of the drawn examples, the harness' own default."""

_IDENTITY = "identity"


# ---- surroundings of the harness


@contextlib.contextmanager
def quiet(*, silent: bool = False) -> Iterator[None]:
    """Temporarily lets the harness and the hub's client report errors only, in this process.

    What is printed goes to stderr, where results are not; ``silent``: nowhere.
    """
    disabled, forks = logging.root.manager.disable, os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"  # bootstrapping: other processes would need the model
    logging.disable(logging.WARNING)
    try:
        with contextlib.ExitStack() as stack:
            if silent:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
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
    """Returns what the harness' ``TaskManager.load`` does, with the number of examples set.

    Args:
        names: of tasks, groups or tags: the harness' own, those of ``configs/tasks``, and those of
            ``include_path``, which go first.
        include_path: folder of your own task files; None: none.
        num_fewshot: examples before each question; None: as the task says. Tasks that say 0
            keep it, as in the harness.

    Raises:
        ValueError: if a name is unknown, or the data of a task cannot be had.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path ({include_path}) is no folder; name one of task files")
    folders = [OWN_TASKS, *([] if include_path is None else [Path(include_path)])]
    found: dict[str, Any] = {"tasks": {}, "groups": {}}
    with quiet():
        manager = _manager(names, folders)
        for name in names:
            if name not in manager.task_index:
                raise ValueError(_unknown(name, manager.all_tasks))
        for name in names:
            part = _load(manager, name)
            found["tasks"] |= part["tasks"]
            found["groups"] |= part.get("groups", {})
        for task in found["tasks"].values():
            _set_shots(task, num_fewshot)
    return found


def _manager(names: Sequence[str], folders: Sequence[Path]) -> TaskManager:
    """Returns what knows the names; all of the harness' task files only if that takes them.

    Reading the thousands of them takes a minute. Folders that a name begins with come first.
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


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return (
        f"tasks ({name}) is no task, group or tag of the harness, of configs/tasks or of "
        f"--include_path{hint}"
    )


def _load(manager: TaskManager, name: str) -> Any:
    """Returns the tasks of a name.

    Raises:
        ValueError: if they cannot be had.
    """
    try:
        return manager.load([name])
    except TaskDataError:
        raise
    except Exception as error:  # whatever datasets, the hub's client and task files raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"tasks ({name}) cannot be loaded ({reason}). Its data come from the Hugging Face hub: "
            "set HF_HOME to a cache that holds them, or copy them into a folder, name it with "
            "DATA=folder, and take the tasks of configs/tasks (lambada_local, hellaswag_local, "
            "piqa_local, blimp_local, arc_easy_local, arc_challenge_local; see docs/tasks.md)"
        ) from error


def _set_shots(task: Any, num_fewshot: int | None) -> None:
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    shots, pool = task.get_config("num_fewshot"), getattr(task, "sampler", None)
    found = len(getattr(pool, "df", None) or ())
    if shots and found <= shots:  # one of them may be the question itself
        raise ValueError(
            f"num_fewshot ({shots}): {task.task_name} has {found} documents to draw them from, "
            "which must be more; set a smaller number"
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
    """Returns what the harness' ``evaluate`` does, examples included; None on ranks but the first.

    Args:
        lm: the model.
        tasks: as ``load_tasks`` returned them.
        limit: only that many examples of each task, the first ones; None: all.
        cache: file of answers: those in it are taken, others go into it as they come.
        identity: what decides the answers; a cache of another one is refused.
        bootstrap_iters: samples for the standard errors of perplexities; 0: no standard errors.
        silent: whether the harness shows no progress.

    Raises:
        ValueError: if the cache belongs to another model or other settings, or is no such file.
    """
    for task in tasks["tasks"].values():  # again: draws go on from where the latest scoring ended
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
    """The model with a file of answers, in which each repeat of a written text has its entry.

    The harness keeps one text a request, which all repeats would get, and leaves out requests
    that are repeated with other draws.
    """

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Returns the continuations; ``HarnessModel`` looks them up by their random stream."""
        texts = self.lm.generate_until(requests)
        self.dbdict.commit()
        return texts


def open_cache(lm: HarnessModel, path: Path, identity: str) -> AnswerFile:
    """Returns the model with its answers in a file.

    Raises:
        ValueError: see ``score_tasks``.
    """
    if path.is_file() and path.stat().st_size:
        _check_whole(path)
    caching = AnswerFile(lm, str(path))
    known = caching.dbdict.setdefault(_IDENTITY, identity)
    if known != identity:
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
            f"cache ({path}) is damaged, or no file of answers ({state}); delete it, or name "
            "another file"
        )


def identity_of(model: LanguageModel, tokenizer_state: Any, settings: dict[str, Any]) -> str:
    """Returns a digest of what decides answers: weights, configuration, tokenizer and settings."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).float().numpy().tobytes())
    decisive = {"recipe": model.recipe(), "tokenizer": tokenizer_state, "settings": settings}
    digest.update(json.dumps(decisive, sort_keys=True, default=str).encode())
    return digest.hexdigest()
