"""Tokenizers with one interface, selected by name.

| name | tokenizer |
|---|---|
| ``bytes`` | 256 byte values and EOS; needs no files |
| ``gpt2``, ``cl100k_base``, ... | a tiktoken encoding |
| ``path/tokenizer.json`` | a file of the ``tokenizers`` library, with the configs next to it |
| ``path/of/a/folder`` | the folder of such a file, e.g. a published or exported model |
| ``owner/name`` | the ``tokenizer.json`` of a repository on the Hugging Face hub |
| ``bpe:1024`` | a byte-level BPE of exactly that many entries, trained on the corpus |

Text never becomes a special id: ``<|endoftext|>`` in a document is encoded as 13 characters.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from datamodules.json_tokenizer import JsonTokenizer, bpe_size
from datamodules.json_tokenizer import train_bpe as train_bpe
from datamodules.long_texts import sure_cuts
from datamodules.special_tokens import CONFIGS, SpecialTokens
from datamodules.tokenizer_base import Tokenizer, TokenizerUnavailableError, first_line
from lightning_models.atomic_files import write_whole


class BytesTokenizer(Tokenizer):
    """One id per UTF-8 byte, and EOS = 256: a vocabulary of 257 that needs no files."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    stop_ids = (256,)
    gains_from_processes = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the UTF-8 bytes of each text as uint8 arrays."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the byte ids without EOS; broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def state(self) -> dict[str, str]:
        """Returns ``{"kind": "bytes"}``."""
        return {"kind": "bytes"}

    def _byte_counts(self) -> Sequence[int]:
        return [1] * 256 + [0]


class TiktokenTokenizer(Tokenizer):
    """A tiktoken encoding.

    Args:
        name: Name of an encoding of tiktoken.

    Raises:
        TokenizerUnavailableError: If the encoding's files are not cached and cannot be downloaded.
    """

    def __init__(self, name: str) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:
            raise TokenizerUnavailableError(
                f"tokenizer={name!r}: tiktoken could not get the encoding's files "
                f"({type(error).__name__}: {first_line(error)}). Set TIKTOKEN_CACHE_DIR to the "
                "absolute path of a folder that has them, or pass the path of a local "
                "tokenizer.json, 'bytes' or 'bpe:1024'."
            ) from error
        self.name = name
        self._threads = os.cpu_count() or 1
        self.vocab_size = self._encoding.n_vocab
        self.eos_id = self._encoding.eot_token
        self.stop_ids = (self.eos_id,)
        special = self._encoding.special_tokens_set
        self._special_ids = {self._encoding.encode_single_token(text) for text in special}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; text never becomes a special token."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=self._threads)

    def _arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._threads == 1:
            return [self._array(text) for text in texts]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._array, texts))

    def _array(self, text: str) -> np.ndarray:
        """Returns the library's array of ids of `text`, without an intermediate list."""
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    @cached_property
    def sure_cuts(self) -> re.Pattern[str] | None:
        """Pattern of positions between matches of the encoding's pattern; no token crosses them."""
        import regex  # a dependency of tiktoken

        pattern = regex.compile(self._encoding._pat_str)
        return sure_cuts(lambda text: [match.group() for match in pattern.finditer(text)])

    def use_one_core(self) -> None:
        self._threads = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the name."""
        return TiktokenTokenizer, (self.name,)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` without special and unused ids; broken UTF-8 becomes U+FFFD."""
        return self._encoding.decode([int(i) for i in ids if int(i) not in self._textless_ids])

    @cached_property
    def _textless_ids(self) -> frozenset[int]:
        return frozenset(i for i, count in enumerate(self._byte_counts()) if count == 0)

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
    """Meaning of a tokenizer name, determined without loading anything.

    Attributes:
        family: Family of tokenizers.
        name: The name as given.
        vocab_size: V, or None if it is unknown before loading.
    """

    family: Literal["bytes", "tiktoken", "file", "hub", "bpe"]
    name: str
    vocab_size: int | None

    @property
    def path(self) -> Path:
        """The tokenizer.json of a local file or folder."""
        path = Path(self.name).expanduser()
        return path / "tokenizer.json" if path.is_dir() else path

    @property
    def identity(self) -> str:
        """Value for data fingerprints: the name or, for a local file, a hash of its content.

        Special tokens are part of it if they differ from what older versions chose.
        """
        if self.family != "file":
            return self.name
        identity = f"json:{hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]}"
        tokenizer = JsonTokenizer.from_file(self.name, self.path)
        if tokenizer.is_legacy:
            return identity
        return f"{identity}:{json.dumps(tokenizer.special.state())}"


