"""Word problems as data: splits, the hub, placed steps, and what is counted."""

import pytest

from datamodules import ReasoningGSM8K
from datamodules.gsm8k import Problem, Problems
from datamodules.reasoning import gsm8k
from datamodules.reasoning.gsm8k import question_of
from tests.datamodules.reasoning.gsm8k.word_problems import MARKED, ROWS, write


def test_splits_are_shares_or_files(make, tmp_path, train_file):
    data = make(val_fraction=0.2, test_fraction=0.1)
    sizes = {split: len(data.stored(split)) for split in ("train", "val", "test")}
    assert sum(sizes.values()) == len(ROWS)
    assert sizes["val"] == 6
    questions = [p.question for split in sizes for p in data.problems(split)]
    assert sorted(questions) == sorted(row["question"] for row in ROWS)
    test = write(tmp_path / "test.jsonl", [{**ROWS[0], "question": "Another 2?"}])
    data = make(test_files=test, val_fraction=0.0)
    assert [len(data.stored(split)) for split in sizes] == [len(ROWS), 0, 1]
    assert not data.expects("val")
    assert data.recipe()["init_args"]["test_files"] == test
    with pytest.raises(ValueError, match="in data_files and in test_files"):
        make(test_files=train_file)
    with pytest.raises(ValueError, match=r"val_files name files, and data_files none"):
        ReasoningGSM8K(val_files=test)


def test_the_hub_is_read_without_files(tmp_path, monkeypatch):
    def fetch(split, *, cure):
        rows = ROWS[:20] if split == "train" else ROWS[20:]
        return Problems([Problem(**row) for row in rows], {"hub": "openai/gsm8k", "split": split})

    monkeypatch.setattr(gsm8k, "fetch_problems", fetch)
    data = ReasoningGSM8K(val_fraction=0.2, test_fraction=0.5, cache_dir=str(tmp_path))
    data.prepare_data()
    data.setup()
    assert [len(data.stored(split)) for split in ("train", "val", "test")] == [15, 5, 10]
    assert data.origin["test"] == {"hub": "openai/gsm8k", "split": "test"}


def test_examples_have_placed_equations_and_plain_answers(make):
    data = make(val_fraction=0.0, test_fraction=0.0)
    example = next(iter(data.examples("train")))
    assert example.marked() == "Ann has 2 cats. Bob has twice<T><T> as many. How many in all?"
    assert example.steps == ("<<2*2=4>>", "<<2+4=6>>")
    assert (example.answer, example.group) == (" 6000", 2)
    report = data.report()["train"]
    assert report["rule: steps decided alone"] == 2 * len(ROWS)
    assert report["rule: steps decided by a tie"] == report["rule: steps missing an operand"] == 0
    assert report["rule: examples decided alone"] == len(ROWS)
    clause = make(place_at="clause", last_step_at_end=True, val_fraction=0.0, test_fraction=0.0)
    assert next(iter(clause.examples("train"))).marked() == MARKED.format(n=2)
    assert clause.fingerprint != data.fingerprint


def test_problems_without_equations_stay(make, tmp_path):
    rows = [{"question": "Why?", "answer": "So.\n#### 1"}, *ROWS[:3]]
    data = make(data_files=write(tmp_path / "b.jsonl", rows), val_fraction=0.0, test_fraction=0.0)
    assert data.report()["train"]["examples without steps"] == 1
    assert next(iter(data.examples("train"))).steps == ()


def test_the_question_can_be_told_in_front_as_well(make):
    data = make(question_first=True, val_fraction=0.0, test_fraction=0.0)
    example = next(iter(data.examples("train")))
    assert example.marked() == (
        "How many in all? Ann has 2 cats. Bob has twice<T><T> as many. How many in all?"
    )
    assert question_of("Mr. X has $1.50. How much is it to Mr. Y, at 2.5 a piece?  ") == (
        "How much is it to Mr. Y, at 2.5 a piece?"
    )
    assert question_of("Is it so? Tell me.") == ""
    assert question_of("") == ""
