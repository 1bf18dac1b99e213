"""The objective's terms, their normalisers, and what the statistics say."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lightning_models.layers import recording
from lightning_models.outputs import objective
from tests.thinking_states.cases import (
    GRIDS,
    build,
    exact,
    gold_of,
    outspoken,
    reasoning_batch,
    rows_of,
    without_steps,
)

OPTIONS = {
    "default": {},
    "down-weighted": {"trivial_weight": 0.25},
    "without-trivial": {"trivial_weight": 0.0},
    "weighted": {"thought_weight": 0.3, "trivial_weight": 2.0},
    "no-thoughts": {"thought_weight": 0.0},
    "chunk-sum": {"thought_loss": "chunk_sum"},
    "chunk-sum-down": {"thought_loss": "chunk_sum", "trivial_weight": 0.5, "thought_weight": 0.7},
    "query": {"lm_on_query": True},
    "answers": {"think_in_decode": True, "grid": "absolute"},
    "partial": {"grid": "partial", "tie_thinking_head": True},
}


@pytest.fixture(params=OPTIONS)
def options(request):
    return OPTIONS[request.param]


def test_the_shares_of_parts_add_up_to_the_whole(options):
    """Two ranks of two accumulated micro-batches each are one batch, gradients too."""
    model = exact(build(**options))
    whole = reasoning_batch((11, 4, 9, 12), (3, 1, 2, 2), seed=6)
    whole = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in whole.items()}
    whole["step_lengths"][2] = 0  # one micro-batch has trivial thoughts only
    whole["step_places"][2] = -1
    counter = pickle.loads(pickle.dumps(model.counter))
    totals = counter(whole)
    gradients = []
    for parts, options_of in (
        ([whole], {"accumulate": 1, "world_size": 1}),
        ([rows_of(whole, [row]) for row in range(4)], {"accumulate": 2, "world_size": 2}),
    ):
        model.zero_grad()
        value = 0.0
        for part in parts:
            given = totals if len(parts) > 1 else {}
            share = objective(
                model.loss(part), given, device=torch.device("cpu"), **options_of
            ) / len(parts)
            share.backward()
            value += share.item()
        gradients.append((value, [p.grad.clone() for p in model.network.parameters()]))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-6)  # float32 shares
    for mine, theirs in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_parameter_takes_part_in_every_batch(grid):
    """Also where no thought has tokens, and where no chunk thinks at all."""
    batches = [reasoning_batch(), without_steps(reasoning_batch())]
    batches += [without_steps(reasoning_batch((1, 2), (1, 1)))]
    for number, batch in enumerate(batches):
        model = build(grid=grid, chunk_size=4 if number < 2 else 12)
        sum(term.sum for term in model.loss(batch).terms.values()).backward()
        gradients = {name: p.grad for name, p in model.network.named_parameters()}
        assert [name for name, grad in gradients.items() if grad is None] == []
        silent = [name for name, grad in gradients.items() if not grad.any()]
        compression = [name for name in gradients if name.startswith("compression.")]
        thinking = [name for name in gradients if name.startswith("thinking.")]
        never = number == 2 and grid == "absolute"
        assert silent == ([] if number == 0 else (thinking if never else []) + compression)


def within_a_run(model, step=0, every=1):
    """The model in an optimiser step of a trainer that logs every so many."""
    model._trainer = SimpleNamespace(global_step=step, log_every_n_steps=every)
    return model


def test_statistics_are_shares_of_what_they_count():
    model = within_a_run(outspoken())
    batch = reasoning_batch((11, 4, 9), (3, 1, 2), seed=4)
    stats = {
        name: (float(m.sum), float(m.normaliser)) for name, m in model.loss(batch).stats.items()
    }
    thoughts = [t for row in range(3) for t in gold_of(batch, row, model.layout).values()]
    trivial, spoken = thoughts.count([]), sum(len(t) + 1 for t in thoughts if t)
    assert stats["trivial_share"] == (trivial, pytest.approx(len(thoughts)))
    assert stats["trivial_accuracy"][1] == trivial
    assert stats["thought_accuracy"][1] == stats["thought_nll"][1] == spoken
    rows = model.layout.rows(batch)
    with torch.no_grad():
        logits = model.network(rows).thoughts @ model.network.thinking_matrix.t()
    right, valid = logits.argmax(-1) == rows.thoughts.tokens, rows.thoughts.valid
    own = rows.thoughts.trivial
    assert stats["trivial_accuracy"][0] == int((right & own).sum())
    assert stats["thought_accuracy"][0] == int((right & valid & ~own).sum())
    losses = F.cross_entropy(logits.transpose(1, 2), rows.thoughts.tokens, reduction="none")
    assert stats["thought_nll"][0] == pytest.approx(float(losses[valid & ~own].sum()), rel=1e-5)
    assert 0 < stats["trivial_accuracy"][0] < trivial or trivial < 3


ACCURACIES = {"thought_accuracy", "trivial_accuracy"}


def test_accuracies_are_measured_in_steps_that_are_logged():
    """They take a second pass over the vocabulary."""
    model, batch = build(), reasoning_batch()
    cheap = {"thought_nll", "trivial_share"}
    assert model.loss(batch).stats.keys() == cheap
    for every, logged in ((3, {2, 5}), (1, set(range(6))), (0, set())):
        for step in range(6):
            stats = within_a_run(model, step, every).loss(batch).stats
            assert stats.keys() == cheap | (ACCURACIES if step in logged else set())


def test_a_batch_without_trivial_chunks_has_no_share_of_them():
    model, batch = build(chunk_size=20, trivial_weight=0.0), reasoning_batch((5,), (2,), steps=1)
    batch["step_lengths"][:], batch["step_places"][:] = 1, 2
    stats = model.loss(batch).stats
    assert float(stats["trivial_share"].sum) == 0
    assert model.counter(batch)["thought_tokens"] == 2
    empty = model.loss(without_steps(batch))
    assert empty.terms["thoughts"].sum.item() == 0
    assert empty.terms["thoughts"].normaliser.item() == 0


def test_dropout_of_attention_reaches_T_and_C():
    model, batch = build(attention_dropout=0.5).train(), reasoning_batch()
    rows = model.layout.rows(batch)
    h = torch.randn(3, rows.tokens.shape[1], 16)
    with torch.no_grad():
        for once, again in (
            (
                model.network._think(h, rows.thinking),
                model.network._think(h, rows.thinking),
            ),
            (model.network._injected(rows.states, h), model.network._injected(rows.states, h)),
        ):
            assert not torch.equal(once, again)
        model.eval()
        assert torch.equal(*(model.network._think(h, rows.thinking) for _ in range(2)))


def test_a_model_learns_to_think_and_to_answer_by_itself():
    """Forced to think the gold thoughts, it thinks them by itself, and answers."""
    torch.manual_seed(0)
    model = build(init_std=0.1, dim=32, num_kv_heads=2).train()
    batch = reasoning_batch((11, 7), (2, 2), seed=3, steps=3)
    optimizer = torch.optim.AdamW(model.network.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(50):
        optimizer.zero_grad()
        sum(t.sum / t.normaliser for t in model.loss(batch).terms.values()).backward()
        optimizer.step()
    model.eval()
    traces = {}
    with recording(
        thoughts=lambda trace: traces.update(own=trace),
        gold_thoughts=lambda trace: traces.update(gold=trace),
    ):
        log_prob = model.score(batch).log_prob
    assert traces["own"].rows == traces["gold"].rows
    assert sum(traces["own"].nontrivial) > 1
    assert log_prob.sum(dim=1).min() > -0.5
