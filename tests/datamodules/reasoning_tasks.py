"""A task of a few questions, for tests of what all tasks share."""

from typing import Any

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
