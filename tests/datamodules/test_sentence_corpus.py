"""Marked stores next to the inner corpus' own: same words, shared, resumed, rebuilt."""

import json
import pickle

import numpy as np
import pytest

from datamodules import LocalText, Sentences, SentenceWindows, StoreError, encoding
from datamodules.sentences import SplitterUnavailableError, splitters
from datamodules.store import SPLITS, Store
from datamodules.tokenizers import BytesTokenizer
from lightning_models import recipe as recipes
from tests.datamodules.test_prepare import content


def words_of(data, split) -> list[list[int]]:
    stream = data.stream(split)
    ids = stream.gather(np.arange(len(stream)))
    documents = np.split(ids, stream.document_ends)[:-1]
    return [document[document < data.vocab_size - 3].tolist() for document in documents]


def flat_documents(corpus, split) -> list[list[int]]:
    stream = corpus.stream(split)
    ids = stream.gather(np.arange(len(stream)))
    return [document[:-1].tolist() for document in np.split(ids, stream.document_ends)[:-1]]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("splitter", ["rules", "spans:9"])
def test_the_words_are_those_of_the_flat_store(sentences, tokenizer, splitter):
    data = sentences(tokenizer, splitter=splitter)
    for split in SPLITS:
        documents = words_of(data, split)
        assert documents == flat_documents(data.corpus, split)
        assert documents
        assert data.counts(split).utf8_bytes == data.corpus.counts(split).utf8_bytes
    assert data.vocab_size == data.corpus.vocab_size + 3 == data.tokenizer.vocab_size


def stamps(folder) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.glob("*.*")}


def test_stores_are_shared_and_made_once(sentences, stories, tmp_path):
    data = sentences()
    plain = LocalText(data_files=str(stories), cache_dir=str(tmp_path / "cache"), block_size=9)
    assert plain.fingerprint == data.corpus.fingerprint
    before = stamps(plain.store_dir), stamps(data.store_dir)
    plain.prepare_data()
    again = sentences(kind=SentenceWindows, block_size=32)
    other = sentences(max_sentences=7, batch_tokens=99)
    assert again.fingerprint == other.fingerprint == data.fingerprint
    assert (stamps(plain.store_dir), stamps(data.store_dir)) == before
    assert len(list((tmp_path / "cache").glob("*/"))) == 2


def test_all_that_decides_the_marks_is_in_the_name(stories, tmp_path):
    def name(tokenizer="bytes", **options) -> str:
        inner = LocalText(data_files=str(stories), tokenizer=tokenizer, cache_dir=str(tmp_path))
        return Sentences(corpus=inner, **options).fingerprint

    names = [
        name(),
        name(splitter="spans:9"),
        name(splitter="spans:8"),
        name(splitter="sat"),
        name(splitter="sat:sat-12l"),
        name(language="de"),
        name(max_sentence_tokens=32),
        name("bpe:300"),
    ]
    assert len(set(names)) == len(names)
    assert name(splitter="spans:9", language="de") == names[1]  # without effect there
    assert names[0].startswith("local_text-bytes-rules_sentences-")
    assert not list(tmp_path.glob("local_text*"))  # known without preparing


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 3)
    monkeypatch.setattr(encoding, "BYTES_BEFORE_WORKERS", 1000)


def test_a_broken_preparation_goes_on_where_it_stood(
    small_chunks, sentences, stories, tmp_path, monkeypatch
):
    monkeypatch.setattr(encoding, "PART_BYTES", 2000)
    whole = sentences()
    expected = content(whole.store_dir)
    inner = LocalText(data_files=str(stories), cache_dir=str(tmp_path / "again"), num_proc=1)
    data = Sentences(corpus=inner)
    decode, decoded = BytesTokenizer.decode, []

    def broken(self, ids):
        if len(ids) > 1:  # a document, not a piece of the vocabulary
            decoded.append(1)
        if len(decoded) == 30:
            decoded.append(1)
            raise KeyboardInterrupt
        return decode(self, ids)

    monkeypatch.setattr(BytesTokenizer, "decode", broken)
    with pytest.raises(KeyboardInterrupt):
        data.prepare_data()
    assert not data.store_dir.exists()
    data = Sentences(corpus=inner)
    data.prepare_data()
    assert content(data.store_dir) == expected
    assert 40 < len(decoded) < 60  # 30, and those after the finished shards


def test_shards_of_other_text_are_not_gone_on_with(sentences):
    data = sentences()
    origin = data.pin(None)
    assert data.pin(origin) == origin == data.origin
    with pytest.raises(StoreError, match=r"started from text.*Delete its folder"):
        data.pin({**origin, "store": "another"})


