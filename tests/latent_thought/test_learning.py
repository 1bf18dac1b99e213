"""A toy that only latent vectors can solve: they are used, and more inference helps."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evaluation.load import build_model, changed_fields
from lightning_models import LatentThoughtLM
from lightning_models.checkpoint import Checkpoint, CheckpointError
from lightning_models.latent_thought import LatentThoughtConfig

SYMBOLS, LENGTH, ROWS = 8, 32, 64
GUESSING = LENGTH / 4 * math.log(SYMBOLS)
"""Nats of a text for the best model that sees no further than the window."""
CONFIG = {
    "vocab_size": 4 + SYMBOLS,
    "vocab_multiple": 1,
    "block_size": LENGTH,
    "num_layers": 1,
    "dim": 16,
    "num_heads": 2,
    "init_std": 0.3,
    "window": 2,
    "latents_per_layer": 1,
    "inner_steps": 8,
    "inner_lr": (0.15, 0.15),
    "init_log_variance": -3.0,
}


def texts(rows, seed):
    """1 2 3 s 1 2 3 s ...: s is the sequence's own, and too far away for the window."""
    generator = torch.Generator().manual_seed(seed)
    symbol = torch.randint(4, 4 + SYMBOLS, (rows, 1), generator=generator)
    pattern = torch.tensor([1, 2, 3, 0]).repeat(LENGTH)[: LENGTH + 1].expand(rows, -1)
    stream = torch.where(pattern == 0, symbol, pattern)
    return {
        "tokens": stream[:, :-1],
        "targets": stream[:, 1:],
        "mask": torch.ones(rows, LENGTH, dtype=torch.bool),
        "sequence_id": torch.arange(rows) + 1000 * seed,
    }


def train(steps=120):
    torch.manual_seed(0)
    model = LatentThoughtLM(LatentThoughtConfig(**CONFIG))
    model.configure_model()
    optimizer = torch.optim.AdamW(model.network.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        nll = model.loss(texts(32, seed=step + 1)).terms["nll"]
        (nll.sum / nll.normaliser).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint():
    """What a run leaves: enough to rebuild the trained model with other dials."""
    model, content = train(), {}
    model.on_save_checkpoint(content)
    return Checkpoint(Path("toy.ckpt"), {**content, "state_dict": model.state_dict()})


@pytest.fixture(scope="module")
def held_out():
    return texts(ROWS, seed=100_000)


def nats(model, batch):
    """Per sequence: -log p(x | z), the KL divergence, and their sum."""
    scores = model.score(batch)
    nll, kl = (-part.sum().item() / ROWS for part in (scores.log_prob, scores.sequence_term))
    return SimpleNamespace(nll=nll, kl=kl, bound=nll + kl)


def test_inferred_latents_are_better_than_the_priors(checkpoint, held_out):
    """Eight symbols of ln 8 nats; to name one once would do."""
    inferred = nats(build_model(checkpoint, {"inner_steps": 16}), held_out)
    prior = nats(build_model(checkpoint, {"inner_steps": 0}), held_out)
    assert prior.kl == 0
    assert inferred.nll < 0.25 * prior.nll, "z is used"
    assert inferred.bound < prior.bound, "and worth its price"
    assert inferred.bound < GUESSING, "also to one who would do without"
    assert inferred.kl > math.log(SYMBOLS), "which cannot be below what there is to know"


def test_more_steps_give_a_better_bound(checkpoint, held_out):
    steps = (1, 4, 8, 16)  # the first one pays more than it finds: it is below none at all
    found = [nats(build_model(checkpoint, {"inner_steps": n}), held_out).bound for n in steps]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4


def test_latents_are_the_sequences_own(checkpoint, held_out):
    """Those of another text are no better than none."""
    model = build_model(checkpoint, {"inner_steps": 16})
    own = nats(model, held_out).nll
    with torch.no_grad():
        kept = {}
        model.recorded(held_out, posterior=lambda **values: kept.update(values))
        start = model.network.begin(held_out["tokens"])
        h = model.network(start, kept["mean"].roll(1, dims=0))
        rows = (h @ model.network.output_matrix.t()).log_softmax(dim=-1)
    picked = rows.gather(2, held_out["targets"][..., None])[..., 0]
    assert -picked.sum().item() / ROWS > own + GUESSING / 2


@pytest.mark.parametrize("latents", [1, 2, 3])
def test_the_number_of_latents_is_a_dial(checkpoint, held_out, latents):
    """No weight depends on it; what is inferred still helps."""
    model = build_model(checkpoint, {"latents_per_layer": latents, "inner_steps": 16})
    assert changed_fields(checkpoint, model).keys() - {"latents_per_layer"} == {"inner_steps"}
    kept = {}
    model.recorded(held_out, posterior=lambda **values: kept.update(values))
    assert kept["mean"].shape == (ROWS, latents, 16)
    guess = nats(build_model(checkpoint, {"inner_steps": 0}), held_out)
    assert nats(model, held_out).nll < 0.7 * guess.nll


@pytest.mark.parametrize(
    "changes",
    [
        {"inner_schedule": "cosine"},
        {"noise": "fixed"},
        {"bound_noise": "inner"},
        {"inner_lr": [0.3, 0.34]},
        {"init_log_variance": 0.0},
        {"inference": "langevin", "langevin_step_size": 0.01},
        {"inference_seed": 1},
    ],
    ids=str,
)
def test_inference_can_be_set_anew(checkpoint, held_out, changes):
    before = nats(build_model(checkpoint, {"inner_steps": 16}), held_out)
    model = build_model(checkpoint, {"inner_steps": 16, **changes})
    after = nats(model, held_out)
    assert after.bound != before.bound
    assert after.nll < 0.7 * nats(build_model(checkpoint, {"inner_steps": 0}), held_out).nll


def test_an_encoder_cannot_be_set_at_test_time(checkpoint):
    with pytest.raises(CheckpointError, match=r"network\.encoder"):
        build_model(checkpoint, {"inference": "amortised"})


def test_a_context_tells_the_rest(checkpoint, held_out):
    """Inferred from two symbols, z predicts the others."""
    model = build_model(checkpoint, {"inner_steps": 16})
    rest = torch.arange(LENGTH) >= 8
    found = {}
    for context in (1, 8):
        batch = {**held_out, "context": torch.full((ROWS,), context)}
        found[context] = -model.score(batch).log_prob[:, rest].sum().item() / ROWS
    assert found[8] < 0.6 * found[1]
