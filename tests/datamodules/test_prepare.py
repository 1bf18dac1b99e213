"""Killed and started again, on one process or several: the same bytes, nothing done twice."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from datamodules import LocalText
from datamodules import prepare as preparing
from datamodules.prepare import WorkerDiedError, chunks, encode_in_order, prepare_store
from datamodules.store import Counts, Store, StoreError
from datamodules.tokenizers import BytesTokenizer, train_bpe

SPLIT_CYCLE = ("train", "train", "val", "train", "test")
DOCUMENTS = [
    (SPLIT_CYCLE[i % 5], f"Document {i} of the corpus. " * (i % 11) + "x" * (i % 3))
    for i in range(400)
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Many chunks and, with several processes, workers from the second one on."""
    monkeypatch.setattr(preparing, "CHUNK_DOCUMENTS", 7)
    monkeypatch.setattr(preparing, "BYTES_BEFORE_WORKERS", 1000)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe("bpe:280", ["Document of the corpus. 0123456789 xx"] * 3)


def prepare(folder: Path, documents=DOCUMENTS, tokenizer=None, **options) -> Store:
    prepare_store(
        folder,
        description={"source": "test"},
        documents=lambda: iter(documents),
        make_tokenizer=lambda: tokenizer or BytesTokenizer(),
        **{"shard_tokens": 3000, **options},
    )
    return Store(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    shards = (path for suffix in ("tokens", "ends") for path in folder.glob(f"*.{suffix}"))
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in shards}


