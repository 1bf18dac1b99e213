"""``evaluate.py known_facts``: which facts of two-hop questions a model knows by itself.

Each fact is asked for as the public sets ask for it, a sentence to be continued ("The singer of
X is"), and greedily: `TwoHop(known_file=...)` keeps the questions whose two facts are known, the
parametric knowledge of Thinking States (Sec. 4.3).

NOTE(paper): the paper does not say how its questions were filtered. The protocol is that of the
public sets (Biran et al., arXiv 2406.12775): ten new tokens, and a fact is known if a name of its
object occurs in them, whatever the case; but only as whole words.

Answers are on the disk batch by batch: the same command continues where an interrupted one ended.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jsonargparse import ArgumentParser, Namespace
from tqdm import tqdm

from datamodules.files import expand
from datamodules.journals import append_durably, only_writer
from datamodules.readers import parse_json
from datamodules.reasoning.two_hop import Chain, Hop, check_csv, read_chains
from evaluation.arguments import add_device_arguments
from evaluation.devices import float32_products, pick_device
from evaluation.output import check_target, format_table, write_jsonl
from evaluation.pretrained import Pretrained


@dataclass
class AnswerJournal:
    """Answers by batch, in a hidden file next to the output until that is whole.

    A header that names the command, then a line for each batch of questions. Whole batches only: in
    another batch the same question has other padding, and with it other rounding.

    Attributes:
        output: The file that is to be written.
        made_by: All that decides what is written, in plain values of JSON.
        batches: What was written before, a list of texts a batch.

    Raises:
        ValueError: There is a journal of another command, or it is none.
    """

    output: Path
    made_by: Mapping[str, Any]
    batches: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Reads what is whole and cuts off the line that a killed process was writing."""
        self._path = self.output.with_name(f".{self.output.name}.journal")
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        try:
            header, *batches = [parse_json(line) for line in whole] or [self.made_by]
            found, self.batches = dict(header), [list(batch["written"]) for batch in batches]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"output ({self.output}): {self._path} is in the way and no journal of this "
                "command; remove it"
            ) from error
        for key, value in self.made_by.items():
            if found.get(key) != value:
                raise ValueError(
                    f"output ({self.output}): an interrupted command has begun it with another "
                    f"{key} ({found.get(key)}, now {value}); run that one again, name another "
                    f"file, or remove {self._path}"
                )
        os.truncate(self._path, sum(map(len, whole)))

    def append(self, written: list[str]) -> None:
        """Adds a batch, which is on the disk when this returns."""
        new = not self._path.exists() or not self._path.stat().st_size
        lines = [*([self.made_by] if new else []), {"written": written}]
        append_durably(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.batches.append(written)

    def finish(self) -> None:
        """Removes the file: the output is whole."""
        self._path.unlink(missing_ok=True)


# ---- the command


def names_one(text: str, names: Iterable[str]) -> bool:
    """Returns whether one of the names occurs in a text as whole words, whatever the case.

    Names of one character do not count.
    """
    return any(
        re.search(rf"(?<!\w){re.escape(name.strip())}(?!\w)", text, re.IGNORECASE)
        for name in names
        if len(name.strip()) > 1
    )


def ask(
    pretrained: Pretrained,
    hops: Iterable[Hop],
    output: Path,
    *,
    max_new_tokens: int = 10,
    batch_size: int = 32,
    made_by: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Returns what a model writes for the objects of facts, each question asked once.

    Columns: ``question``, ``object``, ``written``, and ``known``, whether that names the object.
    They are the keys of the lines of `output`, which is written once all answers are there; until
    then they are in a journal next to it, which a later call continues.

    Args:
        pretrained: A causal model.
        hops: The facts; of those with the same question the first counts.
        output: jsonl file; its folder exists.
        max_new_tokens: Longest continuation; only its first line counts.
        batch_size: Questions at once; they are sorted by length, and the result keeps their order.
        made_by: What else decides the answers, in plain values: a journal with another is refused.

    Raises:
        ValueError: A question leaves no room for an answer in the model's context, another process
            writes the output, or another command has begun it.
    """
    unique: dict[str, Hop] = {}
    for hop in hops:
        unique.setdefault(hop.question, hop)
    ids = {text: [*pretrained.start, *pretrained.encode(text)] for text in unique}
    _check_room(pretrained, max(map(len, ids.values()), default=0) + max_new_tokens)
    order = sorted(unique, key=lambda text: len(ids[text]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    sizes = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    digest = hashlib.sha256("\n".join(order).encode("utf-8", "replace")).hexdigest()[:16]
    with only_writer(output):
        journal = AnswerJournal(output, {**(made_by or {}), **sizes, "questions": digest})
        done = len(journal.batches)
        for texts in tqdm(
            batches[done:], "asking", len(batches), initial=done, unit=" batches", disable=None
        ):
            journal.append(_continue(pretrained, [ids[text] for text in texts], max_new_tokens))
        written = dict(zip(order, chain.from_iterable(journal.batches), strict=True))
        rows = [
            (text, hop.object, written[text], names_one(written[text], hop.names))
            for text, hop in unique.items()
        ]
        asked = pd.DataFrame(rows, columns=["question", "object", "written", "known"])
        write_jsonl(output, asked.to_dict("records"))
        journal.finish()
    return asked


def _check_room(pretrained: Pretrained, needed: int) -> None:
    if pretrained.context is not None and needed > pretrained.context:
        raise ValueError(
            f"hf ({pretrained.source}): the longest question needs {needed} tokens with its answer "
            f"and the model's context has {pretrained.context}; take a model with a longer one"
        )


def _continue(pretrained: Pretrained, rows: Sequence[list[int]], max_new_tokens: int) -> list[str]:
    """Returns the first lines of greedy continuations; questions are padded on the left."""
    width = max(map(len, rows))
    model, tokenizer = pretrained.model, pretrained.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    pad = 0 if pad is None else pad
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode(), float32_products(pretrained.precision):
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
        )
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return [text.strip().split("\n")[0] for text in texts]


def summary(chains: Sequence[Chain], asked: pd.DataFrame) -> dict[str, str]:
    """Returns how many facts, and questions with both facts, are known."""
    known = set(asked["question"][asked["known"]])
    both = sum({one.first.question, one.second.question} <= known for one in chains)
    return {
        "facts": str(len(asked)),
        "known facts": _percent(len(known), len(asked)),
        "two-hop questions": str(len(chains)),
        "with both facts known": _percent(both, len(chains)),
    }


def _percent(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.1f} %)"


def add_arguments(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--hf",
        type=str,
        required=True,
        help="Hub name or folder of a causal language model of transformers; bf16 rounds all of "
        "its weights.",
    )
    parser.add_argument(
        "--files",
        type=str | list[str],
        required=True,
        help="csv files of TwoHopFact or of Hopping Too Late: paths or globs.",
    )
    parser.add_argument(
        "--output",
        type=str,
        required=True,
        help="JSONL file to write; one that an interrupted command has begun is continued.",
    )
    parser.add_argument("--max_new_tokens", type=int, default=10, help="Longest answer, in tokens.")
    parser.add_argument("--batch_size", type=int, default=32, help="Questions asked at once.")
    add_device_arguments(parser)


def run(settings: Namespace) -> None:
    """Asks the model, prints how much it knows and writes the file."""
    target = check_target(settings.output)
    paths = expand(settings.files)
    if not paths:
        raise ValueError("files is empty; name at least one csv file")
    for path in paths:
        check_csv(path)
    chains = [one for path in paths for one in read_chains(path)]
    pretrained = Pretrained(settings.hf, pick_device(settings.device), settings.precision)
    asked = ask(
        pretrained,
        (hop for one in chains for hop in (one.first, one.second)),
        target,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        made_by={"hf": _identity(pretrained), "precision": settings.precision},
    )
    print(format_table(summary(chains, asked)))


def _identity(pretrained: Pretrained) -> str:
    """Returns a name for the weights: hub name and commit, or folder and the times of its files."""
    folder = Path(pretrained.source)
    if not folder.is_dir():
        return f"{pretrained.source}@{getattr(pretrained.model.config, '_commit_hash', None)}"
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{folder.resolve()}@{hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]}"
