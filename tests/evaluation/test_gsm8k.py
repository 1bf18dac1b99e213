"""pass@k: numbers read rightly, prompts that fit, shares, and the command on any checkpoint."""

import dataclasses
import itertools
import json
import math
import statistics
from pathlib import Path

import pytest

from datamodules import LocalText, load_tokenizer
from datamodules.gsm8k import Problem, Problems, read_problems, without_annotations
from evaluation.gsm8k import (
    GSM8KConfig,
    ask,
    candidate_rows,
    count,
    documents,
    draw_demonstrations,
    extract_answer,
    gold_answer,
    make_documents,
    pass_at,
    pass_rates,
    prompt_text,
)
from evaluation.load import build_model
from lightning_models.checkpoint import read_checkpoint

COPY = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
ASKED = [Problem(f"What is {n} times 50?", f"<<{n}*50={50 * n}>>\n#### {50 * n}") for n in range(6)]
SHOWN = [Problem(f"And {n}?", f"It is {n}=<<{n}={n}>>{n}.\n#### {n}") for n in range(9)]
MANY = [Problem(f"Of {n}?", f"It is {n}.\n#### {n}") for n in range(30)]
BYTES = load_tokenizer("bytes")


# ---- the number that a text gives as its answer


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


def test_gold_answers():
    assert gold_answer(Problem("q", "5\n#### -1,080.00"), "question 1") == "-1080"
    assert gold_answer(Problem("q", "5\n#### $40%"), "question 1") == "40"
    with pytest.raises(ValueError, match="question 3: the result, '5 apples', is not a number"):
        gold_answer(Problem("q", "5\n#### 5 apples"), "question 3")


@pytest.mark.skipif(not COPY.is_dir(), reason="there is no copy of GSM8K next to the project")
@pytest.mark.parametrize("split", ["train", "test"])
def test_published_answers_are_found_right(split):
    problems = read_problems(COPY / f"{split}.jsonl", "files").rows
    without_mark = 0
    for number, problem in enumerate(problems):
        gold = gold_answer(problem, f"question {number}")
        # A second way to the same number: digits, sign and point, no pattern.
        plain = problem.answer.split("####")[1].replace(",", "").strip()
        assert float(gold) == float(plain)
        for answer in (problem.answer, without_annotations(problem.answer)):
            assert extract_answer(f" {answer}\n\nQuestion: How many are 99?") == gold
        solution = without_annotations(problem.answer).partition("####")[0]
        without_mark += extract_answer(solution) == gold
    # Most solutions end in their result, so the last number is a fair guess without the mark.
    assert without_mark > 0.85 * len(problems)


# ---- prompts


def test_wording():
    assert prompt_text("How many?") == "Question: How many?\nAnswer:"
    assert prompt_text("How many?", MANY[:2]) == (
        "Question: Of 0?\nAnswer: It is 0.\n#### 0\n\n"
        "Question: Of 1?\nAnswer: It is 1.\n#### 1\n\n"
        "Question: How many?\nAnswer:"
    )


def test_draws_depend_on_seed_and_question_only():
    drawn = {n: draw_demonstrations(MANY, 5, seed=0, question=n) for n in (3, 0, 7)}
    assert drawn[3] == draw_demonstrations(MANY, 5, seed=0, question=3)
    assert drawn[3] != drawn[0]
    assert drawn[3] != draw_demonstrations(MANY, 5, seed=1, question=3)
    assert draw_demonstrations(MANY, 2, seed=0, question=3) == drawn[3][:2]
    assert all(len(set(problems)) == 5 for problems in drawn.values())
    draws = [draw_demonstrations(MANY, 3, seed=0, question=n) for n in range(200)]
    counts = [sum(problem in drawn for drawn in draws) for problem in MANY]
    assert 5 <= min(counts) <= max(counts) <= 40  # 20 on average, standard deviation 4.2


