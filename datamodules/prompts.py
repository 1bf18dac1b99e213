"""Prompts for `predict`: texts from a file, as batches whose every token is scored."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from datamodules.loader import Batch
from datamodules.readers import check_utf8, parse_json
from datamodules.tokenizers import Tokenizer
from datamodules.windows import IGNORE, as_batch


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts in a txt file (one a line, blank lines skipped) or a jsonl file.

    Raises:
        ValueError: The file is missing, empty or not UTF-8, or a jsonl line has no text in its
            field ``prompt``, or text
            that is not UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"there is no prompts file {path}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompts file {path} is not UTF-8 text ({error})") from error
    numbered = [(n, line.rstrip("\r")) for n, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"the prompts file {path} is empty")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_field(path, n, line) for n, line in numbered]


def _field(path: Path, number: int, line: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{path}, line {number}: expected {{"prompt": "text"}}')
    check_utf8(row["prompt"], f"{path}, line {number}")
    return str(row["prompt"])


class DealtPrompts:
    """Which prompts are in which batch of a rank.

    Args:
        prompts: Texts.
        batch_size: Rows of a batch; rows that would lie after the last prompt are left out, but
            every rank has equally many batches, so that the last may repeat a prompt.
        rank: This process among `world_size`.
        world_size: Processes that share the prompts.
    """

    def __init__(
        self, prompts: Sequence[str], *, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self._prompts, self._batch_size = prompts, batch_size
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        """Returns the batches of each rank."""
        return -(-len(self._prompts) // (self._batch_size * self._world_size))

    def _numbers(self, n: int) -> range:
        """Returns the numbers of the prompts of batch `n` of this rank."""
        first = (n * self._world_size + self._rank) * self._batch_size
        last = len(self._prompts) - 1
        return range(min(first, last), min(first + self._batch_size, last + 1))


class PromptSource(DealtPrompts):
    """Batches of prompts as a model reads them before it continues them.

    Each stands after a token of its own (an EOS), so that its first token is scored too. Batches
    are those of `windows.as_batch`, as wide as their longest prompt, with ``prompt``, the
    list of texts. ``sequence_id`` is the prompt's number in the file.

    Args:
        prompts: Texts.
        tokenizer: Encodes them.
        block_size: Longest prompt that the model can read, in tokens.
        batch_size: Rows of a batch; see `DealtPrompts`.
        rank: This process among `world_size`.
        world_size: Processes that share the prompts.

    Raises:
        ValueError: A prompt is longer than `block_size`.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        tokenizer: Tokenizer,
        *,
        block_size: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(prompts, batch_size=batch_size, rank=rank, world_size=world_size)
        self._tokenizer = tokenizer
        self._ids = [tokenizer.prompt_ids(prompt) for prompt in prompts]
        for number, ids in enumerate(self._ids):
            if len(ids) - 1 > block_size:
                raise ValueError(
                    f"prompt {number + 1} has {len(ids) - 1} tokens, the model reads block_size="
                    f"{block_size}. Shorten it."
                )

    def batch(self, n: int) -> Batch:
        """Returns batch `n` of this rank."""
        numbers = self._numbers(n)
        ids = [self._ids[number] for number in numbers]
        width = max(2, *map(len, ids))
        rows = np.full((len(ids), width), IGNORE, dtype=np.int64)
        for row, tokens in zip(rows, ids, strict=True):
            row[: len(tokens)] = tokens
        batch = as_batch(
            rows,
            np.array(numbers),
            eos_id=self._tokenizer.eos_id,
            token_bytes=self._tokenizer.token_bytes,
        )
        return {**batch, "prompt": [self._prompts[number] for number in numbers]}
