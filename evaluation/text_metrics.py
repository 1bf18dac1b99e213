"""Metrics of written text: token entropy, MAUVE, perplexity under another language model."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from datamodules.text import IGNORE
from evaluation.load import Pretrained
from evaluation.scoring import Totals

# ---- token entropy, and MAUVE by its authors' library


MAUVE_SEED = 25
"""First seed of the k-means within MAUVE: the library's own default."""


def token_entropy(samples: Sequence[Sequence[int]]) -> float:
    """Returns the entropy of a sample's own token frequencies in nats, averaged over samples.

    Between 0, where a sample repeats one token, and the logarithm of its length. It distinguishes
    collapsed text, which other models find likely, from good text (Zheng et al. 2024, arXiv
    2409.02908).

    Args:
        samples: token ids of each, at least one.
    """
    entropies = []
    for tokens in samples:
        shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
        entropies.append(-(shares * np.log(shares)).sum())
    return float(np.mean(entropies))


def text_features(
    featurizer: Pretrained, texts: Iterable[Sequence[str]], batch_size: int = 8
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


# ---- generative perplexity: likelihood of texts under another language model


def judge_texts(
    judge: Pretrained, texts: Iterable[Sequence[str]], batch_size: int = 8
) -> dict[str, Any]:
    """Returns the perplexity of texts under a causal model, under the keys of the JSON file.

    ``judged_tokens`` are in the judge's tokenizer. A text's first token is context only, unless the
    tokenizer puts a BOS first by itself; the end of a document within a text is the judge's EOS,
    and counts as a token. ``cut_texts`` were longer than the judge's context, and only their
    beginning was scored.

    Args:
        judge: a model with a head.
        texts: each a list of documents in a row.
        batch_size: how many are read at once; changes nothing but rounding.
    """
    rows = [judge.encode_documents(text) for text in texts]
    kept = [row[: judge.context] for row in rows]
    starts = range(0, len(rows), batch_size)
    bar = tqdm(starts, desc="judging", unit=" batches", disable=None)
    nats = torch.cat([_judged_nats(judge.model, kept[n : n + batch_size]) for n in bar])  # (N,)
    tokens = torch.tensor([max(0, len(row) - 1) for row in kept])
    totals = Totals(nats.sum().item(), int(tokens.sum()), None)
    return {
        "generative_perplexity": totals.perplexity,
        "nats_per_token": totals.nats_per_token,
        "judged_tokens": totals.tokens,
        "cut_texts": sum(len(row) > len(part) for row, part in zip(rows, kept, strict=True)),
        # as SEDD's code averages: at least as large, where texts are equally long
        "mean_of_perplexities": (nats / tokens)[tokens > 0].exp().mean().item(),
    }


def _judged_nats(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns the nats of all but the first token of each row, float64 (B,)."""
    # a row without any key would give nan: an empty one has a token, which is not scored
    ids = pad_sequence(
        [torch.tensor(row or [0]) for row in rows], batch_first=True, padding_value=IGNORE
    ).to(model.device)
    mask = ids != IGNORE
    with torch.inference_mode():
        logits = model(input_ids=ids.clamp(min=0), attention_mask=mask.long()).logits[:, :-1]
        sums = [  # row by row: float32 copies of a whole batch's logits would not be small
            cross_entropy(row.float(), target, ignore_index=IGNORE, reduction="none").double().sum()
            for row, target in zip(logits, ids[:, 1:], strict=True)
        ]
    return torch.stack(sums).cpu()