def test_demonstrations_are_dropped_from_the_front():
    question = Problem("How many are there?", "#### 1")
    drawn = draw_demonstrations(MANY, 3, seed=0, question=0)
    texts = [prompt_text(question.question, drawn[n:]) for n in range(4)]
    lengths = [len(BYTES.prompt_ids(text)) for text in texts]
    for room in range(lengths[3] - 2, lengths[0] + 2):
        (row,) = make_documents([question], MANY, BYTES, shots=3, room=room)
        dropped = next((n for n in range(4) if lengths[n] <= room), None)
        found = (row["prompt"], row["shots"], row["cut"])
        assert (
            found == (texts[3], 0, True)
            if dropped is None
            else (texts[dropped], 3 - dropped, False)
        )
    assert make_documents([question], MANY, BYTES, shots=3)[0]["prompt"] == texts[0]


def test_documents_of_all_questions():
    rows = make_documents(ASKED, SHOWN, BYTES, shots=2, seed=5)
    assert make_documents(ASKED[:2], SHOWN, BYTES, shots=2, seed=5) == rows[:2]
    assert [row["gold"] for row in rows] == ["0", "50", "100", "150", "200", "250"]
    for number, row in enumerate(rows):
        drawn = draw_demonstrations(SHOWN, 2, seed=5, question=number)
        assert row["prompt"] == prompt_text(ASKED[number].question, drawn)


def test_only_the_named_folder_takes_the_place_of_the_hub(monkeypatch, tmp_path):
    path = tmp_path / "gsm8k" / "test.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"question": "Of 2?", "answer": "#### 2"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluation.gsm8k.fetch_problems", lambda split, cure: Problems(ASKED, {}))
    monkeypatch.delenv("DATA", raising=False)
    assert len(documents()["test"]) == len(ASKED)
    monkeypatch.setenv("DATA", str(tmp_path))
    assert documents()["test"]["question"] == ["Of 2?"]


def test_what_is_asked_is_not_shown():
    with pytest.raises(ValueError, match=r"files\.train has 1 of the questions that are asked"):
        make_documents(SHOWN[:1], SHOWN, BYTES, shots=1)
    odd = [*ASKED[:1], Problem("b", "#### x")]
    with pytest.raises(ValueError, match="question 2: the result, 'x', is not a number"):
        make_documents(odd)


# ---- shares


def test_pass_at_k_is_unbiased():
    """The mean over all sets of k tries."""
    for tries, right in [(5, 0), (5, 2), (6, 5), (4, 4)]:
        flags = [True] * right + [False] * (tries - right)
        for k in range(1, tries + 1):
            sets = list(itertools.combinations(flags, k))
            share = sum(any(each) for each in sets) / len(sets)
            assert pass_at(k, tries, right) == pytest.approx(share)
    with pytest.raises(ValueError, match=r"k .4. must be from 1 to the 3 tries"):
        pass_at(4, 3, 1)


def samples(found, shots=(0,), gold="1"):
    """As the harness has them."""
    rows = []
    for n, tries in enumerate(found):
        doc = {"gold": gold, "question": "q", "shots": shots[n % len(shots)], "cut": n == 4}
        rates = pass_rates(doc, [tries])
        rows.append({"doc": doc, "filtered_resps": [tries], "resps": [["t"] * len(tries)], **rates})
    return rows


def test_shares_and_their_errors():
    found = [["1", "2"], ["2", "2"], ["1", "1"], [None, "1"], [None, None]]
    shares = [0.5, 0, 1, 0.5, 0]
    counts = count(samples(found, shots=(2, 2, 2, 1, 0)), shots=2)
    assert counts == {
        "k": 2,
        "pass_at_k": pytest.approx(3 / 5),
        "pass_at_k_standard_error": pytest.approx(math.sqrt(0.6 * 0.4 / 5)),
        "pass_at_1": pytest.approx(0.4),
        "pass_at_1_standard_error": pytest.approx(statistics.stdev(shares) / math.sqrt(5)),
        "questions": 5,
        "shots": 2,
        "mean_shots": 7 / 5,
        "shortened_prompts": 2,
        "cut_questions": 1,
        "without_number": 3,
    }


