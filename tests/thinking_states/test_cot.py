"""Chains of thought against a loop over single rows."""

import torch

from lightning_models.generation import SamplingConfig, generate
from lightning_models.thinking_states.baselines.text import TextCache
from tests.thinking_states.questions import (
    EOS,
    PREFIX,
    SHAPES,
    V,
    build,
    questions,
    row_of,
)

SHORT_END = {"answer_prefix": (3,), "max_chain_tokens": 8}
"""An end that a random model happens to write now and then."""


def test_a_chain_is_as_long_as_the_block_at_most():
    model, batch = build("cot", block_size=12).eval(), questions()
    tokens, lengths = model.write_chains(batch["query"], batch["query_lengths"])
    longest = (12 - batch["query_lengths"]).clamp(min=0) + len(PREFIX)
    assert (lengths <= longest).all()
    last = tokens.gather(1, torch.stack((lengths - 2, lengths - 1), dim=1))
    assert last.tolist() == [list(PREFIX)] * len(SHAPES)


def test_rows_that_only_fill_up_write_no_chain(monkeypatch):
    model, batch, rows = build("cot", **SHORT_END).eval(), questions(), []
    batch["targets"][1:3] = -100
    write = model.write_chains

    def counted(query, lengths):
        rows.append(lengths.tolist())
        return write(query, lengths)

    monkeypatch.setattr(model, "write_chains", counted)
    assert (model.score(batch).log_prob < 0).any(dim=1).tolist() == [True, False, False, True]
    assert rows == [[SHAPES[0][0], SHAPES[3][0]]]
    batch["targets"][:] = -100
    assert not model.score(batch).log_prob.any()
    assert len(rows) == 1


def test_generated_text_is_the_chain_that_is_scored():
    model, batch = build("cot", double=False, **SHORT_END).eval(), questions()
    tokens, lengths = model.write_chains(batch["query"], batch["query_lengths"])
    prompts = [row_of(batch, row)[0] for row in range(len(SHAPES))]
    greedy = SamplingConfig(temperature=0)
    texts = generate(model, prompts, max_new_tokens=14, sampling=greedy, vocab_size=V)
    for row, text in enumerate(texts):
        chain = tokens[row, : lengths[row]].tolist()
        assert text[: len(chain)] == chain
        assert model.answer_tokens(text) == text[len(chain) :]
        assert len(model.answer_tokens(text)) >= 5


def test_sampled_chains_are_broken_off_too():
    model = build("cot", double=False, max_chain_tokens=3).eval()
    (text,) = generate(model, [[EOS, 7]], max_new_tokens=8, sampling=SamplingConfig(seed=4))
    assert tuple(text[3:5]) == PREFIX


def test_rows_that_leave_take_their_chains_with_them():
    """The third row and the first: how long each may be, and the tokens that it wrote last."""
    limits, nothing = torch.tensor([9, 5, 1]), torch.zeros(3, dtype=torch.int64)
    cache = TextCache(torch.tensor([6, 7, 8]), limits, end=PREFIX)
    assert cache.take(nothing)[:, 0].tolist() == [6, 7, 8]
    cache.take(torch.tensor([PREFIX[0], 9, 9]))
    cache.select(torch.tensor([2, 0]))
    allowed = cache.forced(torch.zeros(2, V)) == 0.0
    assert allowed.sum(dim=1).tolist() == [1, V]
    assert allowed[0, PREFIX[0]]
    cache.take(torch.tensor([PREFIX[1], PREFIX[1]]))
    assert cache.answering.tolist() == [False, True]
