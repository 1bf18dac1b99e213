"""Right answers are counted by group, through score and by generation, and wrong ones are not."""

import json

import numpy as np
import pytest
import torch

from datamodules import Kinship
from datamodules.order import NO_GROUP
from evaluation.answers import AnswerReport, generate_judge, questions_in, rank_judge
from evaluation.cost import Cost, Thinking
from evaluation.load import build_model
from lightning_models import PonderLM, Scores, TransformerLM
from lightning_models.checkpoint import read_checkpoint


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
def questions(data):
    source = data.evaluation_source("test")
    return [q for n in range(len(source)) for q in questions_in(source.batch(n))]


@pytest.fixture
def answers(evaluates, trained, tmp_path):
    def run(*words):
        target = tmp_path / "result.json"
        table = evaluates("answers", "--ckpt", trained, "--output", target, *words)
        return json.loads(target.read_text()), table

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


def knowing(trained, wanted):
    model = build_model(read_checkpoint(trained))
    model.__class__ = Knows
    model.wanted = wanted
    return model


@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_questions_are_cut_out_of_batches(options, loss_on):
    data = Kinship(**options, loss_on=loss_on)
    data.prepare_data()
    source = data.evaluation_source("test")
    found = [q for n in range(len(source)) for q in questions_in(source.batch(n))]
    expected = list(data.questions("test"))
    assert len(found) == len(expected) == 7  # of 8 rows
    tokenizer = data.tokenizer
    for number, (question, (prompt, answer)) in enumerate(zip(found, expected, strict=True)):
        assert question.prompt == [tokenizer.eos_id, *tokenizer.encode(prompt)]
        assert question.answer == [*tokenizer.encode(answer), tokenizer.eos_id]
        assert (question.group, question.number) == ([3, 5][number % 2], number)
    assert NO_GROUP not in {question.group for question in found}


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_ranking_tells_right_from_wrong(trained, data, questions, batch_size):
    right = {q.number: q.answer for q in questions}
    wrong = {n: [*data.tokenizer.encode(" son"), data.tokenizer.eos_id] for n in right}
    for wanted in (right, wrong):
        judge = rank_judge(
            knowing(trained, wanted), data.tokenizer, data.candidates(), batch_size=batch_size
        )
        judged = judge(questions)
        assert judged.right == [wanted[q.number] == q.answer for q in questions]
        assert judged.likelihood == "exact"


def test_ranking_is_the_slow_loop(trained, data, questions):
    """Each candidate alone, in float64, by the network's own logits."""
    model = build_model(read_checkpoint(trained)).double()
    questions, best = questions[:3], []
    for question in questions:
        totals = []
        for text in data.candidates():
            answer = [*data.tokenizer.encode(text), data.tokenizer.eos_id]
            tokens = torch.tensor([*question.prompt, *answer])
            with torch.no_grad():
                logits = model.network(tokens[None, :-1])[0] @ model.network.output_matrix.t()
            places = range(len(question.prompt) - 1, len(tokens) - 1)
            logs = logits.log_softmax(dim=-1)
            totals.append(sum(logs[p, tokens[p + 1]].item() for p in places))
        winner = data.candidates()[int(np.argmax(totals))]
        best.append([*data.tokenizer.encode(winner), data.tokenizer.eos_id] == question.answer)
    float32 = build_model(read_checkpoint(trained))
    judge = rank_judge(float32, data.tokenizer, data.candidates(), batch_size=16)
    assert judge(questions).right == best


@pytest.mark.parametrize(
    ("written", "is_right"),
    [("{answer}<eos>", True), ("{answer}", False), ("{answer}-x<eos>", False), (" x<eos>", False)],
)
def test_generation_must_write_the_answer_and_stop(
    trained, data, questions, monkeypatch, written, is_right
):
    eos = data.tokenizer.eos_id

    def fake(model, prompts, *, max_new_tokens, **_):
        texts = [data.tokenizer.decode(q.answer[:-1]) for q in questions]
        rows = []
        for text in texts:
            body = written.replace("<eos>", "").replace("{answer}", text)
            end = [eos] if written.endswith("<eos>") else []
            rows.append([*data.tokenizer.encode(body), *end])
        return rows

    monkeypatch.setattr("evaluation.answers.generate", fake)
    model = build_model(read_checkpoint(trained))
    judged = generate_judge(model, data.tokenizer)(questions)
    assert judged == ([is_right] * len(questions), None)


