"""The cost of latent vectors whose coordinates are not the decoder's, for docs/results/cipher.md.

    python docs/results/cipher/rotated.py CHECKPOINT    # last.ckpt of shared-seed0

A decoder that reads W z may as well read (W R) z' with z' = R^T z and R orthogonal: the prior does
not change, but a diagonal posterior does. R has the principal directions of the posterior means.
Nats per text, KL and the variance of the directions are printed before and after.
"""

import sys

import torch
from torch import Tensor

from evaluation.load import build_data, build_model, prepare
from lightning_models.checkpoint import read_checkpoint
from lightning_models.latent_thought.network import LatentAttention

STEPS = 64


def main(path: str) -> None:
    """Scores the test texts before and after the rotation."""
    checkpoint = read_checkpoint(path)
    data = build_data(checkpoint)
    prepare(data, checkpoint)
    model = build_model(checkpoint, {"inner_steps": STEPS})

    def score() -> Tensor:
        """Prints the means over texts; returns the principal directions (D, D) as rows."""
        posteriors: list[dict[str, Tensor]] = []
        for batch in data.test_dataloader():
            model.recorded(batch, posterior=lambda **parts: posteriors.append(parts))
        mean, log_variance = (
            torch.cat([part[name] for part in posteriors]).flatten(1)
            for name in ("mean", "log_variance")
        )
        kl = torch.cat([part["kl"].sum(1) for part in posteriors])
        nll = torch.cat([part["nll"] for part in posteriors])
        _, sizes, directions = torch.linalg.svd(mean - mean.mean(0))
        spread = ", ".join(f"{size:.2f}" for size in (sizes / len(mean) ** 0.5)[:8])
        print(f"{(nll + kl).mean():.2f} nats per text, of which KL {kl.mean():.2f}")
        print(f"standard deviations of the means in principal directions: {spread}, ...")
        print(f"mean posterior variance {log_variance.exp().mean():.3f}")
        return directions

    directions = score()
    with torch.no_grad():
        for reader in model.modules():
            if isinstance(reader, LatentAttention):
                reader.key_value.weight.copy_(reader.key_value.weight @ directions.T)
    print("rotated:")
    score()


if __name__ == "__main__":
    main(sys.argv[1])
