"""Models that the reversal probe asks: checkpoints of ours, and those of ``transformers``."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from datamodules import Tokenizer
from evaluation.checkpoint.device import Precision, autocast
from evaluation.checkpoint.pretrained import Pretrained
from lightning_models import LanguageModel


class Asked(Protocol):
    """What the probe needs of a model and its tokenizer."""

    def prompt(self, sentences: Sequence[str]) -> list[int]:
        """Returns what the model reads of a text of these sentences, the last one unfinished."""

    def next_log_probs(self, prompts: Tensor) -> Tensor:
        """Returns log-probabilities of the next token, float32 (B, V), of prompts int64 (B, P)."""


class OwnModel:
    """A model of this project with its tokenizer, through the decoding contract."""

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, precision: Precision = "32"
    ) -> None:
        """Takes a model on its device, in eval mode, with the tokenizer it was trained with."""
        self.model = model
        self.tokenizer = tokenizer
        self.precision = precision

    def prompt(self, sentences: Sequence[str]) -> list[int]:
        """Returns the ids of the sentences: marked for sentence models, else the joined text."""
        return self.tokenizer.sentence_prompt_ids(sentences)

    def next_log_probs(self, prompts: Tensor) -> Tensor:
        """Returns log-probabilities of the next token, float32 (B, V), of prompts int64 (B, P)."""
        device = self.model.device
        with torch.inference_mode(), autocast(device, self.precision):
            return self._decode(prompts.to(device)).detach().cpu()

    def _decode(self, prompts: Tensor) -> Tensor:
        """Steps each row until it is ready; rows that are leave the batch."""
        lengths = torch.full_like(prompts[:, 0], prompts.shape[1])
        # One stream for all: what a method draws is the same for every prompt, so that normal and
        # reversed questions are compared under equal draws, in batches of any size.
        cache = self.model.init_cache(prompts, lengths, 1, [(0, 0)] * len(prompts))
        tokens, rows = prompts[:, -1], torch.arange(len(prompts), device=prompts.device)
        answers: dict[int, Tensor] = {}
        while True:
            logits, ready = self.model.decode_step(cache, tokens)
            found = logits[ready].float().log_softmax(dim=-1)
            answers.update(zip(rows[ready].tolist(), found, strict=True))
            waiting = (~ready).nonzero()[:, 0]
            if not len(waiting):
                return torch.stack([answers[row] for row in range(len(prompts))])
            if len(waiting) < len(rows):
                cache.select(waiting)
                tokens, rows = tokens[waiting], rows[waiting]


class HubModel:
    """A causal language model of ``transformers`` with its tokenizer."""

    def __init__(self, source: str, device: torch.device, precision: Precision = "32") -> None:
        """Loads both; code of their authors is never run.

        Args:
            source: hub name, or folder of a saved model.
            device: where to run.
            precision: of the weights and all that is computed with them.

        Raises:
            ValueError: if they are not there, cannot be read, or would need code of their own.
        """
        self._pretrained = Pretrained(source, device, precision)
        self.model: Any = self._pretrained.model

    def prompt(self, sentences: Sequence[str]) -> list[int]:
        """Returns the ids of the joined text, behind a BOS if the tokenizer itself puts one."""
        return self._pretrained.encode_documents(["".join(sentences)])

    def next_log_probs(self, prompts: Tensor) -> Tensor:
        """Returns log-probabilities of the next token, float32 (B, V), of prompts int64 (B, P).

        Raises:
            ValueError: if they are longer than the model's context.
        """
        longest = self._pretrained.context
        if longest is not None and prompts.shape[1] > longest:
            raise ValueError(
                f"hf: a prompt has {prompts.shape[1]} tokens and the model's context {longest}; "
                "take one with a longer context"
            )
        with torch.inference_mode():
            logits = self.model(input_ids=prompts.to(self.model.device)).logits[:, -1]
        log_probs: Tensor = logits.float().log_softmax(dim=-1).cpu()
        return log_probs
