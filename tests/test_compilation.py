"""Losses compile into one graph with their gradients, and seldom again."""

import random
import sys
from functools import lru_cache
from types import ModuleType

import pytest
import torch
from formats import SENTENCES, marked_documents
from methods import IN_FULL, METHODS
from torch import _dynamo as dynamo
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from datamodules import load_tokenizer
from lightning_models.layers import attention

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


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
HERE_OR_THERE = [
    *(pytest.param(m, "cpu", marks=pytest.mark.slow, id=m.name) for m in METHODS),
    *(
        pytest.param(m, "cuda", marks=[pytest.mark.gpu, NO_CUDA], id=f"{m.name}-gpu")
        for m in IN_FULL
    ),
]


@pytest.mark.parametrize(("method", "device"), HERE_OR_THERE)
def test_the_compiled_network_trains_like_the_plain_one(method, device):
    if method.network_breaks:
        pytest.skip(method.network_breaks)
    # Moved, not copied: a copy of a compiled network is not compiled.
    plain, compiled = (method.build(compile=each).to(device) for each in (False, True))
    dynamo.utils.counters.clear()
    batch = plain.transfer_batch_to_device(method.batch(), torch.device(device), 0)
    for model in (plain, compiled):
        objective(model, batch).backward()
    assert dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m.network_breaks], ids=lambda method: method.name
)
def test_what_would_compile_anew_for_each_batch_is_refused(method):
    with pytest.raises(ValueError, match=r"compile \(true\): .*compile: false, or allocation"):
        method.build(compile=True)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixture-of-recursions", {}),
        ("thoughtbubbles", {"eval_allocation": "window_topk", "allocation_window": 8}),
    ],
)
def test_scores_of_shapes_that_texts_decide_are_not_compiled(name, changes):
    (method,) = [each for each in METHODS if each.name == name]
    plain, model = (method.build(**changes).eval() for _ in range(2))
    counter = CompileCounter()
    model.network.compile(backend=counter)
    for seed in range(2):
        batch = method.batch(seed=seed)
        assert torch.equal(model.score(batch).log_prob, plain.score(batch).log_prob)
    assert counter.frame_count == 0
    assert objective(model.train(), batch).isfinite()
    assert counter.frame_count > 0, "training is"


def test_text_samples_of_a_training_compile_nothing():
    """A cache has another length for each token."""
    (method,) = [each for each in METHODS if each.name == "ponderlm"]
    model = method.build(compile=True)
    dynamo.utils.counters.clear()
    model.generate_text(["a", "text"], tokenizer=load_tokenizer("bytes"), max_new_tokens=3)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 0


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


def flash(q, k, v, *, dropout_p, softmax_scale, causal, window_size):
    """Computes what flash_attn_func documents: (B, T, H, C), a window with its own token."""
    assert causal
    assert not dropout_p
    query = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    key = torch.arange(k.shape[1])
    seen = (key <= query) & (key >= query - window_size[0])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * softmax_scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("package", [None, ModuleType("flash_attn")], ids=["flex", "flash"])
@pytest.mark.parametrize("name", ["llama3-window", "latent-thought"])
def test_windows_on_a_gpu_break_no_graph(name, package, monkeypatch):
    """Kernels of a GPU are chosen for tensors of the CPU, on which torch computes them slowly."""
    monkeypatch.setattr(attention, "_on_gpu", lambda x: True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # refuses gradients
    if package is not None:
        monkeypatch.setattr(package, "flash_attn_func", flash, raising=False)
    kernel = lru_cache(lambda: torch.compile(flex_attention.flex_attention, backend="eager"))
    monkeypatch.setattr(attention, "_compiled_flex", kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", package)  # None: there is no such package
    attention._found_flash.cache_clear()
    (method,) = [each for each in METHODS if each.name == name]
    plain, model = (
        method.build(dim=64, num_layers=2, attention_backend=b) for b in ("math", "auto")
    )
    dynamo.utils.counters.clear()
    model.network.compile(backend="eager")
    batch = model.transfer_batch_to_device(method.batch(), torch.device("cpu"), 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=package is not None):
        found, expected = objective(model, batch), objective(plain, batch)
    torch.testing.assert_close(found, expected, rtol=1e-2 if package else 1e-5, atol=0)
    assert not dynamo.utils.counters["graph_break"]
    assert dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    attention._found_flash.cache_clear()
