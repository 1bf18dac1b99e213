"""Word problems: read from files and from the hub, and refused where they are none."""

import gzip
import json
from pathlib import Path

import pytest

from datamodules import CorpusUnavailableError
from datamodules.hub import RowsWarning
from datamodules.word_problems import (
    REPOSITORY,
    Problem,
    fetch_problems,
    read_problems,
    result_of,
    without_annotations,
)

COPY = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
SIZES = {"train": 7473, "test": 1319}
ROWS = [
    {
        "question": f"What is {n} plus {n}?",
        "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}",
    }
    for n in range(5)
]
PROBLEMS = [Problem(**row) for row in ROWS]


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_problems_of_a_file(tmp_path):
    path, packed = tmp_path / "test.jsonl", tmp_path / "test.jsonl.gz"
    path.write_bytes(lines(ROWS))
    packed.write_bytes(gzip.compress(lines(ROWS)))
    found = read_problems(path, "files.test")
    assert found.rows == PROBLEMS == read_problems(str(packed), "files.test").rows
    assert found.origin["file"]["name"] == "test.jsonl"
    path.write_bytes(lines(ROWS[:4]))
    assert read_problems(path, "files.test").origin != found.origin


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"files\.test \(.*\): no such file"),
        (b"\n", r"files\.test \(.*\) is empty"),
        (b"nonsense", "line 1 is not JSON"),
        (b'["a"]', "item 1: expected an object with the strings 'question' and 'answer'"),
        (b'\n{"text": "a"}', "line 2: expected an object"),
        (b'{"question": "a", "answer": 3}', "line 1: expected an object"),
        (b'{"question": " ", "answer": "#### 3"}', "line 1: expected an object"),
        (b'{"question": "a", "answer": "3"}', "line 1: the answer does not end in a line '####"),
        (b'{"question": "a", "answer": "3\\n####"}', "line 1: the answer does not end in a line"),
        (
            b'{"question": "a", "answer": "3", "steps": "1+2=3"}',
            "line 1: 'steps' is '1\\+2=3'; use",
        ),
        (b'{"question": "a", "answer": "3", "steps": 2}', "line 1: 'steps' is 2; use a list of"),
        (b'{"question": "a", "answer": "3", "steps": ["1", 2]}', r"line 1: 'steps' is \['1', 2\];"),
        (b'{"question": "a", "answer": null, "steps": ["1"]}', "line 1: expected an object"),
    ],
)
def test_files_that_hold_no_problems(tmp_path, content, expected):
    path = tmp_path / "test.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        read_problems(path, "files.test")


@pytest.mark.parametrize("steps", [None, 2, "1+2=3", {"a": 1}, ["1+2=3"]])
def test_steps_next_to_a_worked_answer_are_a_field_like_any_other(tmp_path, steps):
    path = tmp_path / "test.jsonl"
    path.write_bytes(lines([{**row, "steps": steps} for row in ROWS]))
    assert read_problems(path, "files.test").rows == PROBLEMS


def test_steps_apart_come_with_the_result_alone(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_bytes(lines([{"question": "a", "answer": "6", "steps": ["<<1+2=3>>", "<<3*2=6>>"]}]))
    problem = Problem("a", "<<1+2=3>> <<3*2=6>> #### 6", ("<<1+2=3>>", "<<3*2=6>>"))
    assert read_problems(path, "files.test").rows == [problem]


def test_annotations_and_results():
    answer = "2*3=<<2*3=6>>6, so $<<6-1=5.0>>5.\n#### 5"
    assert without_annotations(answer) == "2*3=6, so $5.\n#### 5"
    assert without_annotations("1 < 2 << 3") == "1 < 2 << 3"
    assert result_of(answer) == "5"
    assert result_of("#### 1\n####  2,000 ") == "2,000"
    assert result_of("no result") == ""


def publish(hub, commit: int, rows) -> None:
    """Lays the repository out as on the hub: one configuration of two splits in parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = hub.repository(REPOSITORY, commit=commit)
    (folder / "main").mkdir()
    for split, part in {"train": rows[:3], "test": rows[3:]}.items():
        name = f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(part), folder / "main" / name)


@pytest.mark.filterwarnings("ignore:openai/gsm8k .* has 3 rows")
def test_problems_of_the_hub(hub):
    publish(hub, 4, ROWS)
    with pytest.warns(RowsWarning, match=rf"\(test\) at {4:040x} has 2 rows, but 1,319 were"):
        fetch_problems("test", cure="Pass a file")
    train, test = (fetch_problems(split, cure="Pass a file") for split in ("train", "test"))
    assert train.rows == PROBLEMS[:3]
    assert test.rows == PROBLEMS[3:]
    commit = f"{4:040x}"
    place = {"hub": "openai/gsm8k", "config": "main", "split": "test", "commit": commit}
    assert test.origin == place


def test_without_network_and_cache_the_message_says_what_helps(hub):
    hub.network = False
    with pytest.raises(CorpusUnavailableError, match=r"GSM8K: openai/gsm8k \(test\)") as caught:
        fetch_problems("test", cure="Pass a file")
    assert "(ConnectionError: no network). Pass a file, or set HF_HOME" in str(caught.value)


def test_rows_of_the_hub_are_checked(hub):
    publish(hub, 4, [{**row, "answer": "none"} for row in ROWS])
    with pytest.raises(ValueError, match=r"openai/gsm8k \(test\), row 1: the answer does not end"):
        fetch_problems("test", cure="Pass a file")


@pytest.mark.skipif(not COPY.is_dir(), reason="there is no copy of GSM8K next to the project")
@pytest.mark.parametrize("split", SIZES)
def test_every_problem_of_the_published_files(split):
    found = read_problems(COPY / f"{split}.jsonl", "files").rows
    assert len(found) == SIZES[split]
    assert sum("<<" in problem.answer for problem in found) > len(found) / 2
    for problem in found:
        plain = without_annotations(problem.answer)
        assert "<<" not in plain
        assert ">>" not in plain
        assert plain.endswith(f"\n#### {result_of(problem.answer)}")
