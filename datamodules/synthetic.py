"""Synthetic texts on which one mechanism must work: where it is needed is known by construction."""

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, Literal

from datamodules.base import none_of, outside, refuse
from datamodules.reasoning.kinship import NAMES, Draws
from datamodules.store import SPLITS, Split
from datamodules.text import TextDataModule

VERSION = 1
"""Raised with any change that gives other text; part of the data's identity."""

PEOPLE = (*NAMES["male"][:16], *NAMES["female"][:16])
THINGS = ("ball", "book", "coin", "drum", "key", "lamp", "ring", "rope")
STATED, ASKED, FILLER = "{} has the {}.", "{} gives the {}.", "It rains."


def recall(length: int, draws: Draws) -> str:
    """Returns a text of ``length`` sentences that states facts, and asks for each once at most.

    "Anna has the coin." states that of the `THINGS`, drawn evenly, Anna has the coin; nothing else
    says so before "Anna gives the coin.", any number of sentences later. As often the latest fact
    is asked for as any of those not asked for yet, so that distances are short and long. A fifth of
    the sentences is filler.
    """
    people, sentences = draws.shuffled(PEOPLE), list[str]()
    open_facts: list[tuple[str, str]] = []
    for _ in range(length):
        if draws.chance(0.2) or not (people or open_facts):
            sentences.append(FILLER)
        elif open_facts and (not people or draws.chance(0.5)):
            place = -1 if draws.chance(0.5) else draws.below(len(open_facts))
            sentences.append(ASKED.format(*open_facts.pop(place)))
        else:
            open_facts.append((people.pop(), draws.pick(THINGS)))
            sentences.append(STATED.format(*open_facts[-1]))
    return " ".join(sentences)


MOST_OPERANDS = 4
ELEMENTS = tuple(permutations(range(3)))
"""The permutations of three things, named a to f: the smallest group that does not commute."""
LETTERS = "abcdef"


def operands(length: int, draws: Draws) -> str:
    """Returns ``length`` products of 1 to `MOST_OPERANDS` operands, such as "bd2e".

    Operands are permutations of three things, drawn evenly; the digit says how many there were, and
    the letter after it is their product, the last operand applied last. So the token at which a
    letter is predicted from n operands is known: it is the digit n.
    """
    terms = []
    for _ in range(length):
        chosen = [draws.pick(LETTERS) for _ in range(draws.between(1, MOST_OPERANDS))]
        product = ELEMENTS[0]  # the identity
        for letter in chosen:
            applied = ELEMENTS[LETTERS.index(letter)]
            product = tuple(applied[i] for i in product)
        terms.append(f"{''.join(chosen)}{len(chosen)}{LETTERS[ELEMENTS.index(product)]}")
    return "".join(terms)


Task = Literal["recall", "operands"]
TASKS: dict[str, Callable[[int, Draws], str]] = {"recall": recall, "operands": operands}
"""Writer of a text by its length."""


class SyntheticText(TextDataModule):
    """Generated documents whose hard tokens are known, one task per mechanism.

    ======  ==========================================================================
    task    text
    ======  ==========================================================================
    recall  facts stated once and asked for many sentences later (memory), see `recall`
    ======  ==========================================================================

    The splits have sizes of their own: `val_fraction` and `test_fraction` have no effect. Nothing
    is downloaded.

    Args:
        task: What the texts are about.
        length: Sentences of a training or validation text.
        test_length: The same of a test text; null: as in training.
        train_documents: Training texts.
        val_documents: Validation texts; 0: no such split.
        test_documents: Test texts; 0: no such split.
        document_seed: Seed of the texts, non-negative; text i of a split is a pure function of
            (task, document_seed, split, i) and of its length.
        **kwargs: See `TextDataModule`.

    Raises:
        ValueError: An argument is out of its range.
    """

    not_in_source = TextDataModule.not_in_source | {"val_fraction", "test_fraction"}

    def __init__(
        self,
        *,
        task: Task = "recall",
        length: int = 40,
        test_length: int | None = None,
        train_documents: int = 10_000,
        val_documents: int = 200,
        test_documents: int = 400,
        document_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        problems = none_of(tuple(TASKS), task=task)
        problems += outside(1, train_documents=train_documents)
        problems += outside(
            0, val_documents=val_documents, test_documents=test_documents
        ) + outside(0, document_seed=document_seed)
        problems += outside(5, length=length, test_length=test_length)
        refuse(problems)
        self._task, self._document_seed = task, document_seed
        lengths = (length, length, length if test_length is None else test_length)
        self._lengths: dict[Split, int] = dict(zip(SPLITS, lengths, strict=True))
        sizes = (train_documents, val_documents, test_documents)
        self._sizes: dict[Split, int] = dict(zip(SPLITS, sizes, strict=True))

    def source(self) -> dict[str, Any]:
        return {**super().source(), "generator": VERSION}

    def expects(self, split: Split) -> bool:
        return self._sizes[split] > 0

    def how_to_get(self, split: Split) -> str:
        return f"Set {split}_documents above 0."

    def documents(self, split: Split) -> Iterator[str]:
        write, length = TASKS[self._task], self._lengths[split]
        for index in range(self._sizes[split]):
            yield write(length, Draws(f"{self._task}/{self._document_seed}/{split}/{index}"))
