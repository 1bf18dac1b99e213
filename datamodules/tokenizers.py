"""Tokenizers with one interface, chosen by a plain name.

| name | tokenizer |
|---|---|
| ``bytes`` | 256 byte values and EOS; needs nothing |
| ``gpt2``, ``cl100k_base``, ... | a tiktoken encoding |
| ``path/tokenizer.json`` | a file of the ``tokenizers`` library |
| ``owner/name`` | the ``tokenizer.json`` of a repository on the Hugging Face hub |
| ``bpe:1024`` | a byte-level BPE of exactly that many entries, trained on the corpus |

Text never becomes a special id: a document that spells out ``<|endoftext|>`` is encoded as those
13 characters.
"""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor


class TokenizerUnavailableError(ValueError):
    """A tokenizer that could not be fetched; the message says what to pass or set instead."""


class Tokenizer(ABC):
    """Maps text to ids and back.

    Attributes:
        name: The name it was asked for by, e.g. ``"gpt2"`` or ``"bpe:1024"``.
        vocab_size: V, the largest id plus one.
        eos_id: The id that ends every stored document.
        gains_from_processes: Whether tokenising costs more than passing text between processes.
    """

    gains_from_processes: bool = True

    name: str
    vocab_size: int
    eos_id: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without EOS; special-token text is ordinary text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special ids vanish, broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns plain values from which `tokenizer_from_state` rebuilds this tokenizer."""

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that are no text: targets among them are no lexical ones."""
        return (self.eos_id,)

    @property
    def stop_id(self) -> int:
        """The id after which a generated text ends."""
        return self.eos_id

    def prompt_ids(self, text: str) -> list[int]:
        """Returns what a model reads before it continues `text`: documents stand after an EOS."""
        return [self.eos_id, *self.encode(text)]

    def sentence_prompt_ids(self, sentences: Sequence[str]) -> list[int]:
        """Returns `prompt_ids` of a text whose sentences are known; they join to that text."""
        return self.prompt_ids("".join(sentences))

    @abstractmethod
    def _byte_counts(self) -> Sequence[int]:
        """Returns the UTF-8 bytes of each id, V entries."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, in parallel where the library can."""
        return [self.encode(text) for text in texts]

    def use_one_core(self) -> None:
        """Keeps batches on the calling thread, for a process that is one of many."""
        return  # most have no threads of their own

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as int64 or smaller arrays (what the text store writes)."""
        return [np.asarray(ids, dtype=np.int64) for ids in self.encode_batch(texts)]

    @cached_property
    def token_bytes(self) -> Tensor:
        """UTF-8 bytes that each id stands for, (V,) int64; 0 for EOS, special and unused ids.

        Exact for byte-level vocabularies. For others (SentencePiece, WordPiece) it counts the
        visible piece.
        """
        return torch.tensor(self._byte_counts(), dtype=torch.int64)


class BytesTokenizer(Tokenizer):
    """One id a UTF-8 byte, and EOS = 256: a vocabulary of 257 that needs no files."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    gains_from_processes = False

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the UTF-8 bytes of each text as uint8 arrays."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the byte ids; EOS vanishes, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def state(self) -> dict[str, str]:
        """Returns ``{"kind": "bytes"}``."""
        return {"kind": "bytes"}

    def _byte_counts(self) -> Sequence[int]:
        return [1] * 256 + [0]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding.

    Args:
        name: One of the encodings that tiktoken knows.

    Raises:
        TokenizerUnavailableError: The encoding's files are not cached and cannot be downloaded.
    """

    def __init__(self, name: str) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:
            raise TokenizerUnavailableError(
                f"tokenizer={name!r}: tiktoken could not get the encoding's files "
                f"({type(error).__name__}: {first_line(error)}). Set TIKTOKEN_CACHE_DIR to the "
                "absolute path of a folder that holds them, or pass the path of a local "
                "tokenizer.json, 'bytes' or 'bpe:1024'."
            ) from error
        self.name = name
        self._threads = os.cpu_count() or 1
        self.vocab_size = self._encoding.n_vocab
        self.eos_id = self._encoding.eot_token
        special = self._encoding.special_tokens_set
        self._special_ids = {self._encoding.encode_single_token(text) for text in special}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; special-token text is ordinary text."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, on all cores."""
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=self._threads)

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text as uint32 arrays, on all cores."""
        if self._threads == 1:
            return [self._array(text) for text in texts]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._array, texts))

    def _array(self, text: str) -> np.ndarray:
        """Returns the ids of `text` as the library lays them down, without a list between."""
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def use_one_core(self) -> None:
        """Keeps batches on the calling thread."""
        self._threads = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what rebuilds this tokenizer in another process."""
        return TiktokenTokenizer, (self.name,)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; special ids vanish, broken UTF-8 becomes U+FFFD."""
        return self._encoding.decode([int(i) for i in ids if int(i) not in self._special_ids])

    def state(self) -> dict[str, str]:
        """Returns the encoding's name."""
        return {"kind": "tiktoken", "name": self.name}

    def _byte_counts(self) -> Sequence[int]:
        return [self._bytes_of(i) for i in range(self.vocab_size)]

    def _bytes_of(self, i: int) -> int:
        if i in self._special_ids:
            return 0
        try:
            return len(self._encoding.decode_single_token_bytes(i))
        except KeyError:  # some vocabularies have unused ids
            return 0


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
        """Returns the bytes that a piece of the vocabulary stands for."""
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
        ValueError: The text is too small for that many entries.
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


