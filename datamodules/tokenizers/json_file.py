"""Tokenizers that are a ``tokenizer.json``, and the byte-level BPE that is trained on a corpus."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.tokenizers.interface import Tokenizer, first_line

EOS_TEXT = "<|endoftext|>"
MIN_BPE_ENTRIES = 257  # one entry a byte value, and EOS
# Names of the end-of-text token in tokenizer.json files, the first one present is taken.
_EOS_CANDIDATES = (EOS_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class JsonTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library, rebuilt from the text of its ``tokenizer.json``.

    Args:
        name: The name it was asked for by.
        json_text: Content of the file.

    Raises:
        ValueError: The file is broken, has no known end-of-text token, or turns text into that
            token.
    """

    def __init__(self, name: str, json_text: str) -> None:
        import tokenizers

        # A process that forks after a parallel encode would otherwise print a warning per
        # data-loading worker.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self.name = name
        self.json_text = json_text
        try:
            inner = tokenizers.Tokenizer.from_str(json_text)
        except Exception as error:
            raise ValueError(
                f"tokenizer={name!r} is not a readable tokenizer.json ({first_line(error)}). Save "
                "it again with tokenizers.Tokenizer.save."
            ) from error
        eos = self._eos_text(inner)
        inner.add_special_tokens([eos])  # marks it special where the file did not; the id stays
        inner.encode_special_tokens = True  # special-token text in documents is ordinary text
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self.eos_id = inner.get_vocab(with_added_tokens=True)[eos]
        self._vocab: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values()) + 1
        if self.eos_id in self.encode(f"a{eos}b {eos}"):
            raise ValueError(
                f"tokenizer={name!r} turns the text {eos!r} into its end-of-text id even as "
                "ordinary text, so a document could end itself. Use a byte-level tokenizer."
            )

    @classmethod
    def from_file(cls, name: str, path: Path) -> "JsonTokenizer":
        """Returns the tokenizer in a file.

        Raises:
            ValueError: It is not UTF-8, or as in `__init__`.
        """
        try:
            return cls(name, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"tokenizer={name!r} is not UTF-8 text ({error.reason} at byte {error.start} of "
                f"{path}), so it is no tokenizer.json. Name another file."
            ) from error

    def _eos_text(self, inner: Any) -> str:
        found = next(
            (text for text in _EOS_CANDIDATES if inner.token_to_id(text) is not None), None
        )
        if found is None:
            special = sorted(
                t.content for t in inner.get_added_tokens_decoder().values() if t.special
            )
            raise ValueError(
                f"tokenizer={self.name!r} has no end-of-text token: looked for "
                f"{', '.join(_EOS_CANDIDATES)}; its special tokens are {special}. Add one of those "
                "names to its added_tokens."
            )
        return found

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` alone; special-token text is ordinary text."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, on all cores."""
        return [e.ids for e in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def use_one_core(self) -> None:
        """Keeps batches on the calling thread, in this whole process."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what rebuilds this tokenizer in another process."""
        return JsonTokenizer, (self.name, self.json_text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special ids vanish, broken UTF-8 becomes U+FFFD."""
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=True))

    def state(self) -> dict[str, str]:
        """Returns the whole ``tokenizer.json``, so that a checkpoint needs no other file."""
        return {"kind": "json", "name": self.name, "json": self.json_text}

    def _byte_counts(self) -> Sequence[int]:
        counts = [0] * self.vocab_size
        count = _piece_counter(json.loads(self.json_text))
        for piece, i in self._vocab.items():
            counts[i] = count(piece)
        for i, added in self._inner.get_added_tokens_decoder().items():
            counts[i] = 0 if added.special else len(added.content.encode("utf-8"))
        return counts


def _piece_counter(data: Mapping[str, Any]) -> Callable[[str], int]:
    """Returns a function from a vocabulary piece to the UTF-8 bytes that it stands for."""
    kinds = {str(kind) for part in ("pre_tokenizer", "decoder") for kind in _types(data.get(part))}
    if "ByteLevel" in kinds:
        return len  # each character of a piece stands for one byte

    def count(piece: str) -> int:
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return 1
        return len(piece.removeprefix("##").replace("\u2581", " ").encode("utf-8"))

    return count


def _types(part: Any) -> Iterable[str]:
    """Yields every ``"type"`` in a part of a tokenizer.json, nested sequences included."""
    if isinstance(part, dict):
        if "type" in part:
            yield part["type"]
        for value in part.values():
            yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)


def bpe_size(name: str) -> int:
    """Returns N of ``bpe:N``.

    Raises:
        ValueError: No number, or too small.
    """
    digits = name.removeprefix("bpe:")
    if not digits.isdecimal() or int(digits) < MIN_BPE_ENTRIES:
        raise ValueError(
            f"tokenizer={name!r}: write 'bpe:' and a number of entries, at least {MIN_BPE_ENTRIES} "
            "(256 byte values and EOS), e.g. 'bpe:1024'."
        )
    return int(digits)


def train_bpe(name: str, texts: Iterable[str]) -> JsonTokenizer:
    """Returns a byte-level BPE of exactly N entries, trained on `texts`; `name` is ``bpe:N``.

    Raises:
        ValueError: The text is too small for so many entries.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    size = bpe_size(name)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    if inner.get_vocab_size() != size:
        raise ValueError(
            f"tokenizer={name!r}: the train split yields only {inner.get_vocab_size()} entries. "
            f"Pass 'bpe:{inner.get_vocab_size()}' or fewer, or 'bytes'."
        )
    return JsonTokenizer(name, inner.to_str())
