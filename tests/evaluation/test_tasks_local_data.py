"""Local copies of data sets: compressed or not, and how damaged ones are refused."""

import gzip
import os
import shutil
from pathlib import Path

import pytest
import yaml
from task_data import lines, write_folder
from zstandard import ZstdCompressor

from evaluation.tasks.local_data import TaskDataError, load

TASKS = Path(__file__).resolve().parents[2] / "configs" / "tasks"
LAMBADA = "lambada/lambada_test.jsonl"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "data")
    monkeypatch.setenv("DATA", str(root))
    return root


class _Loader(yaml.SafeLoader):
    """Reads task files without running their functions."""


_Loader.add_constructor("!function", lambda loader, node: node.value)


def read(name):
    """The splits of a task of configs/tasks, of BLiMP a paradigm, as the harness asks for them."""
    config = yaml.load((TASKS / f"{name}_local.yaml").read_text(), _Loader)
    splits = load(**config["dataset_kwargs"], paradigm="wh_island", version=1.0)
    return {split: rows.to_list() for split, rows in splits.items()}


@pytest.mark.parametrize(
    ("ending", "pack"),
    [(".jsonl.gz", gzip.compress), (".JSONL", bytes), (".jsonl.zst", ZstdCompressor().compress)],
)
def test_compressed_copies_are_the_same_data_sets(folder, ending, pack):
    names = ("lambada", "piqa", "blimp", "arc_easy")
    plain = [read(name) for name in names]
    assert [{split: len(rows) for split, rows in splits.items()} for splits in plain] == [
        {"test": 3},
        {"validation": 2},
        {"train": 2},
        {"validation": 2, "test": 2},
    ]
    assert plain[3]["test"][1]["choices"]["label"] == ["1", "2", "3"]
    for path in list(folder.rglob("*.jsonl")):
        path.with_suffix(ending).write_bytes(pack(path.read_bytes()))
        path.unlink()
    assert [read(name) for name in names] == plain
    path = folder / f"lambada/lambada_test{ending}"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TaskDataError, match=path.name):
        read("lambada")


def test_a_replaced_file_of_the_same_age_and_size_is_read_again(folder):
    path = folder / LAMBADA
    lines(path, [{"text": "old"}])
    before, age = read("lambada"), path.stat().st_mtime_ns
    lines(path, [{"text": "new"}])
    os.utime(path, ns=(age, age))
    assert (before["test"], read("lambada")["test"]) == ([{"text": "old"}], [{"text": "new"}])


def test_fields_that_nobody_reads_may_have_any_type(folder):
    lines(folder / LAMBADA, [{"text": "a", "id": 1}, {"text": "b", "id": "x"}])
    assert read("lambada")["test"] == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("name", "path"),
    [("piqa", "piqa"), ("lambada", LAMBADA), ("blimp", "blimp/first200")],
)
def test_what_is_missing_or_there_twice_is_named(folder, name, path):
    for inside in list((folder / path).parent.rglob("*.jsonl")):
        shutil.copy(inside, inside.with_suffix(".jsonl.gz"))
    with pytest.raises(TaskDataError, match=rf"DATA .*{name}/.*\.jsonl\.gz"):
        read(name)
    shutil.rmtree(folder / name)
    with pytest.raises(TaskDataError, match=f"DATA .*{name}/.*none"):
        read(name)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "lambada"),
        (b'{"text": 3}\n', "line 1.*text"),
        (b'{"text": "a"}\n{"other": "b"}\n', "line 2.*text"),
        (b'{"text": "a"}\n{"text": null}\n', "line 2.*text"),
        (b'{"text": "a"}\n{"text"\n', "line 2"),
        (b"[" * 100_000, "lambada"),
        (b"[1]\n", "item 1.*text"),
        (b'{"text": "\xff"}\n', "line 1"),
    ],
)
def test_rows_of_another_form_are_refused(folder, content, place):
    path = folder / LAMBADA
    path.write_bytes(content)
    with pytest.raises(TaskDataError, match=place) as caught:
        read("lambada")
    assert str(path) in str(caught.value)


def test_the_recipe_for_published_rows(tmp_path, monkeypatch):
    """HellaSwag as the harness' own function makes it, PIQA with its labels in order."""
    code = (TASKS.parents[1] / "docs/tasks.md").read_text().split("```python")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", "data/eval")
    texts = {
        "ctx_a": "A man [header] stands.",
        "ctx_b": "then HE",
        "endings": ["reads [title] it."],
    }
    lines(
        tmp_path / "hellaswag_val.jsonl", [{"activity_label": "Removing ice", **texts, "label": 3}]
    )
    lines(
        tmp_path / "valid.jsonl",
        [{"goal": f"g{i}", "sol1": "a\u2028b", "sol2": "c"} for i in "012"],
    )
    Path("valid-labels.lst").write_text("1\n0\n1\n")
    exec(compile(code, "docs/tasks.md", "exec"), {})
    (row,) = read("hellaswag")["validation"]
    assert row["query"] == "Removing ice: A man stands. Then he"
    assert (row["choices"], row["gold"]) == (["reads. it."], 3)
    assert [row["label"] for row in read("piqa")["validation"]] == [1, 0, 1]
