"""Special tokens of published tokenizer.json files, and folders of them, as transformers has them.

Expected ids are those that ``AutoTokenizer`` or the ``tokenizers`` library give.
"""

import hashlib
import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from tokenizer_files import begun, byte_level, pieces, unigram, word_pieces
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from datamodules import LocalText
from datamodules.special_tokens import find_special_tokens
from datamodules.store import StoreError
from datamodules.tokenizers import (
    JsonTokenizer,
    TokenizerUnavailableError,
    load_tokenizer,
    parse_tokenizer,
    tokenizer_from_state,
)
from tests.datamodules.test_text_bytes import make_old

EOT = "<|endoftext|>"
TEXTS = ["the Cat sat.", "It paid 12,345:\n\tand  more", "caf\u00e9 \u4f60\u597d", "", "a"]


@pytest.fixture
def write(tmp_path):
    def write(inner, **configs):
        inner.save(str(tmp_path / "tokenizer.json"))
        for name, value in configs.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return write


@pytest.fixture
def options(tmp_path):
    """Of thirty short documents."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "the cat"}\n' * 30)
    return {"data_files": str(text), "cache_dir": str(tmp_path / "cache"), "block_size": 4}


# ---- against transformers


def gemma():
    """Gemma's kind: no dummy space, and ``</s>`` an ordinary token beside the special ``<eos>``."""
    vocab = {text: i for i, text in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "</s>"])}
    for sign in [f"<0x{byte:02X}>" for byte in range(256)] + list("\u2581abcdehnost</>"):
        vocab.setdefault(sign, len(vocab))
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    inner = hf.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_tokens(["</s>"])
    inner.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    return begun(inner, "<bos>")


def around(inner, first, last):
    """Puts special tokens around texts, or only on one side of them."""
    special = [(text, inner.token_to_id(text)) for text in (first, last) if text]
    single = [part for part in (first, "$A", last) if part]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return inner


def llama3():
    inner = begun(byte_level("<|begin_of_text|>", "<|end_of_text|>"), "<|begin_of_text|>")
    bytes_first = processors.ByteLevel(trim_offsets=False)
    inner.post_processor = processors.Sequence([bytes_first, inner.post_processor])
    return inner


def roberta():
    inner = byte_level("<s>", "</s>")
    inner.post_processor = processors.RobertaProcessing(("</s>", 257), ("<s>", 256))
    return inner


def padded():
    """A file that also pads on the left, and cuts, for batches of other programs."""
    inner = begun(plain(), "<s>")
    inner.enable_padding(direction="left", pad_id=257, pad_token="</s>", length=9)
    inner.enable_truncation(2)
    return inner


def named(kind, bos, eos, **fields):
    """A folder's tokenizer_config.json."""
    fields = {"tokenizer_class": kind, "bos_token": bos, "eos_token": eos, **fields}
    return {"tokenizer_config": fields}


def of_model(kind, bos, eos):
    """A folder's config.json."""
    return {"config": {"model_type": kind, "bos_token_id": bos, "eos_token_id": eos}}


def plain():
    return byte_level("<s>", "</s>")


def composed(*special):
    """Qwen's and Pythia's kind, which composes accents."""
    return lambda: byte_level(*special, normalizer=normalizers.NFC())


