"""pass@k on GSM8K: numbers read rightly, and the task on a file in the published format."""

import dataclasses
import itertools
import json
import statistics
from pathlib import Path

import pytest
from task_data import lines

from datamodules import LocalText, load_tokenizer
from datamodules.word_problems import Problem, read_problems, without_annotations
from evaluation.load import build_model
from evaluation.tasks.pass_at_k import extract_answer, pass_at, pass_rates
from lightning_models.checkpoint import read_checkpoint

COPY = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
ASKED = [Problem(f"What is {n} times 50?", f"<<{n}*50={50 * n}>>\n#### {50 * n}") for n in range(6)]
SHOWN = [Problem(f"And {n}?", f"It is {n}=<<{n}={n}>>{n}.\n#### {n}") for n in range(9)]
TASK = "gsm8k_pass_at_k_local"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # after ####
        (" 2 * 9 = 18\n#### 18", "18"),
        ("#### 18\nThat leaves 3.", "18"),
        ("#### $18.00 and 4 more", "18"),
        ("#### The answer is 7 of 9", "7"),
        ("#### 1\n#### 2", "1"),
        ("It is 12\n####", "12"),
        ("It is 12\n#### none\nor 13", "13"),
        # the last number
        (" She has 3 cats and 4 dogs, which makes 7.", "7"),
        ("", None),
        (" many, many", None),
        # before the next question
        (" 5 apples\n\nQuestion: How many are 3 and 4?\nAnswer: 7\n#### 7", "5"),
        ("Question: 7", None),
        # forms of one number
        ("18.00", "18"),
        ("018", "18"),
        ("0.50", "0.5"),
        (" .5", "0.5"),
        ("18.", "18"),
        ("$1,234,567.80.", "1234567.8"),
        ("1,000", "1000"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("40%", "40"),
        ("\u20ac40", "40"),
        ("20th", "20"),
        ("**42**", "42"),
        ("\\boxed{42}", "42"),
        ("\u0664\u0662 and 6", "6"),
        # negative ones
        ("-7", "-7"),
        ("= -7.0 degrees", "-7"),
        ("\u22127", "-7"),
        ("-$7", "-7"),
        ("$-7", "-7"),
        ("10-7", "7"),
        ("(2)-7", "7"),
        ("-0", "0"),
        # fractions are worked out
        ("1/2", "0.5"),
        ("$3/4", "0.75"),
        ("so \\boxed{5} of 7", "5"),
        ("6/2 = 3", "3"),
        ("$20/hour", "20"),
    ],
)
def test_extraction(text, expected):
    assert extract_answer(text) == expected


@pytest.mark.skipif(not COPY.is_dir(), reason="there is no copy of GSM8K next to the project")
@pytest.mark.parametrize("split", ["train", "test"])
def test_published_answers_are_found_right(split):
    problems = read_problems(COPY / f"{split}.jsonl", "files").rows
    without_mark = 0
    for problem in problems:
        # A second way to the same number: digits, sign and point, no pattern.
        gold = problem.answer.split("####")[1].replace(",", "").strip()
        for answer in (problem.answer, without_annotations(problem.answer)):
            found = extract_answer(f" {answer}\n\nQuestion: How many are 99?")
            assert float(found) == float(gold)
            assert pass_rates({"answer": problem.answer}, [[found]])["pass_at_k"] == 1
        solution = without_annotations(problem.answer).partition("####")[0]
        without_mark += extract_answer(solution) == str(float(gold)).removesuffix(".0")
    # Most solutions end in their result, so the last number is a fair guess without the mark.
    assert without_mark > 0.85 * len(problems)


def test_pass_at_k_is_unbiased():
    """The mean over all sets of k tries."""
    for tries, right in [(5, 0), (5, 2), (6, 5), (4, 4)]:
        flags = [True] * right + [False] * (tries - right)
        for k in range(1, tries + 1):
            sets = list(itertools.combinations(flags, k))
            share = sum(any(each) for each in sets) / len(sets)
            assert pass_at(k, tries, right) == pytest.approx(share)


def test_rates_of_a_question():
    doc = {"answer": "50 \n#### 1,200.00"}
    assert pass_rates(doc, [["7", None, "1200", "1200"]]) == {"pass_at_k": 1, "pass_at_1": 0.5}
    assert pass_rates(doc, [[None, "120"]]) == {"pass_at_k": 0, "pass_at_1": 0}


# ---- the task, offline


