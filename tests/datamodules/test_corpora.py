"""The hub's corpora: splits, caps, filters, articles and messages, in each native format."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizer_files import byte_level
from tokenizers.normalizers import NFC

from datamodules import (
    CorpusUnavailableError,
    OpenWebText,
    PeS2o,
    Pile,
    WikiText103,
    encoding,
    prepare,
)
from datamodules.corpora import articles
from datamodules.order import shuffled
from datamodules.store import SPLITS
from datamodules.tokenizers import load_tokenizer

PAGES = [f"Page {i}: " + "word " * (i % 7 + 1) for i in range(60)]
PILE_NAMES = ["ArXiv", "Wikipedia (en)", "Github"]


def jsonl(texts, **fields) -> bytes:
    return "".join(json.dumps({"text": t, **fields}) + "\n" for t in texts).encode()


def pile_jsonl(texts) -> bytes:
    rows = [{"text": t, "meta": {"pile_set_name": PILE_NAMES[i % 3]}} for i, t in enumerate(texts)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_parquet(path: Path, texts) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), path)


def prepared(kind, tmp_path, **options):
    defaults = {"cache_dir": str(tmp_path / "cache"), "tokenizer": "bytes", "block_size": 8}
    data = kind(**{**defaults, **options})
    data.prepare_data()
    data.setup()
    return data


def texts_of(data, split) -> list[str]:
    stream = data.stream(split)
    starts = [0, *stream.document_ends[:-1]]
    spans = zip(starts, stream.document_ends, strict=True) if len(stream) else []
    return [data.tokenizer.decode(stream.gather(np.arange(a, b - 1))) for a, b in spans]


@pytest.fixture
def owt_files(tmp_path) -> list[str]:
    """60 pages in three files, one of them parquet."""
    write_parquet(tmp_path / "a.parquet", PAGES[:25])
    (tmp_path / "b.jsonl").write_bytes(jsonl(PAGES[25:55]))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(jsonl(PAGES[55:])))
    return [str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.jsonl.zst")]


# OpenWebText


@pytest.mark.parametrize("held_out", [1, 5, 12, 59])
def test_the_last_documents_of_openwebtext_validate(tmp_path, owt_files, held_out):
    data = prepared(OpenWebText, tmp_path, data_files=owt_files, val_documents=held_out)
    assert texts_of(data, "train") == PAGES[:-held_out] == list(data.documents("train"))
    assert texts_of(data, "val") == PAGES[-held_out:] == list(data.documents("val"))
    assert data.counts("test").documents == 0
    assert data._store.meta["source"]["val"] == f"last {held_out} documents"


def test_a_cap_on_local_files_keeps_the_last_documents(tmp_path, owt_files):
    room = sum(len(p) + 1 for p in PAGES[:20])
    for extra in (0, 5):  # room to spare, but not for another document
        data = prepared(
            OpenWebText, tmp_path, data_files=owt_files, val_documents=7, train_tokens=room + extra
        )
        assert texts_of(data, "train") == PAGES[:20]
        assert data.counts("train").tokens == room
        assert texts_of(data, "val") == PAGES[-7:]


def test_openwebtext_with_files_for_validation_or_without(tmp_path, owt_files):
    (tmp_path / "v.jsonl").write_bytes(jsonl(["held out"]))
    own = prepared(OpenWebText, tmp_path, data_files=owt_files, val_files=str(tmp_path / "v.jsonl"))
    assert (texts_of(own, "train"), texts_of(own, "val")) == (PAGES, ["held out"])
    without = prepared(OpenWebText, tmp_path, data_files=owt_files, val_documents=0)
    assert without.val_dataloader() == []
    shares = prepared(
        OpenWebText, tmp_path, data_files=owt_files, val_documents=10, test_fraction=0.1
    )
    held_out = [shares.counts(s).documents for s in SPLITS]
    assert sum(held_out) == 60
    assert held_out[1] == 10
    assert held_out[2] in (5, 6)
    with pytest.raises(ValueError, match=r"test split .*data\.test_fraction"):
        without.test_dataloader()


@pytest.mark.parametrize("count", [3, 2003, 4001])
def test_nanogpts_split_is_that_of_datasets(tmp_path, count):
    """Document by document, in the same order; datasets counts the empty rows too."""
    rows = [f"Page {i}" if i % 50 else " " for i in range(count)]
    write_parquet(tmp_path / "a.parquet", rows[: count // 2])
    (tmp_path / "b.jsonl").write_bytes(jsonl(rows[count // 2 :]))
    files = [str(tmp_path / name) for name in ("a.parquet", "b.jsonl")]
    data = prepared(OpenWebText, tmp_path, data_files=files, split="nanogpt")
    whole = datasets.Dataset.from_dict({"text": rows})
    theirs = whole.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    for ours, name in (("train", "train"), ("val", "test")):
        expected = [text for text in theirs[name]["text"] if text.strip()]
        assert texts_of(data, ours) == expected == list(data.documents(ours))
    assert data.counts("test").documents == 0
    others = [OpenWebText(data_files=files, val_documents=n).fingerprint for n in (3, 4)]
    assert data.fingerprint not in others
    recipe = data.recipe()["init_args"]
    assert recipe["val_documents"] == 100_000  # its default, which earlier recipes hold too
    assert OpenWebText(**recipe).fingerprint == data.fingerprint
    with pytest.raises(ValueError, match=r"val_documents=3 has no .*data\.val_documents out"):
        OpenWebText(**{**recipe, "val_documents": 3})


def test_nanogpts_split_goes_on_after_a_kill(tmp_path, monkeypatch, owt_files):
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 5)
    monkeypatch.setattr(encoding, "PART_BYTES", 150)
    options = {"data_files": owt_files, "split": "nanogpt", "num_proc": 1}
    whole = prepared(OpenWebText, tmp_path / "whole", **options)
    finish, left = prepare._Partial._finish_part, [3]

    def killed(partial, writer, place):
        if not left:
            raise KeyboardInterrupt
        left.append(left.pop() - 1)
        finish(partial, writer, place)
        if not left[0]:
            left.clear()

    monkeypatch.setattr(prepare._Partial, "_finish_part", killed)
    with (
        pytest.warns(UserWarning, match="tokens that were written are kept"),
        pytest.raises(KeyboardInterrupt),
    ):
        prepared(OpenWebText, tmp_path, **options)
    monkeypatch.setattr(prepare._Partial, "_finish_part", finish)
    again = prepared(OpenWebText, tmp_path, **options)
    names = sorted(path.name for path in whole.store_dir.iterdir())
    assert names == sorted(path.name for path in again.store_dir.iterdir())
    assert len(names) > 9
    for name in names:
        assert (whole.store_dir / name).read_bytes() == (again.store_dir / name).read_bytes()
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_file()] == [
        tmp_path / "cache" / f".{again.fingerprint}.lock"
    ]


def test_too_few_documents_to_hold_out(tmp_path, owt_files):
    with pytest.raises(ValueError, match="val_documents=100000 leaves .* 60 documents. Lower"):
        prepared(OpenWebText, tmp_path, data_files=owt_files)


# peS2o


@pytest.fixture
def pes2o_files(hub) -> Callable[[str], str]:
    """Gzipped json lines as the hub has them, whose other fields change their type."""
    parts = {"train-0": PAGES[:20], "train-1": PAGES[20:50], "validation-0": PAGES[50:]}
    folder = hub.repository("allenai/peS2o") / "data" / "v2"
    folder.mkdir(parents=True)
    for i, (name, texts) in enumerate(parts.items()):
        created = None if i == 0 else "2020-01-01T00:00:00.000Z"
        content = jsonl(texts, created=created, id=i if i else "one", version="v2")
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(content))
    return lambda pattern: str(folder / pattern)


# The Pile


@pytest.fixture
def pile_files(tmp_path) -> dict[str, str]:
    parts = {"data_files": PAGES[:45], "val_files": PAGES[45:54], "test_files": PAGES[54:]}
    for name, texts in parts.items():
        packed = zstandard.ZstdCompressor().compress(pile_jsonl(texts))
        (tmp_path / f"{name}.jsonl.zst").write_bytes(packed)
    return {name: str(tmp_path / f"{name}.jsonl.zst") for name in parts}


def test_the_pile_and_some_of_its_collections(tmp_path, pile_files):
    whole = prepared(Pile, tmp_path, **pile_files)
    assert [texts_of(whole, s) for s in SPLITS] == [PAGES[:45], PAGES[45:54], PAGES[54:]]
    some = prepared(Pile, tmp_path, **pile_files, pile_sets=["ArXiv", "Github"])
    assert texts_of(some, "train") == [p for i, p in enumerate(PAGES[:45]) if i % 3 != 1]
    assert some.counts("val").documents == 6
    shares = prepared(Pile, tmp_path, data_files=pile_files["data_files"])
    assert [shares.counts(s).documents for s in SPLITS] == [43, 1, 1]
    assert len({d.fingerprint for d in (whole, some, shares)}) == 3


def test_the_pile_takes_the_neox_tokenizer_unless_told():
    assert Pile().vocab_size == 50277
    assert Pile(tokenizer="bytes").vocab_size == 257


def test_collections_that_cannot_be_chosen(tmp_path, pile_files):
    with pytest.raises(ValueError, match=r"pile_sets=\['Wiki'\] .* Choose from: ArXiv"):
        Pile(pile_sets=["Wiki"])
    for options in ({}, {"copy": "tokenized"}):
        with pytest.raises(ValueError, match=r"pile_sets needs files .* pass data.data_files"):
            Pile(pile_sets=["ArXiv"], **options)
    with pytest.raises(ValueError, match="train split has no documents"):
        prepared(Pile, tmp_path, **pile_files, pile_sets=["EuroParl"])
    (tmp_path / "plain.jsonl").write_bytes(jsonl(PAGES))
    with pytest.raises(ValueError, match=r"line 1: the row has no meta.pile_set_name"):
        prepared(Pile, tmp_path, data_files=str(tmp_path / "plain.jsonl"), pile_sets=["ArXiv"])
    write_parquet(tmp_path / "p.parquet", PAGES)
    with pytest.raises(ValueError, match="pile_sets needs the Pile's jsonl files"):
        prepared(Pile, tmp_path, data_files=str(tmp_path / "p.parquet"), pile_sets=["ArXiv"])


def test_the_uncopyrighted_pile_has_splits_and_collections_of_its_own(tmp_path, hub, caplog):
    folder = hub.repository("monology/pile-uncopyrighted")
    parts = {"train/00": PAGES[:30], "train/01": PAGES[30:45], "val": PAGES[45:54]}
    for name, texts in {**parts, "test": PAGES[54:]}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        packed = zstandard.ZstdCompressor().compress(pile_jsonl(texts))
        (folder / f"{name}.jsonl.zst").write_bytes(packed)
    with caplog.at_level("INFO"):
        whole = prepared(Pile, tmp_path, copy="uncopyrighted")
    assert [texts_of(whole, s) for s in SPLITS] == [PAGES[:45], PAGES[45:54], PAGES[54:]]
    assert "Pile: The Pile is monology/pile-uncopyrighted, " in caplog.text
    some = prepared(Pile, tmp_path, copy="uncopyrighted", pile_sets=["Github"], train_tokens=60)
    assert texts_of(some, "val") == [p for i, p in enumerate(PAGES[45:54]) if i % 3 == 2]
    assert 0 < some.counts("train").tokens <= 60
    with pytest.raises(ValueError, match=r"copy='uncopyrighted' .*Set data\.copy"):
        Pile(copy="uncopyrighted", data_files="00.jsonl.zst")


@pytest.fixture(params=[NFC(), None], ids=["NFC", "no normaliser"])
def neox(tmp_path, request) -> str:
    """A tokenizer of GPT-NeoX's kind, NFC included, whose EOS is not the first id here."""
    path = tmp_path / "neox.json"
    byte_level(words=["word", "Page"], normalizer=request.param).save(str(path))
    return str(path)