S, FAST = ("<s>", "</s>"), "PreTrainedTokenizerFast"
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>")
ADDS, OMITS = {"add_bos_token": True}, {"add_bos_token": False}
FOLDERS = {
    "template": (lambda: begun(plain(), "<s>"), {}),
    "template, flag off": (lambda: begun(plain(), "<s>"), named(FAST, *S, **OMITS)),
    "template, flag on": (lambda: begun(plain(), "<s>"), named(FAST, *S, **ADDS)),
    "template, padded and cut": (padded, named(FAST, *S)),
    "no template, flag on": (plain, named(FAST, *S, **ADDS)),
    "no template, flag off": (plain, named(FAST, *S, **OMITS)),
    "gpt2, flag on": (
        byte_level,
        named("GPT2Tokenizer", EOT, EOT, **ADDS) | of_model("gpt2", 256, 256),
    ),
    "pythia": (
        composed(EOT, "<|padding|>"),
        named("GPTNeoXTokenizer", EOT, EOT) | of_model("gpt_neox", 256, 256),
    ),
    "qwen": (
        composed(EOT, "<|im_end|>"),
        named("Qwen2Tokenizer", None, "<|im_end|>", **ADDS) | of_model("qwen2", 256, 257),
    ),
    "llama 2": (
        pieces,
        named("LlamaTokenizer", *S, legacy=False, **ADDS) | of_model("llama", 1, 2),
    ),
    "llama 2, flag off": (
        pieces,
        named("LlamaTokenizerFast", *S, **OMITS) | of_model("llama", 1, 2),
    ),
    "mistral": (pieces, named("LlamaTokenizer", *S, **ADDS) | of_model("mistral", 1, 2)),
    "llama 3": (llama3, named(FAST, *LLAMA3) | of_model("llama", 256, [257])),
    "llama 3 as LlamaTokenizer": (
        llama3,
        named("LlamaTokenizer", *LLAMA3) | of_model("llama", 256, 257),
    ),
    "gemma": (
        gemma,
        named("GemmaTokenizer", "<bos>", "<eos>", **ADDS) | of_model("gemma3_text", 2, 1),
    ),
    "gemma without configs": (gemma, {}),
    "t5": (lambda: around(unigram(), None, "</s>"), named(FAST, None, "</s>")),
    "bert": (
        lambda: around(word_pieces(), "[CLS]", "[SEP]"),
        {"tokenizer_config": {"tokenizer_class": FAST, "sep_token": "[SEP]"}},
    ),
    "roberta": (roberta, named(FAST, *S)),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_texts_have_the_ids_of_transformers(name, write):
    from transformers import AutoTokenizer

    build, configs = FOLDERS[name]
    folder = write(build(), **configs)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    if theirs.eos_token is not None:
        assert theirs.eos_token_id == ours.eos_id
    bos = [] if ours.text_bos_id is None else [ours.text_bos_id]
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        if name in ("t5", "bert", "roberta"):  # they end texts too
            assert ids.pop() == ours.eos_id
        assert [*bos, *ours.encode(text)] == ids


def test_a_template_may_call_its_token_otherwise(write):
    inner = plain()
    content = json.loads(begun(inner, "<s>").to_str())
    template = json.loads(
        json.dumps(content["post_processor"]).replace('"id": "<s>"', '"id": "start"')
    )
    template["special_tokens"] = {"start": template["special_tokens"].pop("<s>")}
    inner = hf.Tokenizer.from_str(json.dumps({**content, "post_processor": template}))
    assert inner.encode("a").ids[0] == 256
    assert load_tokenizer(str(write(inner))).text_bos_id == 256


def test_a_vocabulary_without_latin_letters_begins_texts_too(write):
    inner = hf.Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "\u4f60": 2}, []))
    inner.add_special_tokens(["<s>", "</s>"])
    assert inner.encode("a").ids == []
    tokenizer = load_tokenizer(str(write(around(inner, "<s>", "</s>"))))
    assert (tokenizer.text_bos_id, tokenizer.stop_ids) == (0, (1,))


def test_where_the_same_token_ends_and_begins_texts_it_is_written_once(write):
    from transformers import AutoTokenizer

    folder = write(begun(byte_level(), EOT), **named(FAST, EOT, EOT))
    ours = load_tokenizer(str(folder))
    assert ours.text_bos_id is None
    assert ours.prompt_ids("the cat") == AutoTokenizer.from_pretrained(folder)("the cat").input_ids


def test_the_file_counts_where_transformers_takes_the_class(write):
    """LlamaTokenizer drops the dummy space before a space, which the file itself does not."""
    from transformers import AutoTokenizer

    folder = write(pieces(), **FOLDERS["llama 2"][1])
    ours = load_tokenizer(str(folder))
    library = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [ours.text_bos_id, *ours.encode(" the cat")]
    assert ids == library.encode(" the cat").ids
    assert ids != AutoTokenizer.from_pretrained(folder)(" the cat").input_ids


def test_several_tokens_at_the_beginning_are_refused(write):
    inner = byte_level("[gMASK]", "<sop>", EOT)
    inner.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", 256), ("<sop>", 257)]
    )
    folder = write(inner)
    with pytest.raises(ValueError, match=r"begins texts with the ids \[256, 257\].*post_processor"):
        load_tokenizer(str(folder))


# ---- the end of text


