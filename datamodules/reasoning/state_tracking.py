"""Parity and Vars: tracking a state that every sentence may change (Thinking States, App. A.4).

Parity, with markers; its steps are heads, heads, tails, heads:

    The coin starts at state heads.<T> Alice doesn't flip the coin.<T> Bob flips the coin.<T> Alice
    flips the coin.<T>  |  The final state of the coin is  |  heads

Vars; its steps are a=3, b=5, b=8:

    Track the variables values: a=1; b=2 a=a+b<T> b=b+a<T> b=b+3<T>  |  Final values:  |  a=3 b=8

Bars separate the query, the answer prefix, and the answer.

NOTE(paper): App. A.4 leaves details open, which we choose. In Parity, the person, the flip and the
first state are drawn uniformly. In Vars, either another variable or a number from 1 on is added to
a variable, with equal probability. The final values list all variables. The full stop after the
final state is omitted.
"""

from collections.abc import Callable, Iterator, Sequence
from string import ascii_lowercase
from typing import Any, ClassVar, Literal

import numpy as np

from datamodules.base import raise_problems, range_problems
from datamodules.reasoning.examples import MARKER, Example
from datamodules.reasoning.module import ReasoningDataModule
from datamodules.store import SPLITS, Split

Task = Literal["parity", "vars"]

VERSION = 1
"""Incremented with every change of the text; part of the data's identity."""

STATES = ("tails", "heads")
"""States 0 and 1; the final state is the first state plus all flips, modulo 2."""
ENTITIES = ("Alice", "Bob")
VERBS = ("doesn't flip", "flips")

ANSWER_PREFIXES: dict[Task, str] = {
    "parity": " The final state of the coin is",
    "vars": " Final values:",
}
QUESTIONS: dict[Task, str] = {
    "parity": "What is the final state of the coin? ",
    "vars": "What are the final values? ",
}
"""Prepended to queries with question_first; otherwise the answer prefix states the question."""


