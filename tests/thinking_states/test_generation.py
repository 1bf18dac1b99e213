"""Answers: written step by step, scored, and computed in one pass with the same thoughts."""

import pytest
import torch
from torch.nn import functional as F

from lightning_models.generation import SamplingConfig, generate
from lightning_models.layers import recording
from lightning_models.thinking_states.thoughts import Trace
from tests.thinking_states.cases import (
    GRIDS,
    PREFIX,
    V,
    exact,
    outspoken,
    ragged,
    reasoning_batch,
    rows_of,
)

GREEDY = SamplingConfig(temperature=0)
CASES = [(grid, answers) for grid in GRIDS for answers in (False, True)]
LENGTHS, ANSWERS = (11, 4, 9, 1, 14), (7, 1, 2, 5, 3)


def traced(function, *names):
    """What a function returns, and the traces that it records."""
    traces = {}

    def keep(name):
        return lambda trace: traces.__setitem__(name, trace)

    with recording(**{name: keep(name) for name in names}):
        value = function()
    return value, *(traces[name] for name in names)


def model_of(grid, answers, seed=1, **changes):
    return exact(outspoken(seed, grid=grid, think_in_decode=answers, **changes))


@pytest.mark.parametrize(("grid", "answers"), CASES)
def test_scores_are_those_of_the_parallel_pass_with_the_same_thoughts(grid, answers):
    """The thoughts of the model itself, given as gold ones, make the same answers."""
    model, batch = model_of(grid, answers), reasoning_batch(LENGTHS, ANSWERS, seed=7)
    scores, own = traced(lambda: model.score(batch), "thoughts")
    forced = with_thoughts(batch, own)
    assert model.layout.gold_trace(forced).rows == own.rows
    assert sum(own.nontrivial) > 3
    rows = model.layout.rows(forced)
    with torch.no_grad():
        h = model.network(rows).answers
        logits = h @ model.network.output_matrix.t()
    expected = -F.cross_entropy(logits.transpose(1, 2), rows.answers.tokens, reduction="none")
    torch.testing.assert_close(scores.log_prob.double(), expected, atol=1e-5, rtol=0)
    assert scores.num_targets.tolist() == list(ANSWERS)
    assert scores.kind == "exact"


def with_thoughts(batch, trace: Trace):
    """The batch with each thought as one step at its chunk's last token."""
    thoughts = [[thought for thought in row if thought.tokens] for row in trace.rows]
    shape = (len(thoughts), max(1, *map(len, thoughts)))
    size = max(len(t.tokens) for row in thoughts for t in row)
    steps, lengths = torch.zeros(*shape, size, dtype=torch.int64), torch.zeros(shape).long()
    places = torch.full(shape, -1)
    for row, own in enumerate(thoughts):
        for number, thought in enumerate(own):
            steps[row, number, : len(thought.tokens)] = torch.tensor(thought.tokens)
            lengths[row, number], places[row, number] = len(thought.tokens), thought.end
    return {**batch, "steps": steps, "step_lengths": lengths, "step_places": places}


@pytest.mark.parametrize(("grid", "answers"), CASES)
def test_decoding_and_scoring_agree(grid, answers):
    model, batch = model_of(grid, answers), reasoning_batch(LENGTHS, (7,) * 5, seed=3)
    expected, own = traced(lambda: model.score(batch).log_prob, "thoughts")

    def decode():
        cache = model.init_cache(batch["query"], batch["query_lengths"], 7)
        tokens, found = torch.full((5,), 99999), []  # the first ones are not looked at
        for place in range(7):
            logits, ready = model.decode_step(cache, tokens)
            assert ready.all()
            assert logits.dtype == torch.float32
            tokens = batch["targets"][:, place]
            found.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        return torch.stack(found, dim=1)

    found, written = traced(decode, "thoughts")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert written == own, "what is thought while answers are written is added"


@pytest.mark.parametrize(("grid", "answers"), CASES)
def test_answers_do_not_depend_on_the_batch(grid, answers):
    """Rows that end early leave, others go on; alone each writes the same."""
    model = model_of(grid, answers)
    query, lengths = ragged([11, 4, 9, 1, 14, 6], 4)
    prompts = [row[:n].tolist() for row, n in zip(query, lengths.tolist(), strict=True)]
    options = {"max_new_tokens": 9, "sampling": GREEDY, "vocab_size": V}
    free = generate(model, prompts, **options)
    eos = free[0][2]
    together, trace = traced(lambda: generate(model, prompts, eos_id=eos, **options), "thoughts")
    assert len({len(row) for row in together}) > 1
    for number, prompt in enumerate(prompts):
        (alone,), own = traced(
            lambda p=prompt: generate(model, [p], eos_id=eos, **options), "thoughts"
        )
        assert alone == together[number]
        assert own.rows[0] == trace.rows[number]
        assert own.rounds == trace.rounds[number : number + 1]


def test_left_padding_changes_no_answer():
    model, batch = model_of("left_align", False), reasoning_batch(LENGTHS, ANSWERS, seed=5)
    together = model.score(batch)
    for row, q in enumerate(LENGTHS):
        alone = rows_of(batch, [row])
        for width in (q, q + 5):
            padded = {
                **alone,
                "query": F.pad(batch["query"], (0, 9), value=3)[row : row + 1, :width],
            }
            torch.testing.assert_close(
                model.score(padded).log_prob[0], together.log_prob[row], atol=1e-6, rtol=0
            )


