"""pass@k: counted rightly, the same in any batches, and of any checkpoint."""

import dataclasses
import json
import math
import re
import statistics

import numpy as np
import pytest
import torch

from datamodules import LocalText, load_tokenizer
from datamodules.gsm8k import Problem, Problems
from evaluation.gsm8k import (
    GSM8KConfig,
    GSM8KReport,
    Prompt,
    judge,
    measure_gsm8k,
    prompt_text,
    sample_candidates,
)
from evaluation.load import build_model
from lightning_models import TransformerLM
from lightning_models.checkpoint import read_checkpoint
from lightning_models.generation import SamplingConfig
from tests.methods import METHODS

ASKED = [Problem(f"What is {n} times 50?", f"<<{n}*50={50 * n}>>\n#### {50 * n}") for n in range(6)]
SHOWN = [Problem(f"And {n}?", f"It is {n}=<<{n}={n}>>{n}.\n#### {n}") for n in range(9)]


@pytest.fixture(scope="module")
def trained(corpus, train_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("gsm8k") / "bytes.ckpt"
    return train_checkpoint(path, LocalText(**{**corpus, "block_size": 128, "batch_size": 2}))


@pytest.fixture
def files(tmp_path):
    """The command's options that name the problems."""
    for name, problems in {"test": ASKED, "train": SHOWN}.items():
        rows = (json.dumps(dataclasses.asdict(problem)) + "\n" for problem in problems)
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    return ["--files.test", tmp_path / "test.jsonl", "--files.train", tmp_path / "train.jsonl"]


@pytest.fixture
def asks(evaluates, trained, files, tmp_path):
    """Runs the command; returns its result, the rows of texts and the table."""

    def run(*words):
        targets = tmp_path / "result.json", tmp_path / "texts.jsonl"
        options = ("--max_new_tokens", 8, "--output", targets[0], "--texts", targets[1])
        table = evaluates("gsm8k", "--ckpt", trained, *files, *options, *words)
        rows = [json.loads(line) for line in targets[1].read_text().splitlines()]
        return json.loads(targets[0].read_text()), rows, table

    return run


class Script:
    """A cache that holds what remains to be said of each row."""

    def __init__(self, rows):
        self.rows = rows

    def select(self, rows):
        self.rows = [self.rows[row] for row in rows.tolist()]


class Knows(TransformerLM):
    """Says what is known to answer a question, in one of its rows or in all."""

    answers: dict[str, str]
    only: int | None
    seen: list

    def init_cache(self, prompts, lengths, max_new_tokens, streams=()):
        self.seen += streams
        rows = []
        for (_, row), ids in zip(streams, prompts.tolist(), strict=True):
            text = load_tokenizer("bytes").decode(ids)
            question = text.rpartition("Question: ")[2].partition("\nAnswer:")[0]
            known = self.only is None or row % 3 == self.only
            rows.append([*(self.answers[question] if known else " no").encode(), 256])
        return Script(rows)

    def decode_step(self, cache, tokens):
        said = torch.tensor([row.pop(0) for row in cache.rows])
        return torch.nn.functional.one_hot(said, 257) * 1e3, torch.ones(len(said), dtype=torch.bool)


def answered(trained, only, **options):
    """The report on a model that knows all answers."""
    checkpoint = read_checkpoint(trained)
    model = build_model(checkpoint)
    model.__class__ = Knows
    model.answers = {p.question: f" It is\n#### {50 * n}.00" for n, p in enumerate(ASKED)}
    model.only, model.seen = only, []
    report = measure_gsm8k(
        checkpoint,
        model,
        load_tokenizer("bytes"),
        Problems(ASKED, {}),
        Problems(SHOWN, {}),
        config=GSM8KConfig(**{"pass_at": 3, **options}),
        sampling=SamplingConfig(seed=7),
    )
    return report, model


@pytest.mark.parametrize(("only", "mean"), [(None, 1.0), (1, 1 / 3)])
def test_a_model_that_answers_right_passes(trained, only, mean):
    report, model = answered(trained, only, batch_size=4, shots=1, max_new_tokens=20)
    assert report.pass_at_k() == (1.0, 0.0)
    assert report.pass_at_1() == pytest.approx((mean, 0.0))
    assert model.seen == [(7, row) for row in range(18)]
    assert report.counts()["without_number"] == (0 if only is None else 12)
    assert report.counts()["shortened_prompts"] == 0
    assert [row["right"] for row in report.texts()[:3]] == [only in (None, c) for c in range(3)]


def test_an_answer_cut_off_is_not_right(trained):
    report, _ = answered(trained, None, max_new_tokens=len(" It is\n#### 1"))
    assert report.pass_at_k()[0] == 1 / 6  # of 0, 50, 100, ... the first digit is there


def cells(table) -> dict[str, str]:
    """The values of a printed table by their names."""
    return dict(re.split(" {2,}", line, maxsplit=1) for line in table.strip().splitlines())


def test_shares_and_their_errors():
    found = [["1", "2"], ["2", "2"], ["1", "1"], [None, "x 1"], [None, None]]
    judged = [judge([text or "" for text in texts], "1") for texts in found]
    prompts = [Prompt([0], shots, cut) for shots, cut in [(2, False)] * 3 + [(1, False), (0, True)]]
    report = GSM8KReport([Problem("q", "#### 1")] * 5, prompts, judged, 2, "c", {}, {})
    assert report.candidates == 2
    assert report.pass_at_k() == pytest.approx((3 / 5, math.sqrt(0.6 * 0.4 / 5)))
    shares = [0.5, 0, 1, 0.5, 0]
    assert report.pass_at_1() == pytest.approx((0.4, statistics.stdev(shares) / math.sqrt(5)))
    assert report.counts() == {
        "questions": 5,
        "shots": 2,
        "mean_shots": 7 / 5,
        "shortened_prompts": 2,
        "cut_questions": 1,
        "without_number": 3,
    }
    table = cells(report.as_table())
    assert table["pass@2"] == "0.6000 +- 0.2191"
    assert table["shots"] == "2 (1.40 on average)"
    assert table["candidates without a number"] == "3 of 10"


def test_the_error_of_pass_at_1_is_that_of_repeated_draws():
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(300):
        hard = rng.random(40) < 0.5  # of a hard question all candidates are wrong
        right = (rng.random((40, 4)) < 0.6) & ~hard[:, None]
        judged = [judge(["1" if r else "2" for r in row], "1") for row in right]
        mean, error = GSM8KReport([], [], judged, 0, "c", {}, {}).pass_at_1()
        means.append(mean)
        errors.append(error)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(means), rel=0.15)


