"""Synthetic texts on which one mechanism must work: where it is needed is known by construction."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from datamodules.base import choice_problems, raise_problems, range_problems
from datamodules.reasoning.kinship import NAMES, Draws
from datamodules.store import SPLITS, Split
from datamodules.text import TextDataModule

VERSION = 1
"""Raised with any change that gives other text; part of the data's identity."""

PEOPLE = (*NAMES["male"][:16], *NAMES["female"][:16])
THINGS = ("ball", "book", "coin", "drum", "key", "lamp", "ring", "rope")
LETTERS, HOP = "abcdefgh", "x"
STATED, ASKED, FILLER = "{} has the {}.", "{} gives the {}.", "It rains."


def recall(length: int, levels: int, letters: int, draws: Draws) -> str:
    """Returns a text of ``length`` sentences that states facts, and asks for each once at most.

    "Anna has the coin." states that of the `THINGS`, drawn evenly, Anna has the coin; nothing else
    says so before "Anna gives the coin.", any number of sentences later. A question in four is
    about the latest fact, the others about any of those not asked for yet, so that distances are
    short and long. A fifth of the sentences is filler. There are no levels, and no letters.
    """
    people, sentences = draws.shuffled(PEOPLE), list[str]()
    open_facts: list[tuple[str, str]] = []
    for _ in range(length):
        if draws.chance(0.2) or not (people or open_facts):
            sentences.append(FILLER)
        elif open_facts and (not people or draws.chance(0.5)):
            position = -1 if draws.chance(0.25) else draws.below(len(open_facts))
            sentences.append(ASKED.format(*open_facts.pop(position)))
        else:
            open_facts.append((people.pop(), draws.pick(THINGS)))
            sentences.append(STATED.format(*open_facts[-1]))
    return " ".join(sentences)


def hops(length: int, levels: int, letters: int, draws: Draws) -> str:
    """Returns a text of a map of ``letters`` and ``length`` questions of 1 to ``levels`` hops.

    "Map ac ce ea ..." says that a is followed by c, and c by e, in one cycle of all letters, in
    random order. The question "axx" has the answer "e": two hops from a. Each word is one token of
    a byte-level BPE, so that all hops happen within one token, the question's.
    """
    alphabet = LETTERS[:letters]
    cycle = draws.shuffled(alphabet)
    follows = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    parts = ["Map", *draws.shuffled([letter + follows[letter] for letter in alphabet])]
    for _ in range(length):
        start, count = draws.below(len(cycle)), draws.between(1, levels)
        parts += [cycle[start] + HOP * count, cycle[(start + count) % len(cycle)]]
    return " ".join(parts)


def cipher(length: int, levels: int, letters: int, draws: Draws) -> str:
    """Returns a text of ``length`` letters, each written with its code under the text's key.

    In "one two three aC" the letter a has the code C. The key is one of 16 permutations of the
    eight `LETTERS`, under which each letter has each code twice. The next pair costs a decoder that
    reads the latest three tokens 2 log 8 nats, since it never sees another pair, and a reader of
    the key half. A text has 4 ``length`` tokens with its end, which takes the place of the first
    word. There are no levels, and always eight letters.
    """
    key, parts = draws.below(2 * len(LETTERS)), list[str]()
    codes = Draws(f"keys/{key // len(LETTERS)}").shuffled(LETTERS.upper())
    for _ in range(length):
        letter = draws.below(len(LETTERS))
        pair = LETTERS[letter] + codes[(letter + key) % len(LETTERS)]
        parts += ["one", "two", "three", pair]
    return " ".join(parts[1:])


Task = Literal["recall", "hops", "cipher"]
TASKS: dict[Task, Callable[[int, int, int, Draws], str]] = {
    "recall": recall,
    "hops": hops,
    "cipher": cipher,
}
"""Writer of a text by its length, the highest level of its questions and the letters of its map."""


class SyntheticText(TextDataModule):
    """Generated documents whose hard tokens are known, one task per mechanism.

    ======  ==========================================================================
    task    text
    ======  ==========================================================================
    recall  facts stated once and asked for many sentences later (memory), see `recall`
    hops    questions that take a known number of look-ups (depth), see `hops`
    cipher  letters under a key that a window does not show (latents), see `cipher`
    ======  ==========================================================================

    The splits have sizes of their own: `val_fraction` and `test_fraction` have no effect. Nothing
    is downloaded.

    Args:
        task: What the texts are about.
        length: Sentences, questions or pairs of a training text.
        held_out_length: The same of the other texts. By default as in training.
        levels: Highest level of a question, below ``letters`` hops.
        letters: Letters of the map of hops, from 2 to 8.
        train_documents: Training texts.
        val_documents: Validation texts; 0: no such split.
        test_documents: Test texts; 0: no such split.
        document_seed: Seed of the texts, non-negative; text i of a split is a pure function of
            (task, document_seed, split, i), of the length, levels and letters.
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
        held_out_length: int | None = None,
        levels: int = 6,
        letters: int = len(LETTERS),
        train_documents: int = 10_000,
        val_documents: int = 200,
        test_documents: int = 400,
        document_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        problems = choice_problems(tuple(TASKS), task=task)
        problems += range_problems(1, train_documents=train_documents)
        sizes = {"val_documents": val_documents, "test_documents": test_documents}
        problems += range_problems(0, **sizes, document_seed=document_seed)
        problems += range_problems(2, length=length, held_out_length=held_out_length)
        problems += range_problems(2, len(LETTERS), letters=letters)
        raise_problems(problems + range_problems(1, letters - 1, levels=levels))
        self._task, self._document_seed = task, document_seed
        held_out = length if held_out_length is None else held_out_length
        self._lengths: dict[Split, int] = {"train": length, "val": held_out, "test": held_out}
        self._levels, self._letters = levels, letters
        counts = (train_documents, val_documents, test_documents)
        self._sizes: dict[Split, int] = dict(zip(SPLITS, counts, strict=True))

    def source(self) -> dict[str, Any]:
        source = {**super().source(), "generator": VERSION}
        if self._task != "hops":  # has neither: its texts keep their identity
            del source["levels"], source["letters"]
        return source

    def expects(self, split: Split) -> bool:
        return self._sizes[split] > 0

    def how_to_get(self, split: Split) -> str:
        return f"Set {split}_documents above 0."

    def documents(self, split: Split) -> Iterator[str]:
        write, length = TASKS[self._task], self._lengths[split]
        for index in range(self._sizes[split]):
            draws = Draws(f"{self._task}/{self._document_seed}/{split}/{index}")
            yield write(length, self._levels, self._letters, draws)
