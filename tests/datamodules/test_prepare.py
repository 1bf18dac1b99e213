"""Killed and started again, on one process or several: the same bytes, nothing done twice."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from datamodules import LocalText, encoding
from datamodules.encoding import ChunkPosition, WorkerDiedError, chunks, encode_in_order
from datamodules.prepare import prepare_store
from datamodules.store import Counts, Store, StoreError
from datamodules.tokenizers import BytesTokenizer, train_bpe
from tests.programs import Program

SPLIT_CYCLE = ("train", "train", "val", "train", "test")
DOCUMENTS = [
    (SPLIT_CYCLE[i % 5], f"Document {i} of the corpus. " * (i % 11) + "x" * (i % 3))
    for i in range(400)
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Many chunks and parts and, with several processes, workers from the second chunk on."""
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 7)
    monkeypatch.setattr(encoding, "PART_BYTES", 5000)
    monkeypatch.setattr(encoding, "BYTES_BEFORE_WORKERS", 1000)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe("bpe:280", ["Document of the corpus. 0123456789 xx"] * 3)


def prepare(folder: Path, documents=None, tokenizer=None, **options) -> Store:
    prepare_store(
        folder,
        description={"source": "test"},
        documents=documents or (lambda first: iter(DOCUMENTS[first:])),
        make_tokenizer=lambda: tokenizer or BytesTokenizer(),
        **options,
    )
    return Store(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    shards = (path for suffix in ("tokens", "ends") for path in folder.glob(f"*.{suffix}"))
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in shards}


def records(partial: Path) -> list[dict]:
    """What an unfinished store knows of its finished parts."""
    return [json.loads(path.read_text()) for path in sorted((partial / "parts").glob("0*.json"))]


