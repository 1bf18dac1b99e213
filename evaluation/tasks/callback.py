"""``callbacks.TaskScores``: scores on tasks of lm-evaluation-harness during training.

The harness takes seconds to import, so only functions import it, and runs without the callback
never do.
"""

from typing import Any, Literal

import lightning as L

from callbacks.hooks import check_minimum, gather
from callbacks.random_state import undisturbed
from callbacks.trainer_state import tokenizer_of


class TaskScores(L.Callback):
    """Logs scores on a few tasks, like ``evaluate.py tasks``, every n optimiser steps.

    Scores are logged as ``tasks/<task>/<metric>``; the ranks share the examples. Local tasks need
    no network: for example ``blimp_local`` with ``limit: 20``, in the folder that the environment
    variable ``DATA`` names (``docs/tasks.md``). Training is not affected: random states and modes
    are restored, and the position in the data does not change. A Thoughtbubbles model keeps its
    ``budget``, by default in proportion to the length of a text.

    Args:
        tasks: Names of tasks, groups or tags, e.g. ``[lambada_local, blimp_local]``.
        every_n_steps: Number of optimiser steps between scorings.
        limit: Number of examples of each task, from the first. Null means all.
        num_fewshot: Number of examples before each question. Null means as the task sets it.
        batch_size: Number of rows in a batch.
        mode: 'blockwise', or 'autoregressive', which scores each token given its prefix only.
        include_path: Folder of your task files.
        max_gen_toks: Maximum number of new tokens, unless the task sets one.

    Raises:
        ValueError: If a number is too low, or no task is named.
    """

    __module__ = "callbacks"  # the public path, which configs and checkpoints name

    def __init__(
        self,
        tasks: list[str],
        every_n_steps: int = 1000,
        limit: int | None = 100,
        num_fewshot: int | None = None,
        batch_size: int = 16,
        mode: Literal["blockwise", "autoregressive"] = "blockwise",
        include_path: str | None = None,
        max_gen_toks: int = 256,
    ) -> None:
        numbers = {"every_n_steps": every_n_steps, "limit": limit, "batch_size": batch_size}
        for name, value in {**numbers, "max_gen_toks": max_gen_toks}.items():
            check_minimum(name, value, 1)
        self.tasks = list(dict.fromkeys(tasks))
        if not self.tasks:
            raise ValueError("tasks ([]) must name some, e.g. [blimp_local]")
        self.every_n_steps = every_n_steps
        self.limit = limit
        self.num_fewshot = num_fewshot
        self.batch_size = batch_size
        self.mode: Literal["blockwise", "autoregressive"] = mode
        self.include_path = include_path
        self.max_gen_toks = max_gen_toks
        self._latest = 0
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"latest": self._latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest = state_dict["latest"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from evaluation.tasks.harness import load_tasks

        if self.limit is not None and self.limit < trainer.world_size:
            raise ValueError(
                f"limit ({self.limit}) must give each of the {trainer.world_size} processes an "
                f"example; set it to {trainer.world_size} or more"
            )
        self._model_of_harness(trainer, pl_module)  # raises now if the model cannot be scored
        with undisturbed(pl_module):
            self._loaded = load_tasks(self.tasks, self.include_path, self.num_fewshot)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step == self._latest or step % self.every_n_steps:
            return
        self._latest = step
        values = self._scores(trainer, pl_module)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            # the step of scalars logged with this batch, counted from 0
            logger.log_metrics(values, step=step - 1)

    def _scores(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        """Returns the scores by their logged names; nothing on ranks other than 0."""
        from evaluation.tasks.harness import score_tasks
        from evaluation.tasks.task_scores import shown, task_scores

        lm = self._model_of_harness(trainer, pl_module)
        with undisturbed(pl_module):
            results = score_tasks(
                lm, self._loaded, limit=self.limit, bootstrap_iters=0, silent=True
            )
        if results is None:
            return {}
        model: Any = pl_module
        return {
            f"tasks/{name}/{metric}": value
            for name, score in shown(task_scores(results, model, lm.usage)).items()
            for metric, value in score["metrics"].items()
        }

    def _model_of_harness(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Any:
        from evaluation.tasks.adapter import HarnessModel

        model: Any = pl_module
        tokenizer = tokenizer_of(trainer)
        if tokenizer is None:
            raise ValueError(
                "TaskScores: the data have no tokenizer to encode texts with; train on a data "
                "module of datamodules, or leave the callback out"
            )
        return HarnessModel(
            model,
            tokenizer,
            batch_size=self.batch_size,
            mode=self.mode,
            context=model.precision_context,
            max_gen_toks=self.max_gen_toks,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            gather=gather,
            progress=False,
        )
