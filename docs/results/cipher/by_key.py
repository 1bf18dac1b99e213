"""The bound with one posterior for all texts of a key, for docs/results/cipher.md.

    python docs/results/cipher/by_key.py CHECKPOINT            # last.ckpt of shared-seed0
    python docs/results/cipher/by_key.py CHECKPOINT rotated    # read through rotated.py's rotation

Only the key of a text matters for z, so the best q(z | x) is the same for all texts of a key. The
16 posteriors start as the means of the inferred ones, and are then trained together with the
decoder on the bound of training texts. The script prints nats per test text before and after, and
with posteriors that are inferred for the trained decoder.
"""

import itertools
import sys
from typing import Any

import torch
from gaussian_code import KEYS, codes
from rotated import load, posteriors, rotate, score
from torch import Tensor

from datamodules.synthetic import LETTERS
from lightning_models.output_layer import linear_cross_entropy

BATCHES, INFERRED, STEPS = 500, 40, 1500
RATES = {"posteriors": 0.02, "decoder": 3e-3}
SAMPLES = 8


def keys_of(data: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the key of each text (B,), found from its pairs of letter and code."""
    table, keys = codes(), []
    for tokens in batch["tokens"].tolist():
        words = data.tokenizer.decode(tokens).split()
        pairs = [word for word in words if len(word) == 2 and word[0] in LETTERS]
        letters = torch.tensor([LETTERS.index(pair[0]) for pair in pairs])
        agrees = table[:, letters] == torch.tensor([ord(pair[1]) for pair in pairs])
        keys.append(int(agrees.all(dim=1).nonzero().item()))
    return torch.tensor(keys)


def nll(model: Any, batch: dict[str, Tensor], z: Tensor) -> Tensor:
    """Returns -log p(x | z) of a batch, in nats per text."""
    h = model.network(model.network.begin(batch["tokens"]), z)  # (B, T, D)
    total = linear_cross_entropy(h, model.network.output_matrix, batch["targets"])
    return total / len(z)


def main(path: str, rotated: bool) -> None:
    """Prints the bound with inferred posteriors, one for each key, and after training."""
    model, data = load(path)
    mean = score(model, data)
    if rotated:
        rotate(model, mean)
        score(model, data)
    torch.manual_seed(0)
    batches = list(itertools.islice(data.train_dataloader(), BATCHES))
    keys = [keys_of(data, batch) for batch in batches]
    tests = [(batch, keys_of(data, batch)) for batch in data.test_dataloader()]
    inferred, key_of_row = posteriors(model, batches[:INFERRED]), torch.cat(keys[:INFERRED])

    def of_keys(values: Tensor) -> Tensor:
        """Returns the mean over the texts of each key (16, Z, D)."""
        return torch.stack([values[key_of_row == key].mean(0) for key in range(KEYS)])

    mu = of_keys(inferred["mean"]).requires_grad_()
    log_variance = of_keys(inferred["log_variance"]).requires_grad_()

    def bound(batch: dict[str, Tensor], key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns KL and nll per text of a batch, with one sample."""
        z = mu[key] + (0.5 * log_variance[key]).exp() * torch.randn(len(key), *mu.shape[1:])
        kl = 0.5 * (log_variance.exp() + mu.square() - 1 - log_variance).sum((1, 2))
        return kl[key].mean(), nll(model, batch, z)

    def report(name: str) -> None:
        with torch.no_grad():
            costs = torch.tensor([bound(*test) for test in tests * SAMPLES])
        kl, text = costs.mean(0).tolist()
        print(f"{name}: {kl + text:.2f} nats per text, of which KL {kl:.2f}", flush=True)

    report("one posterior for each key")
    decoder = list(model.network.parameters())
    for part in decoder:
        part.requires_grad_(True)
    groups = [
        {"params": [mu, log_variance], "lr": RATES["posteriors"]},
        {"params": decoder, "lr": RATES["decoder"]},
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    order = itertools.cycle(zip(batches, keys, strict=True))
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(bound(*next(order))).backward()
        optimizer.step()
        schedule.step()
    report(f"after {STEPS} steps of both on the bound")
    print("inferred by that decoder:")
    score(model, data)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["rotated"]):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:] == ["rotated"])
