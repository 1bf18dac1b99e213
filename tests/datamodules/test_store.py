import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from datamodules import tokenising
from datamodules.preparation import prepare_store
from datamodules.store import Counts, Store, StoreError, fingerprint, token_dtype
from datamodules.tokenizers import BytesTokenizer, train_bpe

DOCUMENTS = [("train", "first"), ("val", "held out"), ("train", "caf\u00e9"), ("train", "")]


def write(folder: Path, documents=DOCUMENTS, tokenizer=None, **options) -> Store:
    prepare_store(
        folder,
        description={"source": {"corpus": "test"}},
        documents=lambda: documents,
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


def test_special_text_in_a_document_does_not_end_it(tmp_path):
    tokenizer = train_bpe("bpe:260", ["some text to learn from"] * 3)
    stream = write(tmp_path / "s", [("train", "a<|endoftext|>b")], tokenizer).stream("train")
    tokens = stream.gather(np.arange(len(stream)))
    assert (tokens == tokenizer.eos_id).sum() == 1
    assert (tmp_path / "s" / "tokenizer.json").is_file()


def test_lone_surrogates_are_replaced(tmp_path):
    opened = write(tmp_path / "s", [("train", "a\ud800b")])
    stream = opened.stream("train")
    assert bytes(stream.gather(np.arange(5)).tolist()) == "a\ufffdb".encode()
    assert opened.counts("train").utf8_bytes == 5


@pytest.mark.parametrize(("size", "dtype"), [(257, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4")])
def test_dtype_by_vocabulary(size, dtype):
    assert token_dtype(size).str == dtype


def test_large_ids_survive(tmp_path):
    class Large(BytesTokenizer):
        vocab_size, eos_id = 2**18, 2**18 - 1

        def encode_arrays(self, texts):
            return [np.array([2**17 + 5]) for _ in texts]

    stream = write(tmp_path / "s", tokenizer=Large()).stream("train")
    assert stream.gather(np.arange(4)).tolist() == [2**17 + 5, 2**18 - 1] * 2


def test_batches_of_documents_and_shards_hold_the_same_tokens(tmp_path, monkeypatch):
    documents = [("train", "x" * (i % 5 + 1)) for i in range(50)]
    whole = write(tmp_path / "whole", documents)
    monkeypatch.setattr(tokenising, "CHUNK_DOCUMENTS", 3)
    cut = write(tmp_path / "cut", documents, shard_tokens=20)
    shards = cut.meta["splits"]["train"]["shards"]
    assert len(shards) > 3
    assert sum(s["tokens"] for s in shards) == cut.counts("train").tokens
    assert cut.counts("train") == whole.counts("train")
    assert (
        cut.stream("train").document_ends.tolist() == whole.stream("train").document_ends.tolist()
    )


def test_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenising, "CHUNK_DOCUMENTS", 1)

    def broken():
        yield "train", "written before the failure"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_store(
            tmp_path / "s", description={}, documents=broken, make_tokenizer=BytesTokenizer
        )
    assert [p.name for p in tmp_path.iterdir()] == [".s.lock"]
    assert write(tmp_path / "s").counts("train").documents == 2


def test_a_store_that_is_there_needs_no_lock(tmp_path):
    write(tmp_path / "s")
    (tmp_path / ".s.lock").unlink()
    write(tmp_path / "s", documents=[])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_check_can_refuse_the_store(tmp_path):
    def refuse(counts):
        raise ValueError(f"only {counts['train'].documents} documents")

    with pytest.raises(ValueError, match="only 2 documents"):
        write(tmp_path / "s", check=refuse)
    assert not (tmp_path / "s").exists()


def _prepare_slowly(folder: Path, log: Path, seconds: float) -> None:
    def documents():
        with log.open("a") as file:
            file.write("started\n")
        yield "train", "first"
        time.sleep(seconds)
        yield "train", "second"

    tokenising.CHUNK_DOCUMENTS = 1
    prepare_store(folder, description={}, documents=documents, make_tokenizer=BytesTokenizer)


def _start(*arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=_prepare_slowly, args=arguments)
    process.start()
    return process


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_process_leaves_nothing_that_looks_whole(tmp_path):
    folder, log = tmp_path / "s", tmp_path / "log"
    process = _start(folder, log, 60.0)
    _wait_for(lambda: list(tmp_path.glob("s.partial/train-00000.tokens")))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not folder.exists()
    with pytest.raises(StoreError, match="no text store"):
        Store(folder)
    assert write(folder).counts("train").documents == 2
    assert not list(tmp_path.glob("s.partial"))  # the next preparation clears what was left


def test_two_processes_prepare_once(tmp_path):
    folder, log = tmp_path / "s", tmp_path / "log"
    processes = [_start(folder, log, 0.3) for _ in range(2)]
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert log.read_text() == "started\n"
    assert Store(folder).counts("train").documents == 2


@pytest.mark.parametrize("name", ["train-00000.tokens", "val-00000.ends"])
def test_truncated_store_is_named_with_its_cure(tmp_path, name):
    folder = tmp_path / "s"
    write(folder)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    for opening in (lambda: Store(folder), lambda: write(folder)):
        with pytest.raises(StoreError, match=f"{name} has .* bytes where .*Delete the folder"):
            opening()
    path.unlink()
    with pytest.raises(StoreError, match=f"{name} has 0 bytes"):
        Store(folder)


def test_broken_or_foreign_meta(tmp_path):
    folder = tmp_path / "s"
    write(folder)
    meta = folder / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 99}))
    with pytest.raises(StoreError, match="format is 99, this version reads 1"):
        Store(folder)
    meta.write_text("{")
    with pytest.raises(StoreError, match="meta.json cannot be read"):
        Store(folder)


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
