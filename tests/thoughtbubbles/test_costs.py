"""Memory that a step may take, and FLOPs against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_models import CopyLM, vocabulary
from lightning_models.flops import TRAINING_FACTOR
from lightning_models.thoughtbubbles import CopyConfig
from tests.largest import Largest
from tests.thoughtbubbles.cases import build, rows_of


def wide_batch(rows, length, words):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (rows, length + 1), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.bool)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"kappa": "4L"},
        {"kappa": "2L", "allocation": "window_topk"},
        {"kappa": "2L", "allocation": "threshold"},
        {"kappa": "4L", "output_average": "residual_norm"},
    ],
    ids=str,
)
def test_logits_of_all_streams_are_never_held(changes, autocast, monkeypatch):
    rows, length, words, limit = 2, 24, 3000, 16
    monkeypatch.setitem(vocabulary.CHUNK_ROWS, "cpu", limit)
    model = build(vocab_size=words, block_size=length, **changes).train()
    batch = wide_batch(rows, length, words)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), Largest() as step:
        model.loss(batch).terms["nll"].sum.backward()
        model.score(batch)
    # a chunk may grow by the streams of one token, at most 4 here; the embedding is as large
    most = max(limit + 4, model.config.dim) * words
    assert limit * words <= step.numel <= most
    assert most < rows * length * words / 2


def test_padding_is_cut_into_chunks_too(monkeypatch):
    """Padding belongs to no token that must stay whole; short rows have a lot of it."""
    length, words, limit = 24, 3000, 16
    monkeypatch.setitem(vocabulary.CHUNK_ROWS, "cpu", limit)
    model = build(vocab_size=words, block_size=length, kappa="4L")
    batch = wide_batch(3, length, words)
    batch["mask"][1:, 2:] = False
    batch["mask"][2] = False
    batch["targets"] = batch["targets"].masked_fill(~batch["mask"], -100)
    with Largest() as step:
        model.loss(batch).terms["nll"].sum.backward()
        model.score(batch)
    assert step.numel <= max(limit + 4, model.config.dim) * words


def forward_flops(model, tokens):
    """Multiply-adds times two of a forward pass with all logits, attention's unseen half off."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoded = model.network(tokens)
        decoded.states @ model.network.output_matrix.t()
    return counter.get_total_flops() - unseen_flops(model, tokens)


def unseen_flops(model, tokens):
    """What the math kernel spends on keys behind the query: of N keys, N (N - 1) / 2 pairs."""
    rows, length = tokens.shape
    streams, total = length, 0
    for layer in range(model.config.num_layers):
        if layer in model.config.fork_layers:
            streams = min(model.config.most_streams(length), 2 * streams)
        total += rows * 4 * model.config.dim * streams * (streams - 1) // 2
    return total


COUNTED = {
    "2L": {"kappa": "2L"},
    "4L": {"kappa": "4L", "fork_layers": (0, 1, 3)},
    "1.5L": {"kappa": "1.5L", "fork_layers": (0, 2)},
    "19-streams": {"kappa": 19, "fork_layers": (1, 3)},
    "residual_norm": {"kappa": "4L", "output_average": "residual_norm"},
    "no-forks": {"fork_layers": ()},
}


@pytest.mark.parametrize("case", COUNTED)
def test_flops_of_a_forward_pass(case):
    model = build(attention_backend="math", block_size=10, **COUNTED[case])
    tokens = rows_of([10, 10])["tokens"]
    counted = forward_flops(model, tokens)
    assert model.flops_per_token(10) * 20 == pytest.approx(counted, rel=1e-9)


def product_flops(into, left, right, out_shape=None, **_):
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize("case", COUNTED)
def test_flops_of_a_training_step(case):
    """What is above three forward passes: nothing; below: gradients that nobody needs."""
    model = build(attention_backend="math", block_size=10, **COUNTED[case]).train()
    batch = rows_of([10, 10])
    in_place = {torch.ops.aten.addmm_: product_flops}  # torch counts only the other form
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model.loss(batch).terms["nll"].sum.backward()
    counted = counter.get_total_flops() - TRAINING_FACTOR * unseen_flops(model, batch["tokens"])
    assert model.flops_per_token(10, training=True) * 20 == pytest.approx(counted, rel=0.02)


def test_shorter_texts_have_a_smaller_budget_unless_it_is_fixed():
    dynamic, fixed = (build(kappa="2L", block_size=32, budget=b) for b in ("dynamic", "fixed"))
    assert dynamic.flops_per_token(32) == fixed.flops_per_token(32)
    assert dynamic.flops_per_token(8) < fixed.flops_per_token(8)


@pytest.mark.parametrize("copies", [1, 3, 5])
def test_flops_of_copies(copies):
    sizes = {"vocab_size": 11, "vocab_multiple": 1, "num_layers": 3, "dim": 8, "num_heads": 2}
    model = CopyLM(CopyConfig(**sizes, block_size=10, copies=copies, attention_backend="math"))
    model.configure_model()
    tokens, streams = rows_of([10, 10])["tokens"], 10 * copies
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.network(tokens) @ model.network.output_matrix.t()
    unseen = 2 * 3 * 4 * 8 * streams * (streams - 1) // 2
    assert model.flops_per_token(10) * 20 == pytest.approx(counter.get_total_flops() - unseen)