def test_one_question_has_no_error(asks):
    result, rows, table = asks("--limit_questions", 1, "--pass_at", 1)
    assert result["pass_at_1_standard_error"] is None
    assert result["pass_at_k"] == result["pass_at_1"]
    assert len(rows) == 1
    assert table.count("pass@1") == 1


def test_the_command_reports_and_writes(asks, trained):
    result, rows, table = asks("--pass_at", 3, "--shots", 1, "--seed", 4, "--top_k", 200)
    assert [(row["number"], row["candidate"]) for row in rows] == [
        (number, candidate) for number in range(6) for candidate in range(3)
    ]
    assert [row["gold"] for row in rows[::3]] == ["0", "50", "100", "150", "200", "250"]
    assert [row["question"] for row in rows[::3]] == [problem.question for problem in ASKED]
    assert all(row["right"] == (row["found"] == row["gold"]) for row in rows)
    assert len({row["text"] for row in rows}) > 12
    assert result["k"] == 3
    assert result["questions"] == 6
    assert result["mean_shots"] == 1
    assert result["without_number"] == sum(row["found"] is None for row in rows)
    assert result["pass_at_1"] == pytest.approx(statistics.fmean(row["right"] for row in rows))
    settings = result["settings"]
    assert {"pass_at": 3, "shots": 1, "max_new_tokens": 8, "seed": 4}.items() <= settings.items()
    assert {"temperature": 1.0, "top_k": 200, "tokenizer": "bytes"}.items() <= settings.items()
    assert settings["model"] == "TransformerLM"
    assert result["data"]["test"]["file"]["name"] == "test.jsonl"
    assert result["checkpoint"] == str(trained)
    assert "pass@3" in table
    assert (result["executed_steps"], result["seconds"] > 0) == (0, True)
    assert result["flops_per_token_6nd"] > 0
    assert "FLOPs/generated token" in table


def test_neither_batches_nor_further_questions_change_a_text(asks):
    _, rows, _ = asks("--pass_at", 3, "--shots", 1)
    for words in [("--batch_size", 1), ("--batch_size", 7)]:
        assert asks("--pass_at", 3, "--shots", 1, *words)[1] == rows
    assert asks("--pass_at", 3, "--shots", 1, "--limit_questions", 2)[1] == rows[:6]
    assert asks("--pass_at", 3, "--shots", 1, "--seed", 1)[1] != rows


def test_dropped_demonstrations_are_counted(asks):
    result, rows, table = asks("--shots", 3, "--pass_at", 1)
    assert {row["shots"] for row in rows} == {1}  # of 128 bytes
    assert result["shortened_prompts"] == 6
    assert result["mean_shots"] == 1
    assert result["cut_questions"] == 0
    assert cells(table)["questions with fewer shots"] == "6"
    cut, rows, _ = asks("--max_new_tokens", 100, "--pass_at", 1)
    assert cut["cut_questions"] == 6
    assert all(row["cut"] for row in rows)