class StateTracking(ReasoningDataModule):
    """Texts of n operations on a state, with a marker for the new state after each operation.

    Training and validation texts are short, test texts longer: length generalisation (Sec. 4.2).
    Each number of operations in a split has the same number of texts (plus or minus one). Nothing
    is downloaded.

    There are few short texts (8 in Parity with one operation), so texts repeat, even across
    training and validation; validation measures whether the training lengths are solved.

    NOTE(paper): the paper trains on up to N in {10, 20, 40} operations and tests on N to 100; the
    sizes of its splits, the number of variables and the modulus are not published. Two variables
    and a modulus of 10 agree with its example.

    Args:
        task: 'parity', a coin that is flipped or not, or 'vars', variables that are added up.
        operations: Numbers of operations in training and validation texts: two numbers are the ends
            of a range in which all occur equally often; one, three or more are an explicit list
            (only 20 and 40: [20, 20, 40, 40]).
        test_operations: Numbers of operations in test texts, in the same form.
        train_examples: Number of training texts.
        val_examples: Number of validation texts; 0 omits the split.
        test_examples: Number of test texts; 0 omits the split.
        example_seed: Seed of the texts, non-negative; text i of a split is a pure function of
            (example_seed, split, i) and of its number of operations.
        variables: Number of variables (a, b, c and so on) in Vars.
        modulus: Modulus of values and sums in Vars.
        answer_prefix: Text before the answer. Null uses the task's default, as above.
        **kwargs: See `ReasoningDataModule`.

    Raises:
        ValueError: If an argument is out of range; in `setup`, if a row is longer than block_size.
    """

    group_name: ClassVar[str] = "operations"

    def __init__(
        self,
        *,
        task: Task = "parity",
        operations: Sequence[int] = (1, 10),
        test_operations: Sequence[int] = (11, 40),
        train_examples: int = 20_000,
        val_examples: int = 1_000,
        test_examples: int = 3_000,
        example_seed: int = 0,
        variables: int = 2,
        modulus: int = 10,
        answer_prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        if task not in ANSWER_PREFIXES:
            raise ValueError(f"task={task!r} must be 'parity' or 'vars'.")
        prefix = ANSWER_PREFIXES[task] if answer_prefix is None else answer_prefix
        super().__init__(answer_prefix=prefix, **kwargs)
        problems = range_problems(1, train_examples=train_examples)
        problems += range_problems(
            0, val_examples=val_examples, test_examples=test_examples, example_seed=example_seed
        )
        problems += range_problems(1, len(ascii_lowercase), variables=variables)
        raise_problems(problems + range_problems(2, modulus=modulus))
        usual, longer = _numbers(operations=operations), _numbers(test_operations=test_operations)
        self._operations: dict[Split, Sequence[int]] = {
            "train": usual,
            "val": usual,
            "test": longer,
        }
        sizes = (train_examples, val_examples, test_examples)
        self._sizes: dict[Split, int] = dict(zip(SPLITS, sizes, strict=True))
        self._task: Task = task
        self._example_seed, self._variables, self._modulus = example_seed, variables, modulus

    def source(self) -> dict[str, Any]:
        return {**super().source(), "generator": VERSION}

    def expects(self, split: Split) -> bool:
        return self._sizes[split] > 0

    def how_to_get(self, split: Split) -> str:
        return f"Set {split}_examples above 0."

    def repeats_cure(self) -> None:
        """Returns None, because the few short texts recur across splits by chance."""

    def examples(self, split: Split) -> Iterator[Example]:
        for index in range(self._sizes[split]):
            yield self.example(split, index)

    def example(self, split: Split, index: int) -> Example:
        """Returns text `index` of a split; any index is valid."""
        operations = self._operations[split]
        num_operations = operations[index % len(operations)]
        below = draws_of(self._example_seed, self._task, split, index)
        example = (
            parity(num_operations, below)
            if self._task == "parity"
            else assignments(num_operations, below, self._variables, self._modulus)
        )
        return example.after(QUESTIONS[self._task]) if self.question_first else example


def draws_of(seed: int, task: Task, split: Split, index: int) -> Callable[[int], int]:
    """Returns a function that draws integers in [0, n) for one text.

    The draws are a pure function of the arguments and the previous draws.

    Args:
        seed: Seed of all texts.
        task: Task of the text.
        split: Split of the text.
        index: Index of the text in the split.
    """
    purpose = list(ANSWER_PREFIXES).index(task) * len(SPLITS) + SPLITS.index(split)
    # Blocks of a text advance the first word of the counter, texts the second.
    philox = np.random.Philox(key=[seed, purpose], counter=[0, index, 0, 0])
    return lambda n: int(philox.random_raw()) % n


def parity(operations: int, below: Callable[[int], int]) -> Example:
    """Returns a text about a coin that is flipped, or not, `operations` times.

    Args:
        operations: Number of operations.
        below: Draws an integer in [0, n).
    """
    state = below(2)
    text, steps = f"The coin starts at state {STATES[state]}.{MARKER}", [STATES[state]]
    for _ in range(operations):
        entity, flips = ENTITIES[below(2)], below(2)
        state = (state + flips) % 2
        text += f" {entity} {VERBS[flips]} the coin.{MARKER}"
        steps.append(STATES[state])
    return Example.from_marked(text, steps, f" {STATES[state]}", operations)


def assignments(
    operations: int, below: Callable[[int], int], variables: int = 2, modulus: int = 10
) -> Example:
    """Returns a text with `operations` assignments to variables.

    Args:
        operations: Number of assignments.
        below: Draws an integer in [0, n).
        variables: Number of variables; with one, only numbers are added.
        modulus: Modulus of the values, at least 2.
    """
    names = ascii_lowercase[:variables]
    values = [below(modulus) for _ in names]
    first = "; ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    text, steps = f"Track the variables values: {first}", []
    for _ in range(operations):
        target = below(variables)
        if variables > 1 and below(2):
            other = (target + 1 + below(variables - 1)) % variables
            term, value = names[other], values[other]
        else:
            value = 1 + below(modulus - 1)
            term = str(value)
        values[target] = (values[target] + value) % modulus
        text += f" {names[target]}={names[target]}+{term}{MARKER}"
        steps.append(f"{names[target]}={values[target]}")
    final = "".join(f" {name}={value}" for name, value in zip(names, values, strict=True))
    return Example.from_marked(text, steps, final, operations)


def _numbers(**ranges: Sequence[int]) -> Sequence[int]:
    """Expands two numbers into the range between them; other lists are returned unchanged.

    Raises:
        ValueError: If the list is empty, a number is below 1, or the second of two is smaller.
    """
    ((key, value),) = ranges.items()
    operations = list(value)
    falling = len(operations) == 2 and operations[0] > operations[1]
    if falling or min(operations, default=0) < 1:
        raise ValueError(
            f"{key}={operations} must be the minimum and maximum number of operations, e.g. [11, "
            "40], or one, three or more exact numbers, all at least 1."
        )
    return range(operations[0], operations[1] + 1) if len(operations) == 2 else operations
