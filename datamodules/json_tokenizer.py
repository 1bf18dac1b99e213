"""Tokenizers of the ``tokenizers`` library: published tokenizer.json files and ``bpe:N``.

This module settles two questions that such a file leaves open (`special_tokens` settles a third):

- Bytes per token: only a plain byte-level vocabulary has tokens of a fixed size; otherwise the
library's offsets say which characters of the text each token covers.
- Continuations: SentencePiece vocabularies put a space before a text ("dummy prefix"), which a text
that continues another one must not get, and their decoders remove one.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.long_texts import members, sure_cuts, word_parts
from datamodules.special_tokens import (
    EOS_TEXT,
    SPECIAL_TOKENS_FILE,
    SpecialTokens,
    check_special_tokens,
    find_special_tokens,
    legacy_special_tokens,
)
from datamodules.tokenizer_base import Row, Tokenizer, first_line

MIN_BPE_ENTRIES = 257  # one entry per byte value, and EOS


def special_tokens_of(name: str, path: Path) -> SpecialTokens:
    """Returns the special tokens of a tokenizer.json and the configs next to it.

    Raises:
        ValueError: If it is not UTF-8, or `JsonTokenizer` rejects it.
    """
    folder = path.parent if path.name == "tokenizer.json" else None
    return find_special_tokens(name, _loaded(name, _read(name, path)), folder)


class JsonTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library, rebuilt from the text of its ``tokenizer.json``.

    Args:
        name: The requested name.
        json_text: Content of the file.
        special: Its special tokens. Defaults to EOS by name and no BOS, as in checkpoints and text
            stores of versions before special_tokens.json.

    Attributes:
        is_legacy: Whether its special tokens are what those versions chose.

    Raises:
        ValueError: If the file is broken or has no known end-of-text token.
    """

    def __init__(self, name: str, json_text: str, special: SpecialTokens | None = None) -> None:
        # Otherwise a process that forks after a parallel encode prints a warning per data-loading
        # worker.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self.name = name
        self.json_text = json_text
        self._inner = inner = _loaded(name, json_text)
        self._vocab: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        legacy = legacy_special_tokens(self._vocab)
        self.is_legacy = special is None or special == legacy
        self.special = special = special or legacy or find_special_tokens(name, inner)
        check_special_tokens(name, self._vocab, special)
        self._keep_special_apart(inner)
        self.vocab_size = max(self._vocab.values()) + 1
        self.eos_id, *_ = self.stop_ids = tuple(self._vocab[text] for text in special.eos)
        self.text_bos_id = None if special.bos is None else self._vocab[special.bos]
        steps = _steps(inner.pre_tokenizer)
        types = {step["type"] for step in (*steps, *_steps(inner.decoder))}
        self._byte_level = "ByteLevel" in types
        self._splits_at_spaces = "WhitespaceSplit" in types
        prefixed = any(step.get("add_prefix_space") for step in steps)
        self.exact_bytes = self._byte_level and inner.normalizer is None and not prefixed
        self._spelled = self._find_spelled()

    @classmethod
    def from_file(cls, name: str, path: Path) -> "JsonTokenizer":
        """Reads a tokenizer.json and its configs; files with other names have no configs.

        Raises:
            ValueError: If it is not UTF-8, or the constructor rejects it.
        """
        return cls(name, _read(name, path), special_tokens_of(name, path))

    @classmethod
    def from_store(cls, name: str, folder: Path) -> "JsonTokenizer":
        """Reads the tokenizer of a text store, which an older version may have written."""
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        path = folder / SPECIAL_TOKENS_FILE
        if not path.is_file():
            return cls(name, text)
        return cls(name, text, SpecialTokens.from_state(json.loads(path.read_text())))

    def files(self) -> dict[str, str]:
        """Returns the files that a text store keeps of this tokenizer, as text by name."""
        files = {"tokenizer.json": self.json_text}
        if not self.is_legacy or self.special != self.by_names:
            files[SPECIAL_TOKENS_FILE] = json.dumps(self.special.state())
        return files

    @cached_property
    def by_names(self) -> SpecialTokens | None:
        """Special tokens according to the file alone, without configs; None if it has none."""
        try:
            return find_special_tokens(self.name, _loaded(self.name, self.json_text))
        except ValueError:
            return None

    def _keep_special_apart(self, inner: Any) -> None:
        """Removes special tokens from decoded text, and encodes text that spells them as text."""
        # Marks tokens as special if the file did not; their ids stay. An ordinary piece, e.g. a
        # line ending, that ends answers but not documents stays text.
        added = {token.content for token in inner.get_added_tokens_decoder().values()}
        eos, *stops = self.special.eos
        bos = [] if self.special.bos is None else [self.special.bos]
        inner.add_special_tokens([eos, *(text for text in stops if text in added), *bos])
        inner.encode_special_tokens = True

    @cached_property
    def _continuing(self) -> Any:
        """The same tokenizer without a dummy prefix, for texts that continue another one."""
        data = json.loads(self.json_text)
        changed = _without_prefix(data)
        if changed == data:
            return self._inner
        inner = _loaded(self.name, json.dumps(changed))
        self._keep_special_apart(inner)
        return inner

    # Text to ids

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` alone; text that spells special tokens is ordinary text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._spelled:
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        return [[int(i) for i in ids] for ids, _ in self.encode_measured(texts)]

    def encode_continuation(self, text: str) -> list[int]:
        """Returns the ids of a text that continues another one, without a dummy prefix."""
        return [int(i) for i in self.measure_continuations([text])[0][0]]

    def encode_measured(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return self._in_pairs(texts, continues=False)

    def measure_continuations(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return self._in_pairs(texts, continues=True)

    def _in_pairs(
        self, texts: Sequence[str], *, continues: bool
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns ids and the bytes that each id covers; long texts are encoded in parts."""
        if self.exact_bytes:
            return super().encode_measured(texts)
        later = partial(self._measured, continues=False)
        rows = self._in_parts(texts, later, partial(self._measured, continues=continues))
        return [(ids, sizes) for ids, sizes in rows]

    def _measured(self, texts: Sequence[str], *, continues: bool) -> list[Row]:
        """Returns ids and the bytes that each id covers, for whole texts."""
        if not continues:
            return self._rows(texts, self._inner)
        heads = [self._before_prefixes.match(text).group() for text in texts]  # type: ignore[union-attr]
        tails = [text[len(head) :] for head, text in zip(heads, texts, strict=True)]
        rows = zip(self._rows(heads, self._continuing), self._rows(tails, self._inner), strict=True)
        return list(map(_joined, rows, zip(heads, tails, strict=True)))

    def _rows(self, parts: Sequence[str], reader: Any) -> list[Row]:
        """Returns ids and bytes of parts, none of whose text becomes a special token."""
        encodings = reader.encode_batch(parts, add_special_tokens=False)
        rows: list[Row] = []
        for part, encoding in zip(parts, encodings, strict=True):
            first, *rest = self._around_special(part, encoding)
            if rest:
                pieces = [*self._rows([first], reader), *self._measured(rest, continues=True)]
                rows.append(_joined(pieces, [first, *rest]))
            else:
                ids = np.array(encoding.ids, dtype=np.int64)
                rows.append((ids, covered_bytes(part, encoding.offsets)))
        return rows

    @cached_property
    def _before_prefixes(self) -> re.Pattern[str]:
        """Pattern of the beginning of a continuation, up to the next regular dummy prefix.

        If whitespace splits words, each word has a prefix, and some files put one after every
        added token.
        """
        if self._continuing is self._inner:
            return re.compile("(?s:.*)")
        if self._splits_at_spaces:
            return re.compile(r"\S*")
        steps = _steps(self._inner.pre_tokenizer)
        once = any(step.get("prepend_scheme") == "first" for step in steps)
        # normalisers only see text between added tokens that are matched before they act
        early = any(step["type"] == "Prepend" for step in _steps(self._inner.normalizer))
        added = [t.content for t in self._added if not once and not (early and t.normalized)]
        ends = "|".join([*map(re.escape, sorted(added, key=len, reverse=True)), r"\Z"])
        return re.compile(f"(?s:.*?)(?:{ends})")

    @property
    def _added(self) -> list[Any]:
        """The added tokens that ordinary text can become."""
        return [t for t in self._inner.get_added_tokens_decoder().values() if not t.special]

    def _around_special(self, text: str, encoding: Any) -> list[str]:
        """Cuts a text within each span that became a special token, which no text may become."""
        cuts = []
        if self._spelled:
            cuts = [
                a + 1
                for i, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)
                if i in self._spelled
                and b - a > 1
                and (i != self._unknown[0] or text[a:b] == self._unknown[1])
            ]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    @cached_property
    def _unknown(self) -> tuple[int | None, str | None]:
        """Id and text of the token for unknown characters, if the model has one."""
        model = json.loads(self.json_text)["model"]
        i, text = model.get("unk_id"), model.get("unk_token")
        if i is not None:
            return i, self._inner.id_to_token(i)
        return (None, None) if text is None else (self._vocab.get(text), text)

    def _find_spelled(self) -> frozenset[int]:
        """Returns special ids that the model produces from ordinary text, as Unigram models do."""
        added = self._inner.get_added_tokens_decoder().values()
        texts = [token.content for token in added if token.special and len(token.content) > 1]
        texts = [text for text in texts if self._inner.model.token_to_id(text) is not None]
        probes = [f"a{text}b {text}" for text in texts]
        encodings = self._inner.encode_batch(probes, add_special_tokens=False)
        pairs = zip(texts, encodings, strict=True)
        return frozenset(i for text, e in pairs if (i := self._vocab[text]) in e.ids)

    # Long texts

    @cached_property
    def sure_cuts(self) -> re.Pattern[str] | None:
        """Pattern of positions at which a cut leaves the tokens unchanged; None if unknown."""
        if any(token.rstrip for token in self._added):  # they absorb the whitespace after them
            return None
        texts = [
            *(token.content for token in self._added),
            *self.special.eos,
            self.special.bos or "",
        ]

        def allowed(letters: str, mark: str) -> bool:
            """Returns whether no added token, matched before any split, crosses the cut."""
            across = re.compile(f"[{letters}]{re.escape(mark)}")
            return not any(across.search(text) for text in texts)

        return sure_cuts(self._pre_tokens, allowed=allowed, apart=self._never_joined)

    def _pre_tokens(self, text: str) -> list[str]:
        """Returns the pre-tokens of a text, which the model encodes independently."""
        inner = self._inner
        text = text if inner.normalizer is None else inner.normalizer.normalize_str(text)
        if inner.pre_tokenizer is None:
            return [text]
        return [part for part, _ in inner.pre_tokenizer.pre_tokenize_str(text)]

    def _never_joined(self, letters: str, firsts: set[str]) -> bool:
        """Returns whether no vocabulary piece has such a letter directly before one of `firsts`."""
        pieces = self._independent_pieces
        # Characters without a piece would merge with unknown characters before them.
        if pieces is None or not firsts <= self._vocab.keys():
            return False
        every = "".join(self._pre_tokens("".join(members(letters))))
        if not re.fullmatch(f"\u2581?[{letters}]*", every):  # normalised to other letters
            return False
        return not re.search(f"[{letters}][{re.escape(''.join(firsts))}]", pieces)

    @cached_property
    def _independent_pieces(self) -> str | None:
        """All pieces of a vocabulary, or None if a token can depend on distant text."""
        from tokenizers import models

        model = self._inner.model
        by_place = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        is_bpe = isinstance(model, models.BPE)
        if isinstance(model, models.Unigram) or (
            is_bpe and not any(getattr(model, key) for key in by_place)
        ):
            return "\0".join(self._vocab)
        return None

    def use_one_core(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonTokenizer, (self.name, self.json_text, self.special)

    # Ids to text

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` without special ids; broken UTF-8 becomes U+FFFD."""
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=True))

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` after other text, keeping a leading space."""
        if self._byte_level:
            return self.decode(ids)
        before = self._anchor
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    @cached_property
    def _anchor(self) -> list[int]:
        """Ids of a short text that precedes continuations in decoding."""
        return next(ids for text in ("a", ".", "0", " ") if (ids := self.encode(text)))

    def state(self) -> dict[str, Any]:
        """Returns the state with the whole ``tokenizer.json``; a checkpoint needs no other file."""
        state: dict[str, Any] = {"kind": "json", "name": self.name, "json": self.json_text}
        return state if self.is_legacy else {**state, "special": self.special.state()}

    @cached_property
    def byte_pieces(self) -> frozenset[int]:
        """Ids of byte-fallback pieces; a run of them decodes to U+FFFD if any byte is invalid."""
        if self._byte_level:
            return frozenset()
        return frozenset(i for piece, i in self._vocab.items() if _BYTE_PIECE.fullmatch(piece))

    @property
    def text_changes(self) -> str | None:
        if self.exact_bytes:
            return None
        plain = self._restored(_PLAIN)
        if _PLAIN not in plain:
            return "cannot restore plain words"
        # A change to every text, e.g. a space before it, must not be attributed to each probe.
        changed = [
            change
            for change, text in _PROBES
            if self._restored(text) != plain.replace(_PLAIN, text, 1)
        ]
        if plain != _PLAIN or self._restored(f" {_PLAIN}") != f" {_PLAIN}":
            changed.insert(0, "leading spaces")
        return f"cannot restore {', '.join(changed)}" if changed else None

    def _restored(self, text: str) -> str:
        return self.decode(self.encode(text))

    @property
    def bos_and_eos(self) -> str:
        """The chosen special tokens with their ids, for messages."""
        bos = self.special.bos
        begins = "no BOS" if bos is None else f"BOS {bos!r} ({self.text_bos_id})"
        stops = zip(self.special.eos, self.stop_ids, strict=True)
        eos = ", ".join(f"{text!r} ({i})" for text, i in stops)
        return f"{begins}, EOS {eos}"

    @property
    def description(self) -> str:
        """One line with the chosen special tokens, their ids, and the changes by encoding."""
        changes = "" if self.text_changes is None else f"; it {self.text_changes}"
        return f"tokenizer={self.name!r} has {self.bos_and_eos}{changes}."

    def _byte_counts(self) -> Sequence[int]:
        counts = [0] * self.vocab_size
        for piece, i in self._vocab.items():
            # each character of a byte-level piece stands for one byte
            counts[i] = len(piece) if self._byte_level else _piece_bytes(piece)
        for i, added in self._inner.get_added_tokens_decoder().items():
            counts[i] = 0 if added.special else len(added.content.encode("utf-8"))
        return counts


