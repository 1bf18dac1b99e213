"""Reference models of ``transformers`` for the probes, from the hub or a local folder."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from evaluation.devices import Precision
from lightning_models.transformer.pretrained import load_pretrained, read_pretrained


class Pretrained:
    """A model of ``transformers`` and its tokenizer; remote code is never run.

    Args:
        source: Hub name, or folder of a saved model.
        device: Device of the model.
        precision: Precision of weights and activations.
        head: Either 'causal' to predict next tokens, or 'none' for hidden states only.
        key: Name of the option, for messages.

    Attributes:
        source: The hub name or folder.
        precision: Precision of weights and activations.
        model: The ``transformers`` model in eval mode.
        tokenizer: The ``transformers`` tokenizer.
        start: BOS if the tokenizer prepends it to texts by default, else empty.

    Raises:
        ValueError: If they do not exist, cannot be read, lack weights, or need remote code.
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
        from transformers import AutoTokenizer

        label = f"{key} ({source})"
        noun = "causal language model" if head == "causal" else "model"
        other = f"the folder of a saved {noun} with its tokenizer"
        self.source, self.precision = source, precision
        self.tokenizer: Any = read_pretrained(
            AutoTokenizer, source, "tokenizer", label, other=other
        )
        model = load_pretrained(
            source,
            label,
            other=other,
            head=head,
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        )
        self.model: Any = model.eval().to(device)
        first, bos = self.tokenizer("a")["input_ids"][:1], self.tokenizer.bos_token_id
        self.start: list[int] = [bos] if first == [bos] else []

    @property
    def context(self) -> int | None:
        """Maximum sequence length of the model, or None if its config has none."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text`` without special tokens, not truncated."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_documents(self, documents: Sequence[str]) -> list[int]:
        """Returns the ids of consecutive documents after ``start``, separated by EOS, if any."""
        eos = self.tokenizer.eos_token_id
        ids = list(self.start)
        for idx, document in enumerate(documents):
            if idx and eos is not None:
                ids.append(eos)
            ids += self.encode(document)
        return ids
