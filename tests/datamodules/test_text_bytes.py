"""Bytes of texts, BOS and continuations with the tokenizers that people have.

Expected bytes are counted in the text itself, expected ids come from the ``tokenizers`` library.
"""

import json

import numpy as np
import pytest
import tokenizers as hf
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_files import PUBLISHED

from datamodules import Kinship, LocalText, Sentences, SentenceWindows, StateTracking
from datamodules.store import SPLITS, StoreError
from datamodules.text import IGNORE
from datamodules.tokenizers import JsonTokenizer, load_tokenizer, tokenizer_from_state, train_bpe

TEXTS = [
    f"Document {i}. The caf\u00e9 says:  a word\n\tof the cafe\u0301 it! Mr. Smith ran.\n\n"
    f"He went out \U0001f642 to see, and {i} \u4f60\u597d said so.  A title </s> <s> [SEP]"
    for i in range(30)
]
every = pytest.mark.parametrize("kind", PUBLISHED)


@pytest.fixture
def file(tmp_path, kind):
    path = tmp_path / "tokenizer.json"
    PUBLISHED[kind]().save(str(path))
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def make(tokenizer, kind=LocalText, **options):
        text = {"data_files": str(lines), "tokenizer": tokenizer, "val_fraction": 0.3}
        text["cache_dir"] = str(tmp_path / "cache")
        data = (
            kind(**text, **options)
            if kind is LocalText
            else kind(corpus=LocalText(**text), **options)
        )
        data.prepare_data()
        data.setup()
        return data

    return make


def scored_bytes(data, split):
    source = data.evaluation_source(split)
    return sum(int(source.batch(n)["num_bytes"].sum()) for n in range(len(source)))


def source_documents(data, split):
    """The texts of a split as they were written."""
    texts = [text for s, text in getattr(data, "corpus", data).labelled_documents() if s == split]
    assert len(texts) > 5
    assert set(texts) < set(TEXTS)
    return texts


@every
@pytest.mark.parametrize("module", [LocalText, SentenceWindows, Sentences])
def test_scored_bytes_are_those_of_the_text(file, corpus, module):
    data = corpus(file, module, **({} if module is Sentences else {"block_size": 7}))
    held_out = source_documents(data, "val")
    assert scored_bytes(data, "val") == sum(len(text.encode()) for text in held_out)


# ---- sentences


class Capped(LocalText):
    @property
    def train_tokens(self):
        return 1500


@every
@pytest.mark.parametrize("inner", [LocalText, Capped])
def test_sentences_hold_the_tokens_of_the_source(kind, file, tmp_path, inner):
    texts = [text for document in TEXTS for text in ("", document)]  # no text is no document
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = inner(data_files=str(lines), tokenizer=file, cache_dir=str(tmp_path / "cache"))
    data = Sentences(corpus=corpus)
    data.prepare_data()
    data.setup()
    labelled = [(split, text) for split, text in corpus.labelled_documents() if text]
    library = hf.Tokenizer.from_file(file)
    library.encode_special_tokens = True
    stored = 0
    for split in SPLITS:
        stream, words = data.stream(split), data.corpus.tokenizer.vocab_size
        ids = stream.gather(np.arange(len(stream)))
        documents = [part[part < words] for part in np.split(ids, stream.document_ends)[:-1]]
        expected = [text for s, text in labelled if s == split][: len(documents)]
        if kind != "unigram":  # whose library makes special tokens of text
            encoded = [library.encode(text, add_special_tokens=False).ids for text in expected]
            assert [part.tolist() for part in documents] == encoded
        assert data.counts(split).utf8_bytes == sum(len(text.encode()) for text in expected)
        assert list(data.documents(split)) == expected
        stored += len(documents)
    assert stored == sum(corpus.counts(split).documents for split in SPLITS)
    assert (stored < len(TEXTS)) == (inner is Capped)


