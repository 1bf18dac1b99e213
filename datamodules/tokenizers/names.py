"""From a tokenizer's name to what it means, and to the tokenizer."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datamodules.tokenizers.interface import (
    BytesTokenizer,
    Tokenizer,
    TokenizerUnavailableError,
    first_line,
)
from datamodules.tokenizers.json_file import JsonTokenizer, bpe_size
from datamodules.tokenizers.tiktoken_encoding import TiktokenTokenizer

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
