"""A text store: what is written, and that damage is found."""

import json
import pickle
import re
import shutil
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.trainer.states import TrainerFn

from datamodules import LocalText, SentenceWindows, check, encoding, store
from datamodules.prepare import prepare_store
from datamodules.store import SPLITS, Counts, Store, StoreError, fingerprint
from datamodules.tokenizers import BytesTokenizer, train_bpe
from tests.programs import run

DOCUMENTS = [("train", "first"), ("val", "held out"), ("train", "caf\u00e9"), ("train", "")]


def write(folder: Path, documents=DOCUMENTS, tokenizer=None, **options) -> Store:
    prepare_store(
        folder,
        description={"source": {"corpus": "test"}},
        documents=lambda first: documents[first:],
        make_tokenizer=lambda: tokenizer or BytesTokenizer(),
        **options,
    )
    return Store(folder)


def test_documents_end_in_eos_and_meta_counts_them(tmp_path):
    opened = write(tmp_path / "s")
    stream = opened.stream("train")
    assert stream.gather(np.arange(len(stream))).tolist() == [
        *b"first",
        256,
        *"caf\u00e9".encode(),
        256,
    ]
    assert stream.document_ends.tolist() == [6, 12]
    assert opened.counts("train") == Counts(documents=2, tokens=12, utf8_bytes=10)
    assert opened.counts("val") == Counts(documents=1, tokens=9, utf8_bytes=8)
    assert len(opened.stream("test")) == 0 == len(opened.stream("test").document_ends)
    assert opened.meta["source"] == {"corpus": "test"}
    assert opened.meta["dtype"] == "<u2"


def test_lone_surrogates_are_replaced(tmp_path):
    opened = write(tmp_path / "s", [("train", "a\ud800b")])
    stream = opened.stream("train")
    assert bytes(stream.gather(np.arange(5)).tolist()) == "a\ufffdb".encode()
    assert opened.counts("train").utf8_bytes == 5


def test_large_ids_survive(tmp_path):
    class Large(BytesTokenizer):
        vocab_size, eos_id = 2**18, 2**18 - 1

        def encode_arrays(self, texts):
            return [np.array([2**17 + 5]) for _ in texts]

    stream = write(tmp_path / "s", tokenizer=Large()).stream("train")
    assert stream.gather(np.arange(4)).tolist() == [2**17 + 5, 2**18 - 1] * 2


def test_a_store_that_is_there_needs_no_lock(tmp_path):
    write(tmp_path / "s")
    (tmp_path / ".s.lock").unlink()
    write(tmp_path / "s", documents=[])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("name", ["train-00000.tokens", "val-00000.ends"])
def test_truncated_store_is_named_with_its_cure(tmp_path, name):
    folder = tmp_path / "s"
    write(folder)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    for opening in (lambda: Store(folder), lambda: write(folder)):
        with pytest.raises(StoreError, match=f"{name} has .* bytes, but .*Delete the folder"):
            opening()
    path.unlink()
    with pytest.raises(StoreError, match=f"{name} has 0 bytes"):
        Store(folder)