@pytest.fixture
def token_rows(neox) -> np.ndarray:
    """PAGES with an EOS after each, joined, in rows of 64 uint16 ids.

    Letters, whose text would be encoded as words, fill the last row.
    """
    tokenizer = load_tokenizer(neox)
    ids = [i for page in PAGES for i in (*tokenizer.encode(page), tokenizer.eos_id)]
    ids += [i for letter in "word" * 16 for i in tokenizer.encode(letter)][: -len(ids) % 64]
    return np.array(ids, dtype="<u2").reshape(-1, 64)


def test_published_tokens_are_stored_as_they_are(tmp_path, hub, neox, token_rows, caplog):
    """As LLaMA-Factory writes its tokenized_path: a DatasetDict saved by `datasets`."""
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("uint16"))})
    rows = datasets.Dataset.from_dict({"input_ids": token_rows}, features=features)
    saved = datasets.DatasetDict({"train": rows, "validation": rows.select(range(2))})
    folder = hub.repository("hyq718/uint16smallpile")
    saved.save_to_disk(str(folder), num_shards={"train": 3, "validation": 1})
    options = {"copy": "tokenized", "tokenizer": neox, "val_fraction": 0.1, "test_fraction": 0.0}
    with caplog.at_level("INFO"):
        data = prepared(Pile, tmp_path, **options)
    assert "The Pile is hyq718/uint16smallpile, " in caplog.text
    texts = [*texts_of(data, "train"), *texts_of(data, "val")]
    tail = [text for text in texts if not text.startswith("Page")]
    assert sorted(texts) == sorted([*PAGES, *tail])
    assert len(tail) == 1
    stored = np.concatenate([data.stream(s).gather(np.arange(len(data.stream(s)))) for s in SPLITS])
    assert sorted([*token_rows.ravel(), data.tokenizer.eos_id]) == sorted(stored)
    assert list(data.documents("val")) == texts_of(data, "val") != []
    for split in ("train", "val"):
        size = sum(len(text.encode()) for text in texts_of(data, split))
        assert data.counts(split).utf8_bytes == size
        positions = np.arange(len(stream := data.stream(split)))
        assert stream.bytes_at(positions, stream.gather(positions)).sum() == size
    token_rows.tofile(tmp_path / "tokens.bin")
    flat = prepared(Pile, tmp_path, **options, data_files=str(tmp_path / "tokens.bin"))
    assert [texts_of(flat, s) for s in SPLITS] == [texts_of(data, s) for s in SPLITS]
    capped = prepared(Pile, tmp_path, **options, train_tokens=200)
    assert texts_of(capped, "train") == texts_of(data, "train")[: len(texts_of(capped, "train"))]
    assert len({d.fingerprint for d in (data, flat, capped)}) == 3