def finished_shards(partial: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the shards of finished parts."""
    names = {name for record in records(partial) for name in record["checksums"]}
    return {k: v for k, v in stamps(partial).items() if k in names}


def failing_at(number):
    """Documents whose reading fails at one of them."""

    def documents(first):
        yield from DOCUMENTS[first:number]
        raise ConnectionError("the line is dead")

    return documents


def unfinished(tmp_path, at=300, tokenizer=None, **options) -> Path:
    """Prepares until reading fails; returns the folder that is left."""
    with (
        pytest.warns(UserWarning, match=r"tokens that were written are kept in .*s\.partial"),
        pytest.raises(ConnectionError),
    ):
        prepare(tmp_path / "s", failing_at(at), tokenizer, **options)
    assert not (tmp_path / "s").exists()
    return tmp_path / "s.partial"


# Processes


def test_the_number_of_processes_does_not_show(tmp_path, bpe):
    for n in (1, 2, 3):
        prepare(tmp_path / str(n), tokenizer=bpe, num_proc=n)
    assert content(tmp_path / "1") == content(tmp_path / "2") == content(tmp_path / "3")


def test_few_texts_and_bytes_start_no_process(monkeypatch, bpe):
    monkeypatch.setattr(encoding, "DataLoader", None)  # would fail if it were called
    assert list(encode_in_order(chunks(DOCUMENTS), BytesTokenizer(), 4))
    monkeypatch.setattr(encoding, "BYTES_BEFORE_WORKERS", 10**6)
    assert list(encode_in_order(chunks(DOCUMENTS), bpe, 4))


def test_workers_use_one_core_each(bpe, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    bpe.use_one_core()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_workers_leave_the_random_numbers_of_a_run_alone(bpe):
    import torch

    before = torch.get_rng_state()
    assert list(encode_in_order(chunks(DOCUMENTS), bpe, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failing_tokenizer_is_named(monkeypatch):
    class Broken(BytesTokenizer):
        gains_from_processes = True

        def encode_arrays(self, texts):
            if os.getpid() != parent:
                raise LookupError("cannot tokenise")
            return super().encode_arrays(texts)

    parent = os.getpid()
    with pytest.raises(LookupError, match="^'?cannot tokenise'?$"):
        list(encode_in_order(chunks(DOCUMENTS), Broken(), 2))


def test_a_dead_worker_is_named():
    class Dying(BytesTokenizer):
        gains_from_processes = True

        def encode_arrays(self, texts):
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().encode_arrays(texts)

    parent = os.getpid()
    with pytest.raises(WorkerDiedError, match=r"Killed.*num_proc"):
        list(encode_in_order(chunks(DOCUMENTS), Dying(), 2))


# Parts


def test_a_record_says_which_documents_each_shard_holds(tmp_path):
    partial = unfinished(tmp_path, at=399)
    parts = records(partial)
    assert len(parts) > 5
    first = 0
    for i, part in enumerate(parts):
        held, first = DOCUMENTS[first : part["documents"]], part["documents"]
        assert 5000 <= sum(len(text) for _, text in held) < 5000 + 7 * 300
        for split, counts in part["splits"].items():
            texts = [text for s, text in held if s == split and text]
            assert counts["documents"] == len(texts)
            ends = np.fromfile(partial / f"{split}-{i:05d}.ends", "<i8")
            assert np.diff(ends, prepend=0).tolist() == [len(t) + 1 for t in texts]
    store = prepare(tmp_path / "s")
    assert store.counts("train").documents == sum(s == "train" and bool(t) for s, t in DOCUMENTS)


def test_chunks_and_parts_are_cut_by_the_documents_alone():
    found = list(chunks(DOCUMENTS))
    ends = [chunk.position for chunk in found if chunk.position.ends]
    assert [place.part for place in ends] == list(range(len(ends)))
    assert [place.last for place in ends] == [False] * (len(ends) - 1) + [True]
    start = ChunkPosition(part=2, documents=ends[1].documents)
    again = list(chunks(DOCUMENTS[start.documents :], start))
    assert again == [chunk for chunk in found if chunk.position.part >= 2]


@pytest.mark.parametrize("at", [100, 399])
@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_failure_keeps_finished_parts(tmp_path, bpe, at, num_proc):
    partial = unfinished(tmp_path, at, bpe, num_proc=num_proc)
    before = finished_shards(partial)
    assert before
    asked = []

    def documents(first):
        asked.append(first)
        return iter(DOCUMENTS[first:])

    done = records(partial)[-1]["documents"]
    prepare(tmp_path / "s", documents, tokenizer=bpe)
    prepare(tmp_path / "whole", tokenizer=bpe)
    assert asked == [done]
    assert before.items() <= stamps(tmp_path / "s").items()
    assert content(tmp_path / "s") == content(tmp_path / "whole")
    assert not partial.exists()


def test_half_a_record_and_a_begun_shard_are_left_out(tmp_path):
    partial = unfinished(tmp_path, at=200)
    (partial / "parts" / "00002.json").write_text('{"part": 1')
    (partial / "train-00099.tokens").write_bytes(b"begun")
    prepare(tmp_path / "s")
    prepare(tmp_path / "whole")
    assert content(tmp_path / "s") == content(tmp_path / "whole")


def test_a_trained_tokenizer_is_not_trained_again(tmp_path, bpe):
    unfinished(tmp_path, 200, bpe)
    prepare(tmp_path / "s", tokenizer=train_bpe("bpe:257", ["other text"]))
    prepare(tmp_path / "whole", tokenizer=bpe)
    assert content(tmp_path / "s") == content(tmp_path / "whole")


def test_a_damaged_shard_does_not_get_the_name(tmp_path):
    partial = unfinished(tmp_path)
    (partial / "train-00003.tokens").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="are kept"),
        pytest.raises(StoreError, match=r"s\.partial is damaged: train-00003.tokens has 0 bytes"),
    ):
        prepare(tmp_path / "s")
    assert not (tmp_path / "s").exists()


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
    unfinished(tmp_path, 100, train_tokens=9000)
    prepare(tmp_path / "s", train_tokens=9000)
    prepare(tmp_path / "whole", train_tokens=9000)
    assert content(tmp_path / "s") == content(tmp_path / "whole")


# Killed for real, and several at once

SCRIPT = """
import os, time
from pathlib import Path
from datamodules import LocalText, encoding
encoding.CHUNK_DOCUMENTS, encoding.BYTES_BEFORE_WORKERS, encoding.PART_BYTES = 7, 1000, 5000
class Stopping(LocalText):
    def labelled_documents(self):
        for i, item in enumerate(super().labelled_documents()):
            if i == {stop}:
                Path({marker!r}).touch()
                time.sleep(100)
            yield item
Stopping.__name__ = "LocalText"  # which is in the fingerprint
Stopping(**{options!r}).prepare_data()
"""


def start(stop: int | None, marker: Path, options: dict) -> Program:
    """Prepares in another process, which stops for a long time before a document."""
    script = SCRIPT.format(stop=stop, marker=str(marker), options=options)
    return Program("-c", script)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def options(tmp_path, bpe) -> dict:
    lines = (json.dumps({"text": text}) + "\n" for _, text in DOCUMENTS if text)
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "tokenizer.json").write_text(bpe.json_text)
    return {
        "data_files": str(tmp_path / "a.jsonl"),
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "cache_dir": str(tmp_path / "cache"),
    }


def fresh(options, tmp_path) -> dict[str, bytes]:
    """The store that one process writes at once."""
    data = LocalText(**{**options, "cache_dir": str(tmp_path / "fresh")}, num_proc=1)
    data.prepare_data()
    return content(data.store_dir)


def test_killed_and_finished(tmp_path, options):
    process = start(250, tmp_path / "reached", {**options, "num_proc": 2})
    wait_for((tmp_path / "reached").exists)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not any(worker.is_running() for worker in workers))
    (partial,) = (tmp_path / "cache").glob("*.partial")
    before = finished_shards(partial)
    assert len(before) > 4
    data = LocalText(**options)
    data.prepare_data()
    assert before.items() < stamps(data.store_dir).items()
    assert content(data.store_dir) == fresh(options, tmp_path)


def test_a_second_process_waits_and_goes_on_where_the_first_was_killed(tmp_path, options):
    slow = start(250, tmp_path / "reached", {**options, "num_proc": 1})
    wait_for((tmp_path / "reached").exists)
    other = start(None, tmp_path / "never", {**options, "num_proc": 1})
    errors = Path(f"/proc/{other.pid}/fd/2")
    wait_for(lambda: "Waiting for another process" in errors.read_text())
    (partial,) = (tmp_path / "cache").glob("*.partial")
    before = finished_shards(partial)
    assert before
    slow.kill()
    slow.communicate()
    other.communicate(timeout=60)
    assert other.returncode == 0
    data = LocalText(**options)
    assert before.items() < stamps(data.store_dir).items()
    assert content(data.store_dir) == fresh(options, tmp_path)


# What must not be lost


def test_one_that_gives_up_leaves_nothing(tmp_path, bpe):
    with pytest.raises(ConnectionError):
        prepare(tmp_path / "t", failing_at(0), bpe)
    assert not (tmp_path / "t.partial").exists()


def test_what_another_version_left_is_moved_aside(tmp_path, monkeypatch):
    partial = unfinished(tmp_path)
    before = stamps(partial)
    monkeypatch.setattr(encoding, "PART_BYTES", 2000)
    with pytest.warns(UserWarning, match=r"is now at .*s\.partial\.old-1"):
        prepare(tmp_path / "s")
    assert stamps(tmp_path / "s.partial.old-1") == before


def test_a_refused_store_keeps_its_shards_and_says_so(tmp_path):
    def refuse(counts):
        raise ValueError("no")

    with (
        pytest.warns(UserWarning, match=r"tokens that were written are kept in .*s\.partial"),
        pytest.raises(ValueError, match="no"),
    ):
        prepare(tmp_path / "s", check=refuse)
    before = finished_shards(tmp_path / "s.partial")
    prepare(tmp_path / "s", lambda first: pytest.fail("nothing is missing"))
    assert before == stamps(tmp_path / "s")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_at_a_restart_loses_no_finished_part(tmp_path, monkeypatch, call):
    partial = unfinished(tmp_path)
    before = finished_shards(partial)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), full)
        with (
            pytest.warns(UserWarning, match="are kept"),
            pytest.raises(StoreError, match="No space"),
        ):
            prepare(tmp_path / "s")
    assert finished_shards(partial) == before
    prepare(tmp_path / "s")
    prepare(tmp_path / "whole")
    assert content(tmp_path / "s") == content(tmp_path / "whole")


def newest(commit):
    """Settles a source whose newest commit changes."""
    return lambda stored: stored or {"commit": commit}


def test_origin_and_notes_of_the_finished_parts_stay(tmp_path):
    unfinished(tmp_path, pin=newest("a"), notes=lambda: ["a note"])
    store = prepare(tmp_path / "s", pin=newest("b"), notes=lambda: ["another"])
    assert (store.meta["origin"], store.meta["notes"]) == ({"commit": "a"}, ["a note"])
    prepare(tmp_path / "whole", pin=newest("a"))
    whole, here = content(tmp_path / "whole"), content(tmp_path / "s")
    assert {**whole, "meta.json": b""} == {**here, "meta.json": b""}
