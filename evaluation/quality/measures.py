"""Numbers about texts: token entropy, MAUVE, generative perplexity, and their report."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from datamodules import Tokenizer
from evaluation.cost import Cost
from evaluation.load import Precision, Pretrained
from evaluation.output import format_columns, format_table
from evaluation.quality.texts import QualityConfig, Written, documents, sampling_config, write_texts
from evaluation.scoring import Totals
from lightning_models import LanguageModel

# ---- token entropy, and MAUVE by its authors' library

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


# ---- likelihood of texts under another language model: generative perplexity


@dataclass(frozen=True)
class JudgedTexts:
    """Negative log-likelihoods of texts under a judge."""

    nats: Tensor
    """Of each text, float64 (N,)."""
    tokens: Tensor
    """Tokens of each text that were scored, in the judge's tokenizer, int64 (N,)."""
    cut: int
    """Texts that were longer than the judge's context; only their beginning was scored."""

    @property
    def totals(self) -> Totals:
        """The sums over all texts."""
        return Totals(self.nats.sum().item(), int(self.tokens.sum()), None)

    @property
    def mean_of_perplexities(self) -> float:
        """Mean over the texts of each one's perplexity, as the code of SEDD averages; nan of none.

        At least as large as the perplexity of all texts together, where they are equally long.
        """
        scored = self.tokens > 0
        return (self.nats[scored] / self.tokens[scored]).exp().mean().item()


