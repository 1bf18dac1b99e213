"""A task of a few questions, for tests of what all tasks share, and what its batches hold."""

from types import SimpleNamespace
from typing import Any

import torch

from datamodules.reasoning import Example, ReasoningDataModule

OWN = {
    "train": [
        ("Two<T> and two<T> make?", ["2", "2+2=4"], " 4"),
        ("<T>Caf\u00e9<T><T><T>", ["a", "bb", "ccc", "dddd"], " \u00fc\u4f60"),
        ("Nothing to think about.", [], " no"),
        ("One <T>step.", ["step"], " one"),
        ("AAAA bbbb<T> CCCC.<T>", ["x", "yy"], " z"),
    ],
    "val": [
        ("Val<T> one", ["v"], " 1"),
        ("VAL two<T>", ["w"], " 2"),
        ("Val<T> three", ["u"], " 3"),
    ],
    "test": [("Test<T> one", ["t"], " 10")],
}


class FewQuestions(ReasoningDataModule):
    """Examples as they are given.

    Args:
        repeats: How often each comes.
        **kwargs: See `ReasoningDataModule`.
    """

    own: Any = OWN
    seconds = 0.0

    def __init__(self, *, repeats: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.repeats = repeats

    def examples(self, split):
        """Yields them, and counts those with capitals only."""
        for number, (marked, steps, answer) in enumerate(self.own[split] * self.repeats):
            self.notice("questions with capitals only", int(marked.isupper()))
            yield Example.from_marked(marked, steps, answer, group=number)


def task(**own):
    """A kind of `FewQuestions` with other questions."""
    return type("FewQuestions", (FewQuestions,), {"own": {**OWN, **own}})


def fake_trainer(rank=0, world_size=1, accumulate=1, counter=None, limit=1.0):
    """What the data read of a trainer."""
    return SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        accumulate_grad_batches=accumulate,
        limit_train_batches=limit,
        callbacks=[],
        lightning_module=SimpleNamespace(counter=counter) if counter else SimpleNamespace(),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(
            epoch_loop=SimpleNamespace(
                batch_progress=SimpleNamespace(total=SimpleNamespace(processed=0))
            )
        ),
    )


def batches_of(source):
    return [source.batch(n) for n in range(len(source))]


def rows_in(batch):
    found = []
    for b in range(len(batch["query"])):
        lengths = batch["step_lengths"][b].tolist()
        found.append(
            {
                "query": batch["query"][b, : batch["query_lengths"][b]].tolist(),
                "steps": [batch["steps"][b, r, :n].tolist() for r, n in enumerate(lengths) if n],
                "places": [p for p in batch["step_places"][b].tolist() if p >= 0],
                "targets": [t for t in batch["targets"][b].tolist() if t >= 0],
                "group": int(batch["group"][b]),
            }
        )
    return found
