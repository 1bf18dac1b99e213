"""Weights of ``transformers`` models in our plain transformer, and back."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_models.transformer.families import FAMILIES, Family, family_of
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
    if getattr(model.config, "recurrent_model", False):
        raise ValueError(
            "config.json has recurrent_model: these are weights of the PonderLM family, whose own "
            "code takes further steps; name the method, with --method ponderlm2 for example"
        )
    family, options = describe(model.config)
    lm = TransformerLM(TransformerConfig(**{**options, **changes}))
    lm.configure_model()
    with torch.no_grad():
        lm.network.load_state_dict(family.import_weights(model.state_dict(), lm.config))
    return lm


def describe(config: Any) -> tuple[Family, dict[str, Any]]:
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

    model, info = read_pretrained(
        # weights_only and trust_remote_code: no code of the model's author is ever run.
        lambda: AutoModelForCausalLM.from_pretrained(
            source, weights_only=True, trust_remote_code=False, output_loading_info=True
        ),
        "model",
        repr(source),
        other="the folder of a saved GPT-2, LLaMA, Qwen2 or GPT-NeoX model",
    )
    missing = sorted(info["missing_keys"])
    if missing:  # transformers draws them at random, and goes on
        raise ValueError(
            f"{source!r}: {len(missing)} weights are not in it ({missing[0]}); get it again, or "
            "name a causal language model"
        )
    return model


# ---- the other way


def export_transformers(lm: TransformerLM, folder: Path, **options: Any) -> str:
    """Writes the ``transformers`` model that computes what a plain decoder computes.

    Args:
        lm: the decoder; methods that derive from it compute something else.
        folder: gets config.json, generation_config.json and model.safetensors.
        **options: fields of the configuration, for example ``eos_token_id``.

    Returns:
        The name of its architecture there.

    Raises:
        ValueError: if no architecture of ``transformers`` expresses it.
    """
    from transformers import AutoConfig

    family = family_of(lm.config)
    fields = {
        "vocab_size": lm.config.padded_vocab_size,
        "tie_word_embeddings": lm.config.tie_head,
        **family.to_theirs(lm.config),
        **options,
    }
    config = AutoConfig.for_model(family.model_type, **fields)
    weights = lm.network.state_dict()
    save_causal_lm(folder, config, lambda like: family.export_weights(weights, lm.config, like))
    return family.model_type


def save_causal_lm(
    folder: Path, config: Any, weights_for: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """Writes a causal language model of ``transformers`` as ``save_pretrained`` does.

    Args:
        folder: where to.
        config: its configuration.
        weights_for: returns its weights (tied ones once) for its state dict without numbers.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = weights_for(model.state_dict())
    model.config.dtype = next(iter(weights.values())).dtype
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not empty, empty
    model.save_pretrained(folder)