def change(path: Path, place: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


def without_checksums(folder: Path) -> None:
    """Leaves a store as versions without checksums wrote it."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta["checksums"]
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    tokenizer = train_bpe("bpe:260", ["some text to learn from"] * 3)
    return write(tmp_path_factory.mktemp("sound") / "s", tokenizer=tokenizer).folder


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_changed_byte_is_found(sound, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("changed") / "s"
    shutil.copytree(sound, folder)
    names = sorted(json.loads((sound / "meta.json").read_text())["checksums"]["crc32"])
    assert {"tokenizer.json", "train-00000.tokens", "val-00000.ends"} < set(names)
    path = folder / data.draw(st.sampled_from(names))
    change(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(1, 255)))
    with pytest.raises(StoreError, match=f"bytes 0 to .* of {path.name} changed"):
        Store(folder)


def test_every_block_of_every_file_has_a_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK_BYTES", 64)
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 2)
    documents = [("train", "x" * (i % 50 + 1)) for i in range(100)]
    monkeypatch.setattr(encoding, "PART_BYTES", 800)
    opened = write(tmp_path / "s", documents)
    names = [shard["name"] for shard in opened.meta["splits"]["train"]["shards"]]
    assert len(names) > 2
    for name in names:
        for suffix in ("tokens", "ends"):
            content = (tmp_path / "s" / f"{name}.{suffix}").read_bytes()
            blocks = [content[i : i + 64] for i in range(0, len(content), 64)]
            digits = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
            assert opened.meta["checksums"]["crc32"][f"{name}.{suffix}"] == digits
    sizes: list[int] = []
    opened.verify(sizes.append)
    assert sum(sizes) == opened.size == 2 * opened.counts("train").tokens + 800
    change(tmp_path / "s" / f"{names[1]}.tokens", 200)
    with pytest.raises(StoreError, match=f"bytes 192 to 255 of {names[1]}.tokens changed"):
        Store(tmp_path / "s")


def test_a_large_store_is_verified_before_it_is_trained_on(tmp_path, monkeypatch):
    """Whatever byte changed; to open it for a validation costs no reading of it."""
    (tmp_path / "text.txt").write_text("Some words to train on.\n" * 400)
    options = {"data_files": str(tmp_path / "text.txt"), "cache_dir": str(tmp_path / "cache")}
    data = LocalText(block_size=16, batch_size=2, val_fraction=0.2, **options)
    data.prepare_data()
    change(data.store_dir / "train-00000.tokens", 777)
    monkeypatch.setattr(store, "VERIFIED_BYTES", 99)
    Store(data.store_dir)
    for fn, refused in ((TrainerFn.VALIDATING, False), (TrainerFn.FITTING, True)):
        again = LocalText(block_size=16, batch_size=2, val_fraction=0.2, **options)
        again.trainer = SimpleNamespace(state=SimpleNamespace(fn=fn))
        with pytest.raises(StoreError, match="changed") if refused else nullcontext():
            again.prepare_data()
    inner = LocalText(block_size=16, batch_size=2, val_fraction=0.2, **options)
    marked = SentenceWindows(corpus=inner, splitter="spans:9", block_size=16, batch_size=2)
    with pytest.raises(StoreError, match="changed"):  # its documents would get new checksums
        marked.prepare_data()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-00000.tokens", b"\xff", "has the id 65535, but the vocabulary has 257"),
        ("train-00000.tokens", b"\0", "ends by train-00000.ends has no EOS"),
        ("train-00000.ends", b"\xff", "do not ascend to 12 tokens"),
        ("train-00000.ends", b"\0", "do not ascend to 12 tokens"),
        ("val-00000.ends", b"\x7f", "do not ascend to 9 tokens"),
    ],
)
def test_stores_without_checksums_open_and_their_values_are_checked(
    tmp_path, name, content, message
):
    folder = write(tmp_path / "s").folder
    without_checksums(folder)
    assert not Store(folder).has_checksums
    path = folder / name
    path.write_bytes(content * path.stat().st_size)
    with pytest.raises(StoreError, match=message):
        Store(folder)


def test_what_changes_later_is_refused_when_it_is_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "s").folder
    without_checksums(folder)
    monkeypatch.setattr(store, "VERIFIED_BYTES", 0)
    stream = Store(folder).stream("train")
    with pytest.raises(StoreError, match="documents end beyond its 12 tokens"):
        stream.gather(np.array([3, 12]))
    (folder / "train-00000.tokens").write_bytes(b"\xff" * 24)
    stream = pickle.loads(pickle.dumps(Store(folder).stream("train")))
    with pytest.raises(StoreError, match="has the id 65535, but the vocabulary has 257"):
        stream.gather(np.arange(3))


def test_check_names_every_store_of_a_cache(tmp_path, capsys):
    names = [fingerprint({"number": i}, "test") for i in range(3)]
    sound, old, changed = (write(tmp_path / name).folder for name in names)
    (tmp_path / f"{names[0]}.partial").mkdir()
    without_checksums(old)
    assert check.main([str(tmp_path)]) == 0
    said = {line.partition(": ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert said.keys() == {str(sound), str(old), str(changed)}
    assert "checksums, ids and document ends are valid (21 tokens" in said[str(sound)]
    assert "an older version prepared it without checksums" in said[str(old)]
    change(changed / "train-00000.tokens", 3)
    assert check.main([str(sound), str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out.count(str(sound)) == 2
    (line,) = printed.err.splitlines()
    assert re.match(f"error: .*{changed.name} is damaged: bytes 0 to 23 of train-00000.tok", line)


def test_check_of_what_is_no_store(tmp_path):
    done = run("-m", "datamodules.check", tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path} is neither a text store nor a folder of text stores. Name a store, or "
        "the cache_dir of the data.\n"
    )


def paths(value, path=()):
    """Yields the path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from paths(part, (*path, key))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_value_in_meta_json_is_refused_or_harmless(sound, tmp_path_factory, data):
    meta = {"notes": ["a"], "origin": {}, **json.loads((sound / "meta.json").read_text())}
    *parents, key = data.draw(st.sampled_from(list(paths(meta))))
    part = meta
    for parent in parents:
        part = part[parent]
    if data.draw(st.booleans()):
        part[key] = data.draw(JSON)
    else:
        del part[key]
    folder = tmp_path_factory.mktemp("meta") / "s"
    shutil.copytree(sound, folder)
    (folder / "meta.json").write_text(json.dumps(meta))
    opened, refusal = None, ""
    try:
        opened = Store(folder)
    except StoreError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 400 + len(str(folder))
    if opened is not None:
        for split in SPLITS:
            stream = opened.stream(split)
            assert len(stream) == opened.counts(split).tokens
            stream.gather(np.arange(len(stream)))
        " ".join(opened.meta.get("notes", []))
        dict(opened.meta.get("origin", {}))


def test_fingerprint_changes_with_every_value():
    base = {"source": {"corpus": "A", "files": ["x"]}, "tokenizer": "bytes"}
    others = [
        {**base, "tokenizer": "gpt2"},
        {**base, "source": {"corpus": "B", "files": ["x"]}},
        {**base, "source": {"corpus": "A", "files": ["x", "y"]}},
        {**base, "more": None},
    ]
    names = {fingerprint(d, "p") for d in [base, *others]}
    assert len(names) == 5
    assert fingerprint(dict(reversed(base.items())), "p") == fingerprint(base, "p")
    assert fingerprint(base, "p").startswith("p-")