@pytest.fixture(scope="module")
def trained(corpus, train_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("gsm8k") / "bytes.ckpt"
    return train_checkpoint(path, LocalText(**{**corpus, "block_size": 256, "batch_size": 2}))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that DATA names, with both files in the published format."""
    for split, problems in {"test": ASKED, "train": SHOWN}.items():
        rows = [dataclasses.asdict(problem) for problem in problems]
        lines(tmp_path / "gsm8k" / f"{split}.jsonl", rows)
    monkeypatch.setenv("DATA", str(tmp_path))
    return tmp_path / "gsm8k"


@pytest.fixture
def asks(evaluates, trained, folder, tmp_path):
    """Runs the task; returns its result and the samples."""

    def run(*words):
        targets = tmp_path / "result.json", tmp_path / "samples.jsonl"
        options = ("--tasks", TASK, "--output", targets[0], "--samples", targets[1])
        evaluates("tasks", "--ckpt", trained, *options, *words)
        samples = [json.loads(line) for line in targets[1].read_text().splitlines()]
        return json.loads(targets[0].read_text()), samples

    return run


def test_candidates_are_those_of_the_decode_loop(asks, trained):
    """Candidate c of question q draws from stream 5 q + c, after the end-of-text token."""
    result, samples = asks("--limit", 2, "--seed", 9)
    prompts = [f"Question: {problem.question}\nAnswer:" for problem in ASKED[:2] for _ in range(5)]
    texts = build_model(read_checkpoint(trained)).generate_text(
        prompts, tokenizer=load_tokenizer("bytes"), max_new_tokens=50, seed=9
    )
    assert [text for sample in samples for text in sample["texts"]] == texts
    assert len(set(texts)) > 5
    assert result[f"{TASK}_pass_at_k"] == statistics.fmean(
        any(extract_answer(text) == gold for text in sample["texts"])
        for sample, gold in zip(samples, ("0", "50"), strict=True)
    )
    assert (result["tasks"][TASK]["examples"], result["settings"]["seed"]) == (2, 9)
    assert result["tasks"][TASK]["flops_per_token_6nd"] > 0


def test_neither_batches_nor_further_questions_change_a_text(asks):
    shown = ("--num_fewshot", 1, "--set.attention_backend", "math")
    _, samples = asks(*shown)
    assert len(samples) == 6
    for size in (1, 7):
        assert asks(*shown, "--batch_size", size)[1] == samples
    assert asks(*shown, "--limit", 2)[1] == samples[:2]
    assert asks(*shown, "--seed", 1)[1] != samples


@pytest.mark.parametrize(("only", "mean"), [(None, 1.0), (1, 0.2)])
def test_right_answers_pass(asks, monkeypatch, only, mean):
    """Each candidate is right, or only the second one of every question."""
    from evaluation.tasks.writing import Continuations

    prompts = []

    def write(model, tokenizer, requests):
        texts = []
        for request in requests:
            prompts.append(tokenizer.decode(request.prompt))
            number = int(prompts[-1].rpartition("What is ")[2].split()[0])
            known = only is None or request.stream % 5 == only
            texts.append(f" It is\n#### {50 * number}.00" if known else " no")
        return Continuations(texts, sum(map(len, texts)), None)

    monkeypatch.setattr("evaluation.tasks.adapter.write", write)
    result, _ = asks("--num_fewshot", 2)
    scores = result["tasks"][TASK]
    assert scores["metrics"] == {"pass_at_k": 1.0, "pass_at_1": pytest.approx(mean)}
    assert scores["standard_errors"] == {"pass_at_k": 0, "pass_at_1": pytest.approx(0, abs=1e-9)}
    blocks = {f"Question: {p.question}\nAnswer: {without_annotations(p.answer)}" for p in SHOWN}
    for prompt in prompts:
        *shown, asked = prompt.removeprefix("<|endoftext|>").split("\n\n")
        assert len(set(shown)) == 2
        assert set(shown) <= blocks
        assert asked in {f"Question: {problem.question}\nAnswer:" for problem in ASKED}


@pytest.mark.parametrize(
    ("edit", "words", "named"),
    [
        (lambda folder: (folder / "test.jsonl").unlink(), (), "DATA"),
        (
            lambda folder: (folder / "test.jsonl").write_text("Two?||<<2=2>> #### 2\n"),
            (),
            "test.jsonl",
        ),
        (lambda folder: (folder / "train.jsonl").unlink(), ("--num_fewshot", 1), "num_fewshot (1)"),
        (
            lambda folder: (folder / "train.jsonl").write_bytes(
                (folder / "test.jsonl").read_bytes()
            ),
            ("--num_fewshot", 1),
            "6 of the test questions",
        ),
        (
            lambda folder: (folder / "test.jsonl").write_text(
                '{"question": "Two?", "answer": "it is two"}\n'
            ),
            (),
            "question 0",
        ),
        (lambda folder: None, ("--num_fewshot", 9), "num_fewshot (9)"),
        (lambda folder: None, ("--limit", 0), "--limit: "),
        (lambda folder: None, ("--seed", -1), "seed"),
    ],
)
def test_bad_input_is_named(fails, trained, folder, edit, words, named):
    edit(folder)
    assert named in fails("tasks", "--ckpt", trained, "--tasks", TASK, *words)