def test_a_source_that_is_not_what_the_store_holds_is_refused(tmp_path):
    path, text = tmp_path / "tokenizer.json", tmp_path / "texts.jsonl"
    PUBLISHED["word_pieces"]().save(str(path))
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    corpus = LocalText(data_files=str(text), tokenizer=str(path), cache_dir=str(tmp_path / "c"))
    data = Sentences(corpus=corpus)
    corpus.prepare_data()
    text.write_text("".join(json.dumps({"text": text + "!"}) + "\n" for text in TEXTS))
    with pytest.raises(StoreError, match=r"split of the source has \d+ documents.*Delete"):
        data.prepare_data()


LOSSY = {"word_pieces", "pieces_without_space"}  # which do not give back a continuation
PREFIXED = {"byte_level_prefix"}  # which gives back each text after a space
SIZES = {
    Kinship: {"train_stories": 9, "val_stories": 9, "test_stories": 9},
    StateTracking: {
        "train_examples": 9,
        "val_examples": 9,
        "test_examples": 9,
        "operations": [3, 4],
    },
}


@pytest.fixture
def questions(tmp_path):
    def make(tokenizer, kind):
        options = {"cache_dir": str(tmp_path / "cache"), "block_size": 4000, "batch_size": 4}
        data = kind(tokenizer=tokenizer, **options, **SIZES[kind])
        data.prepare_data()
        data.setup()
        return data

    return make


@every
@pytest.mark.parametrize("module", SIZES)
def test_scored_bytes_of_answers_are_those_of_their_text(file, questions, module, kind):
    if module is StateTracking and kind in LOSSY | PREFIXED:
        with pytest.raises(ValueError, match="does not restore the text"):
            questions(file, module)
        return
    data = questions(file, module)
    if module is Kinship:
        answers = [answer for _, answer in data.questions("val")]
    else:
        answers = [example.answer for example in data.examples("val")]
    assert scored_bytes(data, "val") == sum(len(answer.encode()) for answer in answers)


# ---- texts that begin with BOS


@pytest.mark.parametrize("kind", ["byte_level_bos", "pieces"])
def test_documents_begin_with_bos_which_is_read_and_not_predicted(file, corpus):
    library, data = hf.Tokenizer.from_file(file), corpus(file, block_size=9)
    library.encode_special_tokens = True
    bos, eos = library.token_to_id("<s>"), library.token_to_id("</s>")
    held_out = source_documents(data, "val")
    expected = [[*library.encode(text).ids, eos] for text in held_out]
    assert {ids[0] for ids in expected} == {bos}
    stream = data.stream("val")
    assert stream.gather(np.arange(len(stream))).tolist() == [i for ids in expected for i in ids]
    source = data.evaluation_source("val")
    rows = [source.batch(n) for n in range(len(source))]
    assert int(rows[0]["tokens"][0, 0]) == bos
    targets = torch.cat([row["targets"].flatten() for row in rows])
    scored = targets[targets != IGNORE].tolist()
    assert scored == [i for ids in expected for i in ids[1:]]


@pytest.mark.parametrize("kind", ["byte_level_bos", "pieces"])
def test_questions_begin_with_bos_and_answers_continue_them(file, questions):
    library = hf.Tokenizer.from_file(file)
    bos, eos = library.token_to_id("<s>"), library.token_to_id("</s>")
    data = questions(file, Kinship)
    (question, answer), *_ = data.questions("val")
    batch = data.evaluation_source("val").batch(0)
    read = batch["tokens"][0].tolist()
    scored = [i for i in batch["targets"][0].tolist() if i != IGNORE]
    assert read[0] == bos
    assert bos not in read[1:]
    assert scored[-1] == eos
    assert read[: len(library.encode(question).ids)] == library.encode(question).ids
    assert library.decode(read[1:]).startswith(question + answer)


# ---- continuations