def test_thinking_about_answers_changes_them_only_behind_their_first_chunk():
    batch = reasoning_batch((8, 5), (9, 9), seed=2)
    first, last = batch["targets"].clone(), batch["targets"]
    first[:, :5], last[:, :5] = 2, 2  # with the prefix of three, even tokens end chunks of four
    scores = [model_of("left_align", answers).score(batch).log_prob for answers in (False, True)]
    torch.testing.assert_close(scores[0][:, :2], scores[1][:, :2])
    assert not torch.allclose(scores[0][:, 2:], scores[1][:, 2:])


def test_the_last_thought_reaches_one_token_answers():
    """It enters with the prefix (F3); without the thought the answer is another one."""
    model = model_of("left_align", False, strength=20.0)
    batch = reasoning_batch((8,), (1,))
    batch["query"][0] = torch.tensor([1, 3, 5, 7, 9, 11, 13, 2])  # ends loud
    loud, trace = traced(lambda: model.score(batch).log_prob, "thoughts")
    assert trace.nontrivial == [1]
    assert trace.rows[0][1].end == 7
    with torch.no_grad():
        cache = model.init_cache(batch["query"], batch["query_lengths"], 1)
        assert cache.state.any()
        cache.state = torch.zeros_like(cache.state)
        logits, _ = model.decode_step(cache, torch.zeros(1, dtype=torch.int64))
    quiet = logits.log_softmax(-1)[0, batch["targets"][0, 0]]
    assert not torch.isclose(quiet, loud[0, 0])


@pytest.mark.parametrize("grid", GRIDS)
def test_without_a_prefix_the_query_predicts_the_answer(grid):
    model = model_of(grid, False, answer_prefix=())
    batch = reasoning_batch(LENGTHS, (3,) * 5, seed=3)
    expected = model.score(batch).log_prob
    cache = model.init_cache(batch["query"], batch["query_lengths"], 3)
    for place in range(3):
        last = batch["targets"][:, place - 1] if place else batch["query"][:, 0]
        logits, _ = model.decode_step(cache, last)
        found = logits.log_softmax(-1).gather(1, batch["targets"][:, place : place + 1])[:, 0]
        torch.testing.assert_close(found, expected[:, place], atol=1e-5, rtol=0)


def test_rows_can_leave_between_steps():
    model, (query, lengths) = model_of("absolute", True), ragged([11, 4, 9], 6)
    kept = torch.tensor([2, 0])
    tokens = torch.randint(0, V, (3, 5))
    whole = model.init_cache(query, lengths, 9)
    part = model.init_cache(query, lengths, 9)
    for place in range(4):
        one, _ = model.decode_step(whole, tokens[:, place])
        if place == 2:
            part.select(kept)
        mine = tokens[kept, place] if place >= 2 else tokens[:, place]
        other, _ = model.decode_step(part, mine)
        torch.testing.assert_close(other, one[kept] if place >= 2 else one, atol=1e-5, rtol=0)


def test_filling_rows_are_scored_as_nothing():
    model, batch = model_of("left_align", True), reasoning_batch((6, 1), (2, 1))
    batch["targets"][1] = -100
    scores = model.score(batch)
    assert not scores.log_prob[1].any()
    assert scores.num_targets.tolist() == [2, 0]
    torch.testing.assert_close(
        model.score(rows_of(batch, [0])).log_prob[0], scores.log_prob[0], atol=1e-6, rtol=0
    )


def test_sequential_and_speculative_models_score_alike():
    batch = reasoning_batch(LENGTHS, ANSWERS, seed=9)
    scores, traces = [], []
    for prefill in ("speculative", "sequential"):
        model = model_of("left_align", False, prefill=prefill)
        value, trace, gold = traced(lambda m=model: m.score(batch), "thoughts", "gold_thoughts")
        scores.append(value.log_prob)
        traces.append(trace)
        assert [[t.end for t in row] for row in gold.rows] == [
            [t.end for t in row] for row in trace.rows
        ]
        assert gold.rounds == []
    torch.testing.assert_close(*scores, atol=1e-6, rtol=0)
    assert traces[0].rows == traces[1].rows
    assert traces[1].rounds == [-(-q // 4) for q in LENGTHS]
    assert traces[0].rounds != traces[1].rounds


def test_the_prefix_is_what_the_first_step_reads():
    model, (query, lengths) = model_of("left_align", False), ragged([6], 1)
    cache = model.init_cache(query, lengths, 2)
    assert cache.past.lengths.tolist() == [6]
    model.decode_step(cache, torch.tensor([0]))
    assert cache.past.lengths.tolist() == [6 + len(PREFIX)]
    model.decode_step(cache, torch.tensor([0]))
    assert cache.past.lengths.tolist() == [7 + len(PREFIX)]


def test_sharded_models_do_not_think():
    model = model_of("left_align", False)
    model.network.sharded = True
    with pytest.raises(ValueError, match="cannot think with sharded parameters.*strategy=ddp"):
        model.score(reasoning_batch())
