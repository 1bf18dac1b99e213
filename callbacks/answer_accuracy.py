"""How many questions a model answers rightly, after validations, so that runs can be chosen by it.

``--checkpoint.monitor val/accuracy --checkpoint.mode max`` keeps the checkpoint that answers best.
"""

from collections import Counter
from typing import Any

import lightning as L
import torch.distributed as dist

from callbacks.hooks import EvaluationHooks, check_least, gather, undisturbed
from callbacks.reasoning.questions import (
    REASONING,
    Question,
    judge,
    not_asked,
    questions_in,
    room_for,
    write,
)


class AnswerAccuracy(EvaluationHooks):
    """Logs the share of questions that a model answers rightly, of those in the first batches.

    The model writes greedily, thinking in its own way; right is what the data take for right. It is
    logged as ``val/accuracy`` (or ``test/accuracy``), over all ranks, and where there are several
    groups of questions as ``val/accuracy/<group>_<g>``, too. Each rank asks those of its own
    batches, so with more ranks more questions are asked. Training is not touched: random states and
    modes stay as they are.
    """

    def __init__(
        self,
        num_batches: int | None = 8,
        max_new_tokens: int | None = None,
        by_group: bool = True,
    ) -> None:
        """Chooses how many questions are asked.

        Args:
            num_batches: so many batches of each rank; null: all.
            max_new_tokens: most tokens that a model may write, a chain of thought included; null:
                twice as many as the longest right text of the batch has.
            by_group: whether groups of questions are logged, too.

        Raises:
            ValueError: if a number is too low.
        """
        check_least("num_batches", num_batches, 1)
        check_least("max_new_tokens", max_new_tokens, 1)
        self.num_batches = num_batches
        self.max_new_tokens = max_new_tokens
        self.by_group = by_group
        self._asked: Counter[int] = Counter()
        self._right: Counter[int] = Counter()

    # ---- hooks

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Checks that there are questions.

        Raises:
            ValueError: if model or data are of another kind.
        """
        if pl_module.reads != REASONING:
            kind = type(pl_module).__name__
            raise ValueError(
                f"AnswerAccuracy: {not_asked(kind, pl_module.reads)}; leave the callback out"
            )
        data = _data_of(trainer)
        if not hasattr(data, "is_right"):
            raise ValueError(
                f"AnswerAccuracy: data ({type(data).__name__}) do not say which answers are right; "
                "choose data of reasoning rows, e.g. datamodules.StateTracking, or leave it out"
            )

    def evaluation_starts(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Starts at nothing."""
        self._asked, self._right = Counter(), Counter()

    def evaluation_batch_ends(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Asks the questions of the first batches."""
        if self.num_batches is not None and batch_idx >= self.num_batches:
            return
        own = questions_in(batch)
        asked, first = _of_all_ranks(own) if _is_sharded(pl_module) else (own, 0)
        if not asked:
            return
        data = _data_of(trainer)
        with undisturbed(pl_module):
            room = room_for(asked, data, self.max_new_tokens)
            written = write(pl_module, data, asked, room)[first : first + len(own)]
        for question, ids in zip(own, written, strict=True):
            self._asked[question.group] += 1
            self._right[question.group] += judge(pl_module, data, question, ids).right

    def evaluation_epoch_ends(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Logs shares over all ranks, the same names on each, in time to rank checkpoints."""
        asked: Counter[int] = Counter()
        right: Counter[int] = Counter()
        for their_asked, their_right in gather((self._asked, self._right)):
            asked += their_asked  # drops what is 0
            right += their_right
        if not asked:
            return
        name = f"{stage}/accuracy"
        values = {name: right.total() / asked.total()}
        if self.by_group and len(asked) > 1:
            label = getattr(_data_of(trainer), "group_name", "group")
            values |= {f"{name}/{label}_{g}": right[g] / asked[g] for g in sorted(asked)}
        for key, value in values.items():
            pl_module.log(key, value, prog_bar=key == name, rank_zero_only=False)


def _data_of(trainer: L.Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]


def _is_sharded(pl_module: Any) -> bool:
    """Whether ranks hold parts of the weights, so that all must take the same steps."""
    return getattr(pl_module, "_device_mesh", None) is not None


def _of_all_ranks(own: list[Question]) -> tuple[list[Question], int]:
    """Returns the questions of all ranks, the same on each, and where among them its own begin."""
    parts = gather(own)
    rank = dist.get_rank() if len(parts) > 1 else 0
    return [question for part in parts for question in part], sum(map(len, parts[:rank]))