_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# A text that lossy tokenizers leave unchanged, and texts with one feature that they change.
_PLAIN = "cat"
_PROBES = (
    ("case", "Cat"),
    ("spaces", "cat  cat\n\tcat "),
    ("punctuation", 'cat:"don\'t(cat),3.5%!"'),
    ("accents", "caf\u00e9"),
    ("decomposed accents", "cafe\u0301"),
    ("compatibility characters", "cat\ufb01\uff41\u00bd"),
    ("other scripts", "cat\u4f60\u597d\u043c\u0438\u0440"),
    ("emoji", "cat\U0001f642"),
)


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"tokenizer={name!r} is not UTF-8 text ({error.reason} at byte {error.start} of "
            f"{path}), so it is not a tokenizer.json. Name another file."
        ) from error


def _loaded(name: str, json_text: str) -> Any:
    """Returns the library's tokenizer, without padding and truncation.

    Raises:
        ValueError: If the library cannot read it.
    """
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_str(json_text)
    except Exception as error:
        raise ValueError(
            f"tokenizer={name!r} is not a readable tokenizer.json ({first_line(error)}). Save it "
            "again with tokenizers.Tokenizer.save."
        ) from error
    inner.no_padding()
    inner.no_truncation()
    return inner


def _joined(rows: Sequence[Row], parts: Sequence[str]) -> Row:
    """Returns ids and bytes of consecutive parts; bytes of a part without ids go to the last id.

    Args:
        rows: Ids and bytes of each part.
        parts: The text of each part.
    """
    ids, sizes = (np.concatenate(values) for values in zip(*rows, strict=True))
    ends = np.cumsum([len(row[0]) for row in rows])
    for text, row, end in zip(parts, rows, ends, strict=True):
        if not len(row[0]) and end:
            sizes[end - 1] += len(text.encode("utf-8"))
    return ids, sizes