# From a name to a tokenizer

TIKTOKEN_SIZES = {
    "gpt2": 50257,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "p50k_edit": 50284,
    "cl100k_base": 100277,
    "o200k_base": 200019,
    "o200k_harmony": 201088,
}
HUB_SIZES = {
    "EleutherAI/gpt-neox-20b": 50277,
    "openai-community/gpt2": 50257,
    "Qwen/Qwen2.5-0.5B": 151665,
    "Qwen/Qwen2.5-1.5B": 151665,
    "Qwen/Qwen2.5-3B": 151665,
    "Qwen/Qwen2.5-7B": 151665,
}


@dataclass(frozen=True)
class TokenizerSpec:
    """What a tokenizer name means, known without loading anything.

    Attributes:
        kind: The family.
        name: The name as given.
        vocab_size: V where it is known beforehand, else None.
    """

    kind: Literal["bytes", "tiktoken", "file", "hub", "bpe"]
    name: str
    vocab_size: int | None

    @property
    def identity(self) -> str:
        """What goes into a data fingerprint: the name, and for a local file its content."""
        if self.kind == "file":
            return (
                f"json:{hashlib.sha256(Path(self.name).expanduser().read_bytes()).hexdigest()[:16]}"
            )
        return self.name


def parse_tokenizer(name: str) -> TokenizerSpec:
    """Returns what `name` means.

    Raises:
        ValueError: Not a name of any family (the message lists them), a missing file, or a BPE that
            is too small.
    """
    if name == "bytes":
        return TokenizerSpec("bytes", name, BytesTokenizer.vocab_size)
    if name in TIKTOKEN_SIZES:
        return TokenizerSpec("tiktoken", name, TIKTOKEN_SIZES[name])
    if name.startswith("bpe:"):
        return TokenizerSpec("bpe", name, bpe_size(name))
    if name.endswith(".json"):
        if not Path(name).expanduser().is_file():
            raise ValueError(
                f"tokenizer={name!r}: there is no such file. Pass the path of a tokenizer.json."
            )
        return TokenizerSpec("file", name, None)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
        return TokenizerSpec("hub", name, HUB_SIZES.get(name))
    raise ValueError(
        f"tokenizer={name!r} is not known. Possible are 'bytes', a tiktoken encoding "
        f"({', '.join(TIKTOKEN_SIZES)}), the path of a tokenizer.json, a hub name such as "
        "'EleutherAI/gpt-neox-20b', or 'bpe:1024' (trained on the corpus, any size from 257)."
    )


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer of that name, downloading it where it must.

    Raises:
        ValueError: Unknown name, a ``bpe:N`` (it exists only in a prepared text store), or a
            vocabulary of another size than the one known for this name.
        TokenizerUnavailableError: The download failed.
    """
    spec = parse_tokenizer(name)
    if spec.kind == "bpe":
        raise ValueError(
            f"tokenizer={name!r} is trained on a corpus: prepare a data module with it and take "
            "its tokenizer."
        )
    if spec.kind == "bytes":
        return BytesTokenizer()
    if spec.kind == "tiktoken":
        return check_vocab_size(TiktokenTokenizer(name), spec)
    path = Path(name).expanduser() if spec.kind == "file" else _download(name)
    return check_vocab_size(JsonTokenizer.from_file(name, path), spec)


def check_vocab_size(tokenizer: Tokenizer, spec: TokenizerSpec) -> Tokenizer:
    """Returns `tokenizer`, whose vocabulary must have the size that its name promised.

    Raises:
        ValueError: The sizes differ.
    """
    if spec.vocab_size is not None and tokenizer.vocab_size != spec.vocab_size:
        raise ValueError(
            f"tokenizer={spec.name!r} has {tokenizer.vocab_size} entries where {spec.vocab_size} "
            "were expected: the file is not the one that this name stands for. Delete the cached "
            "copy, or pass a local tokenizer.json by path."
        )
    return tokenizer


def _download(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except Exception as error:
        raise TokenizerUnavailableError(
            f"tokenizer={name!r}: could not get tokenizer.json from the hub "
            f"({type(error).__name__}: {first_line(error)}). Pass the path of a local "
            "tokenizer.json, or set HF_HOME to a folder that has it cached, or use 'bytes' or "
            "'bpe:1024'."
        ) from error


def tokenizer_from_state(state: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer that `Tokenizer.state` described.

    Raises:
        ValueError: `state` has another ``kind`` than bytes, tiktoken, json or sentences, or lacks
            what that kind has.
    """
    try:
        return _from_state(state)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"tokenizer state of kind {state.get('kind')!r} is broken ({error}); take another "
            "checkpoint."
        ) from error


def _from_state(state: Mapping[str, Any]) -> Tokenizer:
    kind = state.get("kind")
    if kind == "bytes":
        return BytesTokenizer()
    if kind == "tiktoken":
        return TiktokenTokenizer(state["name"])
    if kind == "json":
        return JsonTokenizer(state["name"], state["json"])
    if kind == "sentences":
        from datamodules.sentences.tokenizer import SentenceTokenizer

        return SentenceTokenizer.from_state(state)
    raise ValueError(
        f"tokenizer state has kind={kind!r}; known are bytes, tiktoken, json and sentences."
    )
