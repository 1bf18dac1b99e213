"""Statistics reach who asks for them, and nobody else."""

import pytest
import torch

from lightning_models.layers import attend, record, recording, wants


def test_a_consumer_gets_what_is_recorded_under_its_name():
    seen = []
    with recording(one=lambda **values: seen.append(values)):
        assert wants("one")
        assert not wants("two")
        record("one", x=1, y="z")
        record("two", x=2)
        record("one", x=3)
    assert seen == [{"x": 1, "y": "z"}, {"x": 3}]


def test_inner_consumers_stand_in_for_outer_ones_of_their_name():
    outer, inner, other = [], [], []
    with recording(a=lambda **v: outer.append(v), b=lambda **v: other.append(v)):
        with recording(a=lambda **v: inner.append(v)):
            record("a", x=1)
            record("b", x=2)
        record("a", x=3)
        assert wants("b")
    assert (inner, outer, other) == ([{"x": 1}], [{"x": 3}], [{"x": 2}])


def test_an_error_ends_the_recording():
    with pytest.raises(KeyError), recording(one=lambda **_: None):
        raise KeyError
    assert not wants("one")


def test_an_error_of_a_consumer_is_not_hidden():
    def complain(**_):
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"), recording(one=complain):
        record("one", x=1)
    assert not wants("one")


def test_compiled_code_runs_uncompiled_meanwhile():
    seen, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def double(x):
        record("doubled", x=x)
        return 2 * x

    with recording(doubled=lambda x: seen.append(x.item())):
        assert double(torch.tensor(3.0)) == 6
    assert seen == [3.0]
    assert graphs == []
    assert double(torch.tensor(3.0)) == 6
    assert seen == [3.0]
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["auto", "sdpa", "math"])
def test_attention_weights_come_from_the_math_kernel(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind()
    bias, seen = -torch.rand(2, 5), []
    plain = attend(q, k, v, causal=True, key_bias=bias, backend=backend)
    with recording(attention=lambda weights: seen.append(weights)):
        recorded = attend(q, k, v, causal=True, key_bias=bias, backend=backend)
    (weights,) = seen
    assert weights.shape == (2, 2, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(weights @ v, recorded)
    torch.testing.assert_close(recorded, plain, atol=1e-6, rtol=1e-5)
