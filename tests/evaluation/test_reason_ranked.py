"""Questions to models of windows: the likeliest of all answers, or a written one; by group."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from callbacks.answer_accuracy import ask, judge, questions_in, room_for
from datamodules import Kinship
from evaluation.load import build_model
from evaluation.reason.asking import rank
from lightning_models import PonderLM, Scores, TransformerLM
from lightning_models.checkpoint import read_checkpoint

QUICK = ("--rounds", "null")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("answers_cache"))
    sizes = {"train_stories": 12, "val_stories": 6, "test_stories": 7}
    return {**sizes, "test_hops": [3, 5], "block_size": 640, "batch_size": 4, "cache_dir": cache}


@pytest.fixture(scope="module")
def trained(options, train_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("answers") / "kinship.ckpt"
    return train_checkpoint(path, Kinship(**options))


@pytest.fixture(scope="module")
def data(options):
    module = Kinship(**options)
    module.prepare_data()
    module.setup()
    return module


@pytest.fixture
def model(trained):
    return build_model(read_checkpoint(trained))


@pytest.fixture
def questions(data):
    source = data.evaluation_source("test")
    return [q for n in range(len(source)) for q in questions_in(source.batch(n))]


@pytest.fixture
def reason(evaluates, trained, tmp_path):
    """Runs the command on Kinship models; returns the JSON file, the answers and the tables."""

    def run(*words, ckpts=(trained,)):
        target, answers = tmp_path / "result.json", tmp_path / "answers.jsonl"
        files = ("--output", target, "--answers_file", answers)
        printed = evaluates("reason", "--ckpt", *ckpts, *files, *words)
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        return json.loads(target.read_text()), rows, printed

    return run


class Knows(TransformerLM):
    """Gives one wanted answer a higher likelihood than every other, through ``score`` only."""

    wanted: dict[int, list[int]]

    def score(self, batch):
        log_prob = torch.full(batch["targets"].shape, -1.0)
        for row, number in enumerate(batch["sequence_id"].tolist()):
            counted = batch["targets"][row] >= 0
            right = batch["targets"][row][counted].tolist() == self.wanted[number]
            log_prob[row] = torch.where(counted, 0.0 if right else -1.0, 0.0)
        count = (batch["targets"] >= 0).sum(dim=1)
        return Scores(log_prob, torch.zeros(len(log_prob)), count, self.likelihood)


@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_questions_are_cut_out_of_batches(options, loss_on):
    data = Kinship(**options, loss_on=loss_on)
    data.prepare_data()
    source = data.evaluation_source("test")
    found = [q for n in range(len(source)) for q in questions_in(source.batch(n))]
    expected = list(data.questions("test"))
    assert len(found) == len(expected) == 7  # of 8 rows
    encode, eos = data.tokenizer.encode, data.tokenizer.eos_id
    for number, (question, (prompt, answer)) in enumerate(zip(found, expected, strict=True)):
        assert question.query == [eos, *encode(prompt)]
        assert (question.answer, question.steps) == (encode(answer), [])
        assert (question.group, question.number) == ([3, 5][number % 2], number)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_ranking_finds_the_right_answers_and_no_others(model, data, questions, batch_size):
    eos = data.tokenizer.eos_id
    right = {q.number: [*q.answer, eos] for q in questions}
    wrong = {n: [*data.tokenizer.encode(" son"), eos] for n in right}
    batched = SimpleNamespace(
        tokenizer=data.tokenizer, candidates=data.candidates, eval_batch_size=batch_size
    )
    model.__class__ = Knows
    for wanted in (right, wrong):
        model.wanted = wanted
        replies, kind = rank(model, batched, questions)
        assert [r.right for r in replies] == [wanted[n] == right[n] for n in right]
        assert [r.written for r in replies] == list(wanted.values())
        assert kind == "exact"


def test_ranking_is_the_slow_loop(model, data, questions):
    """Each candidate alone, in float64, by the network's own logits."""
    questions, best = questions[:3], []
    replies, _ = rank(model, data, questions)
    slow = model.double()
    for question in questions:
        totals = []
        for text in data.candidates():
            answer = [*data.tokenizer.encode(text), data.tokenizer.eos_id]
            tokens = torch.tensor([*question.query, *answer])
            with torch.no_grad():
                logits = slow.network(tokens[None, :-1])[0] @ slow.network.output_matrix.t()
            places = range(len(question.query) - 1, len(tokens) - 1)
            logs = logits.log_softmax(dim=-1)
            totals.append(sum(logs[p, tokens[p + 1]].item() for p in places))
        best.append(data.candidates()[int(np.argmax(totals))])
    assert [reply.text for reply in replies] == best


