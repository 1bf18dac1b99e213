"""Decoding under inferred latent vectors."""

import pytest
import torch

from lightning_models.generation import SamplingConfig, generate
from lightning_models.latent_thought.module import WRITTEN
from lightning_models.latent_thought.posterior import Noise, Purpose
from lightning_models.layers import recording
from tests.latent_thought.cases import build, random_latents, reference_of, rows_of
from tests.reference import latent_thought as reference

KINDS = {
    "variational": {},
    "shared": {"latents": "shared"},
    "full-attention": {"window": None},
    "untied": {"tie_head": False},
    "langevin": {"inference": "langevin"},
    "amortised": {"inference": "amortised"},
    "transport": {"prior": "transport"},
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def decoded(model, tokens, lengths, cache):
    """Logits (B, steps, V) while each row reads its ``tokens`` from its prompt's last one on."""
    out = []
    for step in range(int((tokens.shape[1] - lengths).min()) + 1):
        place = lengths[:, None] - 1 + step
        logits, ready = model.decode_step(cache, tokens.gather(1, place)[:, 0])
        assert ready.all()
        assert logits.dtype == torch.float32
        out.append(logits)
    return torch.stack(out, dim=1)


@torch.no_grad()
def test_cached_and_uncached_logits_are_equal(kind, monkeypatch):
    """For given z; rows of unequal prompts, beyond window and block size."""
    model, tokens = build(**kind), rows_of([14, 14])["tokens"]
    memory = model.network.remember(random_latents(model, 2))
    monkeypatch.setattr(model.network, "remember", lambda z: memory)
    cache = model.init_cache(tokens[:, :5], torch.tensor([5, 2]), 12)
    found = decoded(model, tokens, torch.tensor([5, 2]), cache)
    h = model.network.decode(model.network.begin(tokens), memory)
    whole = h @ model.network.output_matrix.t()
    for row, length in enumerate((5, 2)):
        expected = whole[row, length - 1 : length - 1 + found.shape[1]]
        torch.testing.assert_close(found[row], expected, **CLOSE)


@pytest.mark.usefixtures("exact")
@torch.no_grad()
def test_latents_are_a_sample_of_the_posterior_of_the_prompt():
    """Eq. 7; of a prompt of one token, which has nothing to predict, of the prior (eq. 8)."""
    model, tokens = build(inference_seed=3), torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0]])
    caught, remember = [], model.network.remember
    model.network.remember = lambda z: caught.append(z) or remember(z)
    model.init_cache(tokens, torch.tensor([4, 1]), 5, [(8, 0), (8, 1)])
    noise = Noise(
        [(3, WRITTEN, 8, r) for r in range(2)], (4, 8), torch.device("cpu"), caught[0].dtype
    )
    draw = noise.draw(Purpose.SCORED)
    start, inner = noise.draw(Purpose.START), noise.draw(Purpose.INNER)
    with torch.enable_grad():
        prompt = [1, 2, 3, 4], [2, 3, 4, -100]
        slow = reference.FastLearning(
            reference_of(model), *prompt, start[0], [inner[0]] * 3, model.config.inner_lr[1]
        )
    expected = reference.sample(*slow.path[-1], draw[0])
    torch.testing.assert_close(caught[-1][0], expected, atol=1e-9, rtol=1e-8)
    assert torch.equal(caught[-1][1], draw[1])


def test_streams_decide_the_latents():
    """Greedy texts differ only by what was drawn for z."""
    model, prompt = build(scale=1.0), [1, 2, 3]
    greedy = {"sampling": SamplingConfig(temperature=0, seed=4), "max_new_tokens": 8}
    texts = generate(model, [prompt] * 6, **greedy)
    assert len({tuple(text) for text in texts}) > 1
    assert generate(model, [prompt] * 6, **greedy) == texts
    assert generate(model, [prompt] * 3, first_row=3, **greedy) == texts[3:]
    other = {"sampling": SamplingConfig(temperature=0, seed=5), "max_new_tokens": 8}
    assert generate(model, [prompt] * 6, **other) != texts


def test_streams_default_to_the_rows():
    model, tokens = build(), rows_of([4, 4])["tokens"]
    lengths = torch.tensor([4, 4])
    plain = model.init_cache(tokens, lengths, 2)
    named = model.init_cache(tokens, lengths, 2, [(0, 0), (0, 1)])
    other = model.init_cache(tokens, lengths, 2, [(0, 0), (0, 2)])
    for own, same, changed in zip(plain.memory, named.memory, other.memory, strict=True):
        assert torch.equal(own[1], same[1])
        assert torch.equal(own[1][0], changed[1][0])
        assert not torch.equal(own[1][1], changed[1][1])


# ---- inferring again


@torch.no_grad()
@pytest.mark.parametrize(("every", "expected"), [(None, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_when_latents_are_inferred_anew(every, expected):
    """After so many new tokens, and at no other step."""
    model, tokens = build(resample_every=every), rows_of([9, 9])["tokens"]
    cache = model.init_cache(tokens[:, :3], torch.tensor([3, 2]), 8)
    inferred, now = [], {"new": 0}

    def note(step, **_):
        if step == 0:
            inferred.append(now["new"])

    with recording(inner_step=note):
        for new in range(7):  # the first step reads the prompt's last token: nothing is new yet
            now["new"] = new
            model.decode_step(cache, tokens[:, 2 + new])
    assert inferred == expected


@pytest.mark.usefixtures("exact")
@torch.no_grad()
def test_latents_inferred_anew_are_those_of_the_whole_text():
    model, tokens = build(resample_every=3), rows_of([9])["tokens"]
    cache = model.init_cache(tokens[:, :3], torch.tensor([3]), 8, [(0, 5)])
    first = cache.memory
    found = decoded(model, tokens[:, :6], torch.tensor([3]), cache)[:, -1]
    whole = model.init_cache(tokens[:, :6], torch.tensor([6]), 8, [(0, 5)])
    expected = decoded(model, tokens[:, :6], torch.tensor([6]), whole)[:, -1]
    torch.testing.assert_close(found, expected, **CLOSE)
    for mine, theirs, old in zip(cache.memory, whole.memory, first, strict=True):
        torch.testing.assert_close(mine[1], theirs[1], **CLOSE)
        assert not torch.allclose(mine[1], old[1])


def test_generation_under_inference_mode(kind):
    model = build(**kind, resample_every=2)
    expected = generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
    with torch.inference_mode():
        assert generate(model, [[1, 2, 3], [4]], max_new_tokens=5) == expected
