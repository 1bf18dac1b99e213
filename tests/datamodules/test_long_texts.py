"""Long texts in parts: the tokens and bytes of the whole text, in bounded memory."""

import json
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tiktoken
import tokenizers as hf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from datamodules import long_texts
from datamodules.tokenizers import (
    BytesTokenizer,
    JsonTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    train_bpe,
)

CORPUS = [
    "The cat sat on the mat. It's 1234 o'clock,\n\nthe caf\u00e9 is closed; we'll see the end.",
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u3002 the the cat",
    "\u041c\u0438\u0440, \u0434\u0430.",
] * 8
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
# As in cl100k_base, Llama 3 and Qwen, and in DeepSeek V3, whose splits follow each other.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    "[\r\n]",
    r"\s?[A-Za-z\u00b5\u00c0-\u024f]+",
    r"\s?[!-/:-~]+",
    r"\s+$",
    "[\u4e00-\u9fa5]+",
)


def trained(inner: hf.Tokenizer, trainer, **changes) -> JsonTokenizer:
    inner.train_from_iterator(CORPUS, trainer)
    data = {**json.loads(inner.to_str()), **changes}
    return JsonTokenizer("trained", json.dumps(data))


def bpe(entries: int = 700, *, special: list[str] = SPECIAL + BYTES, **model) -> tuple:
    options = {"special_tokens": special, "show_progress": False, "vocab_size": entries}
    return hf.Tokenizer(models.BPE(**model)), trainers.BpeTrainer(**options)


def byte_level(*splits: str) -> JsonTokenizer:
    inner, trainer = bpe(special=SPECIAL)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    steps = [pre_tokenizers.Split(hf.Regex(split), "isolated") for split in splits]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    inner.decoder = decoders.ByteLevel()
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(inner, trainer)


def added() -> JsonTokenizer:
    """With added tokens that are found before anything splits."""
    tokenizer = byte_level(CL100K)
    inner = hf.Tokenizer.from_str(tokenizer.json_text)
    inner.add_tokens(["\n\n", "   ", hf.AddedToken("the end", single_word=True), "cat,"])
    return JsonTokenizer("added", inner.to_str())


def added_after_prefix() -> JsonTokenizer:
    """As Mistral v3: text after an added token that is not normalised gets a prefix again."""
    inner = hf.Tokenizer.from_str(without_split().json_text)
    inner.add_tokens([hf.AddedToken(",", normalized=False), "cat"])
    return JsonTokenizer("added", inner.to_str())


