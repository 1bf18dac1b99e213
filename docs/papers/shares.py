"""Fig. 3 and the training FLOPs of Table 1 of the Latent-Thought paper, without weights."""

import torch

from evaluation.cost import compute_frame, count_compute
from evaluation.figures import compute_figure
from lightning_models import LatentThoughtConfig, LatentThoughtLM

sizes = {
    "small": (3, 8, 16),
    "medium": (6, 4, 16),
    "large": (12, 2, 64),
}  # layers, latents in each, inner steps
counts = []
for layers, latents, steps in sizes.values():
    config = LatentThoughtConfig(
        vocab_size=50257,
        block_size=1024,
        dim=512,
        num_heads=8,
        window=256,
        num_layers=layers,
        latents_per_layer=latents,
        inner_steps=steps,
    )
    model = LatentThoughtLM(config)
    with torch.device("meta"):
        model.configure_model()
    counts.append(count_compute(model, 1024))
shares = compute_frame(counts, list(sizes))
print(shares.T)
compute_figure(shares).savefig("shares.svg")
