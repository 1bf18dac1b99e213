"""The cost of latent vectors whose coordinates are not the decoder's, for docs/results/cipher.md.

    python docs/results/cipher/rotated.py CHECKPOINT [STEPS]    # last.ckpt of shared-seed0

A decoder that reads W z may as well read (W R) z' with z' = R^T z and R orthogonal: the prior does
not change, but a diagonal posterior does. R has the principal directions of the posterior means, in
each layer of its own vectors. Nats per text, KL, the variances and how far the means spread in each
coordinate are printed before and after. STEPS is the number of inner steps, 64 by default.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from evaluation.load import build_data, build_model, prepare
from lightning_models.checkpoint import read_checkpoint
from lightning_models.latent_thought.network import LatentAttention

STEPS = 64


def load(path: str, steps: int = STEPS) -> tuple[Any, Any]:
    """Returns the model, which infers with a number of steps, and its prepared data module."""
    checkpoint = read_checkpoint(path)
    data = build_data(checkpoint)
    prepare(data, checkpoint)
    return build_model(checkpoint, {"inner_steps": steps}), data


def posteriors(model: Any, batches: Any) -> dict[str, Tensor]:
    """Returns mean and log-variance (B, Z, D) of each text, its KL (B,) and nll (B,) in nats."""
    parts: list[dict[str, Tensor]] = []
    for batch in batches:
        model.recorded(batch, posterior=lambda **part: parts.append(part))
    names = ("mean", "log_variance", "kl", "nll")
    joined = {name: torch.cat([part[name] for part in parts]) for name in names}
    return {**joined, "kl": joined["kl"].sum(1)}  # over the vectors of a text


def score(model: Any, data: Any) -> Tensor:
    """Prints means over the test texts; returns the posterior means (B, Z, D)."""
    inferred = posteriors(model, data.test_dataloader())
    kl = inferred["kl"]
    print(f"{(inferred['nll'] + kl).mean():.2f} nats per text, of which KL {kl.mean():.2f}")
    print(f"mean posterior variance {inferred['log_variance'].exp().mean():.3f}")
    spread = inferred["mean"].std(0)
    print(
        f"standard deviations of the means by coordinate: {spread.min():.2f} to {spread.max():.2f}"
    )
    return inferred["mean"]


def rotate(model: Any, mean: Tensor) -> None:
    """Rotates the matrices that read z by the principal directions of posterior means (B, Z, D)."""
    readers = [part for part in model.modules() if isinstance(part, LatentAttention)]
    layered = model.config.latents == "layered"
    parts = mean.chunk(len(readers), dim=1) if layered else (mean,) * len(readers)
    for reader, part in zip(readers, parts, strict=True):
        centred = (part - part.mean(0)).flatten(0, 1)  # (B Z, D)
        _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
        spread = ", ".join(f"{size:.2f}" for size in (sizes / len(centred) ** 0.5)[:8])
        print(f"standard deviations of the means in principal directions: {spread}, ...")
        with torch.no_grad():
            reader.key_value.weight.copy_(reader.key_value.weight @ directions.T)


def main(path: str, steps: int = STEPS) -> None:
    """Scores the test texts before and after the rotation."""
    model, data = load(path, steps)
    rotate(model, score(model, data))
    print("rotated:")
    score(model, data)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
