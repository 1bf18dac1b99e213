"""The father-son probe: a relation is stated in the prompt, and asked for in both directions.

"The son of X is Y." is followed by "The son of X is" (normal) or "The father of Y is" (reversed).
The answer's first token is compared with that of the other name (section 3.4 and Fig. 5 of the
Thought Gestalt paper; an error in reverse is the in-context reversal curse).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from evaluation.perplexity.scoring import standard_error
from evaluation.reversal.models import Asked

CONDITIONS = ("normal", "reversed")
CANDIDATES = ("target", "distractor")
STATEMENT = "The son of {father} is {son}."
QUERIES = {"normal": " The son of {father} is", "reversed": " The father of {son} is"}

BATCH = 32
"""Prompts read at once."""

Pair = tuple[str, str]
"""Names of father and son."""


@dataclass(frozen=True)
class Answers:
    """Negative log-likelihoods of target and distractor for each pair of names."""

    nll: Tensor
    """Nats, float64 (2, 2, N): conditions, candidates, pairs."""

    def __len__(self) -> int:
        """Returns N."""
        return self.nll.shape[2]

    @property
    def margins(self) -> Tensor:
        """NLL(distractor) - NLL(target) in nats, (2, N); negative: the wrong name is likelier."""
        return self.nll[:, 1] - self.nll[:, 0]

    def samples(self) -> dict[str, Tensor]:
        """Returns what is averaged over pairs, float64 (N,) each.

        For both conditions: ``<condition>_target`` and ``_distractor`` (NLL in nats), ``_margin``
        (nats), ``_error_rate`` (1 where the margin is negative).
        """
        found = {}
        for condition, nll, margin in zip(CONDITIONS, self.nll, self.margins, strict=True):
            for candidate, values in zip(CANDIDATES, nll, strict=True):
                found[f"{condition}_{candidate}"] = values
            found[f"{condition}_margin"] = margin
            found[f"{condition}_error_rate"] = (margin < 0).double()
        return found

    def means(self) -> dict[str, float]:
        """Returns the means of ``samples``."""
        return {name: values.mean().item() for name, values in self.samples().items()}

    def standard_errors(self) -> dict[str, float]:
        """Returns the standard errors of ``means``, as if pairs were independent; nan of one."""
        return {name: standard_error(values) for name, values in self.samples().items()}


def single_tokens(
    names: Iterable[str], prompt: Callable[[Sequence[str]], list[int]]
) -> dict[str, int]:
    """Returns the ids of the names that are one token behind a space; the others are left out.

    ``prompt`` returns the ids of unfinished sentences (`Asked.prompt`): names stand at the end of a
    query there, so that tokenizers which treat the beginning of a text specially, or mark its end,
    need no care. Of names that share an id the first one stays.
    """
    stem = "The son of the man is"
    before = prompt([stem])
    found: dict[int, str] = {}
    for name in names:
        ids = prompt([f"{stem} {name}"])
        if len(ids) == len(before) + 1 and ids[:-1] == before:
            found.setdefault(ids[-1], name)
    return {name: i for i, name in found.items()}


def draw_pairs(names: Sequence[str], count: int, seed: int) -> list[Pair]:
    """Returns different ordered pairs of two names, drawn uniformly; all if there are fewer.

    Args:
        names: at least two.
        count: how many pairs.
        seed: of the draw.
    """
    others = len(names) - 1
    total = len(names) * others
    drawn = random.Random(seed).sample(range(total), min(count, total))
    places = (divmod(number, others) for number in drawn)
    return [(names[i], names[j + (j >= i)]) for i, j in places]


def ask(model: Asked, pairs: Sequence[Pair], ids: Mapping[str, int]) -> Answers:
    """Returns the answers of a model.

    Args:
        model: what is asked.
        pairs: names of father and son.
        ids: token of each name.
    """
    prompts, wanted = [], []
    for condition in CONDITIONS:
        for father, son in pairs:
            prompts.append(one_prompt(model, (father, son), condition))
            target, distractor = (son, father) if condition == "normal" else (father, son)
            wanted.append((ids[target], ids[distractor]))
    nll = torch.empty(len(prompts), 2, dtype=torch.float64)
    with tqdm(total=len(prompts), desc="asking", unit=" prompts", disable=None) as bar:
        for rows in equal_lengths(prompts):
            log_probs = model.next_log_probs(torch.tensor([prompts[row] for row in rows]))
            candidates = torch.tensor([wanted[row] for row in rows])
            nll[rows] = -log_probs.gather(1, candidates).double()
            bar.update(len(rows))
    return Answers(nll.view(2, len(pairs), 2).transpose(1, 2))


def one_prompt(model: Asked, pair: Pair, condition: str) -> list[int]:
    """Returns what a model reads: the statement about a pair, and the query of a condition."""
    father, son = pair
    parts = (STATEMENT, QUERIES[condition])
    return model.prompt([part.format(father=father, son=son) for part in parts])


def equal_lengths(prompts: Sequence[Sequence[int]], most: int = BATCH) -> Iterator[list[int]]:
    """Yields the numbers of prompts of one length, up to ``most`` at once: none needs padding."""
    by_length: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(row)
    for rows in by_length.values():
        for start in range(0, len(rows), most):
            yield rows[start : start + most]