def answered(trained, monkeypatch, only, **options):
    """The harness' samples where all answers are known, in one of three candidates or in all."""
    from evaluation.tasks.writing import Continuations

    seen = []

    def write(model, tokenizer, requests):
        seen.extend(request.stream for request in requests)
        texts = []
        for request in requests:
            number = int(BYTES.decode(request.prompt).rpartition("What is ")[2].split()[0])
            known = only is None or request.stream % 3 == only
            texts.append(f" It is\n#### {50 * number}.00"[: request.most] if known else " no")
        return Continuations(texts, sum(map(len, texts)), None)

    monkeypatch.setattr("evaluation.tasks.adapter.write", write)
    model = build_model(read_checkpoint(trained))
    config = GSM8KConfig(pass_at=3, **options)
    rows = make_documents(ASKED, SHOWN, BYTES, shots=config.shots, seed=7)
    return ask(model, BYTES, rows, config=config)[0], seen


@pytest.mark.parametrize(("only", "mean"), [(None, 1.0), (1, 1 / 3)])
def test_right_answers_pass(trained, monkeypatch, only, mean):
    found, seen = answered(trained, monkeypatch, only, batch_size=4, shots=1, max_new_tokens=20)
    counts = count(found, 1)
    assert (counts["pass_at_k"], counts["pass_at_k_standard_error"]) == (1.0, 0.0)
    assert counts["pass_at_1"] == pytest.approx(mean)
    assert sorted(seen) == list(range(18))
    assert counts["without_number"] == (0 if only is None else 12)
    right = [row["right"] for row in candidate_rows(found)[:3]]
    assert right == [only in (None, c) for c in range(3)]


def test_an_answer_cut_off_is_not_right(trained, monkeypatch):
    found, _ = answered(trained, monkeypatch, None, max_new_tokens=len(" It is\n#### 1"))
    assert count(found, 0)["pass_at_k"] == pytest.approx(1 / 6)  # of 0, 50, ... the first digit


# ---- the command


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


def test_the_command_reports_and_writes(asks, trained):
    result, rows, table = asks("--pass_at", 3, "--shots", 1, "--seed", 4, "--top_k", 200)
    assert [(row["number"], row["candidate"]) for row in rows] == [
        (number, candidate) for number in range(6) for candidate in range(3)
    ]
    assert [row["question"] for row in rows[::3]] == [problem.question for problem in ASKED]
    assert all(row["right"] == (row["found"] == row["gold"]) for row in rows)
    assert len({row["text"] for row in rows}) > 12
    assert (result["k"], result["questions"], result["mean_shots"]) == (3, 6, 1)
    assert result["without_number"] == sum(row["found"] is None for row in rows)
    assert result["pass_at_1"] == pytest.approx(statistics.fmean(row["right"] for row in rows))
    settings = result["settings"]
    assert {"pass_at": 3, "shots": 1, "max_new_tokens": 8, "seed": 4}.items() <= settings.items()
    assert {"temperature": 1.0, "top_k": 200, "tokenizer": "bytes"}.items() <= settings.items()
    assert settings["model"] == "TransformerLM"
    assert result["data"]["test"]["file"]["name"] == "test.jsonl"
    assert result["checkpoint"] == str(trained)
    assert (result["executed_steps"], result["seconds"] > 0) == (0, True)
    assert result["flops_per_token_6nd"] > 0
    assert "pass@3" in table


def test_candidates_are_those_of_the_decode_loop(asks, trained):
    """Candidate c of question q draws from stream q * k + c, after the end-of-text token."""
    _, rows, _ = asks("--pass_at", 2, "--limit_questions", 2, "--seed", 9)
    model = build_model(read_checkpoint(trained))
    prompts = [prompt_text(problem.question) for problem in ASKED[:2] for _ in range(2)]
    texts = model.generate_text(prompts, tokenizer=BYTES, max_new_tokens=8, seed=9)
    assert [row["text"] for row in rows] == texts


def test_neither_batches_nor_further_questions_change_a_text(asks):
    ask_three = ("--pass_at", 3, "--shots", 1, "--set.attention_backend", "math")
    result, rows, _ = asks(*ask_three)
    assert result["settings"]["set"] == {"attention_backend": "math"}
    for words in [("--batch_size", 1), ("--batch_size", 7)]:
        assert asks(*ask_three, *words)[1] == rows
    assert asks(*ask_three, "--limit_questions", 2)[1] == rows[:6]
    assert asks(*ask_three, "--seed", 1)[1] != rows


