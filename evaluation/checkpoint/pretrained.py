"""Models of ``transformers``, from the hub or a local folder, with their tokenizers."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from evaluation.checkpoint.device import Precision
from lightning_models.transformer.pretrained import read_pretrained

OTHER = "the folder of a saved model with its tokenizer"


class Pretrained:
    """A model of ``transformers`` and its tokenizer; code of their authors is never run.

    Args:
        source: hub name, or folder of a saved model.
        device: where to run.
        precision: of the weights and all that is computed with them.
        head: 'causal': predicts next tokens; 'none': hidden states only.
        key: the option that names it, for messages.

    Attributes:
        source: the same.
        model: the ``transformers`` model, in eval mode.
        tokenizer: the ``transformers`` tokenizer.
        start: the BOS that the tokenizer puts in front of texts by itself, or nothing.

    Raises:
        ValueError: if they are not there, cannot be read, lack weights, or would need code of their
            own.
    """

    def __init__(
        self,
        source: str,
        device: torch.device,
        precision: Precision = "32",
        *,
        head: Literal["causal", "none"] = "causal",
        key: str = "hf",
    ) -> None:
        from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

        self.source = source
        self.tokenizer: Any = read_pretrained(
            lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=False),
            "tokenizer",
            f"{key} ({source})",
            other=OTHER,
        )
        kind: Any = AutoModelForCausalLM if head == "causal" else AutoModel
        model, info = read_pretrained(
            lambda: kind.from_pretrained(
                source,
                weights_only=True,
                trust_remote_code=False,
                dtype=torch.float32 if precision == "32" else torch.bfloat16,
                output_loading_info=True,
            ),
            "model",
            f"{key} ({source})",
            other=OTHER,
        )
        missing = sorted(info["missing_keys"])
        if missing:  # transformers draws them at random, and goes on
            needs, cure = (
                ("a causal language model needs", "name a causal language model")
                if head == "causal"
                else ("its model needs", "get it again, or name another one")
            )
            raise ValueError(
                f"{key} ({source}): {len(missing)} weights that {needs} are not in it "
                f"({missing[0]}); {cure}"
            )
        self.model: Any = model.eval().to(device)
        first, bos = self.tokenizer("a")["input_ids"][:1], self.tokenizer.bos_token_id
        self.start: list[int] = [bos] if first == [bos] else []

    @property
    def context(self) -> int | None:
        """Most tokens that the model reads at once; None where its config does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text`` alone, however many."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_documents(self, documents: Sequence[str]) -> list[int]:
        """Returns the ids of documents in a row: ``start``, and the tokenizer's EOS between them.

        Tokenizers without an EOS have nothing between documents.
        """
        eos = self.tokenizer.eos_token_id
        ids = list(self.start)
        for number, document in enumerate(documents):
            if number and eos is not None:
                ids.append(eos)
            ids += self.encode(document)
        return ids