def parse_tokenizer(name: str) -> TokenizerSpec:
    """Parses a tokenizer name.

    Raises:
        ValueError: If the name belongs to no family (the message lists them), the file is missing,
            or the BPE is too small.
    """
    if name == "bytes":
        return TokenizerSpec("bytes", name, BytesTokenizer.vocab_size)
    if name in TIKTOKEN_SIZES:
        return TokenizerSpec("tiktoken", name, TIKTOKEN_SIZES[name])
    if name.startswith("bpe:"):
        return TokenizerSpec("bpe", name, bpe_size(name))
    path = Path(name).expanduser()
    if name.endswith(".json") and not path.is_dir():
        if not path.is_file():
            raise ValueError(
                f"tokenizer={name!r}: no such file. Pass the path of a tokenizer.json."
            )
        return TokenizerSpec("file", name, None)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise ValueError(
                f"tokenizer={name!r} is a folder without a tokenizer.json. Save the tokenizer "
                "there with AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
        return TokenizerSpec("file", name, None)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.exists():
        return TokenizerSpec("hub", name, HUB_SIZES.get(name))
    raise ValueError(
        f"tokenizer={name!r} is unknown. Choose 'bytes', a tiktoken encoding "
        f"({', '.join(TIKTOKEN_SIZES)}), the path of a tokenizer.json or its folder, a hub name "
        "such as 'EleutherAI/gpt-neox-20b', or 'bpe:1024' (trained on the corpus, any size from "
        "257)."
    )


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer of a name, downloading it if necessary.

    Raises:
        ValueError: If the name is unknown or a ``bpe:N`` (which exists only in a prepared text
            store), or the vocabulary size differs from the known size for this name.
        TokenizerUnavailableError: If the download failed.
    """
    spec = parse_tokenizer(name)
    if spec.family == "bpe":
        raise ValueError(
            f"tokenizer={name!r} is trained on a corpus: prepare a data module with it and use "
            "the module's tokenizer."
        )
    if spec.family == "bytes":
        return BytesTokenizer()
    if spec.family == "tiktoken":
        return check_vocab_size(TiktokenTokenizer(name), spec)
    path = spec.path if spec.family == "file" else _download(name)
    return check_vocab_size(JsonTokenizer.from_file(name, path), spec)


def check_vocab_size(tokenizer: Tokenizer, spec: TokenizerSpec) -> Tokenizer:
    """Returns `tokenizer` after checking its vocabulary size against its name.

    Raises:
        ValueError: If the sizes differ.
    """
    if spec.vocab_size is not None and tokenizer.vocab_size != spec.vocab_size:
        raise ValueError(
            f"tokenizer={spec.name!r} has {tokenizer.vocab_size} entries instead of "
            f"{spec.vocab_size}: the file does not belong to this name. Delete the cached copy, or "
            "pass a local tokenizer.json by path."
        )
    return tokenizer


def _download(name: str) -> Path:
    import huggingface_hub

    try:
        path = Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except Exception as error:
        raise TokenizerUnavailableError(
            f"tokenizer={name!r}: could not get tokenizer.json from the hub "
            f"({type(error).__name__}: {first_line(error)}). Pass the path of a local "
            "tokenizer.json, or set HF_HOME to a folder that has it cached, or use 'bytes' or "
            "'bpe:1024'."
        ) from error
    unknown = _missing_configs(name)
    if unknown:
        rank_zero_warn(
            f"tokenizer={name!r}: the hub cannot be reached, and {', '.join(unknown)} of this "
            "repository are not cached. They may name a different EOS; load the tokenizer "
            "once with a network."
        )
    return path


def _missing_configs(name: str) -> list[str]:
    """Downloads the configs of a hub tokenizer into the folder of its tokenizer.json.

    Returns:
        Configs whose existence cannot be determined without the hub.

    Raises:
        TokenizerUnavailableError: If the hub has a config that cannot be downloaded.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unknown = []
    for file in CONFIGS:
        try:
            huggingface_hub.hf_hub_download(name, file)
        except LocalEntryNotFoundError:  # neither a network nor a cached file
            if huggingface_hub.try_to_load_from_cache(name, file) is None:
                unknown.append(file)
        except EntryNotFoundError:  # most repositories lack some of them
            continue
        except Exception as error:
            raise TokenizerUnavailableError(
                f"tokenizer={name!r}: could not get {file}, which names its special tokens, from "
                f"the hub ({type(error).__name__}: {first_line(error)}). Try again, or pass the "
                "path of a local folder with tokenizer.json and this file."
            ) from error
    return unknown


def file_at_hand(name: str) -> Path | None:
    """Returns the local tokenizer.json of a file, a folder, or a cached hub name.

    It downloads only missing configs, and returns None if that fails, and for tokenizers that are
    trained or defined by their name.
    """
    spec = parse_tokenizer(name)
    if spec.family == "file":
        return spec.path
    if spec.family != "hub":
        return None
    import huggingface_hub

    path = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    if not isinstance(path, str):
        return None
    try:
        return None if _missing_configs(name) else Path(path)
    except TokenizerUnavailableError:
        return None


def tokenizer_from_state(state: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds a tokenizer from its `Tokenizer.state`.

    Raises:
        ValueError: If the ``kind`` of `state` is not bytes, tiktoken, json or sentences, or `state`
            lacks a value of that kind.
    """
    family = state.get("kind")
    try:
        if family == "bytes":
            return BytesTokenizer()
        if family == "tiktoken":
            return TiktokenTokenizer(state["name"])
        if family == "json":
            saved = state.get("special")  # older checkpoints have none
            special = None if saved is None else SpecialTokens.from_state(saved)
            return JsonTokenizer(state["name"], state["json"], special)
        if family == "sentences":
            from datamodules.sentences.tokenizer import SentenceTokenizer

            return SentenceTokenizer.from_state(state)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"tokenizer state of kind {family!r} is broken ({error}); use another checkpoint."
        ) from error
    raise ValueError(
        f"tokenizer state has kind={family!r}; it must be bytes, tiktoken, json or sentences."
    )


def with_other_special_tokens(state: Mapping[str, Any], used: Tokenizer) -> JsonTokenizer | None:
    """Returns a saved tokenizer with the same file but a different BOS or EOS, or None.

    Args:
        state: `Tokenizer.state` of the saved tokenizer.
        used: The tokenizer in use.
    """
    if not isinstance(used, JsonTokenizer) or state.get("json") != used.json_text:
        return None
    saved = tokenizer_from_state(state)
    if isinstance(saved, JsonTokenizer) and saved.special != used.special:
        return saved
    return None


def refuse_other_special_tokens(
    state: Mapping[str, Any], used: Tokenizer, cache_dir: Path, option: str
) -> None:
    """Raises if a tokenizer file is now used with a BOS or EOS other than the checkpoint's.

    Args:
        state: `Tokenizer.state` in the checkpoint.
        used: The tokenizer in use.
        cache_dir: Folder in which to save the checkpoint's tokenizer, for the cure.
        option: Option that names the tokenizer.

    Raises:
        ValueError: If they differ; the message names both and the cure.
    """
    saved = with_other_special_tokens(state, used)
    if saved is None or not isinstance(used, JsonTokenizer):
        return
    path = keep_tokenizer(saved, cache_dir.absolute())
    raise ValueError(
        f"tokenizer={used.name!r} has {used.bos_and_eos}, but the checkpoint was trained with "
        f"{saved.bos_and_eos}: the rest of the run would read different text. Set "
        f"--{option} {path} --on_conflict typed to continue with the checkpoint's special "
        "tokens, or start a new run."
    )


def keep_tokenizer(tokenizer: JsonTokenizer, cache_dir: Path) -> Path:
    """Writes a tokenizer and its special tokens into a folder of `cache_dir`.

    Returns:
        Path of its tokenizer.json, which `load_tokenizer` reads with the same special tokens.
    """
    files = tokenizer.files()
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:16]
    folder = cache_dir / "tokenizers" / digest
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in reversed(files.items()):  # tokenizer.json last
        write_whole(folder / file, text)
    return folder / "tokenizer.json"
