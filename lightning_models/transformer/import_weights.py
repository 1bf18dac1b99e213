"""Import of weights of ``transformers`` models into the plain decoder."""

from typing import Any

import torch

from lightning_models.transformer.families import FAMILIES, HubFamily
from lightning_models.transformer.module import TransformerLM
from lightning_models.transformer.network import TransformerConfig
from lightning_models.transformer.pretrained import has_tied_head, load_pretrained


def import_transformers(source: Any, **changes: Any) -> TransformerLM:
    """Returns a TransformerLM that computes the same as a ``transformers`` model.

    Args:
        source: A model object, or the hub name or local folder of one (GPT-2, LLaMA, Qwen2, Qwen3
            and GPT-NeoX families).
        **changes: Fields of TransformerConfig to set, for example ``attention_backend``.

    Raises:
        ValueError: If our blocks do not implement the architecture or one of its options, or the
            model's published code computes something else with these weights.
    """
    model = load_causal_lm(source) if isinstance(source, str) else source
    marks = [key for key in ("recurrent_model", "ponderinglm") if getattr(model.config, key, False)]
    if marks:
        raise ValueError(
            f"config.json has {marks[0]}: these are weights of the PonderLM family, whose own code "
            "takes further steps; name the method, with --method ponderlm2 for example"
        )
    family, options = describe(model)
    lm = TransformerLM(TransformerConfig(**{**options, **changes}))
    lm.configure_model()
    with torch.no_grad():
        lm.network.load_state_dict(family.import_weights(model.state_dict(), lm.config))
    return lm


def describe(model: Any) -> tuple[HubFamily, dict[str, Any]]:
    """Returns the family of a ``transformers`` model, and its fields of TransformerConfig.

    Raises:
        ValueError: See ``import_transformers``.
    """
    config = model.config
    name = config.model_type
    if name not in FAMILIES:
        raise ValueError(f"model_type ({name}) cannot be imported; known are {sorted(FAMILIES)}")
    family = FAMILIES[name]
    vocabulary = {"vocab_size": config.vocab_size, "vocab_multiple": 1}
    # not config.tie_word_embeddings: transformers leaves a head with other weights untied
    return family, {**vocabulary, **family.to_ours(config), "tie_head": has_tied_head(model)}


def load_causal_lm(source: str) -> Any:
    """Loads a ``transformers`` model by hub name or folder, in float32.

    Raises:
        ValueError: See ``load_pretrained``.
    """
    other = "the folder of a saved causal language model: GPT-2, LLaMA, Qwen2, Qwen3 or GPT-NeoX"
    return load_pretrained(source, repr(source), other=other)
