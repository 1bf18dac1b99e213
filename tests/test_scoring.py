"""What every method makes of targets: scores of all logits at once, from few rows of them."""

import copy
import sys

import pytest
import torch
from methods import BLOCK, METHODS
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_models.layers import recording

EXACT = {"atol": 1e-12, "rtol": 1e-12}


@pytest.fixture(params=METHODS, ids=lambda method: method.name)
def method(request):
    return request.param


class Projected(TorchDispatchMode):
    """Counts the rows that are multiplied by a matrix of ``size`` columns."""

    def __init__(self, size):
        super().__init__()
        self.size, self.rows = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm and out.shape[1] == self.size:
            self.rows += len(out)
        return out


class OutputLayer:
    """Compares each call of the output layer with all logits at once, and counts its rows."""

    def __init__(self, monkeypatch):
        self.rows, self.states, self.expected, self.greedy = 0, 0, 0.0, 0
        for module in [m for name, m in sys.modules.items() if name.startswith("lightning_models")]:
            for name in ("token_scores", "mixture_scores"):
                if hasattr(module, name):
                    spied = self.spied(getattr(module, name), getattr(self, name))
                    monkeypatch.setattr(module, name, spied)

    def spied(self, function, whole):
        def call(h, weight, *arguments, **options):
            with Projected(len(weight)) as projected:
                found = function(h, weight, *arguments, **options)
            self.rows += projected.rows
            targets, expected, chosen = whole(h, weight, *arguments)
            valid = targets != -100
            expected = expected.masked_fill(~valid, 0.0)
            torch.testing.assert_close(found.log_prob, expected, **EXACT)
            self.expected += expected.sum()
            if found.greedy is not None:
                assert torch.equal(found.greedy, (chosen == targets) & valid)
                self.greedy += int(found.greedy.sum())
            return found

        return call

    def token_scores(self, h, weight, targets, vocab_size=None, count=None):
        everything = torch.einsum("...d,vd->...v", h, weight).log_softmax(-1)
        self.states += int((targets != -100).sum())
        picked = everything.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return targets, picked, everything[..., :vocab_size].argmax(-1)

    def mixture_scores(self, h, weight, log_scores, owner, targets, vocab_size=None):
        everything = torch.einsum("nd,vd->nv", h, weight).log_softmax(-1) + log_scores[:, None]
        mixed = []
        for token, target in enumerate(targets.tolist()):
            own = owner == token
            self.states += int(own.sum()) if target != -100 else 0
            mixed.append(everything[own].logsumexp(0) - log_scores[own].logsumexp(0))
        table = torch.stack(mixed)
        picked = table.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        return targets, picked, table[:, :vocab_size].argmax(-1)


def kept_targets(method, batch, which):
    """Which targets stay; an answer of a reasoning row is scored in one piece or not at all."""
    valid = batch["targets"] >= 0
    flat = valid.flatten().cumsum(0).view_as(valid)  # numbers of the targets, from 1
    kept = {
        "all": valid,
        "some": valid & (flat % 3 == 0),
        "one": valid & (flat == flat.max()),
        "a row": valid.clone(),
        "none": torch.zeros_like(valid),
    }[which]
    if which == "a row":
        kept[0] = False
    if method.format.__class__.__name__ == "Reasoning" and which in ("some", "one"):
        pytest.skip("answers are scored in one piece")
    return kept


@pytest.fixture(scope="module")
def scored():
    """A model of each method in float64, a batch, and the scores of all its targets."""
    known = {}

    def score(method):
        if method.name not in known:
            model, batch = method.build().eval().double(), method.batch()
            if method.reads_windows:
                # what is inferred depends on no target
                batch["context"] = torch.full((2,), BLOCK // 2)
            with torch.no_grad():
                known[method.name] = model, batch, model.score(batch).log_prob
        return known[method.name]

    return score


@pytest.mark.parametrize("which", ["all", "some", "one", "a row", "none"])
def test_only_states_with_a_target_reach_the_output_layer(method, which, scored, monkeypatch):
    """Scores and greedy choices are those of all logits, in float64, and of any other targets."""
    model, batch, everything = scored(method)
    kept = kept_targets(method, batch, which)
    thinned = copy.deepcopy(batch)
    thinned["targets"] = thinned["targets"].masked_fill(~kept, -100)
    with torch.no_grad():
        layer, found = OutputLayer(monkeypatch), {}
        with recording(greedy=found.update):
            mine = model.score(thinned).log_prob
    assert mine.dtype == torch.float64
    assert layer.rows == layer.states
    torch.testing.assert_close(mine, everything.masked_fill(~kept, 0.0), **EXACT)
    torch.testing.assert_close(mine.sum(), torch.as_tensor(layer.expected).double(), **EXACT)
    if found:
        assert found["greedy"].shape == kept.shape
        assert int(found["greedy"].sum()) == layer.greedy
        assert not found["greedy"][~kept].any()
