"""Weights of ``transformers`` models in our plain transformer."""

from typing import Any

import torch

from lightning_models.transformer.families import FAMILIES, HubFamily
from lightning_models.transformer.module import TransformerLM
from lightning_models.transformer.network import TransformerConfig
from lightning_models.transformer.pretrained import has_tied_head, load_pretrained


def import_transformers(source: Any, **changes: Any) -> TransformerLM:
    """Returns a TransformerLM that computes what the given ``transformers`` model computes.

    Args:
        source: a model object, or the hub name or local folder of one (GPT-2, LLaMA, Qwen2,
            Qwen3 and GPT-NeoX families).
        **changes: fields of TransformerConfig to set, for example ``attention_backend``.

    Raises:
        ValueError: if the architecture, or an option of it, is not one our blocks can express; or
            the model is one whose own code computes something else with these weights.
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
        ValueError: see ``import_transformers``.
    """
    config = model.config
    kind = config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"model_type ({kind}) cannot be imported; known are {sorted(FAMILIES)}")
    family = FAMILIES[kind]
    vocabulary = {"vocab_size": config.vocab_size, "vocab_multiple": 1}
    # Not config.tie_word_embeddings: transformers leaves a head of another content untied.
    return family, {**vocabulary, **family.to_ours(config), "tie_head": has_tied_head(model)}


def load_causal_lm(source: str) -> Any:
    """Loads the ``transformers`` model of a hub name or folder, in float32.

    Raises:
        ValueError: see ``load_pretrained``.
    """
    other = "the folder of a saved causal language model: GPT-2, LLaMA, Qwen2, Qwen3 or GPT-NeoX"
    return load_pretrained(source, repr(source), other=other)
