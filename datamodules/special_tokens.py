"""The special tokens BOS and EOS of published tokenizer.json files.

Texts begin with BOS if the file's post-processor adds one, whatever add_bos_token in
tokenizer_config.json says: transformers reads it only without a tokenizer.json. EOS comes from
generation_config.json (the first of a list ends documents, generation stops at each), config.json,
tokenizer_config.json and special_tokens_map.json next to the file, and, as a last resort, from
well-known names.
"""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EOS_TEXT = "<|endoftext|>"
# Names of the end-of-text token, tried in this order if no config names one.
_EOS_CANDIDATES = (EOS_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
SPECIAL_TOKENS_FILE = "special_tokens.json"
"""File with `SpecialTokens` next to a tokenizer.json that a text store or a checkpoint wrote."""


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.json, as text.

    Attributes:
        bos: Token that begins every text, or None if there is none.
        eos: Tokens at which generation stops, at least one; the first one ends documents.
    """

    bos: str | None
    eos: tuple[str, ...]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "SpecialTokens":
        """Rebuilds the tokens from `state`.

        Raises:
            ValueError: If it has no EOS, or a value has the wrong type.
        """
        bos, eos = state["bos"], state["eos"]
        texts = isinstance(eos, list | tuple) and all(isinstance(text, str) for text in eos)
        if not (bos is None or isinstance(bos, str)) or not texts or not eos:
            raise ValueError(
                f"bos={reprlib.repr(bos)}, eos={reprlib.repr(eos)}: bos must be the text of a "
                "token or null, and eos a list of at least one."
            )
        return cls(bos, tuple(eos))

    def __str__(self) -> str:
        """Describes the tokens, for messages."""
        begins = "no BOS" if self.bos is None else f"BOS {self.bos!r}"
        return f"{begins} and EOS {', '.join(map(repr, self.eos))}"

    def state(self) -> dict[str, Any]:
        """Returns the tokens as JSON values."""
        return {"bos": self.bos, "eos": list(self.eos)}


def legacy_special_tokens(vocab: Mapping[str, int]) -> SpecialTokens | None:
    """Returns the tokens that versions before special_tokens.json chose, by name alone."""
    eos = next((text for text in _EOS_CANDIDATES if text in vocab), None)
    return None if eos is None else SpecialTokens(None, (eos,))


def find_special_tokens(name: str, inner: Any, folder: Path | None = None) -> SpecialTokens:
    """Finds the special tokens of a tokenizer.json.

    Args:
        name: The tokenizer's name, for messages.
        inner: The ``tokenizers.Tokenizer`` of the file, without padding and truncation.
        folder: Folder that may have the model's `CONFIGS`. By default only names are used.

    Raises:
        ValueError: If neither a config nor a well-known name gives an end-of-text token, texts
            begin with several special tokens, or special_tokens.json is broken.
    """
    configs = {} if folder is None else _configs(folder)
    saved = configs.get(SPECIAL_TOKENS_FILE)
    if saved is not None and {"bos", "eos"} <= saved.keys():
        try:
            return SpecialTokens.from_state(saved)
        except ValueError as error:
            raise ValueError(
                f"{SPECIAL_TOKENS_FILE} of tokenizer={name!r} has {error} Fix or delete it."
            ) from error
    vocab = inner.get_vocab(with_added_tokens=True)
    texts = {i: text for text, i in vocab.items()}
    eos = next((known for values in _eos_values(configs) if (known := _known(values, texts))), ())
    if not eos:
        special = [t.content for t in inner.get_added_tokens_decoder().values() if t.special]
        listed = [text for text in _EOS_CANDIDATES if text in vocab]
        # special tokens first: "</s>" may be an ordinary HTML tag
        eos = tuple(sorted(listed, key=lambda text: text not in special)[:1])
    if not eos:
        names = ", ".join(sorted(special)[:10])
        more = f" and {len(special) - 10} more" if len(special) > 10 else ""
        raise ValueError(
            f"tokenizer={name!r} has no end-of-text token: looked for "
            f"{', '.join(_EOS_CANDIDATES)}; its special tokens are: {names or 'none'}{more}. Put "
            "a tokenizer_config.json with eos_token next to it, or add one of those names to its "
            "added_tokens."
        )
    bos = _leading_token(name, inner, texts)
    # if EOS also begins texts, the previous document's EOS serves as BOS
    return SpecialTokens(None if bos == eos[0] else bos, eos)


def _known(values: Iterable[Any], texts: Mapping[int, str]) -> tuple[str, ...]:
    """Returns the texts of existing tokens, given as ids, texts or AddedToken dicts."""
    plain = [v.get("content") if isinstance(v, Mapping) else v for v in values]
    texts_of_ids = [texts.get(v) if isinstance(v, int) else v for v in plain]
    existing = set(texts.values())
    return tuple(dict.fromkeys(t for t in texts_of_ids if isinstance(t, str) and t in existing))


def check_special_tokens(name: str, vocab: Mapping[str, int], special: SpecialTokens) -> None:
    """Raises a ValueError if the vocabulary of a tokenizer.json lacks a special token."""
    marks = [text for text in (special.bos, *special.eos) if text is not None]
    missing = [text for text in marks if text not in vocab]
    if missing:
        listed = ", ".join(map(reprlib.repr, missing[:10]))
        raise ValueError(
            f"tokenizer={name!r} has no token {listed}, which {SPECIAL_TOKENS_FILE} names as BOS "
            "or EOS. Fix or delete that file."
        )


CONFIGS = (
    "generation_config.json",
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""Files next to a tokenizer.json that name its special tokens."""


def _configs(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Reads the configs in a folder, skipping missing files and files without a JSON object."""
    configs: dict[str, Mapping[str, Any]] = {}
    for file in (SPECIAL_TOKENS_FILE, *CONFIGS):
        try:
            value = json.loads((folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(value, dict):
            configs[file] = value
    return configs


def _eos_values(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Yields the end-of-text values of each config, the most specific config first."""
    for file, key in (
        ("generation_config.json", "eos_token_id"),
        ("config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
    ):
        config = configs.get(file, {})
        inner = config.get("text_config")  # in models that also read images
        value = config.get(key)
        if value is None and isinstance(inner, Mapping):
            value = inner.get(key)
        yield value if isinstance(value, list) else [value]


def _encoded(inner: Any, text: str) -> Any:
    """Returns the library's encoding of a text, or None if its vocabulary cannot express it."""
    try:
        return inner.encode(text)
    except Exception:  # the library raises nothing more specific
        return None


def _leading_token(name: str, inner: Any, texts: Mapping[int, str]) -> str | None:
    """Returns the special token that the post-processor puts before a text.

    Raises:
        ValueError: If it puts several there, or one that the vocabulary lacks.
    """
    # Uses a piece of the vocabulary: around an empty text, leading and trailing special tokens are
    # indistinguishable.
    pieces = (texts[i] for i in sorted(texts))
    encodings = (item for piece in pieces if (item := _encoded(inner, piece)) is not None)
    encoding = next((item for item in encodings if not all(item.special_tokens_mask)), None)
    if encoding is None:
        return None
    leading = encoding.ids[: encoding.special_tokens_mask.index(0)]
    if len(leading) > 1 or not texts.keys() >= set(leading):
        raise ValueError(
            f"tokenizer={name!r} begins texts with the ids {leading}, but only one token of its "
            "vocabulary can begin a text. Change the post_processor of its tokenizer.json."
        )
    return texts[leading[0]] if leading else None
