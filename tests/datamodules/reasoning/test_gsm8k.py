"""Word problems as data: files, the hub, placed steps, what is counted, and the published files."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules import ReasoningGSM8K
from datamodules.check import main as check_main
from datamodules.reasoning import gsm8k
from datamodules.reasoning.gsm8k import (
    MarkedProblems,
    SolvedProblem,
    question_of,
    read_solved,
)
from datamodules.word_problems import PUBLISHED, Problem, Problems

CONFIGS = Path(__file__).parents[3] / "configs" / "data"
NUMBERS = range(2, 32)

ROWS = [
    {
        "question": f"Ann has {n} cats. Bob has twice as many. How many in all?",
        "answer": f"Bob: {n}*2=<<{n}*2={2 * n}>>{2 * n}.\n"
        f"Sum: <<{n}+{2 * n}={3 * n}>>{3 * n},000\n#### {3 * n},000",
    }
    for n in NUMBERS
]

MARKED = "Ann has {n} cats. Bob has twice as many.<T> How many in all?<T>"


def equations(n):
    return [f"<<{n}*2={2 * n}>>", f"<<{n}+{2 * n}={3 * n}>>"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def train_file(tmp_path):
    return write(tmp_path / "train.jsonl", ROWS)


@pytest.fixture
def make(tmp_path, train_file):
    def build(**options):
        defaults = {"data_files": train_file, "cache_dir": str(tmp_path / "cache"), "num_proc": 1}
        data = ReasoningGSM8K(**{"batch_size": 4, **defaults, **options})
        data.prepare_data()
        data.setup()
        return data

    return build


# ---- problems and answers


def test_problems_of_both_formats(tmp_path):
    path = Path(write(tmp_path / "a.jsonl", ROWS[:2]))
    first, _ = read_solved([path], "files")
    assert first == SolvedProblem(ROWS[0]["question"], tuple(equations(2)), "6000")
    augmented = tmp_path / "a.txt"
    augmented.write_text("A || B?||<<1+1=2>> <<2*.5=1>> #### 1\n\nWhy?|| #### 1,200\n")
    assert list(read_solved([augmented], "files"))[1:] == [SolvedProblem("Why?", (), "1200")]
    assert next(read_solved([augmented], "files")).question == "A"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "Why?", "line 1: expected 'question|| *"),
        ("a.txt", "ok||<<1=1>> #### 1\n||<<1=1>> #### 1", "line 2: expected 'question"),
        ("a.txt", "Why?||<<1=1>>", "line 1: expected 'question"),
        ("a.txt", "\n", r"files \(.*a\.txt\) is empty"),
        ("a.txt", None, "no such file"),
        ("a.jsonl", '{"question": "a"}', "line 1: expected an object with the strings 'question'"),
        ("a.parquet", "", "not from parquet"),
    ],
)
def test_files_that_hold_no_problems(tmp_path, name, content, expected):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=expected.replace("||", r"\|\|")):
        list(read_solved([path], "files"))


def test_another_solution_is_another_problem():
    one = SolvedProblem("a", ("b", "c"), "1")
    assert one.identity == SolvedProblem("a", ("b", "c"), "2").identity
    others = [
        SolvedProblem("a", ("bc",), "1"),
        SolvedProblem("ab", ("c",), "1"),
        SolvedProblem("a", ("c", "b"), "1"),
    ]
    assert len({one.identity, *(other.identity for other in others)}) == 4


# ---- an aligned file


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
    with pytest.raises(ValueError, match=r"no examples.*Check that data\.aligned_file has these"):
        make(aligned_file=aligned)
    with pytest.raises(ValueError, match="aligned_file='nowhere'"):
        make(aligned_file="nowhere")


@pytest.mark.parametrize(
    "row",
    [["a"], {"query": "a"}, {"query": 1, "thinking": []}, {"query": "a", "thinking": [1]}],
)
def test_lines_that_are_no_alignments(tmp_path, row):
    with pytest.raises(ValueError, match="(line|item) 1: expected an object with a string 'query'"):
        MarkedProblems(Path(write(tmp_path / "a.jsonl", [row])))


# ---- the data module


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
    with pytest.raises(ValueError, match="data_files.*test_files"):
        make(test_files=train_file)
    with pytest.raises(ValueError, match="val_files.*data_files"):
        ReasoningGSM8K(val_files=test)


def test_the_hub_is_read_without_files(tmp_path, monkeypatch):
    def fetch(split, *, cure, dataset, revision):
        assert (dataset, revision) == ("openai/gsm8k", None)
        rows = ROWS[:20] if split == "train" else ROWS[20:]
        return Problems([Problem(**row) for row in rows], {"hub": "openai/gsm8k", "split": split})

    monkeypatch.setattr(gsm8k, "fetch_problems", fetch)
    data = ReasoningGSM8K(val_fraction=0.2, test_fraction=0.5, cache_dir=str(tmp_path))
    data.prepare_data()
    data.setup()
    assert [len(data.stored(split)) for split in ("train", "val", "test")] == [15, 5, 10]
    assert data.origin["test"] == {"hub": "openai/gsm8k", "split": "test"}


AUGMENTED = [  # rows of whynlp/gsm8k-aug
    {
        "question": f"Ann has {n} cats. Bob has twice as many. How many in all?",
        "steps": [f"<<{n}*2={2 * n}>>", f"<<{n}+{2 * n}={3 * n}>>"],
        "answer": str(3 * n),
    }
    for n in range(2, 12)
]


SIZES = {"train": 6, "val": 2, "test": 2}


def publish(hub, name, rows):
    folder = hub.repository(name, commit=5) / "data"
    folder.mkdir()
    for split, part in {"train": rows[:6], "validation": rows[6:8], "test": rows[8:]}.items():
        pq.write_table(pa.Table.from_pylist(part), folder / f"{split}-00000-of-00001.parquet")


@pytest.mark.filterwarnings("ignore:whynlp/gsm8k-aug.* were published")
def test_gsm8k_aug_by_name_is_what_its_authors_files_have(tmp_path, hub, caplog):
    words = [{**row, "steps": ["Bob has twice.", "So it is that."]} for row in AUGMENTED]
    publish(hub, "whynlp/gsm8k-aug", AUGMENTED)
    publish(hub, "whynlp/gsm8k-aug-nl", words)
    options = {"tokenizer": "bytes", "cache_dir": str(tmp_path / "cache")}

    def built(**more):
        data = ReasoningGSM8K(**options, **more)
        data.prepare_data()
        data.setup()
        return data

    with caplog.at_level("INFO"):
        data = built(dataset="whynlp/gsm8k-aug")
    assert f"--data.revision {5:040x} repeats it." in caplog.text
    assert data.origin["val"]["commit"] == f"{5:040x}"
    lines = [f"{r['question']}||{' '.join(r['steps'])} #### {r['answer']}\n" for r in AUGMENTED]
    for split, part in {"train": lines[:6], "val": lines[6:8], "test": lines[8:]}.items():
        file = tmp_path / f"{split}.txt"
        file.write_text("".join(part))
        assert list(data.problems(split)) == list(read_solved([file], "file"))
    files = {f"{split}_files": str(tmp_path / f"{split}.txt") for split in ("val", "test")}
    local = built(data_files=str(tmp_path / "train.txt"), **files)
    for split in ("train", "val", "test"):
        assert list(local.examples(split)) == list(data.examples(split))
    pinned = ReasoningGSM8K(**options, dataset="whynlp/gsm8k-aug", revision=f"{5:040x}")
    in_words = built(dataset="whynlp/gsm8k-aug-nl")
    assert next(iter(in_words.examples("test"))).steps == ("Bob has twice.", "So it is that.")
    usual = ReasoningGSM8K(**options)
    assert len({d.fingerprint for d in (data, local, pinned, in_words, usual)}) == 5
    again = ReasoningGSM8K(**data.recipe()["init_args"])
    assert again.fingerprint == data.fingerprint


def test_a_command_fetches_and_compares_the_published_numbers(tmp_path, hub, capsys, monkeypatch):
    publish(hub, "whynlp/gsm8k-aug", AUGMENTED)
    config = str(CONFIGS / "gsm8k_aug.yaml")
    assert check_main([config]) == 2
    assert "(train) at 0000" in (error := capsys.readouterr().err)
    assert "has 6 rows, but 385,620 were published" in error
    small = {split: (PUBLISHED["whynlp/gsm8k-aug"][split][0], n) for split, n in SIZES.items()}
    monkeypatch.setitem(PUBLISHED, "whynlp/gsm8k-aug", small)
    assert check_main([config]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{config}: ")
    assert f'"commit": "{5:040x}"' in out
    assert check_main([str(CONFIGS / "pile.yaml"), str(tmp_path / "none.yaml")]) == 2
    assert "ReasoningDataModule" in capsys.readouterr().err


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


# ---- the published problems


COPY = Path(__file__).parents[4] / "shared" / "data"
TEST, VALID = COPY / "gsm8k" / "test.jsonl", COPY / "gsm8k_aug" / "valid.txt"

published = pytest.mark.skipif(
    not COPY.is_dir(), reason="there is no copy of GSM8K next to the project"
)


def prepared(cache, train, test, **options):
    data = ReasoningGSM8K(
        data_files=str(train),
        test_files=str(test),
        val_fraction=0.0,
        block_size=2048,
        cache_dir=str(cache),
        num_proc=1,
        **options,
    )
    data.prepare_data()
    data.setup()
    return data


def beginning(path, folder, lines=40):
    copy = folder / path.name
    copy.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    return copy


@published
def test_all_problems_are_kept_and_nearly_all_steps_placed(tmp_path):
    report = prepared(tmp_path, TEST, VALID).report()
    assert report["train"]["examples kept"] == 1319
    assert report["test"]["examples kept"] == 500
    for split in ("train", "test"):
        steps = [report[split][f"rule: steps {v}"] for v in ("decided alone", "decided by a tie")]
        assert sum(steps) / report[split]["steps"] > 0.9


@published
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:512"])
def test_problems_round_trip(tmp_path, tokenizer):
    files = [beginning(path, tmp_path) for path in (TEST, VALID)]
    data = prepared(tmp_path, *files, tokenizer=tokenizer, batch_size=40)
    decode = data.tokenizer.decode
    for split in ("train", "test"):
        batch = data.evaluation_source(split).batch(0)
        rows = {key: batch[key].numpy() for key in batch}
        for i, example in enumerate(data.examples(split)):
            query = rows["query"][i, 1 : rows["query_lengths"][i]].tolist()
            assert decode(query) == example.query
            assert (
                decode(rows["targets"][i][rows["targets"][i] >= 0].tolist()[:-1]) == example.answer
            )
            lengths = rows["step_lengths"][i]
            steps = [rows["steps"][i, r, : lengths[r]] for r in np.flatnonzero(lengths)]
            assert tuple(decode(step.tolist()) for step in steps) == example.steps
            places = rows["step_places"][i, : len(example.steps)]
            for place, marker in zip(places, example.markers, strict=True):
                assert decode(query[:place]).startswith(example.query[:marker].rstrip())


def test_equal_questions_in_two_splits_are_warned_of(make, tmp_path, recwarn):
    def rows(numbers, answer):
        asked = (f"Ann has {i} cats. How many legs have they in all?" for i in numbers)
        return [{"question": q, "answer": f"So <<{answer}=4>>\n#### {answer}"} for q in asked]

    train = write(tmp_path / "a.jsonl", rows(range(2, 40), 4))
    test = write(tmp_path / "b.jsonl", rows(range(37, 50), 5))
    make(data_files=train, test_files=test, val_fraction=0.0)
    (message,) = [str(w.message) for w in recwarn if "in train" in str(w.message)]
    assert message.startswith("ReasoningGSM8K: 3 questions are in train and in test: ")
    assert message.endswith("Remove the repeats from all splits but one.")
