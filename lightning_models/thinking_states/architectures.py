"""Families of backbones: the names of their modules, their shapes and weights."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_models.memory import TooLargeError
from lightning_models.thinking_states.config import ReasoningConfig
from lightning_models.transformer.pretrained import load_pretrained, read_pretrained


class Family(NamedTuple):
    """Names of a decoder family's modules and settings in ``transformers``.

    Attributes:
        layers: Decoder layers, in the model without its head.
        norm: Final norm, in the model without its head.
        attention: Self-attention of a layer.
        norms: Norms of a layer before attention and before the feed-forward part.
        attention_dropout: Dropout probability on attention weights.
    """

    layers: str = "layers"
    norm: str = "norm"
    attention: str = "self_attn"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    attention_dropout: str = "attention_dropout"


FAMILIES = {
    "gpt2": Family("h", "ln_f", "attn", ("ln_1", "ln_2"), "attn_pdrop"),
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
}
"""Families of backbones by their ``model_type``."""


OTHER = (
    "a folder that save_pretrained wrote, or set HF_HOME to a cache that holds it, or set backbone "
    "to null for random weights of the sizes given"
)
"""The cures of a backbone that cannot be loaded."""


ATTENTION = "sdpa"
"""PyTorch's kernels, flash attention among them; other implementations read masks differently."""


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary positions with fixed frequencies; others depend on the longest row read."""


_QWEN25 = {
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


KNOWN: dict[str, dict[str, Any]] = {
    "openai-community/gpt2": {"model_type": "gpt2"},  # the defaults of its configuration
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
"""Shapes of the papers' backbones, so that their size is known without their files."""


def architecture(config: ReasoningConfig) -> Any:
    """Returns the backbone's configuration in ``transformers``, which is read if necessary.

    Raises:
        ValueError: If the configuration cannot be read, is of no family in ``FAMILIES``, has layers
            without full self-attention, or rotary positions that are not in ``ROPE_TYPES``.
    """
    from transformers import AutoConfig

    name, settings, shape = config.backbone, config.architecture, None
    label = _named(config)
    if settings is None:
        settings = _from_sizes(config) if name is None else KNOWN.get(name)
    if settings is None:
        assert name is not None
        shape = read_pretrained(AutoConfig, name, "configuration", label, other=OTHER)
        settings = {"model_type": shape.model_type}
    family = settings.get("model_type", "qwen2")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"{label} is of the family {family}; it must be one of {', '.join(FAMILIES)}"
        )
    with _in_one_line(label):
        if shape is None:
            rest = {key: value for key, value in settings.items() if key != "model_type"}
            shape = AutoConfig.for_model(family, **rest)
        attention = set(getattr(shape, "layer_types", None) or ["full_attention"])
        ropes = _rope_types(shape)
    if getattr(shape, "add_cross_attention", False):
        attention.add("cross_attention")
    if attention != {"full_attention"}:
        raise ValueError(
            f"{label} has layers with {', '.join(sorted(attention))}; use a model with "
            "full_attention alone"
        )
    if not ropes <= set(ROPE_TYPES):
        raise ValueError(
            f"{label} has rotary positions of the rope_type {', '.join(sorted(ropes))}; use a "
            f"model with one of {', '.join(ROPE_TYPES)}, which do not depend on the longest row"
        )
    return shape


def _named(config: ReasoningConfig) -> str:
    """Returns the option that sets the backbone, as messages name it."""
    return "architecture" if config.backbone is None else f"backbone ({config.backbone})"


def _rope_types(shape: Any) -> set[str]:
    """Returns the types of rotary positions in a configuration, which may list them by layer."""
    rope = getattr(shape, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict) and "rope_type" in value]
    return {str(parameters.get("rope_type", "default")) for parameters in (rope, *nested)}


@contextlib.contextmanager
def _in_one_line(label: str) -> Iterator[None]:
    """Turns errors of ``transformers`` about a configuration into a ValueError of one line.

    Errors of networks that are too large for memory pass through, for the caller to report.
    """
    try:
        yield
    except (TooLargeError, RuntimeError, OverflowError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if "overflow" in reason:
            raise
        raise ValueError(
            f"{label} cannot be built by transformers ({type(error).__name__}: {reason[:200]}); "
            "correct the value, or use another backbone"
        ) from error


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


def build_causal_lm(shape: Any, config: ReasoningConfig) -> nn.Module:
    """Builds a causal model with random float32 weights.

    Args:
        shape: Configuration in ``transformers``.
        config: Our configuration, which messages name.

    Raises:
        ValueError: If ``transformers`` cannot build a model from these values.
    """
    from transformers import AutoModelForCausalLM

    with _in_one_line(_named(config)):
        model: nn.Module = AutoModelForCausalLM.from_config(
            shape, attn_implementation=ATTENTION, dtype=torch.float32
        )
    return model


def load_causal_lm(config: ReasoningConfig) -> nn.Module:
    """Loads the trained causal LM named by ``config.backbone``, in float32.

    Raises:
        ValueError: If the model cannot be loaded, or lacks weights.
    """
    assert config.backbone is not None
    label = f"backbone ({config.backbone})"
    model: nn.Module = load_pretrained(
        config.backbone, label, other=OTHER, attn_implementation=ATTENTION
    )
    return model