def covered_bytes(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the UTF-8 bytes of `text` that each token covers, int64; they sum to the text's size.

    Characters that no token covers (dropped by a normaliser) count for the next token, or at the
    end for the last one; if tokens share a character, the last of them gets its bytes.

    Args:
        text: The encoded text.
        offsets: Start and end of each token in `text`, in characters.
    """
    if not offsets:
        return np.empty(0, dtype=np.int64)
    spans = np.array(offsets, dtype=np.int64)
    ends = np.append(np.minimum(spans[:-1, 1], spans[1:, 0]), len(text))
    ends = np.maximum.accumulate(ends)
    if not text.isascii():
        code = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        sizes = 1 + (code > 0x7F).astype(np.int64) + (code > 0x7FF) + (code > 0xFFFF)
        ends = np.concatenate([[0], np.cumsum(sizes)])[ends]
    return np.diff(ends, prepend=0)


def _without_prefix(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer.json that neither adds nor removes spaces before a text."""
    changed = json.loads(json.dumps(data))
    for part in _parts(changed.get("pre_tokenizer")):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
        elif part.get("add_prefix_space"):
            part["add_prefix_space"] = False
    for part in _parts(changed.get("normalizer")):
        if part.get("type") == "Strip":
            part["strip_left"] = False
    parts = list(_parts(changed.get("normalizer")))
    normalizer = changed.get("normalizer")
    if isinstance(normalizer, dict) and normalizer.get("type") == "Prepend":
        changed["normalizer"] = None
    elif isinstance(normalizer, dict) and "normalizers" in normalizer:
        kept = [part for part in normalizer["normalizers"] if part.get("type") != "Prepend"]
        normalizer["normalizers"] = kept
    # An added token that is normalised had the prefix too: "cat" only matched "\u2581cat".
    replaced = {part["content"]: " " for part in parts if part.get("pattern") == {"String": " "}}
    for part in parts:
        if part["type"] == "Prepend":
            prefix = replaced.get(part["prepend"], part["prepend"])
            for token in changed.get("added_tokens", ()):
                if token["normalized"] and not token["special"]:
                    token["content"] = prefix + token["content"]
    return dict(changed)


def _piece_bytes(piece: str) -> int:
    """Returns the number of bytes that a piece of a character vocabulary represents."""
    if _BYTE_PIECE.fullmatch(piece):
        return 1
    return len(piece.removeprefix("##").replace("\u2581", " ").encode("utf-8"))


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """Yields every object with a ``"type"`` in a part of a tokenizer.json, at any depth."""
    if isinstance(part, dict):
        if "type" in part:
            yield part
        for value in part.values():
            yield from _parts(value)
    elif isinstance(part, list):
        for value in part:
            yield from _parts(value)


def _steps(part: Any) -> list[dict[str, Any]]:
    """Returns the JSON steps of a normaliser, pre-tokenizer or decoder of the library."""
    return [] if part is None else list(_parts(json.loads(part.__getstate__())))


# Tokenizers trained on the corpus


def bpe_size(name: str) -> int:
    """Returns N of ``bpe:N``.

    Raises:
        ValueError: If N is not a number, or too small.
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
        ValueError: If the text is too small for that many entries.
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
    # The trainer only counts words, but holds the words of a text with their positions.
    inner.train_from_iterator(word_parts(texts, inner.pre_tokenizer, name), trainer)
    if inner.get_vocab_size() != size:
        raise ValueError(
            f"tokenizer={name!r}: the train split yields only {inner.get_vocab_size()} entries. "
            f"Pass 'bpe:{inner.get_vocab_size()}' or fewer, or 'bytes'."
        )
    return JsonTokenizer(name, inner.to_str())
