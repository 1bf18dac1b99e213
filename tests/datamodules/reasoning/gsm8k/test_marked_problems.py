"""Files that say where the steps of problems go."""

from pathlib import Path

import pytest

from datamodules.reasoning.gsm8k import MarkedProblems, offsets
from tests.datamodules.reasoning.gsm8k.word_problems import MARKED, NUMBERS, ROWS, equations, write


def aligned_rows():
    rows = [{"query": MARKED.format(n=n), "thinking": equations(n)} for n in NUMBERS]
    rows[3]["query"] = rows[3]["query"].replace("cats", "dogs")  # of n=5: another problem
    rows[4]["thinking"] = ["<<1=1>>", "<<2=2>>"]
    rows[5]["query"] += "<T>"
    return rows


def test_an_aligned_file_places_training_problems_and_drops_the_rest(make, tmp_path):
    aligned = write(tmp_path / "aligned.jsonl", aligned_rows())
    data = make(aligned_file=aligned, val_fraction=0.2, test_fraction=0.1)
    report = data.report()
    lost = [ROWS[i]["question"] for i in (3, 4, 5)]
    gone = [p.question for p in data.problems("train") if p.question in lost]
    assert report["train"]["left out, not in the aligned file"] == len(gone) > 0
    assert report["train"]["aligned file: lines"] == len(ROWS)
    assert report["train"]["aligned file: lines with another number of markers than steps"] == 1
    assert report["train"]["examples kept"] == len(list(data.problems("train"))) - len(gone)
    found = list(data.examples("train"))
    assert all(e.marked().endswith("twice as many.<T> How many in all?<T>") for e in found)
    for split in ("val", "test"):  # are never left out
        assert report[split]["examples read"] == len(list(data.problems(split)))
        assert report[split]["examples placed by the aligned file"] > 0
    assert data.recipe()["init_args"]["aligned_file"] == aligned
    assert data.fingerprint != make(val_fraction=0.2, test_fraction=0.1).fingerprint


def test_an_aligned_file_that_places_nothing_is_an_error(make, tmp_path):
    aligned = write(tmp_path / "aligned.jsonl", aligned_rows()[3:4])
    with pytest.raises(ValueError, match=r"no examples.*Is data\.aligned_file about these"):
        make(aligned_file=aligned)
    with pytest.raises(ValueError, match=r"aligned_file='nowhere': there is no such file"):
        make(aligned_file="nowhere")


@pytest.mark.parametrize(
    "row",
    [["a"], {"query": "a"}, {"query": 1, "thinking": []}, {"query": "a", "thinking": [1]}],
)
def test_lines_that_are_no_alignments(tmp_path, row):
    with pytest.raises(ValueError, match="line 1: expected an object with the text 'query'"):
        MarkedProblems(Path(write(tmp_path / "a.jsonl", [row])))


def test_offsets_of_markers():
    assert offsets("ab<T>c<T><T>") == (2, 3, 3)
    assert offsets("abc") == ()
