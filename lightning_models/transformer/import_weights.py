"""Weights of ``transformers`` models in our plain transformer."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_models.transformer.families import FAMILIES, HubFamily
from lightning_models.transformer.module import TransformerLM
from lightning_models.transformer.network import TransformerConfig

# ---- reading what transformers has saved


Read = TypeVar("Read")


def read_pretrained(read: Callable[[], Read], what: str, named: str, *, other: str) -> Read:
    """Returns what ``read`` does.

    Args:
        read: calls ``from_pretrained``; it must never run code of the model's author.
        what: it reads, for messages: 'model', 'tokenizer'.
        named: the option and its value, for messages.
        other: what else may be named, for messages.

    Raises:
        ValueError: if it fails, whatever damaged files make of the library; in a line.
    """
    try:
        return read()
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{named} is refused: its pickled weights contain more than tensors, which could "
            "run any code while loading. Use a model with .safetensors weights"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{named}: no {what} found (neither in a local folder of that name nor on the "
            f"hub); pass {other}"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{named}: the {what} cannot be read ({reason}); get it again, or pass {other}"
        ) from error


# ---- weights


def import_transformers(source: Any, **changes: Any) -> TransformerLM:
    """Returns a TransformerLM that computes what the given ``transformers`` model computes.

    Args:
        source: a model object, or the hub name or local folder of one (GPT-2, LLaMA, Qwen2 and
            GPT-NeoX families).
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
    family, options = describe(model.config)
    lm = TransformerLM(TransformerConfig(**{**options, **changes}))
    lm.configure_model()
    with torch.no_grad():
        lm.network.load_state_dict(family.import_weights(model.state_dict(), lm.config))
    return lm


def describe(config: Any) -> tuple[HubFamily, dict[str, Any]]:
    """Returns the family of a ``transformers`` configuration, and its fields of TransformerConfig.

    Raises:
        ValueError: see ``import_transformers``.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"model_type ({kind}) cannot be imported; known are {sorted(FAMILIES)}")
    family = FAMILIES[kind]
    vocabulary = {"vocab_size": config.vocab_size, "vocab_multiple": 1}
    return family, {
        **vocabulary,
        **family.to_ours(config),
        "tie_head": config.tie_word_embeddings,
    }


def load_causal_lm(source: str) -> Any:
    """Returns the ``transformers`` model of a hub name or folder; it runs no code of its author.

    Raises:
        ValueError: if it cannot be read, or lacks weights.
    """
    from transformers import AutoModelForCausalLM

    found: Any = read_pretrained(
        # weights_only and trust_remote_code: no code of the model's author is ever run.
        lambda: AutoModelForCausalLM.from_pretrained(
            source, weights_only=True, trust_remote_code=False, output_loading_info=True
        ),
        "model",
        repr(source),
        other="the folder of a saved GPT-2, LLaMA, Qwen2 or GPT-NeoX model",
    )
    model, info = found
    missing = sorted(info["missing_keys"])
    if missing:  # transformers draws them at random, and goes on
        raise ValueError(
            f"{source!r}: {len(missing)} weights are not in it ({missing[0]}); get it again, or "
            "name a causal language model"
        )
    return model
