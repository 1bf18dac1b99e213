"""Chunks by arithmetic against counting tokens one by one, and the gold thoughts of steps."""

import pickle

import pytest
import torch

from lightning_models.thinking_states.rows import Grid, in_blocks
from lightning_models.thinking_states.thoughts import ThoughtLayout
from tests.thinking_states.cases import (
    GRIDS,
    PREFIX,
    V,
    chunks_of,
    gold_of,
    place_of,
    reasoning_batch,
    without_steps,
)

END, STEP, PAD = V, V + 1, V + 2


@pytest.fixture(params=GRIDS)
def kind(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["queries", "answers"])
def in_answers(request):
    return request.param


def layout_of(kind, c=4, in_answers=False, **options):
    return ThoughtLayout(Grid(c, kind, in_answers), PREFIX, END, STEP, PAD, **options)


@pytest.mark.parametrize("c", [1, 3, 4, 20])
def test_every_token_has_its_chunk_and_place(kind, c):
    grid, tokens = Grid(c, kind), torch.arange(30)
    for q in range(1, 14):
        length = torch.tensor(q)
        expected = [place_of(t, q, grid) for t in range(30)]
        chunk, place = grid.chunk(tokens, length), grid.offset(tokens, length)
        assert list(zip(chunk.tolist(), place.tolist(), strict=True)) == expected
        assert torch.equal(grid.token(chunk, place, length), tokens)
        assert place.min() >= 0
        assert place.max() < c
        ends = [t for t in range(29) if expected[t + 1][0] != expected[t][0]]
        assert grid.last(chunk[ends], length).tolist() == ends


def test_chunks_think_that_are_there_to_their_ends(kind, in_answers):
    grid, chunk = Grid(4, kind, in_answers), torch.arange(-2, 12)
    for q in range(1, 14):
        for total in range(q, q + 11):
            thinks = grid.thinks(chunk, torch.tensor(q), torch.tensor(total))
            assert chunk[thinks].tolist() == sorted(chunks_of(q, total, grid))


@pytest.mark.parametrize("seed", range(4))
def test_gold_thoughts_join_the_steps_of_a_chunk(kind, in_answers, seed):
    layout = layout_of(kind, in_answers=in_answers)
    batch = reasoning_batch((11, 4, 9, 1, 13), (3, 1, 2, 6, 2), seed, steps=6)
    gold = layout.gold(batch)
    for row in range(5):
        expected = gold_of(batch, row, layout)
        spoken = [(c, token) for c in sorted(expected) for token in expected[c]]
        valid = gold.valid[row]
        found = zip(gold.chunk[row][valid].tolist(), gold.tokens[row][valid].tolist(), strict=True)
        assert list(found) == spoken
        assert int(gold.first[row].sum()) == sum(map(bool, expected.values()))
        assert gold.tokens[row][gold.final[row]].tolist() == [
            expected[c][-1] for c in sorted(expected) if expected[c]
        ]
    assert (gold.tokens == STEP).any(), "some chunk must have two steps"


def test_steps_of_a_chunk_that_never_ends_are_left_out():
    batch = reasoning_batch((6,), (1,), steps=1)
    batch["step_places"] = torch.tensor([[5]])
    for answers, tokens in ((1, 0), (2, 2)):  # of c = 8, six are in the query, one in the prefix
        targets = torch.full((1, answers), 3)
        changed = {**batch, "targets": targets}
        layout = ThoughtLayout(Grid(8, "absolute"), (1,), END, STEP, PAD)
        assert int(layout.gold(changed).valid.sum()) == tokens
        assert layout(changed)["thought_tokens"] == (3.0 if tokens else 0.0)


def test_a_batch_without_steps_has_trivial_thoughts_only(kind, in_answers):
    layout = layout_of(kind, in_answers=in_answers)
    batch = without_steps(reasoning_batch())
    counted = layout(batch)
    chunks = sum(len(gold_of(batch, row, layout)) for row in range(3))
    assert counted["thought_tokens"] == counted["trivial_thoughts"] == chunks
    rows = layout.rows(batch)
    assert rows.thoughts.tokens[rows.thoughts.valid].unique().tolist() == [END]
    assert (rows.states.where == rows.tokens.numel()).all(), "no state goes anywhere"
    nothing = {**batch, **{k: batch[k][:, :0] for k in ("steps", "step_lengths", "step_places")}}
    assert layout(nothing) == counted


def test_the_counter_counts_what_is_predicted(kind, in_answers):
    layout = pickle.loads(pickle.dumps(layout_of(kind, in_answers=in_answers, lm_on_query=True)))
    batch = reasoning_batch((11, 4, 9), (3, 1, 2), seed=5)
    thoughts = [gold_of(batch, row, layout) for row in range(3)]
    sizes = [len(thought) + 1 for row in thoughts for thought in row.values()]
    assert layout(batch) == {
        "targets": 3 + 1 + 2 + 10 + 3 + 8,
        "queries": 3,
        "thought_tokens": sum(sizes),
        "trivial_thoughts": sizes.count(1),
    }


@pytest.mark.parametrize("c", [1, 3, 4, 16])
def test_blocks_hold_a_chunk_each_with_its_end_last(kind, c):
    lengths = [11, 4, 9, 1, 12]
    query = torch.arange(1, 61).view(5, 12)
    blocks = in_blocks(Grid(c, kind), query, torch.tensor(lengths))
    for row, q in enumerate(lengths):
        chunks = {}
        for t in range(q):
            chunks.setdefault(place_of(t, q, Grid(c, kind))[0], []).append(t)
        own = [[]] * (blocks.num_blocks - len(chunks)) + [chunks[k] for k in sorted(chunks)]
        assert int(blocks.chunks[row]) == len(chunks)
        for number, tokens in enumerate(own):
            real = blocks.real[row, number]
            assert real.tolist() == [False] * (c - len(tokens)) + [True] * len(tokens)
            assert blocks.tokens[row, number][real].tolist() == query[row, tokens].tolist()
            places = [place_of(t, q, Grid(c, kind))[1] for t in tokens]
            assert blocks.offset[row, number][real].tolist() == places
            if tokens:
                assert int(blocks.last[row, number]) == tokens[-1]
        assert int(blocks.thinks[row].sum()) == len(chunks_of(q, q, Grid(c, kind)))
