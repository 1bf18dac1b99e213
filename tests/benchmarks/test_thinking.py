"""The thinking benchmark times what it says, and prints its tables."""

import argparse
import sys

import pytest
import torch

from benchmarks import thinking
from benchmarks.thinking import build, thought_tokens
from lightning_models.generation import generate
from lightning_models.layers import recording

TINY = {
    "layers": 3,
    "dim": 32,
    "heads": 2,
    "vocab": 60,
    "batch": 2,
    "rounds": 1,
    "length": 8,
    "thoughts": 8,
    "chunks": 4,
    "chunk_size": 3,
    "thought": 2,
    "answer": 2,
}
LISTS = {"counts": [2, 4], "every": [2, 1]}
OPTIONS = argparse.Namespace(**TINY, **LISTS, device="cpu", shape=None, bf16=False)


def changed(**options):
    return argparse.Namespace(**{**vars(OPTIONS), **options})


@pytest.mark.parametrize("number", OPTIONS.counts)
def test_all_numbers_of_chunks_have_as_many_thought_tokens_and_positions(number):
    model = build("Thinking States", OPTIONS, chunk_size=OPTIONS.length // number)
    batch = thinking.training_batch(number, OPTIONS)
    counts = model.counter(batch)
    assert counts["thought_tokens"] == OPTIONS.batch * OPTIONS.thoughts
    assert counts["trivial_thoughts"] == 0
    rows = model.layout.rows(batch)
    assert rows.states.thoughts.shape[0] == OPTIONS.batch * number
    assert rows.tokens.shape[1] == OPTIONS.length + 4 + OPTIONS.answer


@pytest.mark.parametrize("number", OPTIONS.counts)
def test_coconut_feeds_as_many_latents_and_learns_answers_alone(number):
    seen = []
    model = build("Coconut", OPTIONS, **thinking.latents(number)).train()
    with recording(latents=lambda states, latent: seen.append(len(states))):
        output = model.loss(thinking.training_batch(number, OPTIONS))
    assert seen == [number]
    assert output.terms["nll"].normaliser == OPTIONS.batch * (OPTIONS.answer + 1)


@pytest.mark.parametrize("method", ["Thinking States", "Coconut"])
def test_a_step_trains(method):
    timed = thinking.build_timed(method, 2, OPTIONS)
    losses = torch.tensor([timed.step() for _ in range(3)])
    assert losses[0] > losses[-1]
    assert timed.forward() < losses[-1]


@pytest.mark.parametrize("every", [4, 2, 1])
@pytest.mark.parametrize("thought", [1, 2, 4])
def test_thoughts_come_where_they_are_told_to(every, thought):
    options = changed(thought=thought)
    model = thinking.thinker(options)
    query = thinking.queries(every, options)
    for how, rounds in (("sequential", 4), ("speculative", 4 // every)):
        read = thinking._read(model, query, how, options)
        assert read.rounds == [rounds] * 2
        for row in read.thoughts():
            own = [chunk for chunk, found in enumerate(row, start=1) if found.tokens]
            assert own == list(range(every, 5, every))
            assert all(found.tokens in ([], thought_tokens(options)) for found in row)


def test_a_query_without_marks_is_read_in_one_round():
    model = thinking.thinker(OPTIONS)
    query = thinking.random_tokens(OPTIONS, 2, 12)
    read = thinking._read(model, query, "speculative", OPTIONS)
    assert read.rounds == [1, 1]


def test_both_ways_of_reading_lead_to_the_same_answers():
    query = thinking.queries(2, OPTIONS).tolist()
    speculative, sequential = (
        generate(
            thinking.thinker(OPTIONS, prefill=how),
            query,
            max_new_tokens=4,
            sampling=thinking.GREEDY,
        )
        for how in ("speculative", "sequential")
    )
    assert speculative == sequential


@pytest.mark.parametrize(("only", "rows"), [("training", 4), ("prefill", 2), ("answering", 4)])
def test_the_command_prints_its_tables(monkeypatch, capsys, only, rows):
    sizes = [f"--{key}={value}" for key, value in TINY.items()]
    lists = [word for key, own in LISTS.items() for word in (f"--{key}", *map(str, own))]
    monkeypatch.setattr(sys, "argv", ["thinking", *sizes, *lists, f"--only={only}"])
    thinking.main()
    heading, _, title, _, _, _, *lines = capsys.readouterr().out.splitlines()
    assert "layers 3, dim 32" in heading
    assert title == only
    assert len(lines) == rows
    assert float(lines[-1].split()[-2]) > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--counts", "3"], "counts (3)"),
        (["--counts", "64"], "two tokens a chunk"),
        (["--every", "40"], "every (40)"),
        (["--thought", "0"], "thought (0)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(monkeypatch, capsys, words, named):
    monkeypatch.setattr(sys, "argv", ["thinking", *words])
    with pytest.raises(SystemExit) as refused:
        thinking.main()
    assert refused.value.code == 2
    assert named in capsys.readouterr().err
