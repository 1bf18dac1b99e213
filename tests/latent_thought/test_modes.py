"""What inference leaves as it was, and what it does not depend on."""

import pytest
import torch

from lightning_models import LatentThoughtLM, OptimizerConfig
from lightning_models.generation import generate
from lightning_models.latent_thought import LatentThoughtConfig
from lightning_models.layers import recording
from tests.latent_thought.cases import build, posterior_of, rows_of
from tests.quiet import quiet_trainer

KINDS = {
    "variational": {},
    "trajectory": {"slow_gradient": "trajectory"},
    "langevin": {"inference": "langevin"},
    "amortised": {"inference": "amortised"},
    "transport": {"prior": "transport"},
    "shared-resampled": {"latents": "shared", "noise": "resampled"},
}
DROPS = {"dropout": 0.5, "attention_dropout": 0.5}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def uses(model, batch):
    return {
        "loss": lambda: model.loss(batch),
        "score": lambda: model.score(batch),
        "context": lambda: model.score(
            {**batch, "context": torch.tensor([3] * len(batch["mask"]))}
        ),
        "generate": lambda: generate(model, [[1, 2, 3], [4]], max_new_tokens=3),
    }


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


# ---- gradients, random state, modes


@pytest.mark.parametrize("drops", [{}, DROPS], ids=["plain", "dropout"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_random_state_and_modes_are_left_alone(kind, training, drops):
    """Gradients too that are there already, of earlier micro-batches for example."""
    model, batch = build(**kind, **drops, resample_every=1).train(training), rows_of([5, 3])
    for use in uses(model, batch).values():
        for grad, mode in ((None, True), (torch.ones(()), False)):
            for p in model.parameters():
                p.grad = None if grad is None else grad.expand(p.shape).clone()
            before, state = modes(model), torch.get_rng_state()
            with torch.set_grad_enabled(mode):
                use()
                assert torch.is_grad_enabled() == mode
            assert modes(model) == before
            assert (drops and training) or torch.equal(torch.get_rng_state(), state)
            for p in model.parameters():
                assert p.requires_grad
                assert (p.grad is None) if grad is None else (p.grad == grad).all()


@pytest.mark.parametrize("drops", [{}, DROPS], ids=["plain", "dropout"])
def test_modes_that_differ_between_modules_are_left_alone(drops):
    """A part that somebody has frozen in eval mode, for example."""
    model, batch = build(**drops).train(), rows_of([5, 3])
    model.network.layers[0].eval()
    before = modes(model)
    model.loss(batch)
    assert modes(model) == before


@pytest.mark.parametrize("drops", [{}, DROPS], ids=["plain", "dropout"])
def test_modes_are_left_alone_when_inference_fails(drops, monkeypatch):
    model, batch = build(**drops).train(), rows_of([5, 3])
    before, grad = modes(model), torch.is_grad_enabled()

    def fail(z):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.network, "remember", fail)
    for name, use in uses(model, batch).items():
        with pytest.raises(RuntimeError, match="out of memory"):
            use()
        assert modes(model) == before, name
        assert torch.is_grad_enabled() == grad
    assert all(p.grad is None for p in model.parameters())


def test_fast_learning_drops_nothing():
    """The same posterior as without dropout, in training mode too."""
    batch, found = rows_of([5, 3]), []
    for drops in ({}, DROPS):
        model, seen = build(**drops).train(), []
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model.recorded_loss(batch, inner_step=lambda seen=seen, **values: seen.append(values))
        found.append(torch.stack([values["nll"] for values in seen]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("name", ["score", "context", "generate"])
def test_nothing_is_dropped_when_training_looks_up(name):
    """Inference in training mode, as nobody should but may: of the same posterior."""
    model, batch, seen = build(**DROPS).train(), rows_of([5, 3]), []
    for _ in range(2):
        found = []
        with recording(inner_step=lambda found=found, **values: found.append(values["nll"])):
            uses(model, batch)[name]()
        seen.append(torch.stack(found))
    assert torch.equal(*seen)


def test_slow_learning_drops():
    """As training with dropout is meant to."""
    model, batch = build(**DROPS).train(), rows_of([5, 3])
    losses = [model.loss(batch).terms["nll"].sum.item() for _ in range(2)]
    assert losses[0] != losses[1]
    model.eval()
    losses = [model.loss(batch).terms["nll"].sum.item() for _ in range(2)]
    assert losses[0] == losses[1]


# ---- scores after a context


def in_context(batch, *lengths):
    return {**batch, "context": torch.tensor(lengths)}


def test_a_context_decides_the_latents_alone(kind):
    """Later tokens change what is predicted after them, and nothing else."""
    model, batch = build(**kind), rows_of([8, 8])
    before = model.score(in_context(batch, 4, 3))
    assert before.kind == "estimate"
    assert not before.sequence_term.any()
    changed = {**batch, "tokens": batch["tokens"].clone()}
    changed["tokens"][:, 6] = (changed["tokens"][:, 6] + 1) % 11
    after = model.score(in_context(changed, 4, 3))
    assert torch.equal(before.log_prob[:, :6], after.log_prob[:, :6])
    assert not torch.equal(before.log_prob[:, 6:], after.log_prob[:, 6:])
    first = {**batch, "tokens": batch["tokens"].clone()}
    first["tokens"][0, 4] = (first["tokens"][0, 4] + 1) % 11  # the first one that is not given
    after = model.score(in_context(first, 4, 3))
    assert torch.equal(before.log_prob[0, :4], after.log_prob[0, :4])
    assert torch.equal(before.log_prob[1], after.log_prob[1])


def test_targets_behind_a_context_are_not_read(kind):
    model, batch = build(**kind), rows_of([8])
    before = model.score(in_context(batch, 4))
    other = {**batch, "targets": (batch["targets"] + 1) % 11}
    other["targets"][0, 2] = batch["targets"][0, 2]
    after = model.score(in_context(other, 4))
    assert before.log_prob[0, 2] == after.log_prob[0, 2]
    assert (before.log_prob != after.log_prob).sum() == 7


@pytest.mark.usefixtures("exact")
def test_a_context_is_what_it_would_be_as_a_text_of_its_own():
    """The mean of q, inferred from the context's tokens and the targets among them."""
    model, batch = build(), rows_of([8])
    given, _ = posterior_of(model, in_context(batch, 4))
    text = {key: value[:, :4] if value.dim() > 1 else value for key, value in batch.items()}
    text["targets"] = text["targets"].clone()
    text["targets"][0, 3] = -100
    own, _ = posterior_of(model, text)
    torch.testing.assert_close(given.mean, own.mean)
    h = model.network(model.network.begin(batch["tokens"]), own.mean)
    rows = (h @ model.network.output_matrix.t()).log_softmax(dim=-1)
    expected = rows.gather(2, batch["targets"][..., None])[..., 0]
    torch.testing.assert_close(model.score(in_context(batch, 4)).log_prob, expected)


@pytest.mark.parametrize("length", [0, 1])
def test_a_context_that_tells_nothing_leaves_the_priors_mean(kind, length):
    model, batch = build(**kind), rows_of([8])
    scores = model.score(in_context(batch, length))
    z = torch.zeros(1, model.config.num_latents, 8)
    h = model.network(model.network.begin(batch["tokens"]), z)
    rows = (h @ model.network.output_matrix.t()).log_softmax(dim=-1)
    expected = rows.gather(2, batch["targets"][..., None])[..., 0]
    torch.testing.assert_close(scores.log_prob, expected)
    assert not scores.sequence_term.any()


def test_a_context_beyond_the_row_is_the_row():
    model, batch = build(), rows_of([6, 4])
    whole, beyond = (model.score(in_context(batch, *n)).log_prob for n in ((6, 4), (50, 50)))
    assert torch.equal(whole, beyond)


# ---- runs


class Spy(LatentThoughtLM):
    def score(self, batch):
        scores = super().score(batch)
        self.scored = [*getattr(self, "scored", []), scores]
        return scores


def small(**changes):
    sizes = {"vocab_size": 257, "block_size": 32, "num_layers": 2, "dim": 16, "num_heads": 2}
    inner = {"window": 8, "inner_steps": 2, "encoder_layers": 1, "prior_layers": 1}
    optimizer = OptimizerConfig(lr=1e-3, warmup=2)
    model = Spy(LatentThoughtConfig(**{**sizes, **inner, **changes}), optimizer)
    torch.manual_seed(0)
    model.configure_model()
    return model


def test_weights_may_be_bfloat16(kind, make_data, tmp_path):
    model = small(**kind)
    options = {"max_steps": 2, "precision": "bf16-true", "limit_val_batches": 1}
    trainer = quiet_trainer(tmp_path, **options)
    trainer.fit(model, make_data())
    assert model.network.embedding.weight.dtype == torch.bfloat16
    (result,) = trainer.validate(model, make_data(), verbose=False)
    assert 4 < result["val/loss"] < 12
