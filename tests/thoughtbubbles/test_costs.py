"""Memory that a step may take, and FLOPs against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_models import CopyLM, output_layer
from lightning_models.flops import TRAINING_FACTOR
from lightning_models.layers import recording
from lightning_models.thoughtbubbles import CopyConfig
from tests.largest import Largest
from tests.thoughtbubbles.cases import THRESHOLDS, build, row_alone, rows_of, stream_counts


def wide_batch(rows, length, words):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (rows, length + 1), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.bool)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def test_padding_is_cut_into_chunks_too(monkeypatch):
    """Padding belongs to no token that must stay whole; short rows have a lot of it."""
    length, words, limit = 24, 3000, 16
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", limit)
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
    """What the math kernel spends on keys after the query: of N keys, N (N - 1) / 2 pairs."""
    counts = streams_by_block(model, tokens)
    return sum(len(tokens) * 4 * model.config.dim * n * (n - 1) // 2 for n in counts)


def streams_by_block(model, tokens):
    """Streams of a row in each block, all rows having as many."""
    widths = []
    with torch.no_grad(), recording(fork=lambda after, **_: widths.append(after.lengths)):
        model.network(tokens)
    assert all(len(set(lengths.tolist())) == 1 for lengths in widths)
    forks = dict(zip(model.config.fork_layers, widths, strict=True))
    streams, counts = tokens.shape[1], []
    for block in range(model.config.num_layers):
        streams = int(forks[block][0]) if block in forks else streams
        counts.append(streams)
    return counts


COUNTED = {
    "2L": {"kappa": "2L"},
    "4L": {"kappa": "4L", "fork_layers": (0, 1, 3)},
    "1.5L": {"kappa": "1.5L", "fork_layers": (0, 2)},
    "19-streams": {"kappa": 19, "fork_layers": (1, 3)},
    "residual_norm": {"kappa": "4L", "output_average": "residual_norm"},
    "no-forks": {"fork_layers": ()},
}


RULES = {
    "global_topk": {},
    "fixed": {"budget": "fixed"},
    "threshold": {"allocation": "threshold"},
    "window_topk": {"allocation": "window_topk"},
    "residual_norm": {"allocation": "threshold", "output_average": "residual_norm"},
    "early": {"allocation": "threshold", "fork_layers": (0, 2, 3)},
}


def recorded_costs(model, batch):
    """Additional steps of each token, FLOPs and tokens of each row, as scoring records them."""
    found = {}
    model.recorded(
        batch,
        thinking_steps=lambda executed, most: found.update(steps=executed, most=most),
        flops=lambda flops, tokens: found.update(flops=flops, tokens=tokens),
    )
    return found


@pytest.mark.parametrize("kappa", ["1.5L", "3L"])
@pytest.mark.parametrize("rule", RULES)
def test_recorded_costs_are_those_that_ran(rule, kappa):
    """Against torch's counter on each row alone, and the streams that the fork layers report."""
    changes = {"kappa": kappa, "block_size": 8, "attention_backend": "math", **RULES[rule]}
    model = build(thresholds=THRESHOLDS, **changes)
    batch = rows_of([8, 5, 1, 7])
    found, config = recorded_costs(model, batch), model.config
    assert found["tokens"].tolist() == [8, 5, 1, 7]
    counts = dict(zip(config.fork_layers, stream_counts(model, batch), strict=True))
    streams, total = batch["mask"].long(), torch.zeros(batch["mask"].shape, dtype=torch.float64)
    for block in range(config.num_layers):
        streams = counts.get(block, streams)
        total += streams
    expected = total / config.num_layers - batch["mask"].long()
    torch.testing.assert_close(found["steps"], expected, atol=1e-12, rtol=0)
    assert found["steps"].max() <= found["most"]
    for row, length in enumerate((8, 5, 1, 7)):
        alone = row_alone(batch, row)
        flops = forward_flops(model, alone["tokens"])
        assert found["flops"][row].item() == pytest.approx(flops, rel=1e-12)
        assert recorded_costs(model, alone)["flops"].item() == found["flops"][row].item()
        steps = found["steps"][row].sum().item() / length
        if not model.adaptive:
            assert steps == pytest.approx(model.passes_per_token(length) - 1)
            assert flops == pytest.approx(model.flops_per_token(length) * length)
    assert model.adaptive == ("allocation" in RULES[rule])


def test_steps_of_tokens_that_decoding_takes():
    """Cached or not, a token's additional steps are those of scoring the same text."""
    for rule in ("threshold", "window_topk"):
        model, batch = build(thresholds=THRESHOLDS, **RULES[rule]), rows_of([6, 6])
        expected, steps = recorded_costs(model, batch)["steps"], []
        with torch.no_grad(), recording(generated_steps=lambda steps, to=steps: to.append(steps)):
            cache = model.init_cache(batch["tokens"][:, :1], torch.tensor([1, 1]), 5)
            for token in batch["tokens"].t():
                model.decode_step(cache, token)
        assert torch.equal(torch.stack(steps, dim=1), expected)


def test_generation_costs_what_its_steps_cost():
    model = build(kappa="2L", allocation="threshold", thresholds=THRESHOLDS, block_size=8)
    planned = model.passes_per_token(8) - 1
    assert model.generation_flops(8, planned) == pytest.approx(model.flops_per_token(8))
    plain = build(fork_layers=(), block_size=8)
    forks = sum(2.0 * 2 * model.config.dim for _ in model.config.fork_layers)
    assert model.generation_flops(8, 0.0) == pytest.approx(plain.flops_per_token(8) + forks)
    assert model.generation_flops(8, planned / 2) < model.flops_per_token(8)


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