class Judge:
    """A causal language model that scores texts of others.

    It reads texts through its own tokenizer. A text's first token is context only, unless the
    tokenizer puts a BOS in front by itself; the end of a document within a text is the judge's EOS,
    and counts as a token.
    """

    def __init__(self, pretrained: Pretrained) -> None:
        """Takes a loaded causal model."""
        self.pretrained = pretrained

    def score(self, texts: Sequence[Sequence[str]], batch_size: int = 8) -> JudgedTexts:
        """Returns the likelihood of texts, each a list of documents in a row.

        Args:
            texts: those longer than the judge's context are cut there.
            batch_size: how many are read at once; changes nothing but rounding.
        """
        rows = [self.pretrained.encode_documents(documents) for documents in texts]
        context = self.pretrained.context
        kept = [row[:context] for row in rows]
        starts = range(0, len(rows), batch_size)
        bar = tqdm(starts, desc="judging", unit=" batches", disable=None)
        parts = [self._nats(kept[start : start + batch_size]) for start in bar]
        return JudgedTexts(
            nats=torch.cat(parts),
            tokens=torch.tensor([max(0, len(row) - 1) for row in kept]),
            cut=sum(len(row) > len(part) for row, part in zip(rows, kept, strict=True)),
        )

    def _nats(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the nats of all but the first token of each row, float64 (B,)."""
        model = self.pretrained.model
        width = max(1, *map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        mask[:, 0] = 1  # a row without any true key would give nan
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[number, : len(row)] = 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits
            sums = [  # row by row: float32 copies of a whole batch's logits would not be small
                cross_entropy(
                    logits[n, : len(row) - 1].float(), ids[n, 1 : len(row)], reduction="none"
                )
                .double()
                .sum()
                if len(row) > 1
                else torch.zeros((), dtype=torch.float64, device=ids.device)
                for n, row in enumerate(rows)
            ]
        return torch.stack(sums).cpu()


# ---- report


@dataclass(frozen=True)
class Continuations:
    """Continuations of human prompts, next to the human texts."""

    written: Written
    mauve: list[float]
    """Of each seed of the k-means within."""
    human_texts: int
    """How many they were compared with."""

    @property
    def mauve_deviation(self) -> float:
        """Standard deviation over those seeds; nan of one."""
        return stdev(self.mauve) if len(self.mauve) > 1 else math.nan

    def headline(self) -> dict[str, float]:
        """Returns the number to compare, by its name."""
        return {"mauve": mean(self.mauve)}

    def details(self) -> dict[str, Any]:
        """Returns what else there is to know."""
        return {
            "mauve_by_seed": self.mauve,
            "mauve_deviation": self.mauve_deviation,
            "human_texts": self.human_texts,
            **_details(self.written),
        }


@dataclass(frozen=True)
class Samples:
    """Samples from the start token alone, and what a judge made of them."""

    written: Written
    judged: JudgedTexts | None
    """None without a judge."""
    token_entropy: float
    """In nats."""

    def headline(self) -> dict[str, float]:
        """Returns the numbers to compare, by their names."""
        judged = self.judged
        found = {} if judged is None else {"generative_perplexity": judged.totals.perplexity}
        return {
            **found,
            "token_entropy": self.token_entropy,
            "samples_per_second": self.written.texts_per_second,
        }

    def details(self) -> dict[str, Any]:
        """Returns what else there is to know."""
        if self.judged is None:
            return _details(self.written)
        return {
            "nats_per_token": self.judged.totals.nats_per_token,
            "judged_tokens": self.judged.totals.tokens,
            "cut_texts": self.judged.cut,
            "mean_of_perplexities": self.judged.mean_of_perplexities,
            **_details(self.written),
        }


def _details(written: Written) -> dict[str, Any]:
    return {
        "texts": len(written.new),
        "distinct_texts": written.distinct,
        "seconds": written.seconds,
        "texts_per_second": written.texts_per_second,
    }


@dataclass(frozen=True)
class QualityReport:
    """The numbers of one model, and everything needed to repeat them."""

    continuations: dict[str, Continuations]
    """By way of sampling; empty where they were not asked for."""
    samples: dict[str, Samples]
    """By way of sampling; empty where they were not asked for."""
    model: str
    """Name of the model's class."""
    checkpoint: str
    data: dict[str, Any] | None
    """Where the prompts are from; None without prompts."""
    settings: dict[str, Any]
    cost: Cost
    """Of writing all texts, at the length of the longest."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values under the keys of the JSON file.

        What ``evaluate.py compare --view results`` compares is on top, under ``<sampling>_<name>``.
        """
        return {
            **_headlines(self.continuations),
            **_headlines(self.samples),
            **self.cost.as_dict(),
            "conditional": {way: found.details() for way, found in self.continuations.items()},
            "unconditional": {way: found.details() for way, found in self.samples.items()},
            "model": self.model,
            "checkpoint": self.checkpoint,
            "data": self.data,
            "settings": self.settings,
        }

    def as_table(self) -> str:
        """Returns the result for people."""
        parts = []
        if self.continuations:
            header = ["continuations", "MAUVE", "texts", "different", "per second"]
            rows = [
                [name, _mauve(r), *_counts(r.written)] for name, r in self.continuations.items()
            ]
            parts.append(format_columns([header, *rows]))
        if self.samples:
            header = ["samples", "gen. perplexity", "entropy (nats)", "texts", "different"]
            rows = [
                [
                    name,
                    "-" if result.judged is None else f"{result.judged.totals.perplexity:.5g}",
                    f"{result.token_entropy:.4f}",
                    *_counts(result.written),
                ]
                for name, result in self.samples.items()
            ]
            parts.append(format_columns([[*header, "per second"], *rows]))
        shown = ("featurizer", "judge", "split", "batch_size", "precision", "device")
        facts = {**(self.data or {}), **self.settings}
        named = {key.replace("_", " "): str(facts[key]) for key in shown if key in facts}
        named |= {f"cut {name} texts": _cut(result) for name, result in self.samples.items()}
        named = {key: value for key, value in named.items() if value}
        facts = {**named, **self.cost.as_cells(), "checkpoint": self.checkpoint}
        parts.append(format_table(facts))
        return "\n\n".join(parts)


def _headlines(results: Mapping[str, Continuations | Samples]) -> dict[str, float]:
    return {
        f"{way}_{name}": value
        for way, found in results.items()
        for name, value in found.headline().items()
    }


def _cut(result: Samples) -> str:
    """Returns how many texts were judged in part; nothing where none was."""
    cut = 0 if result.judged is None else result.judged.cut
    return f"{cut} of {len(result.written.new)}, to the judge's context" if cut else ""


def _mauve(result: Continuations) -> str:
    deviation = result.mauve_deviation
    spread = "" if math.isnan(deviation) else f" +- {deviation:.4f}"
    return f"{mean(result.mauve):.4f}{spread}"


def _counts(written: Written) -> list[str]:
    return [str(len(written.new)), str(written.distinct), f"{written.texts_per_second:.4g}"]


# ---- measuring


@dataclass(frozen=True)
class Author:
    """A checkpoint's model, ready to write."""

    model: LanguageModel
    """On its device, in eval mode."""
    tokenizer: Tokenizer
    precision: Precision = "32"

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, config: QualityConfig
    ) -> dict[str, Written]:
        """Returns what the model writes after prompts, by way of sampling."""
        return {
            name: write_texts(
                self.model,
                self.tokenizer,
                prompts,
                new_tokens=new_tokens,
                sampling=sampling_config(name, top_p=config.top_p, seed=config.seed),
                batch_size=config.batch_size,
                precision=self.precision,
            )
            for name in config.sampling
        }

    def documents(self, texts: Sequence[Sequence[int]]) -> list[list[str]]:
        """Returns the documents in each text."""
        return [documents(ids, self.tokenizer) for ids in texts]


def measure_continuations(
    author: Author,
    written: dict[str, Written],
    human: Sequence[Sequence[int]],
    featurizer: Pretrained,
    config: QualityConfig,
) -> dict[str, Continuations]:
    """Returns MAUVE between human texts and written ones, prompts included.

    Args:
        author: who wrote them.
        written: by way of sampling.
        human: token ids of human texts.
        featurizer: a decoder without head.
        config: batch size and seeds.
    """
    size = config.judge_batch_size
    target = text_features(featurizer, author.documents(human), size)
    found = {}
    for name, texts in written.items():
        whole = [[*prompt, *new] for prompt, new in zip(texts.prompts, texts.new, strict=True)]
        features = text_features(featurizer, author.documents(whole), size)
        scores = mauve_scores(target, features, config.mauve_seeds)
        found[name] = Continuations(texts, scores, len(human))
    return found


def measure_samples(
    author: Author, written: dict[str, Written], judge: Judge | None, config: QualityConfig
) -> dict[str, Samples]:
    """Returns generative perplexity (with a judge) and entropy of samples, by way of sampling."""
    return {
        name: Samples(
            texts,
            None
            if judge is None
            else judge.score(author.documents(texts.new), config.judge_batch_size),
            token_entropy(texts.new),
        )
        for name, texts in written.items()
    }
