"""Local copies of data sets: the forms they come in, and how others are refused."""

import gzip
import json
import shutil
import zipfile

import pytest
from task_data import lines, pair, write_folder
from zstandard import ZstdCompressor

from evaluation.tasks.local_data import TaskDataError, load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "data")
    monkeypatch.setenv("DATA", str(root))
    return root


def test_splits_are_data_sets_of_the_harness_columns(folder):
    assert load("lambada")["test"].num_rows == 3
    assert load("hellaswag", version=1.0)["validation"][1]["gold"] == 2
    assert set(load("arc_easy")) == {"test", "validation"}
    assert load("arc_easy")["test"][1]["choices"]["label"] == ["1", "2", "3"]
    assert load("piqa")["validation"]["label"] == [1, 0]
    assert load("blimp", paradigm="wh_island")["train"].num_rows == 2


@pytest.mark.parametrize(
    ("ending", "pack"),
    [(".jsonl.gz", gzip.compress), (".JSONL", bytes), (".jsonl.zst", ZstdCompressor().compress)],
)
def test_compressed_copies_are_the_same_data_sets(folder, ending, pack):
    calls = [("lambada", {}), ("piqa", {}), ("blimp", {"paradigm": "wh_island"}), ("arc_easy", {})]
    plain = [load(name, **options) for name, options in calls]
    for path in list(folder.rglob("*.jsonl")):
        path.with_suffix(ending).write_bytes(pack(path.read_bytes()))
        path.unlink()
    for (name, options), splits in zip(calls, plain, strict=True):
        found = load(name, **options)
        assert {k: v.to_list() for k, v in found.items()} == {
            k: v.to_list() for k, v in splits.items()
        }
    path = folder / f"lambada/lambada_test{ending}"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TaskDataError, match="lambada_test.* does not hold rows as JSON"):
        load("lambada")


@pytest.mark.parametrize("digit", [str, int])
def test_the_published_hellaswag_is_processed_as_by_the_harness(folder, digit):
    row = {
        "ind": 4,
        "activity_label": "Removing ice",
        "ctx_a": "A man [header] stands.",
        "ctx_b": "then HE",
        "endings": ["reads [title] it.", "b", "c", "d"],
        "label": digit(3),
    }
    lines(folder / "hellaswag/validation_1000.jsonl", [row, {**row, "ind": "5"}])
    found, _ = load("hellaswag")["validation"]
    assert found["query"] == "Removing ice: A man stands. Then he"
    assert found["choices"][0] == "reads. it."
    assert found["gold"] == 3


def test_fields_that_nobody_reads_may_have_any_type(folder):
    rows = [{"text": "a", "id": 1}, {"text": "b", "id": "x"}]
    lines(folder / "lambada/lambada_test.jsonl", rows)
    assert load("lambada")["test"].to_list() == [{"text": "a"}, {"text": "b"}]


def test_the_published_files_of_piqa_are_joined(folder):
    (folder / "piqa/validation_labeled.jsonl").unlink()
    rows = [{"goal": f"g{i}", "sol1": "a\u2028b", "sol2": "c"} for i in range(3)]
    path = folder / "piqa/valid.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (folder / "piqa/valid-labels.lst").write_text("1\n0\n1\n")
    assert load("piqa")["validation"]["label"] == [1, 0, 1]
    (folder / "piqa/valid-labels.lst").write_text("1\n0\n")
    with pytest.raises(TaskDataError, match="a label, 0 or 1, for each of the 3 lines"):
        load("piqa")
    (folder / "piqa/valid-labels.lst").write_bytes(b"\xff")
    with pytest.raises(TaskDataError, match="valid-labels.lst cannot be read"):
        load("piqa")


def test_the_complete_archive_of_blimp_comes_first(folder):
    with zipfile.ZipFile(folder / "blimp/BLiMP.zip", "w") as archive:
        rows = [pair("Good.", "Bad.", n) for n in range(5)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        archive.writestr("BLiMP/data/wh_island.jsonl", text)
    assert load("blimp", paradigm="wh_island")["train"].num_rows == 5
    with pytest.raises(TaskDataError, match="BLiMP.zip has no adjunct_island.jsonl"):
        load("blimp", paradigm="adjunct_island")
    (folder / "blimp/BLiMP.zip").write_text("no archive")
    with pytest.raises(TaskDataError, match="BLiMP.zip cannot be read"):
        load("blimp", paradigm="wh_island")


def test_missing_folders_and_files(folder, monkeypatch, tmp_path):
    shutil.rmtree(folder / "piqa")
    with pytest.raises(TaskDataError, match="DATA .* has no folder piqa; see docs/tasks.md"):
        load("piqa")
    (folder / "lambada/lambada_test.jsonl").unlink()
    with pytest.raises(TaskDataError, match="must have one file .test..jsonl, not none"):
        load("lambada")
    shutil.rmtree(folder / "blimp/first200")
    with pytest.raises(TaskDataError, match="neither BLiMP.zip nor wh_island.jsonl"):
        load("blimp", paradigm="wh_island")
    monkeypatch.setenv("DATA", str(tmp_path / "nowhere"))
    with pytest.raises(TaskDataError, match="DATA .*nowhere. is no folder"):
        load("piqa")
    monkeypatch.delenv("DATA")
    with pytest.raises(TaskDataError, match="set the environment variable DATA"):
        load("piqa")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "does not hold rows"),
        ('{"text": 3}\n', "does not hold rows as JSON .*text.* changed from string to number"),
        ('{"text": "a"}\n{"other": "b"}\n', "row 2 has no text"),
        ('{"text": "a"}\n{"text": null}\n', "row 2 has no text"),
        ('{"text": "a"}\n{"text"\n', "does not hold rows as JSON .*in row 1"),
        ("[" * 100_000, "does not hold rows"),
        ("[1]\n", "does not hold rows"),
        (b'{"text": "\xff"}\n', "does not hold rows"),
    ],
)
def test_rows_of_another_form(folder, content, expected):
    path = folder / "lambada/lambada_test.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TaskDataError, match=expected) as caught:
        load("lambada")
    assert str(path) in str(caught.value)