def test_generation_sees_the_question_only(trained, data, questions):
    """Another true answer in the batch must not change what is written."""
    model = build_model(read_checkpoint(trained))
    seen = []
    original = model.init_cache
    model.init_cache = lambda prompts, lengths, n, streams: (
        seen.extend(row[:k].tolist() for row, k in zip(prompts, lengths.tolist(), strict=True))
        or original(prompts, lengths, n, streams)
    )
    generate_judge(model, data.tokenizer)(questions)
    assert seen == [q.prompt for q in questions]


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_every_question_has_its_own_stream_in_any_batch(trained, data, questions, batch_size):
    """Models that draw latent vectors write the same answers whatever the batch size."""
    model, seen = build_model(read_checkpoint(trained)), []
    original = model.init_cache
    model.init_cache = lambda prompts, lengths, n, streams: (
        seen.extend(streams) or original(prompts, lengths, n, streams)
    )
    judge = generate_judge(model, data.tokenizer)
    for start in range(0, len(questions), batch_size):
        judge(questions[start : start + batch_size])
    assert seen == [(0, q.number) for q in questions]


def test_no_questions_have_no_answers(trained, data):
    model, candidates = build_model(read_checkpoint(trained)), data.candidates()
    for judge in (
        generate_judge(model, data.tokenizer),
        rank_judge(model, data.tokenizer, candidates, batch_size=4),
    ):
        assert judge([]) == ([], None)


def test_json_and_table(answers):
    result, table = answers()
    assert [(row["hops"], row["questions"]) for row in result["by_group"]] == [(3, 4), (5, 3)]
    assert result["questions"] == 7
    right = sum(row["accuracy"] * row["questions"] for row in result["by_group"])
    assert result["accuracy"] == pytest.approx(right / 7)
    assert (result["candidates"], result["data"]["split"]) == (22, "test")
    assert (result["settings"]["mode"], result["likelihood"]) == ("rank", "exact")
    rows = dict(line.split("  ", 1) for line in table.strip().splitlines())
    assert {"accuracy", "hops 3", "hops 5", "by chance"} <= rows.keys()
    assert (rows["likelihood"].strip(), rows["causal"].strip()) == ("exact", "yes")
    assert {"FLOPs/token", "executed steps", "seconds"} <= rows.keys()
    assert result["flops_per_token"] > 0


def test_steps_are_those_that_ranking_took(answers, options, train_checkpoint, tmp_path):
    path = tmp_path / "ponder.ckpt"
    train_checkpoint(path, Kinship(**options), PonderLM, thinking_steps=2)
    for tau, steps in ((1e-6, 2), (0.999, 0)):
        result, _ = answers("--ckpt", path, "--set.tau", tau, "--limit_batches", 1)
        assert result["executed_steps"] == steps


def test_other_modes_splits_and_limits(answers):
    result, table = answers("--mode", "generate", "--split", "val", "--limit_batches", "1")
    assert [row["hops"] for row in result["by_group"]] == [2, 3, 4]
    assert (result["questions"], result["candidates"]) == (4, None)
    assert result["settings"]["mode"] == "generate"
    assert "by chance" not in table
    assert (result["likelihood"], result["causal"]) == (None, None)
    assert "likelihood" not in table
    assert "causal" not in table


def test_standard_error_is_binomial():
    report = AnswerReport(
        group_name="hops",
        asked={2: 100, 3: 300},
        right={2: 50, 3: 300},
        candidates=22,
        likelihood="exact",
        causal=True,
        cost=Cost(1.0, Thinking(0.0, 1.0, 6.0), 2.0),
        checkpoint="",
        data={"split": "test"},
        settings={"mode": "rank"},
    )
    assert report.share().value == 350 / 400
    assert report.share(2).error == pytest.approx(0.05)
    assert report.share(3).error == 0


def test_data_without_answers_are_refused(fails, checkpoint_path):
    assert "data (LocalText) has no questions" in fails("answers", "--ckpt", checkpoint_path)


def test_ranking_needs_a_list_of_answers(fails, trained, monkeypatch):
    monkeypatch.setattr(Kinship, "candidates", lambda self: None)
    assert "use --mode generate" in fails("answers", "--ckpt", trained)


def test_bad_limits_are_refused(fails, trained):
    assert "limit_batches (0)" in fails("answers", "--ckpt", trained, "--limit_batches", 0)