STOPS = ["<a>", "<b>", "<c>", EOT, "</s>"]  # ids from 256


@pytest.mark.parametrize(
    ("configs", "stops"),
    [
        ({"generation_config": {"eos_token_id": [258, 256]}, "config": {"eos_token_id": 257}},
         ["<c>", "<a>"]),
        ({"generation_config": {"eos_token_id": [9999, 257]}}, ["<b>"]),
        ({"generation_config": {"eos_token_id": 9999}, "config": {"eos_token_id": 257}}, ["<b>"]),
        ({"config": {"eos_token_id": [257]}, "tokenizer_config": {"eos_token": "<a>"}}, ["<b>"]),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": 258}}}, ["<c>"]),
        ({"config": {"model_type": "llama"}, "tokenizer_config": {"eos_token": "<a>"}}, ["<a>"]),
        ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<c>"}}}, ["<c>"]),
        ({"special_tokens_map": {"eos_token": {"content": "<b>"}}}, ["<b>"]),
        ({"tokenizer_config": {"eos_token": "<gone>"}}, [EOT]),
        ({}, [EOT]),
    ],
)  # fmt: skip
def test_the_most_specific_config_names_the_ends(write, configs, stops):
    tokenizer = load_tokenizer(str(write(byte_level(*STOPS), **configs)))
    assert tokenizer.stop_ids == tuple(256 + STOPS.index(text) for text in stops)
    assert tokenizer.eos_id == tokenizer.stop_ids[0]
    named = ", ".join(f"{text!r} ({256 + STOPS.index(text)})" for text in stops)
    assert tokenizer.description.endswith(f"has no BOS, EOS {named}.")


def test_a_special_token_comes_before_an_html_tag(write):
    tokenizer = load_tokenizer(str(write(gemma())))
    assert tokenizer.eos_id == 1
    assert "has BOS '<bos>' (2), EOS '<eos>' (1)" in tokenizer.description
    assert tokenizer.decode([4]) == "</s>"


# ---- text that spells out special tokens


def xlm_roberta():
    """Pieces of the model that spell ``<s>``, ``<pad>``, ``</s>`` and ``<unk>``, all special."""
    signs = [*"\u2581abcdefghijklmnopqrstuvwxyz.</>", "\u2581the"]
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    inner = hf.Tokenizer(models.Unigram(vocab + [(s, -3.0) for s in signs], unk_id=3))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return around(inner, "<s>", "</s>")


SPELLED = ["a </s> b", "a</s>", "</s></s>", "<s>the<pad> a", "<unk>", "<<s>>", "<s></s><pad><unk>"]


@pytest.mark.parametrize("build", [unigram, xlm_roberta, gemma, pieces, byte_level, word_pieces])
@pytest.mark.parametrize("text", SPELLED)
def test_special_texts_stay_ordinary_text(build, text):
    inner = build()
    tokenizer = JsonTokenizer("spelled", inner.to_str())
    special = {i for i, t in inner.get_added_tokens_decoder().items() if t.special}
    special -= {inner.token_to_id("[UNK]")}  # of words that WordPiece does not know
    for ids in (
        tokenizer.encode(text),
        tokenizer.encode_batch(["a", text])[1],
        tokenizer.encode_continuation(text),
    ):
        assert not special & set(ids)
    if build is not word_pieces:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ((_, sizes),) = tokenizer.encode_measured([text])
    assert sizes.sum() == len(text.encode())


@pytest.mark.parametrize("build", [unigram, xlm_roberta])
def test_normalised_special_texts_stay_ordinary_text_too(build):
    inner = build()
    tokenizer = JsonTokenizer("wide", inner.to_str())
    ids = tokenizer.encode("a \uff1c/s\uff1e \uff1cpad\uff1e b")  # NFKC makes "</s>" and "<pad>"
    assert not {"</s>", "<pad>"} & {inner.id_to_token(i) for i in ids}
    assert tokenizer.decode(ids) == "a </s> <pad> b"


def test_a_continuation_of_several_words_keeps_its_spaces():
    tokenizer = JsonTokenizer("words", unigram().to_str())  # cut at spaces, as T5's are
    ids = tokenizer.encode_continuation("s> the cat")
    assert tokenizer.decode([*tokenizer.encode("a </"), *ids]) == "a </s> the cat"