def test_dropped_demonstrations_are_counted(asks):
    result, rows, _ = asks("--shots", 3, "--pass_at", 1)
    assert {row["shots"] for row in rows} == {1}  # of 128 bytes
    assert (result["shortened_prompts"], result["mean_shots"], result["cut_questions"]) == (6, 1, 0)
    cut, rows, _ = asks("--max_new_tokens", 100, "--pass_at", 1)
    assert cut["cut_questions"] == 6
    assert all(row["cut"] for row in rows)


def test_annotations_stay_where_that_is_asked_for(asks, monkeypatch):
    seen = []

    def noted(model, tokenizer, rows, **how):
        seen.append(rows[0]["prompt"])
        return ask(model, tokenizer, rows, **how)

    monkeypatch.setattr("evaluation.gsm8k.ask", noted)
    asks("--shots", 1, "--pass_at", 1)
    asks("--shots", 1, "--pass_at", 1, "--keep_annotations", "true")
    assert ["<<" in prompt for prompt in seen] == [False, True]
    assert all(prompt.endswith(prompt_text(ASKED[0].question)) for prompt in seen)


def test_one_question_has_no_error_and_needs_no_training_file(evaluates, trained, files, tmp_path):
    words = ("--limit_questions", 1, "--pass_at", 1, "--max_new_tokens", 2)
    target = tmp_path / "one.json"
    evaluates("gsm8k", "--ckpt", trained, *files[:2], *words, "--output", target)
    result = json.loads(target.read_text())
    assert result["pass_at_1_standard_error"] is None
    assert result["pass_at_k"] == result["pass_at_1"]


def test_it_is_a_task_of_the_harness(asks, evaluates, trained, files, tmp_path, monkeypatch):
    """The same texts, and the same shares, by ``tasks`` with what the task file says."""
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "test.jsonl").rename(tmp_path / "gsm8k/test.jsonl")
    monkeypatch.setenv("DATA", str(tmp_path))
    words = ("tasks", "--ckpt", trained, "--tasks", "gsm8k_pass_at_k", "--limit", 2)
    target, output = tmp_path / "samples.jsonl", tmp_path / "tasks.json"
    evaluates(*words, "--samples", target, "--output", output)
    texts = [text for line in target.open() for text in json.loads(line)["texts"]]
    files[1] = tmp_path / "gsm8k/test.jsonl"
    own, rows, _ = asks("--limit_questions", 2, "--max_new_tokens", 50)
    assert texts == [row["text"] for row in rows]
    assert json.loads(output.read_text())["gsm8k_pass_at_k_pass_at_k"] == own["pass_at_k"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--pass_at", "0"], "pass_at (0) must be at least 1"),
        (["--shots", "-1"], "shots (-1) must be at least 0"),
        (["--shots", "10"], "shots (10) is more than the 9 training problems"),
        (["--max_new_tokens", "0"], "max_new_tokens (0) must be at least 1"),
        (["--max_new_tokens", "128"], "leaves no room for a prompt in the model's context of"),
        (["--batch_size", "0"], "batch_size (0) must be at least 1"),
        (["--limit_questions", "0"], "limit_questions (0) must be at least 1"),
        (["--temperature", "-1"], "temperature (-1.0) must be 0 (greedy) or above"),
        (["--files.test", "none.jsonl"], "files.test (none.jsonl): there is no such file"),
        (["--texts", "none/a.jsonl"], "texts (none/a.jsonl): the folder none does not exist"),
        (["--set.dimm", "3"], "TransformerLM has no option config.dimm"),
        (["--output", "a.json", "--texts", "a.json"], "are one file"),
    ],
)
def test_bad_options_are_named(fails, trained, files, options, expected):
    assert expected in fails("gsm8k", "--ckpt", trained, *files, *options)


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


def test_without_files_and_network_one_line_says_what_to_pass(fails, trained, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("datamodules.hub.dataset_info", offline)
    line = fails("gsm8k", "--ckpt", trained)
    assert "GSM8K: openai/gsm8k (test) cannot be read from the Hugging Face hub" in line
    assert "Pass your copy with --files.test test.jsonl" in line
