"""Sentences as batches of streams, for models that step from sentence to sentence."""

from collections.abc import Sequence
from typing import Any

from datamodules.base import LanguageDataModule
from datamodules.sentences.batches import DocumentSource, SentencePromptSource, StreamSource
from datamodules.sentences.corpus import SentenceCorpus
from datamodules.sentences.dealing import Bounds
from datamodules.sentences.index import SentenceIndex
from datamodules.sentences.streams import Curriculum
from datamodules.sentences.tokenizer import MARKERS
from datamodules.store import Split


class Sentences(SentenceCorpus, LanguageDataModule):
    """A corpus as batches of sentences (Thought Gestalt, section 2.1 and App. B.1).

    Training documents are cut into streams of at most S sentences, and streams are dealt to batches
    of at most `batch_tokens` lexical tokens and `batch_size` streams; S grows by `curriculum_step`
    every `curriculum_epochs` epochs. Evaluation scores whole documents.

    Args:
        batch_tokens: Most lexical tokens (all but BOS, EOS and EOD) of a device's batch when
            training; the paper's number is unpublished.
        batch_size: Most streams of a device's batch when training.
        max_sentences: Most sentences of a stream in the first epochs (S).
        curriculum_step: How much S grows; 0: not at all.
        curriculum_epochs: After how many epochs it grows; passes over the data, which are the
            trainer's epochs unless limit_train_batches makes those shorter.
        curriculum_limit: Largest S; null: it grows on.
        **kwargs: See `SentenceCorpus` and `LanguageDataModule`; eval_batch_size counts documents.

    Raises:
        ValueError: An argument is out of its range; the message lists all of them.
    """

    rows = "sentences"

    def __init__(
        self,
        *,
        batch_tokens: int = 8192,
        batch_size: int = 64,
        max_sentences: int = 30,
        curriculum_step: int = 12,
        curriculum_epochs: int = 5,
        curriculum_limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.batch_tokens = batch_tokens
        self.max_sentences = max_sentences
        self.curriculum_step = curriculum_step
        self.curriculum_epochs = curriculum_epochs
        self.curriculum_limit = curriculum_limit
        super().__init__(batch_size=batch_size, **kwargs)

    def _problems(self) -> list[str]:
        problems = super()._problems()
        lowest = {"max_sentences": 1, "curriculum_step": 0, "curriculum_epochs": 1}
        problems += [
            f"{key}={getattr(self, key)} must be at least {least}"
            for key, least in lowest.items()
            if getattr(self, key) < least
        ]
        if self.curriculum_limit is not None and self.curriculum_limit < self.max_sentences:
            problems.append(
                f"curriculum_limit={self.curriculum_limit} must be at least max_sentences="
                f"{self.max_sentences}, or null"
            )
        if self.batch_tokens < self.max_sentence_tokens:
            problems.append(
                f"batch_tokens={self.batch_tokens} must be at least max_sentence_tokens="
                f"{self.max_sentence_tokens}, so that a batch can take any sentence"
            )
        return problems

    @property
    def block_size(self) -> int:
        """Slots of a sentence: its words, BOS, EOD and EOS."""
        return self.max_sentence_tokens + MARKERS

    def row_tokens(self, split: Split) -> int:
        """Returns the slots of a document of a split, on average."""
        counts = self.counts(split)
        return -(-counts.tokens // max(1, counts.documents))

    def sentences(self, split: Split) -> SentenceIndex:
        """Returns where the sentences of a split of the prepared corpus are."""
        return SentenceIndex(self.stream(split), self.tokenizer.eos_id)

    def training_source(self) -> StreamSource:
        """Returns the training batches of this rank by number.

        Raises:
            ValueError: The train split is too small to give each batch a sentence.
        """
        rank, world_size = self._ranks()
        return StreamSource(
            self.sentences("train"),
            bounds=Bounds(
                lexical=self.batch_tokens,
                streams=self.batch_size,
                sentence=self.max_sentence_tokens,
            ),
            curriculum=Curriculum(
                max_sentences=self.max_sentences,
                step=self.curriculum_step,
                epochs=self.curriculum_epochs,
                limit=self.curriculum_limit,
            ),
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )

    def evaluation_source(self, split: Split) -> DocumentSource:
        """Returns the batches of this rank that score every token of a split once.

        Raises:
            ValueError: The split is empty.
        """
        index = self.sentences(split)
        if not len(index):
            raise ValueError(f"The {split} split is empty. {self.how_to_get(split)}")
        rank, world_size = self._ranks()
        return DocumentSource(
            index,
            batch_size=self.eval_batch_size,
            token_bytes=self.tokenizer.token_bytes,
            rank=rank,
            world_size=world_size,
        )

    def prompt_source(self, prompts: Sequence[str]) -> SentencePromptSource:
        """Returns batches of prompts, whose last sentence is open."""
        rank, world_size = self._ranks()
        return SentencePromptSource(
            prompts,
            self.tokenizer,
            batch_size=self.eval_batch_size,
            rank=rank,
            world_size=world_size,
        )

    def order(self) -> dict[str, Any]:
        """Returns what decides, besides text and world size, which streams make batch n."""
        sizes = ("batch_tokens", "batch_size", "max_sentences")
        growth = ("curriculum_step", "curriculum_epochs", "curriculum_limit")
        return {key: getattr(self, key) for key in (*sizes, *growth, "seed")}