# ---- special_tokens.json


@pytest.mark.parametrize(
    ("saved", "wrong"),
    [
        ({"bos": "<nope>", "eos": ["<a>"]}, "has no token '<nope>'"),
        ({"bos": None, "eos": ["<a>", "x<gone>"]}, "has no token 'x<gone>'"),
        ({"bos": None, "eos": []}, r"eos=\[\].*at least one"),
        ({"bos": None, "eos": "<a>"}, "eos='<a>'.*a list"),
        ({"bos": 3, "eos": ["<a>"]}, "bos=3.*text of a token"),
    ],
)
def test_special_tokens_that_cannot_be_are_refused_by_name(write, saved, wrong):
    folder = write(byte_level(*STOPS), special_tokens=saved)
    with pytest.raises(ValueError, match=wrong) as refused:
        load_tokenizer(str(folder))
    assert re.search(wrong, str(refused.value))
    assert repr(str(folder)) in str(refused.value)
    assert "special_tokens.json" in str(refused.value)
    state = {"kind": "json", "name": "broken", "json": byte_level(*STOPS).to_str()}
    with pytest.raises(ValueError, match=wrong):
        tokenizer_from_state({**state, "special": saved})


# ---- normalisers


@pytest.mark.parametrize(
    ("build", "changed"),
    [
        (lambda: byte_level(normalizer=normalizers.NFC()), "decomposed accents"),
        (lambda: byte_level(normalizer=normalizers.Lowercase()), "case"),
        (lambda: byte_level(normalizer=normalizers.NFKC()),
         "decomposed accents, compatibility characters"),
        (lambda: byte_level(prefix=True), "leading spaces"),
        (lambda: byte_level(normalizer=normalizers.Sequence(
            [normalizers.NFD(), normalizers.StripAccents()])), "accents, decomposed accents"),
        (lambda: byte_level(normalizer=normalizers.Replace("  ", " ")), "spaces"),
        (lambda: pieces(space=False), "leading spaces, spaces"),
        (unigram, "leading spaces, spaces, punctuation, accents, decomposed accents, "
                  "compatibility characters, other scripts, emoji"),
        (word_pieces, "leading spaces, case, spaces, punctuation, accents, decomposed accents, "
                      "compatibility characters, other scripts, emoji"),
        (pieces, None),
        (byte_level, None),
    ],
)  # fmt: skip
def test_what_does_not_come_back_is_said(build, changed):
    tokenizer = JsonTokenizer("lossy", build().to_str())
    expected = None if changed is None else f"cannot restore {changed}"
    assert tokenizer.text_changes == expected
    assert ("it cannot restore" in tokenizer.description) == (changed is not None)


# ---- folders, and stores of older versions


def test_a_folder_is_the_tokenizer_in_it(write, tmp_path):
    folder = write(begun(plain(), "<s>"), generation_config={"eos_token_id": [256, 257]})
    ours = load_tokenizer(str(folder))
    file = load_tokenizer(str(folder / "tokenizer.json"))
    assert parse_tokenizer(str(folder)).identity == parse_tokenizer(file.name).identity
    assert (ours.special, ours.stop_ids) == (file.special, (256, 257))
    before = parse_tokenizer(str(folder)).identity
    (folder / "generation_config.json").write_text('{"eos_token_id": 257}')
    assert parse_tokenizer(str(folder)).identity != before
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"a folder without a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "empty"))


