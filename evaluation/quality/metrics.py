"""Numbers about generated texts: token entropy, and MAUVE by its authors' library."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from evaluation.checkpoint.pretrained import Pretrained

MAUVE_SEED = 25
"""First seed of the k-means within MAUVE: the library's own default."""


def token_entropy(samples: Sequence[Sequence[int]]) -> float:
    """Returns the entropy of a sample's own token frequencies in nats, averaged over samples.

    Between 0, where a sample repeats one token, and the logarithm of its length. It tells collapsed
    text, which other models find likely, from good text (Zheng et al. 2024, arXiv 2409.02908).

    Args:
        samples: token ids of each, at least one.
    """
    return sum(map(_entropy, samples)) / len(samples)


def _entropy(tokens: Sequence[int]) -> float:
    counts = Counter(tokens).values()
    return sum(count / len(tokens) * math.log(len(tokens) / count) for count in counts)


def require_mauve() -> None:
    """Checks that the library is installed.

    Raises:
        ValueError: if not; the message says how to get it.
    """
    try:
        import mauve  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"MAUVE needs the package mauve-text ({error}): pip install -e '.[quality]', or take "
            "--mode unconditional"
        ) from error


def text_features(
    featurizer: Pretrained, texts: Sequence[Sequence[str]], batch_size: int = 8
) -> Tensor:
    """Returns the last layer's state at each text's last token, float32 (N, D), as MAUVE takes it.

    Args:
        featurizer: a decoder without head.
        texts: each a list of documents in a row, cut at the featurizer's context. Empty ones are
            left out, as the library does.
        batch_size: how many are read at once.

    Raises:
        ValueError: if all are empty.
    """
    from mauve.utils import featurize_tokens_from_model

    rows = [featurizer.encode_documents(text)[: featurizer.context] for text in texts]
    ids = [torch.tensor([row]) for row in rows if row]
    if not ids:
        raise ValueError(
            "MAUVE has no text to compare: every text is empty in the tokenizer of featurizer "
            f"({featurizer.source})"
        )
    features: Tensor = featurize_tokens_from_model(featurizer.model, ids, batch_size, "texts")
    return features.float().cpu()


def mauve_scores(human: Tensor, generated: Tensor, seeds: int = 5) -> list[float]:
    """Returns MAUVE in (0, 1], the higher the closer, once for each seed of its k-means.

    All else is the library's default: a tenth as many buckets as the smaller side has texts, and
    scaling 5. The first seed is the library's default too; clusters, and so MAUVE, differ a little
    between seeds.

    Args:
        human: features of human texts, (N, D).
        generated: features of generated texts, (M, D).
        seeds: how many.
    """
    import mauve

    sides = {"p_features": human.numpy(), "q_features": generated.numpy()}
    return [
        float(mauve.compute_mauve(**sides, seed=MAUVE_SEED + number, verbose=False).mauve)
        for number in range(seeds)
    ]