def test_tokens_of_another_tokenizer_or_in_other_files_are_refused(tmp_path, neox, token_rows):
    options = {"copy": "tokenized", "tokenizer": neox, "data_files": str(tmp_path / "tokens.bin")}
    (token_rows + 300).tofile(tmp_path / "tokens.bin")
    with pytest.raises(ValueError, match=r"has the token \d+, .* set data\.tokenizer"):
        prepared(Pile, tmp_path, **options)
    (tmp_path / "tokens.bin").write_bytes(b"odd")
    with pytest.raises(ValueError, match=r"tokens\.bin: uint16 tokens"):
        prepared(Pile, tmp_path, **options)
    (tmp_path / "a.arrow").write_bytes(b"no stream")
    with pytest.raises(ValueError, match=r"a\.arrow is not an Arrow stream"):
        prepared(Pile, tmp_path, **{**options, "data_files": str(tmp_path / "a.arrow")})
    (tmp_path / "a.jsonl").write_bytes(jsonl(PAGES))
    with pytest.raises(ValueError, match=r"a\.jsonl: copy='tokenized' reads"):
        prepared(Pile, tmp_path, **{**options, "data_files": str(tmp_path / "a.jsonl")})
    for name in ("bytes", "gpt2", "bpe:300"):
        with pytest.raises(ValueError, match=r"copy='tokenized' .*Set data\.tokenizer"):
            Pile(copy="tokenized", tokenizer=name)


