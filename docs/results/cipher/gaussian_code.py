"""What Gaussian latent vectors pay for one of 16 keys, for docs/results/cipher.md.

    python docs/results/cipher/gaussian_code.py

Under key k, z has the distribution N(m_k, s^2 I) in D dimensions, with 16 means of squared norm m:
equidistant ones (D = 15), or the corners of a cube (D = 4). A text costs KL(q || N(0, I)), and its
codes, each predicted from p(k | z) alone, cost more than under a known key. The smallest sum
over m and s is printed, by Monte Carlo, also where the variance of all 32 coordinates is s^2; and
what letters cost under any key, and the end of the text for a window, which cannot count pairs.
"""

import itertools
import math

import torch

from datamodules.synthetic import LETTERS, Draws

KEYS, PAIRS, SAMPLES = 2 * len(LETTERS), 64, 20_000


def codes() -> torch.Tensor:
    """Returns the code of each letter (8,) under each key (16, 8)."""
    rows = []
    for key in range(KEYS):
        shuffled = Draws(f"keys/{key // len(LETTERS)}").shuffled(LETTERS.upper())
        rows.append([shuffled[(i + key) % len(LETTERS)] for i in range(len(LETTERS))])
    return torch.tensor([[ord(code) for code in row] for row in rows])


def cheapest(corners: torch.Tensor, priced: int) -> str:
    """Returns the smallest sum of KL and lost codes.

    Args:
        corners: Means of the keys (16, D), of squared norm 1.
        priced: Number of dimensions whose posterior variance is s^2 instead of 1, at least D.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(SAMPLES, corners.shape[1], generator=generator)
    key = torch.randint(KEYS, (SAMPLES,), generator=generator)
    table = codes()
    agrees = (table[:, None] == table[None]).float()  # (16, 16, 8): keys with the same code
    costs = []
    for m, s in itertools.product(
        torch.arange(3.0, 20.1, 0.5).tolist(), torch.arange(0.2, 0.91, 0.05).tolist()
    ):
        means = math.sqrt(m) * corners
        z = means[key] + s * noise
        posterior = (-torch.cdist(z, means).square() / (2 * s * s)).softmax(dim=1)  # p(k | z)
        known = torch.einsum("nk,nkl->nl", posterior, agrees[key])  # probability of the true code
        lost = PAIRS * -known.clamp_min(1e-12).log().mean().item()
        kl = m / 2 + priced / 2 * (s * s - 1 - 2 * math.log(s))
        costs.append((kl + lost, kl, lost, m, s))
    total, kl, lost, m, s = min(costs)
    return f"{total:.2f} nats per text: KL {kl:.2f}, lost {lost:.2f}; m = {m:g}, s = {s:.2g}"


def main() -> None:
    """Prints the cheapest codes."""
    # an orthonormal basis of the 15 dimensions in which the means of 16 keys differ
    basis = torch.linalg.eigh(torch.eye(KEYS) - 1 / KEYS)[1][:, 1:]
    simplex = basis / basis.norm(dim=1, keepdim=True)
    cube = torch.tensor(list(itertools.product((-0.5, 0.5), repeat=4)))
    for name, corners in (("equidistant", simplex), ("cube", cube)):
        for priced in (corners.shape[1], 32):
            print(f"{name}, {priced} variances: {cheapest(corners, priced)}")
    print(f"log 16 = {math.log(KEYS):.2f}")
    end = math.log(PAIRS) + (PAIRS - 1) * math.log(PAIRS / (PAIRS - 1))  # 1/64 after each pair
    print(f"letters {PAIRS * math.log(len(LETTERS)):.1f}, the end in a window {end:.2f}")


if __name__ == "__main__":
    main()
