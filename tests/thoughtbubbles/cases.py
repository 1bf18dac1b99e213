"""Small forking models whose weights are large enough for scores to differ."""

import torch

from lightning_models import ThoughtbubblesLM
from lightning_models.thoughtbubbles import ThoughtbubblesConfig
from tests.reference import thoughtbubbles as reference

V = 11
SIZES = {
    "vocab_size": V,
    "vocab_multiple": 1,
    "block_size": 6,
    "num_layers": 4,
    "dim": 8,
    "num_heads": 2,
    "fork_layers": (1, 2),
    "allocation_window": 3,
}
THRESHOLDS = (-1.2, -1.6, -2.0)


def enliven(network, seed=0):
    """Draws all parameters again, wide enough for streams to differ and to compete."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(0.5 * drawn)
            else:
                parameter.copy_(0.3 * drawn + ("norm" in name and "weight" in name))


def build(seed=0, thresholds=(), model=ThoughtbubblesLM, **changes):
    """A model in evaluation mode; thresholds are set by hand where they are given."""
    config = ThoughtbubblesConfig(**{**SIZES, **changes})
    torch.manual_seed(seed)
    lm = model(config)
    lm.configure_model()
    enliven(lm.network, seed)
    for fork, threshold in zip(lm.network.forks, thresholds, strict=False):
        fork.threshold.fill_(threshold)
        fork.updates.fill_(1)
        fork.observed_ratio.fill_(lm.config.ratio)
        fork.updates.fill_(1)
    return lm.eval()


def rows_of(lengths, seed=0):
    """A padded batch of random rows of these lengths, targets -100 in the padding.

    Up to V tokens, a row never has one twice: in front of block 0 they would score the same.
    """
    generator = torch.Generator().manual_seed(seed)
    most = max(lengths)
    times = -(-most // V)
    rows = [[torch.randperm(V, generator=generator) for _ in range(times)] for _ in lengths]
    tokens = torch.stack([torch.cat(row)[:most] for row in rows])
    targets = torch.randint(0, V, (len(lengths), most), generator=generator)
    mask = torch.arange(most) < torch.tensor(lengths)[:, None]
    return {"tokens": tokens, "targets": targets.masked_fill(~mask, -100), "mask": mask}


def row_alone(batch, row):
    length = int(batch["mask"][row].sum())
    return {key: value[row : row + 1, :length] for key, value in batch.items()}


def reference_of(model, kind=reference.Thoughtbubbles):
    thresholds = [
        fork.threshold.item() if model.config.competes(ordinal) else -float("inf")
        for ordinal, fork in enumerate(model.network.forks)
    ]
    return kind(
        model.network.state_dict(),
        model.config,
        allocation=model.config.inference_allocation,
        thresholds=thresholds,
    )


def stream_counts(model, batch):
    """Streams of every token (B, T), after each fork layer."""
    counts = []

    def count(after, **_):
        own = after.token[..., None] == torch.arange(after.num_tokens)
        counts.append(own.sum(dim=1))

    with torch.no_grad():
        model.recorded(batch, fork=count)
    return counts


def full_distribution(model, batch):
    """The log-probabilities of all next tokens (B, T, V), through the model's own scoring."""
    rows = len(batch["tokens"])
    targets = torch.arange(V).repeat_interleave(rows)[:, None].expand(-1, batch["tokens"].shape[1])
    copies = {"tokens": batch["tokens"].repeat(V, 1), "mask": batch["mask"].repeat(V, 1)}
    copies["targets"] = targets.masked_fill(~copies["mask"], -100)
    log_prob = model.score(copies).log_prob
    return log_prob.unflatten(0, (V, rows)).movedim(0, -1)