@every
@given(text=st.text(st.sampled_from("ab the.\n\u4f60\u00e9"), min_size=1, max_size=20))
@example(text=" returns")
@example(text="returns")
def test_a_continuation_keeps_its_spaces(kind, text):
    if kind in LOSSY or (kind == "unigram" and text != " returns"):  # it drops repeated spaces
        return
    tokenizer = JsonTokenizer(kind, PUBLISHED[kind]().to_str())
    before = "The function"
    ids = tokenizer.encode(before), tokenizer.encode_continuation(text)
    assert tokenizer.decode_continuation(ids[1]) == text
    dummy = " " if kind in PREFIXED else ""
    assert tokenizer.decode([*ids[0], *ids[1]]) == dummy + before + text
    ((_, sizes),) = tokenizer.measure_continuations([text])
    assert sizes.sum() == len(text.encode())


# ---- stores and checkpoints of older versions


def make_old(folder):
    """Turns a store into one of versions without sizes and special tokens."""
    meta = json.loads((folder / "meta.json").read_text())
    for path in [*folder.glob("*.sizes"), folder / "special_tokens.json"]:
        path.unlink(missing_ok=True)
        meta["checksums"]["crc32"].pop(path.name, None)
    meta.pop("sizes", None)
    meta.pop("bos_id", None)
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "kind", ["pieces", "byte_level_bos", "unigram", "byte_level_nfc", "byte_level_prefix"]
)
def test_a_store_of_an_older_version_is_refused_by_name(file, corpus):
    make_old(corpus(file, block_size=9).store_dir)
    with pytest.raises(StoreError, match=r"prepared by an older version.*Delete the folder"):
        corpus(file, block_size=9).evaluation_source("val")


def test_a_store_of_an_older_version_whose_bytes_are_right_keeps_its_meaning(tmp_path):
    path, text = tmp_path / "tokenizer.json", tmp_path / "texts.jsonl"
    PUBLISHED["byte_level_nfc"]().save(str(path))
    texts = [f"The caf\u00e9 {i}." for i in range(30)]  # which NFC keeps
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"tokenizer": str(path), "cache_dir": str(tmp_path / "c"), "val_fraction": 0.3}

    def make():
        data = LocalText(data_files=str(text), block_size=9, **options)
        data.prepare_data()
        data.setup()
        return data

    make_old(make().store_dir)
    data = make()
    held_out = [text for split, text in data.labelled_documents() if split == "val"]
    assert set(held_out) < set(texts)
    assert scored_bytes(data, "val") == sum(len(text.encode()) for text in held_out)
    assert not list(data.store_dir.glob("*.sizes"))


@every
def test_a_tokenizer_of_an_older_checkpoint_keeps_its_meaning(kind):
    text = PUBLISHED[kind]().to_str()
    old = tokenizer_from_state({"kind": "json", "name": kind, "json": text})
    assert old.text_bos_id is None
    assert old.prompt_ids("he")[0] == old.eos_id
    assert "special" not in old.state()


@every
def test_state_and_store_keep_the_special_tokens(file, corpus):
    tokenizer, data = load_tokenizer(file), corpus(file, block_size=9)
    for other in (tokenizer_from_state(tokenizer.state()), data.tokenizer):
        assert (other.text_bos_id, other.stop_ids) == (tokenizer.text_bos_id, tokenizer.stop_ids)
        assert other.prompt_ids("he ran") == tokenizer.prompt_ids("he ran")


def test_stores_of_byte_level_tokenizers_are_those_of_older_versions(corpus, tmp_path):
    path = tmp_path / "bpe.json"
    path.write_text(train_bpe("bpe:300", TEXTS).json_text)
    for name in ("bytes", str(path)):
        data = corpus(name, block_size=9)
        files = {file.name for file in data.store_dir.iterdir()}
        kept = {"meta.json", "tokenizer.json"} if name != "bytes" else {"meta.json"}
        shards = {f"{split}-00000.{part}" for split in SPLITS for part in ("tokens", "ends")}
        assert files == kept | shards
        keys = set(json.loads((data.store_dir / "meta.json").read_text()))
        assert not keys & {"sizes", "bos_id"}
