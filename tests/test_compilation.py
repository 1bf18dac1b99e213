"""Losses compile into one graph with their gradients, and seldom again."""

import random

import pytest
import torch
from formats import SENTENCES, marked_documents
from methods import IN_FULL, METHODS
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounter

MAIN = (
    "gpt2",
    "thoughtbubbles",
    "thought-gestalt",
    "ponderlm",
    "latent-thought",
    "thinking-states",
)
EACH = [m if m.name in MAIN else pytest.param(m, marks=pytest.mark.slow) for m in METHODS]
"""All lines; those of baselines and variants are slow tests."""


def objective(model, batch):
    """The training objective of one batch on its own."""
    return sum(term.sum / term.normaliser for term in model.loss(batch).terms.values())


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What one test has compiled counts in no other."""
    torch.compiler.reset()


@pytest.mark.parametrize("method", EACH, ids=lambda method: method.name)
def test_the_loss_and_its_gradients_compile_into_one_graph(method):
    if method.network_breaks:
        pytest.skip(method.network_breaks)
    plain, model, loss = method.build(), method.build(), objective
    batch = model.transfer_batch_to_device(method.batch(), torch.device("cpu"), 0)
    options = {"fullgraph": True, "backend": "aot_eager"}
    if method.loss_breaks:
        model.network.compile(**options)
    else:
        loss = torch.compile(objective, **options)
    expected, found = objective(plain, batch), loss(model, batch)
    assert torch.equal(found, expected)
    expected.backward()
    found.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)
    assert not any("_orig_mod" in key for key in model.state_dict())


@pytest.mark.parametrize(
    "method", [m for m in IN_FULL if m.loss_breaks], ids=lambda method: method.name
)
def test_what_breaks_the_graph_still_does(method):
    model = method.build()
    compiled = torch.compile(objective, fullgraph=True, backend="eager")
    with pytest.raises(TorchDynamoException):
        compiled(model, method.batch())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_compiled_network_trains_like_the_plain_one(method):
    plain, compiled, batch = method.build(), method.build(compile=True), method.batch()
    for model in (plain, compiled):
        objective(model, batch).backward()
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-3)


RAGGED = {
    "thought-gestalt": 9,
    "thought-gestalt-in-context": 3,
    "thinking-states": 5,
    "no-cot": 3,
}
"""Methods whose shapes change from batch to batch, and the most graphs that they compile."""
BATCHES = 36


def varied(method):
    """Batches of other numbers of rows, sentences or steps, and lengths."""
    rng = random.Random(0)
    for seed in range(BATCHES):
        rows = rng.randint(1, 6)
        if method.format is SENTENCES:
            shape = [[rng.randint(1, 20) for _ in range(rng.randint(1, 6))] for _ in range(rows)]
            yield marked_documents(shape, 256, method.format.sizes["vocab_size"], 32, seed)
        else:
            batch, steps = method.batch(rows, rng.randint(15, 60), seed), rng.randint(1, 3)
            for key in ("steps", "step_lengths", "step_places"):
                batch[key] = batch[key][:, :steps]
            yield batch


@pytest.mark.parametrize(
    "name", [n if n in MAIN else pytest.param(n, marks=pytest.mark.slow) for n in RAGGED]
)
def test_shapes_that_change_compile_a_few_graphs_and_then_none(name):
    (method,) = [each for each in METHODS if each.name == name]
    model, counter, graphs = method.build(), CompileCounter(), []
    model.network.compile(backend=counter)
    for batch in varied(method):
        batch = model.transfer_batch_to_device(batch, torch.device("cpu"), 0)
        assert objective(model, batch).isfinite()
        graphs.append(counter.frame_count)
    assert 0 < graphs[-1] <= RAGGED[name], graphs
    assert graphs[BATCHES // 2] == graphs[-1], graphs
