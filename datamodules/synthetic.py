"""Synthetic texts that each need one mechanism, at positions known by construction."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from datamodules.base import choice_problems, raise_problems, range_problems
from datamodules.reasoning.kinship import NAMES, Draws
from datamodules.store import SPLITS, Split
from datamodules.text import TextDataModule

PEOPLE = (*NAMES["male"][:16], *NAMES["female"][:16])
THINGS = ("ball", "book", "coin", "drum", "key", "lamp", "ring", "rope")
LETTERS, HOP, VALUES = "abcdefgh", "x", "pqr"
STATED, ASKED, FILLER = "{} has the {}.", "{} gives the {}.", "It rains."


def recall(length: int, levels: int, letters: int, draws: Draws) -> str:
    """Returns a text of ``length`` sentences that states facts, and asks for each at most once.

    "Anna has the coin." states a fact about one of the `THINGS`, drawn uniformly. Only "Anna gives
    the coin." repeats it, any number of sentences later. One question in four is about the latest
    fact not yet asked for and the others are about any of these, so distances are both short and
    long. A fifth of the sentences are filler, and all of them once each of the 32 people has had a
    fact and a question (from about 80 sentences on). ``levels`` and ``letters`` have no effect.
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
    """Returns a map of ``letters``, followed by ``length`` questions of 1 to ``levels`` hops.

    "Map ac ce ea ..." lists the successor of each letter in one cycle of all letters, in random
    order: c follows a, and e follows c. The question "axx" has the answer "e", two hops from a. In
    a byte-level BPE each word is one token, so all hops happen within the question's token.
    """
    alphabet = LETTERS[:letters]
    cycle = draws.shuffled(alphabet)
    follows = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    parts = ["Map", *draws.shuffled([letter + follows[letter] for letter in alphabet])]
    for _ in range(length):
        start, count = draws.below(len(cycle)), draws.between(1, levels)
        parts += [cycle[start] + HOP * count, cycle[(start + count) % len(cycle)]]
    return " ".join(parts)


def operands(length: int, levels: int, letters: int, draws: Draws) -> str:
    """Returns a map of ``letters``, then ``length`` times an update, a question and its answer.

    "Map br cq ap ..." gives each letter a value, p, q or r, and the update "cr" gives c another
    draw. The question "cab", of 1 to ``levels`` operands, has the answer "rpr", the latest values
    of its letters in order. In a byte-level BPE each word is one token, so all operands are looked
    up within the question's token. As the latest values of several letters differ in age, a single
    head learns only slowly to look several up at once.
    """
    alphabet = LETTERS[:letters]
    value = {letter: draws.pick(VALUES) for letter in alphabet}
    parts = ["Map", *draws.shuffled([letter + value[letter] for letter in alphabet])]
    for _ in range(length):
        letter = draws.pick(alphabet)
        value[letter] = draws.pick(VALUES)
        question = draws.shuffled(alphabet)[: draws.between(1, levels)]
        answer = "".join(value[letter] for letter in question)
        parts += [letter + value[letter], "".join(question), answer]
    return " ".join(parts)


def cipher(length: int, levels: int, letters: int, draws: Draws) -> str:
    """Returns a text of ``length`` letters, each with its code under the text's key.

    In "one two three aC" the letter a has the code C. The key is one of 16 permutations of the
    eight `LETTERS`; each letter has each code under two of them. A decoder with a window of three
    tokens never sees another pair, so the next pair costs it 2 log 8 nats; with the key it costs
    half. The text drops the first word, so it has 4 ``length`` tokens with its EOS. ``levels`` and
    ``letters`` have no effect.
    """
    key, parts = draws.below(2 * len(LETTERS)), list[str]()
    codes = Draws(f"keys/{key // len(LETTERS)}").shuffled(LETTERS.upper())
    for _ in range(length):
        letter = draws.below(len(LETTERS))
        pair = LETTERS[letter] + codes[(letter + key) % len(LETTERS)]
        parts += ["one", "two", "three", pair]
    return " ".join(parts[1:])


Task = Literal["recall", "hops", "operands", "cipher"]
TASKS: dict[Task, Callable[[int, int, int, Draws], str]] = {
    "recall": recall,
    "hops": hops,
    "operands": operands,
    "cipher": cipher,
}
"""Generator of a text from its length, levels and letters, by task."""
VERSIONS: dict[Task, int] = {"recall": 1, "hops": 1, "operands": 2, "cipher": 1}
"""Version of each generator, part of the data's identity; a change of its texts increments it."""


class SyntheticText(TextDataModule):
    """Generated documents whose hard tokens are known, one task per mechanism.

    ========  ==========================================================================
    task      text
    ========  ==========================================================================
    recall    facts stated once and asked for many sentences later (memory), see `recall`
    hops      questions that take a known number of look-ups (depth), see `hops`
    operands  questions of several operands in one token (forks), see `operands`
    cipher    letters under a key that a window does not show (latents), see `cipher`
    ========  ==========================================================================

    Each split has a size, so `val_fraction` and `test_fraction` have no effect. Nothing is
    downloaded.

    Args:
        task: Task of the texts, see the table.
        length: Number of sentences, questions or pairs of a training text.
        held_out_length: Number of sentences, questions or pairs of validation and test texts.
            Null uses ``length``.
        levels: Maximum number of hops or operands of a question, less than ``letters``.
        letters: Number of letters in the map of hops or operands, from 2 to 8.
        train_documents: Number of training texts.
        val_documents: Number of validation texts; 0 omits the split.
        test_documents: Number of test texts; 0 omits the split.
        document_seed: Seed of the texts, non-negative; text i of a split is a pure function of
            (task, document_seed, split, i), of the length, levels and letters.
        **kwargs: See `TextDataModule`.

    Raises:
        ValueError: If an argument is out of range.
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
        source = {**super().source(), "generator": VERSIONS[self._task]}
        if self._task not in ("hops", "operands"):  # others ignore both and keep their identity
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
