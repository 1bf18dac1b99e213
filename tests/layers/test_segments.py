"""Sums, maxima and log-sum-exps of groups against loops, with and without torch-scatter."""

import builtins
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_models.layers import blocks, segment_logsumexp, segment_max, segment_sum

COUNT = 5


def loops(values, index, count, reduce, empty):
    """One group at a time, one entry at a time."""
    flat, groups = values.reshape(-1, values.shape[-1]), index.reshape(-1, index.shape[-1])
    rows = []
    for row, own in zip(flat, groups.tolist(), strict=True):
        members = [[row[i] for i, g in enumerate(own) if g == group] for group in range(count)]
        rows.append(
            torch.stack(
                [reduce(torch.stack(m)) if m else values.new_tensor(empty) for m in members]
            )
        )
    return torch.stack(rows).view(*values.shape[:-1], count)


CASES = {
    "sum": (segment_sum, torch.sum, 0.0),
    "max": (segment_max, torch.max, -math.inf),
    "logsumexp": (segment_logsumexp, lambda x: x.logsumexp(0), -math.inf),
}


def entries(*shape, seed=0):
    """Random values and groups; group 3 stays empty."""
    generator = torch.Generator().manual_seed(seed)
    values = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    index = torch.randint(0, COUNT - 1, shape, generator=generator)
    index[index == 3] = COUNT - 1
    return values.requires_grad_(), index


@pytest.fixture
def without_package(monkeypatch):
    """As if torch-scatter were not installed."""
    importing = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "torch_scatter":
            raise ImportError(name)
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    blocks._import_torch_scatter.cache_clear()
    yield
    blocks._import_torch_scatter.cache_clear()


@pytest.fixture
def with_package(monkeypatch):
    """The package's maximum for tensors of the CPU, which it serves on a GPU alone."""
    pytest.importorskip("torch_scatter")
    monkeypatch.setattr(blocks, "_scatters", lambda x: True)
    blocks._import_torch_scatter.cache_clear()
    yield
    blocks._import_torch_scatter.cache_clear()


def assert_loops(case, shape):
    function, reduce, empty = CASES[case]
    values, index = entries(*shape)
    mine, expected = function(values, index, COUNT), loops(values, index, COUNT, reduce, empty)
    torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-12)
    upstream = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1)).double()
    finite = expected.isfinite()
    for_mine = torch.autograd.grad(mine[finite], values, upstream[finite])
    for_expected = torch.autograd.grad(expected[finite], values, upstream[finite])
    torch.testing.assert_close(for_mine, for_expected, atol=1e-12, rtol=1e-12)


@pytest.mark.usefixtures("without_package")
@pytest.mark.parametrize("shape", [(9,), (3, 9), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_of_loops(case, shape):
    assert_loops(case, shape)


@pytest.mark.usefixtures("with_package")
@pytest.mark.parametrize("shape", [(9,), (3, 9), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_of_loops_with_torch_scatter(case, shape):
    assert blocks._import_torch_scatter() is sys.modules["torch_scatter"]
    assert_loops(case, shape)


@pytest.mark.parametrize("path", ["without_package", "with_package"])
def test_whole_numbers_and_no_entries(path, request):
    request.getfixturevalue(path)
    index = torch.tensor([[0, 2, 2], [1, 1, 1]])
    sums = segment_sum(torch.ones_like(index), index, 4)
    assert sums.dtype == torch.int64
    assert sums.tolist() == [[1, 0, 2, 0], [0, 3, 0, 0]]
    none = torch.zeros(2, 0)
    assert segment_sum(none, none.long(), 3).tolist() == [[0.0] * 3] * 2
    assert segment_max(none, none.long(), 3).tolist() == [[-math.inf] * 3] * 2
    assert segment_logsumexp(none, none.long(), 3).tolist() == [[-math.inf] * 3] * 2


@pytest.mark.parametrize("path", ["without_package", "with_package"])
def test_large_values_do_not_overflow(path, request):
    request.getfixturevalue(path)
    values = torch.tensor([1000.0, 1000.0, -1000.0, -1000.0])
    out = segment_logsumexp(values, torch.tensor([0, 0, 1, 1]), 2)
    torch.testing.assert_close(out, torch.tensor([1000.0, -1000.0]) + math.log(2))


def test_an_installed_package_finds_maxima_on_a_gpu_alone(monkeypatch):
    """Its sums are torch's scatter_add, and its maxima on a CPU are slower than torch's."""
    calls = []

    def scatter_max(values, index, dim, dim_size):
        calls.append("max")
        out = torch.full((*values.shape[:-1], dim_size), -9.0)
        return out.scatter_reduce(dim, index, values, "amax"), None

    package = SimpleNamespace(scatter_max=scatter_max)
    monkeypatch.setitem(sys.modules, "torch_scatter", package)
    blocks._import_torch_scatter.cache_clear()
    try:
        values, index = torch.tensor([1.0, 2.0]), torch.tensor([1, 1])
        assert segment_max(values, index, 2).tolist() == [-math.inf, 2.0]
        assert segment_sum(values, index, 2).tolist() == [0.0, 3.0]
        assert calls == []
        monkeypatch.setattr(blocks, "_scatters", lambda x: True)
        assert segment_max(values, index, 2).tolist() == [-math.inf, 2.0]
        segment_logsumexp(values, index, 2)
        assert calls == ["max", "max"]
    finally:
        blocks._import_torch_scatter.cache_clear()


@pytest.mark.parametrize("case", CASES)
def test_they_compile_into_one_graph(case):
    function, _, _ = CASES[case]
    values, index = entries(3, 9)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert torch.equal(compiled(values, index, COUNT), function(values, index, COUNT))


def test_a_package_built_for_another_torch_is_as_good_as_none(monkeypatch):
    importing = builtins.__import__

    def broken(name, *args, **kwargs):
        if name == "torch_scatter":
            raise OSError("undefined symbol")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", broken)
    blocks._import_torch_scatter.cache_clear()
    try:
        assert blocks._import_torch_scatter() is None
        assert segment_sum(torch.ones(3), torch.tensor([0, 0, 1]), 2).tolist() == [2.0, 1.0]
    finally:
        blocks._import_torch_scatter.cache_clear()
