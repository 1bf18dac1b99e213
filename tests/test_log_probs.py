"""Log-probabilities and entropies in chunks against whole distributions, one token at a time."""

import pytest
import torch

from lightning_models import output_layer
from lightning_models.output_layer import (
    mixture_entropies,
    mixture_scores,
    token_entropies,
    token_scores,
)
from tests.largest import Largest

V, D = 11, 6
CLOSE = {"atol": 2e-6, "rtol": 2e-6}


@pytest.fixture(params=[1, 4, 5, 256], ids=lambda limit: f"limit-{limit}", autouse=True)
def chunked(request, monkeypatch):
    """The smallest chunks, some that cut between tokens, and a single one."""
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", request.param)


def inputs(counts, dtype=torch.float64, seed=0, scale=1.0):
    """States of tokens that have ``counts`` of them, the matrix, log scores, owners, targets."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    h = scale * torch.randn(len(owner), D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    log_scores = -4 * torch.rand(len(owner), generator=generator, dtype=torch.float64)
    targets = torch.randint(0, V, (len(counts),), generator=generator)
    return h.to(dtype), weight.to(dtype), log_scores.to(dtype), owner, targets


def mixtures(h, weight, log_scores, owner, count):
    """The mixed distribution of each token, a list of (V,) in float64; None without states."""
    h, weight, log_scores = h.double(), weight.double(), log_scores.double()
    out = []
    for token in range(count):
        own = (owner == token).nonzero()[:, 0].tolist()
        total = sum(log_scores[j].exp() for j in own)
        parts = [log_scores[j].exp() / total * (weight @ h[j]).softmax(-1) for j in own]
        out.append(sum(parts) if own else None)
    return out


COUNTS = [1, 4, 2, 7, 1, 1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probs_of_mixtures(dtype):
    h, weight, log_scores, owner, targets = inputs(COUNTS, dtype)
    targets[2] = -100
    mine = mixture_scores(h, weight, log_scores, owner, targets).log_prob
    whole = mixtures(h, weight, log_scores, owner, len(COUNTS))
    expected = [
        p[target].log() if target >= 0 else torch.tensor(0.0, dtype=torch.float64)
        for p, target in zip(whole, targets.tolist(), strict=True)
    ]
    assert mine.dtype == dtype
    close = CLOSE if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(mine.double(), torch.stack(expected), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropies_of_mixtures(dtype):
    h, weight, log_scores, owner, _ = inputs(COUNTS, dtype)
    mine = mixture_entropies(h, weight, log_scores, owner, len(COUNTS))
    whole = mixtures(h, weight, log_scores, owner, len(COUNTS))
    expected = torch.stack([-(p * p.log()).sum() for p in whole])
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine.double(), expected, **CLOSE)
    assert (mine > 0).all()


def test_the_level_of_the_scores_does_not_matter():
    """Only P / sum P counts, also where P itself underflows."""
    h, weight, log_scores, owner, targets = inputs(COUNTS, torch.float32)
    before = mixture_scores(h, weight, log_scores, owner, targets).log_prob
    after = mixture_scores(h, weight, log_scores - 200, owner, targets).log_prob
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    entropies = [
        mixture_entropies(h, weight, scores, owner, len(COUNTS))
        for scores in (log_scores, log_scores - 200)
    ]
    torch.testing.assert_close(entropies[1], entropies[0], atol=1e-4, rtol=1e-4)


def test_tokens_without_states():
    """They have no distribution: 0 where nothing is predicted, nan as entropy."""
    h, weight, log_scores, owner, targets = inputs([2, 3], torch.float32)
    apart = torch.tensor([1, 4])[owner]
    spread = torch.full((6,), -100)
    spread[[1, 4]] = targets
    mine = mixture_scores(h, weight, log_scores, apart, spread).log_prob
    expected = mixture_scores(h, weight, log_scores, owner, targets).log_prob
    torch.testing.assert_close(mine[[1, 4]], expected)
    assert (mine[[0, 2, 3, 5]] == 0).all()
    entropy = mixture_entropies(h, weight, log_scores, apart, 6)
    torch.testing.assert_close(entropy[[1, 4]], mixture_entropies(h, weight, log_scores, owner, 2))
    assert entropy[[0, 2, 3, 5]].isnan().all()


def test_one_state_a_token_is_the_plain_distribution():
    h, weight, log_scores, owner, targets = inputs([1] * 9, torch.float32)
    plain = token_scores(h, weight, targets).log_prob
    torch.testing.assert_close(
        mixture_scores(h, weight, log_scores, owner, targets).log_prob, plain
    )
    entropies = token_entropies(h, weight)
    assert torch.equal(mixture_entropies(h, weight, 0 * log_scores, owner, 9), entropies)
    probabilities = (h.double() @ weight.double().t()).softmax(-1)
    expected = -(probabilities * probabilities.log()).sum(-1)
    torch.testing.assert_close(entropies.double(), expected, **CLOSE)


def test_no_gradients():
    h, weight, log_scores, owner, targets = inputs(COUNTS, torch.float32)
    leaves = h.requires_grad_(), weight.requires_grad_(), log_scores.requires_grad_(), owner
    assert not mixture_scores(*leaves, targets).log_prob.requires_grad
    assert not mixture_entropies(*leaves, len(COUNTS)).requires_grad
    assert not token_entropies(h, weight).requires_grad


def test_certain_and_uniform_distributions():
    weight = torch.eye(D)
    certain = torch.zeros(2, D)
    certain[:, 0] = 500.0
    entropies = token_entropies(torch.cat((certain, torch.zeros(1, D))), weight)
    assert entropies[:2].tolist() == [0.0, 0.0]
    assert entropies[2].item() == pytest.approx(torch.tensor(float(D)).log().item())
    apart = certain.clone()
    apart[1] = apart[1].roll(1)
    mixed = mixture_entropies(apart, weight, torch.zeros(2), torch.tensor([0, 0]), 1)
    assert mixed.item() == pytest.approx(torch.tensor(2.0).log().item())


def test_nothing_at_all():
    weight, none = torch.randn(V, D), torch.zeros(0, D)
    empty, whole = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert token_entropies(none, weight).shape == (0,)
    assert token_scores(none, weight, whole).log_prob.shape == (0,)
    ignored = torch.full((3,), -100)
    assert mixture_scores(none, weight, empty, whole, ignored).log_prob.tolist() == [0.0] * 3
    assert mixture_entropies(none, weight, empty, whole, 2).isnan().all()


def test_autocast_runs_the_products_in_half_precision():
    h, weight, log_scores, owner, targets = inputs(COUNTS, torch.float32)
    exact = mixture_scores(h, weight, log_scores, owner, targets).log_prob
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = mixture_scores(h, weight, log_scores, owner, targets).log_prob
        entropy = mixture_entropies(h, weight, log_scores, owner, len(COUNTS))
    assert half.dtype == entropy.dtype == torch.float32
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, atol=0.1, rtol=0.05)


def test_logits_of_all_states_are_never_held(monkeypatch):
    monkeypatch.setitem(output_layer.CHUNK_ROWS, "cpu", 20)
    words, states = 1000, 200
    h, weight = torch.randn(states, 4), torch.randn(words, 4)
    owner = torch.arange(50).repeat_interleave(4)
    scores, targets = torch.zeros(states), torch.randint(0, words, (50,))
    with Largest() as made:
        mixture_scores(h, weight, scores, owner, targets)
        mixture_entropies(h, weight, scores, owner, 50)
        token_entropies(h, weight)
    assert made.numel == 20 * words


class TestChunks:
    """Where chunks of rows and of whole tokens are cut."""

    @pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 6, 19, 23])
    def test_rows_are_covered_once(self, rows):
        limit = output_layer.chunk_rows(torch.device("cpu"))
        chunks = output_layer.row_chunks(rows, torch.device("cpu"))
        covered = [row for part in chunks for row in range(rows)[part]]
        assert covered == list(range(rows))
        assert all(len(range(rows)[part]) <= limit for part in chunks)

    @pytest.mark.parametrize("counts", [COUNTS, [1] * 9, [9], [3, 3, 3], [], [1, 12, 1]], ids=str)
    @pytest.mark.parametrize("first", [0, 5])
    def test_tokens_stay_whole(self, counts, first):
        limit = output_layer.chunk_rows(torch.device("cpu"))
        owner = torch.tensor(
            [first + 2 * token for token, count in enumerate(counts) for _ in range(count)],
            dtype=torch.int64,
        )
        chunks = output_layer.token_chunks(owner)
        covered = [row for chunk in chunks for row in range(len(owner))[chunk.rows]]
        assert covered == list(range(len(owner)))
        seen = set()
        for chunk in chunks:
            own = owner[chunk.rows]
            assert not seen & set(own.tolist())
            seen |= set(own.tolist())
            assert chunk.first == own[0]
            assert chunk.first + chunk.tokens - 1 == own[-1]
            assert len(own) < limit + max(counts)

    def test_unknown_devices_get_the_large_chunks(self):
        large = output_layer.CHUNK_ROWS["cuda"]
        assert output_layer.chunk_rows(torch.device("meta")) == large