def without_split() -> JsonTokenizer:
    """As Llama 2 and Mistral: a prefix, and nothing splits."""
    inner, trainer = bpe(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    space = normalizers.Replace(" ", "\u2581")
    prefixed = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    changed = json.loads(_file(normalizer=prefixed))["normalizer"]
    return trained(inner, trainer, pre_tokenizer=None, normalizer=changed)


def gemma() -> JsonTokenizer:
    """As Gemma: no prefix, spaces are replaced before a split that then finds none."""
    inner, trainer = bpe(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    file = json.loads(
        _file(
            normalizer=normalizers.Replace(" ", "\u2581"),
            pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        )
    )
    return trained(inner, trainer, **{k: file[k] for k in ("normalizer", "pre_tokenizer")})


def _file(**parts) -> str:
    inner = hf.Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(inner, name, part)
    return inner.to_str()


def unigram(*, split: bool = True, prefix: str = "always") -> JsonTokenizer:
    inner = hf.Tokenizer(models.Unigram())
    steps = [normalizers.NFKC(), normalizers.Replace(hf.Regex(" {2,}"), " ")]
    inner.normalizer = normalizers.Sequence([normalizers.Strip(left=True, right=False), *steps])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    inner.decoder = decoders.Metaspace(prepend_scheme=prefix)
    options = {"vocab_size": 120, "show_progress": False, "unk_token": "<unk>"}
    trainer = trainers.UnigramTrainer(special_tokens=SPECIAL, **options)
    if split:
        return trained(inner, trainer)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    return trained(
        inner, trainer, pre_tokenizer=json.loads(_file(pre_tokenizer=metaspace))["pre_tokenizer"]
    )


def old_t5() -> JsonTokenizer:
    """White space vanishes, and every word gets a prefix."""
    inner = hf.Tokenizer(models.Unigram())
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.Metaspace()
    options = {"vocab_size": 120, "show_progress": False, "unk_token": "<unk>"}
    return trained(inner, trainers.UnigramTrainer(special_tokens=SPECIAL, **options))


def word_piece() -> JsonTokenizer:
    inner = hf.Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    return trained(inner, trainer)


class Encoding(TiktokenTokenizer):
    def __init__(self, pattern: str) -> None:
        ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
        ranks |= {b"12": 259, b"123": 260, b"  ": 261, b"\n\n": 262, b".\n": 263}
        options = {"mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 270}}
        self._encoding = tiktoken.Encoding("small", pat_str=pattern, **options)
        self.name, self.vocab_size, self.eos_id, self._threads = "small", 271, 270, 2
        self._special_ids = {270}


GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

KINDS = {
    "gpt2": lambda: Encoding(GPT2),
    "cl100k": lambda: Encoding(CL100K),
    "byte_level": byte_level,
    "llama3": lambda: byte_level(CL100K),
    "deepseek": lambda: byte_level(*DEEPSEEK),
    "added": added,
    "llama2": without_split,
    "mistral_v3": added_after_prefix,
    "gemma": gemma,
    "unigram": unigram,
    "unigram_first": lambda: unigram(prefix="first"),
    "unigram_whole": lambda: unigram(split=False),
    "t5": old_t5,
    "word_piece": word_piece,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    return KINDS[request.param]()


def library_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    if isinstance(tokenizer, TiktokenTokenizer):
        return tokenizer._encoding.encode_ordinary(text)
    return tokenizer._inner.encode(text, add_special_tokens=False).ids


fragments = st.sampled_from([*long_texts._AROUND, *" \n.,aeTx", "cat", "the end", " the", "\uff0c"])
texts = st.lists(fragments | st.characters(exclude_categories=["Cs"]), max_size=60).map("".join)


@settings(max_examples=60, deadline=None)
@given(text=texts, part=st.integers(1, 12))
@example(text="a cat", part=1)
def test_parts_have_the_tokens_and_bytes_of_the_whole(tokenizer, text, part):
    text = text.replace("</s>", "")
    whole = tokenizer.encode_measured([text])[0]
    later = tokenizer.measure_continuations([text])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "PART", part)
        patch.setattr(long_texts, "TOGETHER", 3)
        (ids,) = tokenizer.encode_arrays([text])
        measured = tokenizer.encode_measured(["", text, "a"])[1]
        continued = tokenizer.measure_continuations([text])[0]
    assert ids.tolist() == library_ids(tokenizer, text)
    for row, expected in ((measured, whole), (continued, later)):
        assert [a.tolist() for a in row] == [a.tolist() for a in expected]
    assert measured[1].sum() in (len(text.encode()), 0)


def test_a_normalised_added_token_keeps_its_space_in_continuations():
    """After a Prepend normaliser "cat" only matches after a space, in continuations as well."""
    tokenizer = added_after_prefix()
    cat = tokenizer._inner.token_to_id("cat")
    assert library_ids(tokenizer, "e cat")[-1] == cat
    assert cat not in library_ids(tokenizer, "ecat")
    assert tokenizer.encode_continuation(" cat") == [cat]
    assert cat not in tokenizer.encode_continuation("cat")


def test_every_kind_is_cut(tokenizer, monkeypatch):
    monkeypatch.setattr(long_texts, "PART", 40)
    spans = list(long_texts.parts_of("The cat sat on the mat. " * 50, tokenizer.sure_cuts, ""))
    assert len(spans) >= 24  # of 1200 characters
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]


def test_text_without_spaces_is_cut_at_its_punctuation(monkeypatch):
    monkeypatch.setattr(long_texts, "PART", 40)
    text = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u3002" * 40
    for pattern in (GPT2, CL100K):
        assert len(list(long_texts.parts_of(text, Encoding(pattern).sure_cuts, ""))) >= 10


def cuts_at(tokenizer: Tokenizer, text: str) -> list[int]:
    return [match.start() for match in (tokenizer.sure_cuts or re.compile("(?!)")).finditer(text)]


def test_no_cut_where_tokens_may_cross():
    assert cuts_at(byte_level(CL100K), "ab cd\nef") == [2, 5]
    assert cuts_at(byte_level(r"\w+\s?"), "ab cd") == []  # takes the space along
    assert cuts_at(byte_level(r'"[^"]*"|\S+|\s+'), "ab cd") == []  # quotes stay whole
    assert cuts_at(byte_level(r"[\s\S]{1,5}"), "ab cd\nef. g") == []  # counts from the start
    words_in_a_row, trainer = bpe(unk_token="<unk>")
    words_in_a_row.normalizer = normalizers.Replace(" ", "\u2581")
    trainer.initial_alphabet = list("abcdefghijklmnopqrstuvwxyz,.\u2581")
    joined = trained(words_in_a_row, trainer)
    assert any(re.search("[a-z]\u2581", piece) for piece in joined._vocab)
    assert 2 not in cuts_at(joined, "ab cd")
    inner = hf.Tokenizer.from_str(byte_level(CL100K).json_text)
    inner.add_tokens([hf.AddedToken("cat", rstrip=True)])  # takes the spaces after it along
    assert cuts_at(JsonTokenizer("rstrip", inner.to_str()), "cat sat") == []
    assert BytesTokenizer().sure_cuts is None


def test_a_continuation_lacks_only_its_first_prefix():
    """The words after it are the same as within a text that contains it."""
    t5 = old_t5()
    whole, later = t5.encode("a cat sat"), t5.encode_continuation("cat sat")
    assert t5.decode([*t5.encode("a"), *later]) == "acat sat"
    assert t5.encode_continuation(" cat sat") == whole[len(t5.encode("a")) :]
    mistral = added_after_prefix()
    for rest in (" end,the end", " end, so"):  # the prefix after the comma stays
        whole = mistral.encode(f"the{rest}")
        assert mistral.encode_continuation(rest) == whole[len(mistral.encode("the")) :]


def test_white_space_at_the_beginning_of_a_continuation_is_not_stripped():
    tokenizer = unigram(prefix="first")  # its normaliser strips texts on the left
    assert tokenizer.decode_continuation(tokenizer.encode_continuation(" cat")) == " cat"
    ((ids, sizes),) = tokenizer.measure_continuations([" cat"])
    assert ids.tolist() == tokenizer.encode("the cat")[len(tokenizer.encode("the")) :]
    assert sizes.sum() == 4


def test_a_huge_text_that_cannot_be_cut_is_said_to_be_so(monkeypatch):
    monkeypatch.setattr(long_texts, "PART", 40)
    monkeypatch.setattr(long_texts, "HUGE", 100)
    tokenizer = byte_level(r"[\s\S]{1,5}")
    text = "The cat sat. " * 10
    with pytest.warns(UserWarning, match=r"'trained' encodes 130 characters .*data\.separator"):
        (ids,) = tokenizer.encode_arrays([text])
    assert ids.tolist() == library_ids(tokenizer, text)


def test_memory_of_a_long_text_does_not_grow_with_its_tokens():
    """Encoding 2.6 MB whole takes 100 to 150 bytes for each byte of text."""
    program = textwrap.dedent(
        """
        from datamodules.tokenizers import train_bpe

        def peak():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))

        text = "The cat sat on the mat. It was the end of the day, number 1234.\\n" * 40_000
        tokenizer = train_bpe("bpe:280", [text[:6400]])
        tokenizer.encode_arrays([text[:500_000]])
        before = peak()
        (ids,) = tokenizer.encode_arrays([text])
        print((peak() - before) / len(text), len(ids))
        """
    )
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    growth, tokens = map(float, output.split())
    assert tokens > 4e5
    assert growth < 25


def test_training_on_a_long_text_counts_the_words_of_the_whole(monkeypatch):
    text = " ".join(CORPUS)
    inner, trainer = bpe(320, special=["<|endoftext|>"])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer.initial_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator([text], trainer)
    monkeypatch.setattr(long_texts, "PART", 40)
    assert train_bpe("bpe:320", [text]).encode(text) == inner.encode(text).ids


def test_ids_take_as_little_room_as_the_vocabulary_allows(monkeypatch):
    monkeypatch.setattr(long_texts, "PART", 40)
    ((ids, sizes),) = byte_level().encode_measured(["The cat sat on the mat. " * 9])
    assert (ids.dtype, sizes.dtype) == (np.uint16, np.int32)
