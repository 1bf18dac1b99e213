"""What a preparation keeps, leaves out and counts; a store is whole or not there."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from datamodules.reasoning import Example, FixedTokens
from datamodules.reasoning.preparation import (
    ARRAYS,
    KEPT,
    NO_STEPS,
    READ,
    STEPS,
    TOO_LONG,
    UNRESTORED,
    ExampleStore,
    prepare_examples,
)
from datamodules.store import SPLITS, StoreError
from datamodules.tokenizers import BytesTokenizer, train_bpe
from tests.datamodules.reasoning.reasoning_tasks import OWN, task

# ---- what is stored comes back


def texts_of(data, split):
    """(query, steps, places, answer, group) of each stored example, decoded."""
    examples, decode = data.stored(split), data.tokenizer.decode

    def text(start, length):
        return decode(examples.stream.gather(np.arange(start, start + length)).tolist())

    found = []
    for i in np.arange(len(examples)):
        steps = np.arange(int(examples.num_steps(i)))
        starts, lengths, places = examples.steps(np.full_like(steps, i), steps)
        own = [text(*span) for span in zip(starts, lengths, strict=True)]
        query, answer = text(*examples.queries(i)), text(*examples.answers(i))
        found.append((query, own, places.tolist(), answer, int(examples.groups(i))))
    return found


def kept_texts(data, split):
    """(query, number of steps, answer) of each stored example."""
    return [(query, len(steps), answer) for query, steps, _, answer, _ in texts_of(data, split)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:265"])
def test_everything_comes_back(make, tokenizer):
    data = make(tokenizer=tokenizer)
    for split in SPLITS:
        expected = [Example.from_marked(*row, group=i) for i, row in enumerate(OWN[split])]
        found = texts_of(data, split)
        assert [(q, s, a, g) for q, s, _, a, g in found] == [
            (one.query, list(one.steps), one.answer, one.group) for one in expected
        ]
        for (query, _, places, *_), example in zip(found, expected, strict=True):
            ids = data.tokenizer.encode(query)
            for place, marker in zip(places, example.markers, strict=True):
                assert data.tokenizer.decode(ids[:place]).startswith(query[:marker].rstrip())


def test_a_moved_step_may_cross_into_another_chunk(make):
    data = make(
        task(train=[("abcdefgh<T><T>ij", ["1", "2"], " a"), ("ab<T><T>cd", ["1", "2"], " a")])
    )
    # rows of 11 and 5 tokens with EOS; chunks end with the query
    crossed = {c: data.stored("train").crossings(c) for c in (1, 2, 3, 4, 8, 64)}
    assert crossed == {1: 2, 2: 2, 3: 0, 4: 0, 8: 0, 64: 0}
    assert data.stored("test").crossings(2) == 0


def test_the_longest_thought_is_the_longest_chunk_of_steps_joined(make):
    data = make()  # the longest one is about a query of 6 tokens with EOS, places 0, 5, 5, 5
    joined = len("bb") + len("ccc") + len("dddd") + 2
    assert {c: data.longest_thought(c) for c in (1, 5, 6, 64)} == {
        1: joined,
        5: joined,
        6: joined + len("a") + 1,
        64: joined + len("a") + 1,
    }
    assert make(task(train=[("One two", [], " a")]), repeats=2).longest_thought(4) == 0
    neighbours = [("ab<T>", ["12"], " a"), ("<T>b", ["345"], " a")]  # two thoughts, not one
    assert make(task(train=neighbours), repeats=3).longest_thought(64) == 3


def test_rows_are_as_long_as_a_scored_one_is_on_average(make):
    data = make()
    rows = [1 + len(q.replace("<T>", "")) + 14 + len(a) + 1 for q, _, a in OWN["val"]]
    assert data.row_tokens("val") == pytest.approx(sum(rows) / 3, abs=0.5)


@pytest.fixture
def lower_case(tmp_path):
    """The path of a tokenizer that does not give capitals back."""
    texts = ["two and val test one step nothing to think about caf\u00e9"] * 5
    content = json.loads(train_bpe("bpe:270", texts).json_text)
    content["normalizer"] = {"type": "Lowercase"}
    path = tmp_path / "lower.json"
    path.write_text(json.dumps(content))
    return str(path)


# ---- kept, left out, counted


def test_training_examples_that_do_not_come_back_are_left_out_and_counted(make, lower_case):
    few = [("two<T> and", ["two"], " one"), ("Two<T> and", ["two"], " one")]
    few += [("two<T> and", ["Two"], " one"), ("two<T> and", ["two"], " One")]
    data = make(task(train=few), tokenizer=lower_case)
    report = data.report()
    assert [report["train"].get(key, 0) for key in (READ, KEPT, UNRESTORED, STEPS)] == [4, 1, 3, 1]
    assert kept_texts(data, "train") == [("two and", 1, " one")]


def test_other_splits_keep_every_example_so_that_results_compare(make, lower_case):
    data = make(task(train=[("two<T> and", ["two"], " one")]), tokenizer=lower_case)
    report = data.report()
    assert [report["val"].get(key, 0) for key in (READ, KEPT, NO_STEPS, STEPS)] == [3, 3, 3, 0]
    assert kept_texts(data, "val") == [
        ("val one", 0, " 1"),
        ("val two", 0, " 2"),
        ("val three", 0, " 3"),
    ]


def test_broken_characters_are_not_aligned(make):
    broken = [("a\ud800<T>b", ["s"], " 1"), ("ab<T>", ["s"], " 1")]
    data = make(task(train=broken, val=broken))
    assert data.report()["train"][UNRESTORED] == 1
    assert [row[0] for row in kept_texts(data, "val")] == ["a\ufffdb", "ab"]


def test_a_tokenizer_that_gives_nothing_back(make, lower_case):
    capitals = [("TWO<T>", ["two"], " one")] * 3
    with pytest.raises(
        ValueError,
        match="tokenizer='.*lower.json' does not restore the text of 3 of its 3 examples",
    ):
        make(task(train=capitals), tokenizer=lower_case)


def test_long_training_examples_can_be_left_out(make):
    def rows(split):  # EOS, query, separator and step each, prefix, answer, EOS
        fixed = 2 + len("\nThe answer is")
        for marked, steps, answer in OWN[split]:
            texts = (marked.replace("<T>", ""), answer, *("\n" + step for step in steps))
            yield fixed + sum(len(text.encode()) for text in texts)

    lengths = sorted(rows("train"))
    data = make(block_size=lengths[-1])
    with pytest.raises(ValueError, match=f"train split has {lengths[-1]} tokens .* max_length"):
        make(block_size=lengths[-1] - 1)
    assert TOO_LONG not in data.report()["train"]
    shorter = make(block_size=lengths[-2], max_length=lengths[-2])
    assert shorter.report()["train"][TOO_LONG] == 1
    assert shorter.report()["val"] == data.report()["val"]
    assert shorter.fingerprint != data.fingerprint
    with pytest.raises(ValueError, match="all 5 are longer than max_length"):
        make(max_length=5)


def test_questions_of_other_splits_that_are_too_long_are_left_out_and_counted(make):
    """Two of five have 118 and 119 tokens: EOS, 100 or 101 bytes, 14 of the prefix, 2, EOS."""
    val = [("Val<T> one", ["v"], " 1"), ("v" * 100, [], " 2"), ("Val two", [], " 3")]
    val += [("w" * 101, [], " 4"), ("Val<T> three", ["u"], " 5")]
    with pytest.warns(UserWarning, match="2 of 5 questions of the val split .* block_size=119"):
        data = make(task(val=val), block_size=117)
    assert [data.left_out(split) for split in SPLITS] == [0, 2, 0]
    source = data.evaluation_source("val")
    batches = [source.batch(n) for n in range(len(source))]
    assert [batch["targets"][:, 1].tolist() for batch in batches] == [[49, 51], [53, -100]]
    assert [batch["sequence_id"].tolist() for batch in batches] == [[0, 2], [4, 5]]  # 5: no row
    assert make(task(val=val), block_size=119).left_out("val") == 0
    train = task(train=[*OWN["train"], ("v" * 100, [], " 2")])
    with pytest.raises(ValueError, match="train split has 118 tokens .* max_length"):
        make(train, block_size=117, max_length=998)
    seen = train(cache_dir=data.cache_dir, block_size=117, max_length=998)
    seen.prepare_data()
    seen.setup("validate")  # a command that evaluates trains on nothing
    assert seen.left_out("train") == 1
    with pytest.raises(ValueError, match="shortest question of the val split has 118 tokens"):
        make(task(val=val[1:2]), block_size=117, max_length=999).evaluation_source("val")


def test_what_a_task_notices_is_counted_once_for_each_split(make):
    for tokenizer in ("bytes", "bpe:260"):  # which is trained on the same examples
        data = make(tokenizer=tokenizer)
        key = "questions with capitals only"
        assert {split: data.report()[split][key] for split in SPLITS} == {
            "train": 0,
            "val": 0,
            "test": 0,
        }
    capitals = [("TWO", [], " 1"), ("ONE", [], " 1"), ("one", [], " 1")]
    assert make(task(train=capitals), tokenizer="bpe:257").report()["train"][key] == 2


# ---- whole or not there


def prepare(folder, examples):
    return prepare_examples(
        folder,
        description=lambda: {"source": "test"},
        examples=examples,
        make_tokenizer=BytesTokenizer,
        wording=lambda tokenizer: FixedTokens((0,), (0,)),
    )


def one_example(split):
    return [Example("one", ("a",), (3,), " b")]


def test_a_failure_leaves_nothing(tmp_path):
    def broken(split):
        yield from one_example(split)
        if split == "val":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "s", broken)
    assert [path.name for path in tmp_path.iterdir()] == [".s.lock"]
    assert prepare(tmp_path / "s", one_example)
    assert not prepare(tmp_path / "s", broken)


def _prepare_slowly(folder, log, seconds):
    def slow(split):
        with log.open("a") as file:
            file.write(f"{split}\n")
        yield from one_example(split)
        if split == "val":
            time.sleep(seconds)

    prepare(folder, slow)


def _start(*arguments):
    process = multiprocessing.get_context("fork").Process(target=_prepare_slowly, args=arguments)
    process.start()
    return process


def test_a_killed_process_leaves_nothing_that_looks_whole(tmp_path):
    folder, log = tmp_path / "s", tmp_path / "log"
    process = _start(folder, log, 60.0)
    deadline = time.monotonic() + 20
    while not log.exists() or "val" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not folder.exists()
    with pytest.raises(StoreError, match="no text store"):
        ExampleStore(folder)
    assert prepare(folder, one_example)
    assert len(ExampleStore(folder).examples("test")) == 1
    assert not list(tmp_path.glob("s.partial"))


def test_two_processes_prepare_once(tmp_path):
    folder, log = tmp_path / "s", tmp_path / "log"
    processes = [_start(folder, log, 0.2) for _ in range(2)]
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert log.read_text().split() == list(SPLITS)


@pytest.mark.parametrize("name", ["train-00000.tokens", "train.places"])
def test_a_truncated_store_is_named_with_its_cure(tmp_path, name):
    prepare(tmp_path / "s", one_example)
    path = tmp_path / "s" / name
    path.write_bytes(path.read_bytes()[:-1])
    for opening in (
        lambda: ExampleStore(tmp_path / "s"),
        lambda: prepare(tmp_path / "s", one_example),
    ):
        with pytest.raises(StoreError, match=f"{name} has .* bytes, but .*Delete the folder"):
            opening()


@pytest.mark.parametrize("name", ["train-00000.tokens", *(f"train.{name}" for name in ARRAYS)])
@pytest.mark.parametrize("old", [False, True])
def test_a_changed_store_is_named_with_its_cure(tmp_path, name, old):
    prepare(tmp_path / "s", one_example)
    path, meta_file = tmp_path / "s" / name, tmp_path / "s" / "meta.json"
    path.write_bytes(b"\x7f" * path.stat().st_size)
    if old:
        meta = json.loads(meta_file.read_text())
        del meta["checksums"]
        meta_file.write_text(json.dumps(meta))
        if name in ("train.groups", "train.shifts"):  # any number is possible
            ExampleStore(tmp_path / "s")
            return
    expected = "is damaged: " if old else f"is damaged: bytes 0 to .* of {name} changed "
    with pytest.raises(StoreError, match=expected):
        ExampleStore(tmp_path / "s")


@pytest.mark.parametrize("key", ["examples", "steps", "longest", "report"])
@pytest.mark.parametrize("value", [None, -1, True, 2**60, "a", {"read": "b"}])
def test_counts_that_cannot_be_are_refused(tmp_path, key, value):
    prepare(tmp_path / "s", one_example)
    path = tmp_path / "s" / "meta.json"
    meta = json.loads(path.read_text())
    meta["splits"]["train"][key] = value
    path.write_text(json.dumps(meta))
    with pytest.raises(StoreError, match="meta.json: "):
        ExampleStore(tmp_path / "s")
