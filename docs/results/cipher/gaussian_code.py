"""The least that Gaussian latent vectors can pay for one of 16 keys, for docs/results/cipher.md.

    python docs/results/cipher/gaussian_code.py

Under key k, z has the distribution N(m_k, s^2 I), with 16 equidistant means of squared norm m. A
text costs KL(q || N(0, I)), and its 16 codes, each predicted from p(k | z) alone, cost more than
under a known key. The smallest sum over m and s is printed, by Monte Carlo, and what letters cost
under any key, and the end of the text for a window, which cannot count pairs.
"""

import itertools
import math

import torch

from datamodules.synthetic import LETTERS, Draws

KEYS, PAIRS, SAMPLES = 2 * len(LETTERS), 16, 40_000


def codes() -> torch.Tensor:
    """Returns the code of each letter (8,) under each key (16, 8)."""
    rows = []
    for key in range(KEYS):
        shuffled = Draws(f"keys/{key // len(LETTERS)}").shuffled(LETTERS.upper())
        rows.append([shuffled[(i + key) % len(LETTERS)] for i in range(len(LETTERS))])
    return torch.tensor([[ord(code) for code in row] for row in rows])


def main() -> None:
    """Prints the cheapest code."""
    generator = torch.Generator().manual_seed(0)
    centred = torch.eye(KEYS) - 1 / KEYS
    corners = centred / centred.norm(dim=1, keepdim=True)
    noise = torch.randn(SAMPLES, KEYS, generator=generator) @ centred  # in the means' 15 dimensions
    key = torch.randint(KEYS, (SAMPLES,), generator=generator)
    table = codes()
    agrees = (table[:, None] == table[None]).float()  # (16, 16, 8): keys with the same code
    costs = []
    for m, s in itertools.product(
        torch.arange(4.0, 14.1, 0.5).tolist(), (0.6, 0.65, 0.7, 0.75, 0.8)
    ):
        means = math.sqrt(m) * corners
        z = means[key] + s * noise
        posterior = (-torch.cdist(z, means).square() / (2 * s * s)).softmax(dim=1)  # p(k | z)
        known = torch.einsum("nk,nkl->nl", posterior, agrees[key])  # probability of the true code
        lost = PAIRS * -known.clamp_min(1e-12).log().mean().item()
        kl = m / 2 + (KEYS - 1) / 2 * (s * s - 1 - 2 * math.log(s))
        costs.append((kl + lost, kl, lost, m, s))
    total, kl, lost, m, s = min(costs)
    print(f"{total:.2f} nats per text: KL {kl:.2f}, lost {lost:.2f}; m = {m:g}, s = {s:g}")
    print(f"log 16 = {math.log(KEYS):.2f}")
    end = math.log(PAIRS) + (PAIRS - 1) * math.log(PAIRS / (PAIRS - 1))  # 1/16 after each pair
    print(f"letters {PAIRS * math.log(len(LETTERS)):.1f}, the end in a window {end:.2f}")


if __name__ == "__main__":
    main()