def finished_shards(partial: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the shards that the journal of an unfinished store names."""
    sections = len((partial / "journal.jsonl").read_text().splitlines()) - 1
    numbers = {f"{i:05d}" for i in range(sections)}
    return {k: v for k, v in stamps(partial).items() if k.partition(".")[0][-5:] in numbers}


def failing_after(number):
    yield from DOCUMENTS[:number]
    raise ConnectionError("the line is dead")


# Processes


def test_the_number_of_processes_does_not_show(tmp_path, bpe):
    for n in (1, 2, 3):
        prepare(tmp_path / str(n), tokenizer=bpe, num_proc=n)
    assert content(tmp_path / "1") == content(tmp_path / "2") == content(tmp_path / "3")


def test_results_come_in_order_and_hold_all_documents(bpe):
    found = list(encode_in_order(DOCUMENTS, bpe, 3))
    assert sum(chunk.documents for chunk in found) == len(DOCUMENTS)
    texts = [text for _, text in DOCUMENTS if text]
    tokens = np.concatenate([chunk.tokens for chunk in found])
    assert bpe.decode(tokens) == "".join(texts)
    assert sum(int(chunk.sizes.sum()) for chunk in found) == sum(len(t) for t in texts)


def test_few_texts_and_bytes_start_no_process(monkeypatch, bpe):
    monkeypatch.setattr(preparing, "_Worker", None)  # would fail if it were called
    assert list(encode_in_order(DOCUMENTS, BytesTokenizer(), 4))
    monkeypatch.setattr(preparing, "BYTES_BEFORE_WORKERS", 10**6)
    assert list(encode_in_order(DOCUMENTS, bpe, 4))


def test_workers_use_one_core_each(bpe, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    bpe.use_one_core()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_a_failing_tokenizer_is_named_and_leaves_no_process():
    class Broken(BytesTokenizer):
        gains_from_processes = True

        def encode_arrays(self, texts):
            if os.getpid() != parent:
                raise RuntimeError("cannot tokenise")
            return super().encode_arrays(texts)

    parent = os.getpid()
    with pytest.raises(RuntimeError, match="cannot tokenise"):
        list(encode_in_order(DOCUMENTS, Broken(), 2))
    assert not _children()


def test_a_dead_worker_is_named():
    class Dying(BytesTokenizer):
        gains_from_processes = True

        def encode_arrays(self, texts):
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().encode_arrays(texts)

    parent = os.getpid()
    with pytest.raises(WorkerDiedError, match=r"exit code -9.*num_proc"):
        list(encode_in_order(DOCUMENTS, Dying(), 2))
    assert not _children()


def _children() -> list[int]:
    return [p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]


# Sections and the journal


def test_the_journal_says_which_documents_each_shard_holds(tmp_path):
    store = prepare(tmp_path / "s")
    lines = (tmp_path / "s" / "journal.jsonl").read_text().splitlines()[1:]
    sections = [json.loads(line) for line in lines]
    assert len(sections) > 5
    assert [s["first"] for s in sections] == [0, *(s["end"] for s in sections[:-1])]
    assert sections[-1]["end"] == len(DOCUMENTS)
    for i, section in enumerate(sections):
        held = DOCUMENTS[section["first"] : section["end"]]
        for split, counts in section["splits"].items():
            texts = [text for s, text in held if s == split and text]
            assert counts["documents"] == len(texts)
            ends = np.fromfile(tmp_path / "s" / f"{split}-{i:05d}.ends", "<i8")
            assert np.diff(ends, prepend=0).tolist() == [len(t) + 1 for t in texts]
    assert store.counts("train").documents == sum(s == "train" and bool(t) for s, t in DOCUMENTS)


def test_chunks_are_cut_by_the_documents_alone():
    found = list(chunks(DOCUMENTS))
    again = list(chunks(DOCUMENTS[found[0].documents :]))
    assert again == found[1:]


@pytest.mark.parametrize("after", [100, 399])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_failure_keeps_finished_shards(tmp_path, bpe, after, num_proc):
    with pytest.raises(ConnectionError):
        prepare(tmp_path / "s", failing_after(after), bpe, num_proc=num_proc)
    assert not (tmp_path / "s").exists()
    partial = tmp_path / "s.partial"
    before = finished_shards(partial)
    prepare(tmp_path / "s", tokenizer=bpe)
    prepare(tmp_path / "whole", tokenizer=bpe)
    assert before.items() <= stamps(tmp_path / "s").items()
    assert content(tmp_path / "s") == content(tmp_path / "whole")
    assert not partial.exists()


def test_half_a_line_and_a_begun_shard_are_left_out(tmp_path):
    partial = unfinished(tmp_path, after=200)
    with (partial / "journal.jsonl").open("a") as file:
        file.write('{"first": 1')
    (partial / "train-00099.tokens").write_bytes(b"begun")
    prepare(tmp_path / "s")
    prepare(tmp_path / "whole")
    assert content(tmp_path / "s") == content(tmp_path / "whole")


def test_a_trained_tokenizer_is_not_trained_again(tmp_path, bpe):
    with pytest.raises(ConnectionError):
        prepare(tmp_path / "s", failing_after(200), bpe)
    prepare(tmp_path / "s", tokenizer=train_bpe("bpe:257", ["other text"]))
    prepare(tmp_path / "whole", tokenizer=bpe)
    assert content(tmp_path / "s") == content(tmp_path / "whole")


# The cap


@pytest.mark.parametrize("cap", [1, 29, 5000, 5001, 10**6])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_the_cap_takes_documents_in_order(tmp_path, bpe, cap, num_proc):
    store = prepare(tmp_path / "s", tokenizer=bpe, train_tokens=cap, num_proc=num_proc)
    expected = {"train": Counts(), "val": Counts(), "test": Counts()}
    for split, text in DOCUMENTS:
        if text:
            size = len(bpe.encode(text)) + 1
            if split == "train" and expected["train"].tokens + size > cap:
                break
            expected[split] += Counts(documents=1, tokens=size, utf8_bytes=len(text))
    assert {split: store.counts(split) for split in expected} == expected


def test_a_capped_preparation_goes_on_to_the_same_end(tmp_path):
    with pytest.raises(ConnectionError):
        prepare(tmp_path / "s", failing_after(100), train_tokens=9000)
    prepare(tmp_path / "s", train_tokens=9000)
    prepare(tmp_path / "whole", train_tokens=9000)
    assert content(tmp_path / "s") == content(tmp_path / "whole")


# Killed for real

SCRIPT = """
import time
from pathlib import Path
from datamodules import LocalText, prepare
prepare.CHUNK_DOCUMENTS, prepare.BYTES_BEFORE_WORKERS = 7, 1000
prepare.prepare_store.__kwdefaults__["shard_tokens"] = 3000
class Stopping(LocalText):
    def labelled_documents(self):
        for i, item in enumerate(super().labelled_documents()):
            if i == {stop}:
                Path({marker!r}).touch()
                time.sleep(100)
            yield item
Stopping.__name__ = "LocalText"  # which is in the fingerprint
Stopping(**{options!r}, num_proc=2).prepare_data()
"""


def _kill_at(stop: int, marker: Path, options: dict) -> None:
    """Prepares in another process up to a document, and kills that process there."""
    script = SCRIPT.format(stop=stop, marker=str(marker), options=options)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    _wait_for(marker.exists)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.kill()
    process.wait()
    _wait_for(lambda: not any(worker.is_running() for worker in workers))


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_and_finished(tmp_path, monkeypatch, bpe):
    lines = (json.dumps({"text": text}) + "\n" for _, text in DOCUMENTS if text)
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "tokenizer.json").write_text(bpe.json_text)
    options = {
        "data_files": str(tmp_path / "a.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "cache_dir": str(tmp_path / "cache"),
    }
    _kill_at(250, tmp_path / "reached", options)
    (partial,) = (tmp_path / "cache").glob("*.partial")
    before = finished_shards(partial)
    assert len(before) > 4
    monkeypatch.setitem(prepare_store.__kwdefaults__, "shard_tokens", 3000)
    data = LocalText(**options)
    data.prepare_data()
    fresh = LocalText(**{**options, "cache_dir": str(tmp_path / "fresh")}, num_proc=1)
    fresh.prepare_data()
    assert before.items() < stamps(data.store_dir).items()
    assert content(data.store_dir) == content(fresh.store_dir)


# What must not be lost


def unfinished(tmp_path, after=300) -> Path:
    with pytest.raises(ConnectionError):
        prepare(tmp_path / "s", failing_after(after))
    return tmp_path / "s.partial"


def test_a_journal_without_checksums_is_continued_and_gets_them(tmp_path):
    path = unfinished(tmp_path) / "journal.jsonl"
    header, *lines = path.read_text().splitlines()
    sections = [json.loads(line) for line in lines]
    assert sum(len(section.pop("checksums")) for section in sections) > 4
    path.write_text("\n".join([header, *map(json.dumps, sections), ""]))
    assert "checksums" not in path.read_text()
    meta = prepare(tmp_path / "s").meta
    assert meta == prepare(tmp_path / "fresh").meta
    assert len(meta["checksums"]["crc32"]) == len(stamps(tmp_path / "s"))


def test_sections_before_a_damaged_shard_are_kept(tmp_path):
    partial = unfinished(tmp_path)
    before = finished_shards(partial)
    (partial / "train-00003.tokens").write_bytes(b"")
    with pytest.warns(UserWarning, match="shards number 3 are damaged"):
        prepare(tmp_path / "s")
    prepare(tmp_path / "whole")
    kept = {name: stamp for name, stamp in before.items() if int(name[-12:].split(".")[0][-1]) < 3}
    assert len(kept) > 5
    assert kept.items() <= stamps(tmp_path / "s").items()
    assert content(tmp_path / "s") == content(tmp_path / "whole")


def test_what_another_version_left_is_moved_aside(tmp_path):
    partial = unfinished(tmp_path)
    before = content(partial)
    with pytest.warns(UserWarning, match=r"is now at .*s\.partial\.old-1"):
        prepare(tmp_path / "s", shard_tokens=2000)
    assert content(tmp_path / "s.partial.old-1") == before


def test_a_refused_store_keeps_its_shards_and_says_so(tmp_path):
    def refuse(counts):
        raise ValueError("no")

    with (
        pytest.warns(UserWarning, match=r"tokens that were written are kept in .*s\.partial"),
        pytest.raises(ValueError, match="no"),
    ):
        prepare(tmp_path / "s", check=refuse)
    before = finished_shards(tmp_path / "s.partial")
    prepare(tmp_path / "s")
    assert before == stamps(tmp_path / "s")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_at_a_restart_loses_no_finished_shard(tmp_path, monkeypatch, call):
    partial = unfinished(tmp_path)
    with (partial / "journal.jsonl").open("a") as file:
        file.write('{"first": 1')  # killed while writing: the restart fixes the end
    before = content(partial)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), full)
        with pytest.raises(StoreError, match="No space"):
            prepare(tmp_path / "s")
    assert content(partial) == before
    prepare(tmp_path / "s")
    prepare(tmp_path / "whole")
    assert content(tmp_path / "s") == content(tmp_path / "whole")


class Remote:
    """A source that counts what it is asked."""

    def __init__(self, commit="a") -> None:
        self.commit, self.places = commit, []

    def pin(self, stored):
        return stored or {"commit": self.commit}

    def go_to(self, place):
        self.places.append(place["document"])

    def place(self, document):
        return {"document": document - 1}


def test_origin_and_place_survive_and_only_a_fitting_place_is_used(tmp_path):
    def run(documents, remote):
        return prepare(tmp_path / "s", documents, remote=remote, notes=lambda: ["a note"])

    with pytest.raises(ConnectionError):
        run(failing_after(300), Remote("a"))
    partial, again = tmp_path / "s.partial", Remote("b")
    journal = (partial / "journal.jsonl").read_text().splitlines()
    with pytest.raises(ConnectionError):
        run(failing_after(0), again)
    assert again.places == [json.loads(journal[-1])["end"] - 1]
    (partial / "place.json").write_text("{}")  # of an older version
    (partial / "train-00002.tokens").write_bytes(b"")  # the start moves before the place
    damaged = Remote("b")
    with pytest.warns(UserWarning, match="damaged"):
        store = run(DOCUMENTS, damaged)
    assert damaged.places == []
    assert (store.meta["origin"], store.meta["notes"]) == ({"commit": "a"}, ["a note"])
    prepare(tmp_path / "whole", remote=Remote("a"))
    whole, here = content(tmp_path / "whole"), content(tmp_path / "s")
    assert {**whole, "meta.json": b""} == {**here, "meta.json": b""}
