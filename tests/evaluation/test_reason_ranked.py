"""Questions to window models: the most likely of all answers, or a written one; by group."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from callbacks.answer_accuracy import Question, Reply, ask, judge, questions_in, room_for
from callbacks.recorded_thoughts import RowThinking, Thought
from datamodules import Kinship
from evaluation.load import build_model
from evaluation.reason import asking
from evaluation.reason.asking import Timing, rank, time_in_turn
from evaluation.reason.scores import answer_row, measure_answers
from evaluation.scoring import share_of
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
def reason(reasoned, trained):
    """Runs the command on Kinship models."""
    return lambda *words, ckpts=(trained,): reasoned(ckpts, *words)


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
        assert (question.group, question.sequence_id) == ([3, 5][number % 2], number)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_ranking_finds_the_right_answers_and_no_others(model, data, questions, batch_size):
    eos = data.tokenizer.eos_id
    right = {q.sequence_id: [*q.answer, eos] for q in questions}
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
    assert drawn == [(0, q.sequence_id) for q in questions]


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
    for shown in ("hops", "the most likely of 22 possible answers", "likelihood", "exact"):
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


# ---- numbers of answers, by hand: shares, means of thinking, times

TEXTS = dict.fromkeys(("decode", "decode_continuation"), lambda ids: "")
TOKENIZER = SimpleNamespace(**TEXTS, vocab_size=99, eos_id=0, text_bos_id=None)


def question(number, answer=(5,), group=0):
    return Question(
        query=[0, 1, 2, 3], answer=list(answer), steps=[], group=group, sequence_id=number
    )


def rows(flags):
    replies = (Reply(question(n, group=n % 2), [5, 0], "", flag) for n, flag in enumerate(flags))
    return [answer_row(TOKENIZER, "any", reply) for reply in replies]


def test_shares_and_their_errors():
    error = pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert share_of([True, False, True, True]) == (0.75, error, 4)
    nothing = share_of([])
    assert math.isnan(nothing.value)
    assert math.isnan(nothing.error)
    assert nothing.questions == 0
    groups = measure_answers(rows([True, False, True, True, False]), "steps")["by_group"]
    assert [(group["steps"], group["accuracy"]) for group in groups] == [(0, 2 / 3), (1, 0.5)]


def test_means_of_thinking():
    def row(number, rounds, *lengths):
        thoughts = tuple(Thought(n, tuple(range(length))) for n, length in enumerate(lengths))
        thinking = RowThinking(thoughts, rounds)
        return answer_row(TOKENIZER, "a", Reply(question(number), [1], "", True, thinking))

    found = measure_answers([row(0, 3, 0, 2, 1), row(1, 1, 0, 0)], "steps")
    means = {"rounds": 2, "chunks": 2.5, "nontrivial_chunks": 1, "thought_tokens": 1.5}
    assert means.items() <= found.items()


def test_models_are_timed_in_turn(monkeypatch):
    """A clock that only moves when a model answers: 2 s, then 3 s, then 8 s, and so on."""
    clock, order = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(asking.time, "perf_counter", lambda: clock.now)
    seconds = {"a": iter([100.0, 2.0, 4.0, 9.0]), "b": iter([100.0, 1.0, 4.0, 3.0])}

    def answering(name):
        def answer():
            order.append(name)
            clock.now += next(seconds[name])

        return answer

    a, b = time_in_turn([answering("a"), answering("b")], 3, 2, torch.device("cpu"))
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert (a.rounds, b.rounds) == ((2.0, 4.0, 9.0), (1.0, 4.0, 3.0))
    assert (a.seconds, b.seconds) == (2.0, 1.5)
    assert b.speed_up(a) == 2.0  # the median of 2, 1 and 3
    assert a.speed_up(b) == 0.5
    assert Timing((6.0,), 3).seconds == 2.0