@pytest.mark.parametrize(
    ("ends", "expected"), [(("{}", True), True), (("{}", False), False), (("{}-x", True), False)]
)
def test_a_written_answer_must_be_whole_and_stop(model, data, questions, ends, expected):
    form, stops = ends
    for question in questions:
        text = form.format(data.tokenizer.decode(question.answer))
        end = [data.tokenizer.eos_id] if stops else []
        assert judge(model, data, question, [*data.tokenizer.encode(text), *end]).right is expected


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_models_see_the_question_only_and_draw_alike_in_any_batch(
    model, data, questions, batch_size
):
    prompts, drawn, original = [], [], model.init_cache

    def init_cache(padded, lengths, count, streams):
        prompts.extend(row[:n].tolist() for row, n in zip(padded, lengths.tolist(), strict=True))
        drawn.extend(streams)
        return original(padded, lengths, count, streams)

    model.init_cache = init_cache
    for start in range(0, len(questions), batch_size):
        part = questions[start : start + batch_size]
        ask(model, data, part, room_for(part, data))
    assert prompts == [q.query for q in questions]
    assert drawn == [(0, q.number) for q in questions]


# ---- the command


def test_the_likeliest_answers_of_several_models(reason, trained, options, train_checkpoint):
    ponder = trained.with_name("ponder.ckpt")
    train_checkpoint(ponder, Kinship(**options), PonderLM, thinking_steps=2)
    timed = ("--rounds", 1, "--timing_batches", 1, "--timing_batch_size", 1)
    chosen = (*timed, "--limit_batches", 1)
    for tau, steps in ((1e-6, 2), (0.999, 0)):
        result, rows, table = reason("--set.tau", tau, *chosen, ckpts=(trained, ponder))
        plain, other = result["results"]
        assert (plain["executed_steps"], other["executed_steps"]) == (0, steps)
    assert (plain["candidates"], plain["likelihood"], plain["causal"]) == (22, "exact", True)
    assert [(row["hops"], row["questions"]) for row in plain["by_group"]] == [(3, 2), (5, 2)]
    assert plain["flops_per_token"] > 0
    assert (plain["speed_up"], result["baseline"]) == (None, None)  # nobody writes a chain
    assert (result["data"]["split"], result["settings"]["mode"]) == ("test", "rank")
    assert len(rows) == 8
    for row in rows:
        assert row["right"] == (row["text"] == row["gold"])
    assert sum(row["right"] for row in rows[:4]) / 4 == plain["accuracy"]
    for shown in ("hops", "the likeliest of 22 possible answers", "likelihood", "exact"):
        assert shown in table


def test_written_answers_of_another_split(reason):
    words = ("--mode", "generate", "--split", "val", "--limit_batches", 1, *QUICK)
    result, rows, table = reason(*words)
    (numbers,) = result["results"]
    assert [row["hops"] for row in numbers["by_group"]] == [2, 3, 4]
    assert numbers["questions"] == len(rows) == 4
    assert not {"candidates", "likelihood", "causal"} & numbers.keys()
    assert result["settings"]["mode"] == "generate"
    assert "likel" not in table


def test_what_cannot_be_asked_is_refused(fails, trained, checkpoint_path, monkeypatch):
    assert "data (LocalText) has no questions" in fails("reason", "--ckpt", checkpoint_path)
    monkeypatch.setattr(Kinship, "candidates", lambda self: None)
    line = fails("reason", "--ckpt", trained, "--mode", "rank")
    assert "use --mode generate" in line