def test_an_older_store_of_a_hub_tokenizer_is_refused_by_name(write, options, monkeypatch):
    folder = write(begun(plain(), "<s>"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, file: str(folder / file))
    data = LocalText(tokenizer="somebody/something", **options)
    data.prepare_data()
    assert data.tokenizer.text_bos_id == 256
    make_old(data.store_dir)
    again = LocalText(tokenizer="somebody/something", **options)
    with pytest.raises(StoreError, match=r"older version with tokenizer='somebody/something'"):
        again.evaluation_source("val")


def test_an_older_store_opens_only_for_the_special_tokens_that_it_was_made_with(write, options):
    folder = write(begun(plain(), "<s>"), special_tokens={"bos": None, "eos": ["</s>"]})
    file = folder / "tokenizer.json"
    older = LocalText(tokenizer=str(folder), **options)
    # the identity that versions without special tokens gave the file, from its bytes alone
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    assert parse_tokenizer(str(file)).identity == f"json:{digest}"
    older.prepare_data()
    make_old(older.store_dir)
    made = (older.store_dir / "meta.json").stat().st_mtime_ns

    again = LocalText(tokenizer=str(file), **options)
    again.prepare_data()
    assert (again.tokenizer.text_bos_id, again.tokenizer.stop_ids) == (None, (257,))
    stream = again.stream("train")
    assert 256 not in stream.gather(np.arange(len(stream)))
    assert (again.store_dir / "meta.json").stat().st_mtime_ns == made

    (folder / "special_tokens.json").unlink()
    begins = LocalText(tokenizer=str(file), **options)
    begins.prepare_data()
    assert begins.store_dir != again.store_dir
    assert (begins.tokenizer.text_bos_id, begins.tokenizer.stop_ids) == (256, (257,))
    assert begins.stream("train").gather(np.arange(1)).tolist() == [256]


# ---- hub tokenizers, whose name stands for configs too


class Repository:
    """A model's files on the hub, and those of them that are cached."""

    def __init__(self, folder, cached):
        self.folder, self.cached = folder, cached
        self.network = True
        self.error = None
        self.absent = set()  # files of which the cache knows that there are none

    def download(self, _, file):
        if file in self.cached:
            return str(self.folder / file)
        if not self.network:
            raise LocalEntryNotFoundError("not cached")
        if self.error is not None and file != "tokenizer.json":
            raise self.error
        if not (self.folder / file).is_file():
            self.absent.add(file)
            raise EntryNotFoundError("404: not in the repository")
        self.cached.add(file)
        return str(self.folder / file)

    def look(self, _, file):
        if file in self.cached:
            return str(self.folder / file)
        return object() if file in self.absent else None


@pytest.fixture
def repository(write, tmp_path, monkeypatch):
    """A repository of which only tokenizer.json is cached; its EOS is not the one by name."""
    folder = write(byte_level("<|im_end|>", EOT))
    online = Repository(folder, {"tokenizer.json"})
    (tmp_path / "snapshot").mkdir()

    def download(name, file):
        path = Path(online.download(name, file))
        target = tmp_path / "snapshot" / path.name
        shutil.copy(path, target)
        return str(target)

    def look(name, file):
        found = online.look(name, file)
        return str(tmp_path / "snapshot" / file) if isinstance(found, str) else found

    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    shutil.copy(folder / "tokenizer.json", tmp_path / "snapshot")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", look)
    return online


def test_a_hub_tokenizer_without_its_configs_is_warned_of(repository):
    repository.network = False
    with pytest.warns(UserWarning, match="generation_config.json, config.json, tok") as said:
        assert load_tokenizer("somebody/something").stop_ids == (257,)  # by name
    assert len(said) == 1
    repository.network = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_tokenizer("somebody/something").stop_ids == (256, 257)
        repository.network = False  # the cache now knows which configs there are
        assert load_tokenizer("somebody/something").stop_ids == (256, 257)


def test_a_config_that_the_hub_does_not_give_is_an_error(repository):
    repository.error = ConnectionError("503: try later")
    with pytest.raises(TokenizerUnavailableError, match=r"generation_config\.json, .*503: try la"):
        load_tokenizer("somebody/something")


def test_a_hub_store_of_other_special_tokens_is_refused(repository, options):
    repository.network = False
    offline = LocalText(tokenizer="somebody/something", **options)
    with pytest.warns(UserWarning, match="hub cannot be reached"):
        offline.prepare_data()
    same = LocalText(tokenizer="somebody/something", **options)
    assert same.tokenizer.stop_ids == (257,)  # the store's own
    repository.network = True
    online = LocalText(tokenizer="somebody/something", **options)
    with pytest.raises(StoreError, match=r"'somebody/something'.*<\|im_end\|>.*Delete the folder"):
        online.evaluation_source("val")


def test_entries_that_cannot_be_encoded_are_passed_over():
    """The library fails at an entry with a space, as the vocabulary has no unknown token."""
    inner = hf.Tokenizer(models.WordLevel({"a b": 0, "<s>": 1, "</s>": 2, "a": 3, "c": 4}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    special = find_special_tokens("words", inner)
    assert (special.bos, special.eos) == ("<s>", ("</s>",))
