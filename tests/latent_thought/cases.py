"""Small models whose weights are large enough for latent vectors to matter, and their batches."""

from types import SimpleNamespace

import torch

from lightning_models import LatentThoughtLM
from lightning_models.latent_thought import LatentThoughtConfig
from lightning_models.latent_thought.module import SCORED, TRAINED
from lightning_models.latent_thought.posterior import Noise, Purpose
from tests.reference import latent_thought as reference

V = 11
SIZES = {
    "vocab_size": V,
    "vocab_multiple": 1,
    "block_size": 8,
    "num_layers": 2,
    "dim": 8,
    "num_heads": 2,
    "ffn_dim": 12,
    "window": 3,
    "latents_per_layer": 2,
    "prior_layers": 1,
    "encoder_layers": 1,
    "inner_steps": 3,
    "inner_lr": (0.2, 0.25),
    "noise": "fixed",
}
TRAINING, SCORING = TRAINED, SCORED


def enliven(network, seed=0, scale=0.4):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(scale * drawn + (parameter.dim() == 1))


def build(seed=0, scale=0.4, **changes):
    model = LatentThoughtLM(LatentThoughtConfig(**{**SIZES, **changes}))
    model.configure_model()
    enliven(model.network, seed, scale)
    return model.eval()


def rows_of(lengths, seed=0, words=V):
    """A batch of random rows of these lengths, padded on the right, targets -100 there."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(0, words, (len(lengths), max(lengths) + 1), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {
        "tokens": stream[:, :-1].masked_fill(~mask, 0),
        "targets": stream[:, 1:].masked_fill(~mask, -100),
        "mask": mask,
        "sequence_id": 7 + 3 * torch.arange(len(lengths)),
    }


def row_of(batch, row):
    length = int(batch["mask"][row].sum())
    return batch["tokens"][row, :length].tolist(), batch["targets"][row, :length].tolist()


def alone(batch, row):
    return {key: value[row : row + 1] for key, value in batch.items()}


def keys_of(model, batch, use, step=0):
    """What the noise of each row is a function of."""
    return [(model.config.inference_seed, use, step, i) for i in batch["sequence_id"].tolist()]


def noise_of(model, batch, use, step=0):
    """The noise of a batch: that of training at a step, or that of scoring."""
    shape = model.config.num_latents, model.config.dim
    dtype = model.network.output_matrix.dtype
    return Noise(keys_of(model, batch, use, step), shape, torch.device("cpu"), dtype)


def inner_draws(model, noise):
    resampled = model.config.noise == "resampled"
    numbers = range(model.config.inner_steps + 1)
    return [noise.draw(Purpose.INNER, number if resampled else 0) for number in numbers]


def reference_of(model):
    """The slow version with the model's weights; a learned prior is the model's own."""
    learned = model.network.prior
    prior = None if learned is None else lambda z: learned(z[None])[0]
    weights = model.network.state_dict()
    decoder = {k: w for k, w in weights.items() if not k.startswith(("prior.", "encoder."))}
    return reference.LatentThought(decoder, model.config, prior)


def fast_learning(model, slow, batch, use, rate=None):
    noise = noise_of(model, batch, use)
    start, first = (noise.draw(Purpose.START, number) for number in range(2))
    draws = inner_draws(model, noise)
    rate = model.config.inner_lr[1] if rate is None else rate
    return [
        reference.FastLearning(
            slow, *row_of(batch, row), start[row], [d[row] for d in draws], rate, first[row]
        )
        for row in range(len(start))
    ]


def log_probs(model, tokens, z):
    """The log-probabilities (B, T, V) under given latent vectors."""
    h = model.network(model.network.begin(tokens), z)
    return (h @ model.network.output_matrix.t()).log_softmax(dim=-1)


def caught(name):
    """A dict, and the consumer of the statistic ``name`` that fills it with the latest values."""
    values = {}
    return values, {name: lambda **found: values.update(found)}


def posterior_of(model, batch):
    """What scoring infers: mean, log-variance, KL and so on, by name; and the scores."""
    values, consumer = caught("posterior")
    scores = model.recorded(batch, **consumer)
    return SimpleNamespace(**values), scores


def random_latents(model, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, model.config.num_latents, model.config.dim, generator=generator)
