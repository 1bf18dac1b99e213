"""Models of ``transformers``, from the hub or a local folder, with their tokenizers."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from evaluation.checkpoint.device import Precision


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
        self.tokenizer: Any = _load(
            lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=False),
            "tokenizer",
            f"{key} ({source})",
        )
        kind: Any = AutoModelForCausalLM if head == "causal" else AutoModel
        model, info = _load(
            lambda: kind.from_pretrained(
                source,
                weights_only=True,
                trust_remote_code=False,
                dtype=torch.float32 if precision == "32" else torch.bfloat16,
                output_loading_info=True,
            ),
            "model",
            f"{key} ({source})",
        )
        missing = sorted(info["missing_keys"])
        if missing:  # transformers draws them at random, and goes on
            needs, cure = (
                ("a causal language model needs", "name a causal language model")
                if head == "causal"
                else ("its model needs", "get it anew, or name another one")
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


def _load(load: Callable[[], Any], what: str, named: str) -> Any:
    """Returns what ``load`` does.

    Raises:
        ValueError: if it fails, in a line of ours.
    """
    try:
        return load()
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{named} is refused: its pickled weights contain more than tensors, which could "
            "run any code while loading. Use a model with .safetensors weights"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{named}: no {what} found (neither in a local folder of that name nor on the "
            "hub); pass the folder of a saved model with its tokenizer"
        ) from error
    except Exception as error:  # whatever damaged files make of the library
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{named}: the {what} cannot be read ({reason}); get it anew, or pass the folder "
            "of another causal language model"
        ) from error