def test_stores_of_different_text_are_told(sentences):
    data = sentences()
    meta = data.corpus.store_dir / "meta.json"
    content = json.loads(meta.read_text())
    meta.write_text(json.dumps({**content, "origin": {"commit": "abc"}}))
    with pytest.raises(StoreError, match=r"was not made from the current .*Delete the former"):
        sentences()


def test_missing_weights_are_told_before_the_work(stories, tmp_path, monkeypatch):
    def no_network(*_):
        raise OSError("no connection")

    monkeypatch.setattr(splitters, "_load", no_network)
    inner = LocalText(data_files=str(stories), cache_dir=str(tmp_path / "cache"))
    data = Sentences(corpus=inner, splitter="sat")
    with pytest.raises(SplitterUnavailableError, match="sat-3l-sm.*no connection"):
        data.prepare_data()
    assert not inner.store_dir.exists()
    with pytest.raises(ValueError, match="the folder does not exist"):
        Sentences(corpus=inner, splitter="sat:./nothing").prepare_data()


def test_what_is_asked_of_the_inner_corpus(stories, tmp_path):
    inner = LocalText(
        data_files=str(stories), cache_dir=str(tmp_path), val_fraction=0.1, test_fraction=0.0
    )
    data = Sentences(corpus=inner)
    assert [data.expects(split) for split in SPLITS] == [True, True, False]
    assert data.how_to_get("val") == inner.how_to_get("val")
    assert (data.cache_dir, data.num_proc) == (inner.cache_dir, inner.num_proc)
    data.prepare_data()
    data.setup()
    with pytest.raises(ValueError, match=r"test split is empty. Splits are by document"):
        data.test_dataloader()
    assert list(data.documents("val")) == list(inner.documents("val"))


def test_notes_say_that_rules_are_not_the_papers(sentences):
    data = sentences()
    (note,) = Store(data.store_dir).meta["notes"]
    assert "sentencex" in note
    assert Store(sentences(splitter="spans:9").store_dir).meta["notes"] == []


# Rebuilding


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"class_path": "datamodules.Nothing"}, "datamodules.Nothing is unknown"),
        ({"class_path": "nothing.LocalText"}, "nothing.LocalText is of no package named"),
        ({"class_path": "LocalText"}, "LocalText is of no package named"),
        ({"class_path": "datamodules.BatchLoader"}, "is not a TextCorpus"),
        ({"init_args": {}}, "is of no package named"),
        ({"class_path": "datamodules.LocalText"}, "set data.data_files to your files"),
    ],
)
def test_unusable_recipes_of_a_corpus(recipe, message):
    with pytest.raises(ValueError, match=message):
        Sentences(corpus=recipe)


def test_a_recipe_imports_no_module_that_lies_around(tmp_path, monkeypatch):
    trace, module = tmp_path / "trace", tmp_path / "lying_around.py"
    mine = "from datamodules import LocalText\nclass Mine(LocalText): pass\n"
    module.write_text(f"open({str(trace)!r}, 'w')\n{mine}")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = {"class_path": "lying_around.Mine", "init_args": {"data_files": str(module)}}
    with pytest.raises(ValueError, match=r"lying_around.Mine is of no .*--packages lying_around"):
        Sentences(corpus=recipe)
    assert not trace.exists()
    monkeypatch.setattr(recipes, "_trusted", {*recipes._trusted, "lying_around"})
    assert type(Sentences(corpus=recipe).corpus).__name__ == "Mine"


def test_sentences_of_sentences_are_refused(sentences):
    with pytest.raises(ValueError, match=r"corpus=datamodules.Sentences must be a corpus of doc"):
        Sentences(corpus=sentences())
    with pytest.raises(ValueError, match="must be a corpus of documents"):
        Sentences(corpus="datamodules.LocalText")


def test_the_path_of_a_file_becomes_absolute(stories, monkeypatch):
    monkeypatch.chdir(stories.parent)
    (stories.parent / "model").mkdir()
    data = Sentences(corpus=LocalText(data_files="stories.jsonl"), splitter="sat:model")
    assert data.recipe()["init_args"]["splitter"] == f"sat:{stories.parent / 'model'}"
    assert data.recipe()["init_args"]["corpus"]["init_args"]["data_files"] == str(stories)


def test_a_prepared_corpus_is_taken_as_it_is(sentences):
    inner = sentences().corpus
    assert Sentences(corpus=inner).corpus is inner
    assert (
        pickle.loads(pickle.dumps(dict(Sentences(corpus=inner).hparams)))["corpus"]
        == inner.recipe()
    )