# What all have


def test_the_fingerprint_follows_what_is_stored(tmp_path, owt_files):
    options = [
        {},
        {"train_tokens": 10**9},
        {"val_documents": 5},
        {"data_files": owt_files, "val_documents": 5},
        {"data_files": owt_files, "val_documents": 6},
        {"data_files": owt_files[:1], "val_documents": 5},
        {"test_fraction": 0.1},
    ]
    assert len({OpenWebText(**o).fingerprint for o in options}) == len(options)
    same = [{"num_proc": 3}, {"block_size": 8}, {"cache_dir": str(tmp_path)}, {"val_fraction": 0.3}]
    assert {OpenWebText(**o).fingerprint for o in same} == {OpenWebText().fingerprint}


def test_a_small_bpe_is_trained_within_the_cap(tmp_path, pile_files):
    data = Pile(**pile_files, tokenizer="bpe:300", train_tokens=200)
    used = list(data.tokenizer_text())
    assert used == PAGES[: len(used)]
    assert 150 < sum(len(text) + 1 for text in used) <= 200


def test_files_of_held_out_splits_alone_are_refused():
    with pytest.raises(ValueError, match="val_files .*test_files .*data_files"):
        OpenWebText(val_files="x.jsonl")


# The hub, offline and played by a folder


@pytest.mark.parametrize("cap", [None, 1000])
@pytest.mark.parametrize("kind", [OpenWebText, PeS2o, WikiText103, Pile])
def test_without_network_one_message_names_corpus_reason_and_cure(tmp_path, kind, cap):
    with pytest.raises(CorpusUnavailableError) as error:
        prepared(kind, tmp_path, train_tokens=cap)
    message = str(error.value)
    assert message.startswith(f"{kind.__name__}: ")
    assert "OfflineModeIsEnabled" in message
    assert "data.data_files=" in message
    assert "HF_HOME" in message
    assert not [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")]


def test_openwebtext_from_the_hub(tmp_path, hub):
    for i in range(3):
        name = f"plain_text/train-0000{i}-of-00003.parquet"
        write_parquet(hub.repository("Skylion007/openwebtext") / name, PAGES[i * 20 : i * 20 + 20])
    whole = prepared(OpenWebText, tmp_path, val_documents=7)
    assert [texts_of(whole, s) for s in SPLITS] == [PAGES[:-7], PAGES[-7:], []]
    capped = prepared(OpenWebText, tmp_path, val_documents=7, train_tokens=100)
    taken = texts_of(capped, "train")
    assert texts_of(capped, "val") == PAGES[:7]
    assert taken == PAGES[7 : 7 + len(taken)]
    assert 60 < capped.counts("train").tokens <= 100
    assert capped._store.meta["source"]["val"] == "first 7 documents"
    assert capped._store.meta["source"]["train_tokens"] == 100
    with pytest.raises(ValueError, match="val_documents=60"):
        prepared(OpenWebText, tmp_path, val_documents=60)


@pytest.mark.parametrize("cap", [None, 300])
def test_pes2o_from_the_hub(tmp_path, hub, pes2o_files, cap):
    data = prepared(PeS2o, tmp_path, train_tokens=cap)
    taken = texts_of(data, "train")
    assert taken == PAGES[:50] if cap is None else taken == PAGES[: len(taken)] != []
    assert texts_of(data, "val") == PAGES[50:]


def test_version_3_of_pes2o(tmp_path, hub):
    """As Thoughtbubbles' first author reads it: train-0000-of-0136.zst, valid-0000-of-0060.zst."""
    folder = hub.repository("allenai/peS2o") / "data" / "v3"
    folder.mkdir(parents=True)
    for name, texts in {"train-0000": PAGES[:20], "train-0001": PAGES[20:50]}.items():
        packed = zstandard.ZstdCompressor().compress(jsonl(texts, version="v3"))
        (folder / f"{name}-of-0002.zst").write_bytes(packed)
    packed = zstandard.ZstdCompressor().compress(jsonl(PAGES[50:], version="v3"))
    (folder / "valid-0000-of-0001.zst").write_bytes(packed)
    data = prepared(PeS2o, tmp_path, version="v3")
    assert [texts_of(data, split) for split in SPLITS] == [PAGES[:50], PAGES[50:], []]
    files = str(folder / "train-*.zst")
    local = prepared(PeS2o, tmp_path, version="v3", data_files=files, val_fraction=0.0)
    assert texts_of(local, "train") == PAGES[:50]
    with pytest.raises(ValueError, match="the suffix decides the format"):
        prepared(PeS2o, tmp_path, data_files=files)
    assert PeS2o().fingerprint == "pe_s2o-bytes-d6e7dd155d0627c1" != PeS2o(version="v3").fingerprint


@pytest.mark.parametrize("seed", [None, 3])
def test_wikitext_from_the_hub(tmp_path, hub, seed):
    repository = hub.repository("Salesforce/wikitext")
    for name in ("wikitext-103-raw-v1", "wikitext-103-v1"):
        for i, split in enumerate(("train", "validation", "test")):
            lines = ["", f" = {name} {split} = \n", "", f" Text {i} . \n", "", " = B = \n"]
            for n, part in enumerate((lines, ["", " b \n"])):  # which ends within an article
                write_parquet(repository / name / f"{split}-0000{n}-of-00002.parquet", part)
    for level, name in {"raw": "wikitext-103-raw-v1", "word": "wikitext-103-v1"}.items():
        data = prepared(WikiText103, tmp_path, level=level, shuffle_seed=seed)
        for i, split in enumerate(SPLITS):
            title = ("train", "validation", "test")[i]
            articles = [f" = {name} {title} = \n\n Text {i} . \n", " = B = \n\n b \n"]
            assert sorted(texts_of(data, split)) == sorted(articles)


ARTICLE = " = Title {i} = \n \n Text of {i} . \n \n = = Section = = \n \n More of {i} . \n"


def text(first: int, end: int) -> str:
    return " \n" + " \n".join(ARTICLE.format(i=i) + " \n" for i in range(first, end))


def expected(first: int, end: int) -> list[str]:
    return [ARTICLE.format(i=i) for i in range(first, end)]


def cut(written: str) -> list[str]:
    return list(articles(written.splitlines(keepends=True), "here"))


def test_articles_begin_at_titles_and_keep_their_lines():
    assert cut(text(0, 3)) == expected(0, 3)
    assert cut("") == cut(" \n \n") == []


@pytest.mark.parametrize(
    "line",
    [
        " = = Section = = ",
        " = = = Part = = = ",
        " = = ",
        "= x",
        " y = z = ",
        " = half = = ",
        " = = half = ",
    ],
)
def test_other_lines_with_equals_signs_are_no_titles(line):
    written = text(0, 1) + f" \n{line}\n \n more \n"
    assert len(cut(written)) == 1
    assert line in cut(written)[0]


def test_a_formula_between_lines_of_text_is_no_title():
    for inside in (" \n = a = b = \n text \n", " text \n = a = b = \n \n"):
        written = text(0, 1) + inside + text(1, 2)
        assert len(cut(written)) == 2
        assert " = a = b = \n" in cut(written)[0]


def test_text_before_the_first_title_and_a_title_at_the_end():
    assert cut(" tail of another \n \n" + text(0, 1))[0] == " tail of another \n"
    assert cut(text(0, 1) + " \n = Last = \n") == [*expected(0, 1), " = Last = \n"]
    assert cut(" = Only = \n") == [" = Only = \n"]


def test_text_without_blank_lines_is_refused():
    dense = "".join(line + "\n" for line in text(0, 3).splitlines() if line.strip())
    with pytest.raises(ValueError, match="here: no line is an article's title"):
        cut(dense)


def write(tmp_path: Path, name: str, content: str) -> str:
    path = tmp_path / name
    if name.endswith(".parquet"):
        lines = ["" if line == " \n" else line for line in content.splitlines(keepends=True)]
        pq.write_table(pa.table({"text": lines}), path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    return str(path)


@pytest.mark.parametrize("suffix", ["raw", "tokens", "txt", "raw.gz"])
def test_files_of_the_archive(tmp_path, suffix):
    parts = {"data_files": (0, 9), "val_files": (9, 11), "test_files": (11, 12)}
    files = {k: write(tmp_path, f"wiki.{k}.{suffix}", text(*span)) for k, span in parts.items()}
    data = prepared(WikiText103, tmp_path, **files)
    for split, span in zip(SPLITS, parts.values(), strict=True):
        assert list(data.documents(split)) == expected(*span)
        assert data.counts(split).documents == span[1] - span[0]


def test_rows_of_the_hub_are_lines(tmp_path):
    data = prepared(WikiText103, tmp_path, data_files=write(tmp_path, "train.parquet", text(0, 20)))
    assert [data.counts(s).documents for s in SPLITS] == [16, 2, 2]
    first = next(iter(data.documents("train")))
    assert first.replace("\n\n", "\n \n") == expected(0, 1)[0]


def test_jsonl_is_not_its_format(tmp_path):
    with pytest.raises(ValueError, match="not jsonl"):
        prepared(WikiText103, tmp_path, data_files=write(tmp_path, "a.jsonl", "{}"))
    with pytest.raises(ValueError, match="suffix decides the format"):
        prepared(WikiText103, tmp_path, data_files=write(tmp_path, "a.csv", "x"))


def test_a_seeded_subset_has_whole_articles_until_the_cap(tmp_path):
    options = {
        "data_files": write(tmp_path, "t.raw", text(0, 40)),
        "val_files": write(tmp_path, "v.raw", text(40, 42)),
        "test_fraction": 0.0,
    }
    size = len(expected(10, 11)[0]) + 1
    orders = {}
    for seed in (0, 1, None):
        for articles_wanted in (10, 20):
            cap = articles_wanted * size
            data = prepared(WikiText103, tmp_path, **options, shuffle_seed=seed, train_tokens=cap)
            assert articles_wanted <= data.counts("train").documents <= articles_wanted + 1
            assert data.counts("train").tokens <= cap
            assert data.counts("val").documents == 2
            orders[seed, articles_wanted] = list(data.documents("train"))
    assert orders[None, 10] == expected(0, 40)
    assert orders[0, 10] == orders[0, 20] != orders[1, 10]  # smaller subsets are in larger ones
    assert sorted(orders[0, 10]) == sorted(expected(0, 40))


def test_shuffling_keeps_all_documents_and_depends_on_the_seed(tmp_path):
    rng = random.Random(0)
    texts = ["x" * rng.randint(0, 9) + str(i) + "\u00e4\ud800" for i in range(200)]
    orders = [list(shuffled(texts, seed=s, folder=tmp_path / "new")) for s in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(texts)
    assert list(shuffled([], seed=0, folder=tmp_path)) == []