def test_annotations_stay_where_that_is_asked_for(trained):
    report, _ = answered(trained, None, shots=1, max_new_tokens=20)
    kept, _ = answered(trained, None, shots=1, max_new_tokens=20, keep_annotations=True)
    decode = load_tokenizer("bytes").decode
    assert "<<" not in decode(report.prompts[0].ids)
    assert "<<" in decode(kept.prompts[0].ids)
    assert decode(kept.prompts[0].ids).endswith(prompt_text(ASKED[0].question))


def test_without_demonstrations_the_training_file_is_not_read(evaluates, trained, files):
    only = files[:2]
    table = evaluates("gsm8k", "--ckpt", trained, *only, "--max_new_tokens", 2, "--pass_at", 2)
    assert "pass@2" in table


def test_config_fields_can_be_changed(asks):
    _, rows, _ = asks("--pass_at", 1)
    result, changed, _ = asks("--pass_at", 1, "--set.attention_backend", "math")
    assert result["settings"]["set"] == {"attention_backend": "math"}
    assert len(changed) == len(rows)


def test_sentence_models_answer_too(make_sentences):
    method = next(method for method in METHODS if method.model.reads == "sentences")
    model = method.build().eval()
    tokenizer = make_sentences().tokenizer
    prompts = [tokenizer.prompt_ids(prompt_text(p.question, SHOWN[:1])) for p in ASKED[:2]]
    how = {"candidates": 2, "max_new_tokens": 12, "sampling": SamplingConfig(top_k=200)}
    texts = sample_candidates(model, tokenizer, prompts, **how)
    assert texts == sample_candidates(model, tokenizer, prompts, **how, batch_size=1)
    assert [len(row) for row in texts] == [2, 2]
    assert len({text for row in texts for text in row}) > 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--pass_at", "0"], "pass_at (0) must be at least 1"),
        (["--shots", "-1"], "shots (-1) must be at least 0"),
        (["--shots", "10"], "shots (10) is more than the 9 training problems"),
        (["--max_new_tokens", "0"], "max_new_tokens (0) must be at least 1"),
        (["--max_new_tokens", "128"], "leaves no room for a question in the model's context of"),
        (["--batch_size", "0"], "batch_size (0) must be at least 1"),
        (["--limit_questions", "0"], "limit_questions (0) must be at least 1"),
        (["--temperature", "-1"], "temperature (-1.0) must be 0 (greedy) or above"),
        (["--files.test", "none.jsonl"], "files.test (none.jsonl): there is no such file"),
        (["--output", "none/a.json"], "output (none/a.json): the folder none does not exist"),
        (["--texts", "none/a.jsonl"], "texts (none/a.jsonl): the folder none does not exist"),
        (["--set.dimm", "3"], "TransformerLM has no option config.dimm"),
    ],
)
def test_bad_options_are_named(fails, trained, files, options, expected):
    assert expected in fails("gsm8k", "--ckpt", trained, *files, *options)


def test_results_and_texts_are_two_files(fails, trained, files, tmp_path):
    same = ("--output", tmp_path / "a.json", "--texts", tmp_path / "a.json")
    assert "are one file" in fails("gsm8k", "--ckpt", trained, *files, *same)


def test_what_is_asked_is_not_shown(fails, trained, files):
    line = fails("gsm8k", "--ckpt", trained, *files[:3], files[1], "--shots", 1)
    assert "files.train has 6 of the questions that are asked" in line


def test_lines_of_another_format_are_named_with_their_reader(fails, trained, tmp_path):
    path = tmp_path / "aug.txt"
    path.write_text("Two and two?||<<2+2=4>> #### 4\n")
    line = fails("gsm8k", "--ckpt", trained, "--files.test", path)
    assert f"files.test: {path}, line 1 is not JSON" in line
    assert "evaluate.py reason --task gsm8k" in line
    path.write_text("Two and two?\n")
    line = fails("gsm8k", "--ckpt", trained, "--files.test", path)
    assert f"files.test: {path}, line 1 is not JSON" in line
    assert "evaluate.py reason" not in line


def test_results_that_are_no_numbers_are_named(fails, trained, tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "#### x"}')
    line = fails("gsm8k", "--ckpt", trained, "--files.test", path)
    assert "question 2: the result, 'x', is not a number" in line


def test_without_files_and_network_one_line_says_what_to_pass(fails, trained, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("datamodules.hub.dataset_info", offline)
    monkeypatch.setattr("datasets.load_dataset_builder", offline)
    line = fails("gsm8k", "--ckpt", trained)
    assert "GSM8K: openai/gsm8k (test) cannot be read from the Hugging Face hub" in line
    assert "Pass your copy with --files.test test.jsonl" in line
