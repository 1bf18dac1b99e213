"""Backbones of the Qwen2 family: from sizes, from the hub or a folder, from a checkpoint."""

from pathlib import Path
from typing import Any

from torch import nn

from lightning_models.thinking_states.config import ReasoningConfig

FAMILY = "qwen2"
ATTENTION = "sdpa"
"""PyTorch's own kernels, flash attention among them; the others read masks in another way."""
_QWEN25 = {
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN25
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen/Qwen2.5-1.5B": _QWEN25
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
}
"""Shapes of the paper's backbones, so that their size is known without their files."""


def architecture(config: ReasoningConfig) -> Any:
    """Returns the transformers configuration of the backbone, loading it where it must.

    Raises:
        ValueError: if it cannot be loaded, or is not of the Qwen2 family with full attention.
    """
    from transformers import Qwen2Config

    if config.architecture is not None:
        settings: dict[str, Any] = dict(config.architecture)
        found = Qwen2Config(**settings)
    elif config.backbone in KNOWN:
        found = Qwen2Config(**KNOWN[config.backbone])
    elif config.backbone is not None:
        found = _load(config.backbone, "configuration")
    else:
        found = Qwen2Config(**_from_sizes(config))
    kinds = set(getattr(found, "layer_types", None) or ["full_attention"])
    if found.model_type != FAMILY or kinds != {"full_attention"}:
        raise ValueError(
            f"backbone ({config.backbone}) is of the family {found.model_type} with "
            f"{', '.join(sorted(kinds))}; it must be {FAMILY} with full attention, e.g. "
            f"{', '.join(KNOWN)}"
        )
    return found


def _from_sizes(config: ReasoningConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": 4 * config.dim if config.ffn_dim is None else config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.key_value_heads,
        "max_position_embeddings": config.block_size,
        "tie_word_embeddings": config.tie_head,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "attention_dropout": config.attention_dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
    }


def build_causal_lm(config: ReasoningConfig, shape: Any) -> nn.Module:
    """Returns a transformers causal LM of that configuration with random weights, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(
        shape, attn_implementation=ATTENTION, dtype=torch.float32
    )
    return model


def load_causal_lm(config: ReasoningConfig) -> nn.Module:
    """Returns the trained causal LM that ``config.backbone`` names, in float32.

    Raises:
        ValueError: if it cannot be loaded.
    """
    assert config.backbone is not None
    model: nn.Module = _load(config.backbone, "weights")
    return model


def _load(name: str, what: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    place = Path(name).expanduser()
    source = str(place) if place.is_dir() else name
    try:
        if what == "configuration":
            return AutoConfig.from_pretrained(source)
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation=ATTENTION
        )
    except Exception as error:  # whatever the libraries on the way to the hub raise
        reason = (str(error).strip().splitlines() or ["no message"])[0][:200]
        raise ValueError(
            f"backbone ({name}): its {what} cannot be loaded ({type(error).__name__}: {reason}). "
            "Name a folder that save_pretrained wrote, or set HF_HOME to a cache that holds it, or "
            "set backbone to null for random weights of the sizes given"
        ) from error
