"""From a model to texts, and from texts to numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from datamodules import Tokenizer
from evaluation.checkpoint.device import Precision
from evaluation.checkpoint.pretrained import Pretrained
from evaluation.quality.config import QualityConfig
from evaluation.quality.judge import Judge
from evaluation.quality.metrics import mauve_scores, text_features, token_entropy
from evaluation.quality.report import Continuations, Samples
from evaluation.quality.texts import Written, documents, sampling_config, write_texts
from lightning_models import LanguageModel


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
        """Returns what the model writes behind prompts, by way of sampling."""
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
