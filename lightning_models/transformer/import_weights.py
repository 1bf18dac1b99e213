"""Weights of ``transformers`` GPT-2 and LLaMA models in our plain transformer."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

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


Weights = dict[str, Tensor]


def import_transformers(source: Any, **changes: Any) -> TransformerLM:
    """Returns a TransformerLM that computes what the given ``transformers`` model computes.

    Args:
        source: a model object, or the hub name or local folder of one (GPT-2 or LLaMA family).
        **changes: fields of TransformerConfig to set, for example ``attention_backend``.

    Raises:
        ValueError: if the architecture, or an option of it, is not one our blocks can express.
    """
    model = _load(source) if isinstance(source, str) else source
    kind = model.config.model_type
    if kind not in _FAMILIES:
        raise ValueError(f"model_type ({kind}) cannot be imported; known are {sorted(_FAMILIES)}")
    to_config, to_weights = _FAMILIES[kind]
    lm = TransformerLM(TransformerConfig(**{**to_config(model.config), **changes}))
    lm.configure_model()
    with torch.no_grad():
        lm.network.load_state_dict(to_weights(model.state_dict(), lm.config))
    return lm


def _load(source: str) -> Any:
    from transformers import AutoModelForCausalLM

    return read_pretrained(
        # weights_only and trust_remote_code: no code of the model's author is ever run.
        lambda: AutoModelForCausalLM.from_pretrained(
            source, weights_only=True, trust_remote_code=False
        ),
        "model",
        repr(source),
        other="the folder of a saved GPT-2 or LLaMA",
    )


def _refuse(family: str, options: dict[str, bool]) -> None:
    found = [name for name, present in options.items() if present]
    if found:
        raise ValueError(f"{family} options that cannot be imported: {', '.join(found)}")


def _gpt2_config(config: Any) -> dict[str, Any]:
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    _refuse(
        "GPT-2",
        {
            f"activation_function={config.activation_function}": config.activation_function
            not in activations,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
            "scale_attn_weights=false": not config.scale_attn_weights,
            "add_cross_attention": config.add_cross_attention,
        },
    )
    return {
        "vocab_size": config.vocab_size,
        "vocab_multiple": 1,
        "block_size": config.n_positions,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "dim": config.n_embd,
        "ffn_dim": config.n_inner,
        "activation": activations[config.activation_function],
        "norm_eps": config.layer_norm_epsilon,
        "tie_head": config.tie_word_embeddings,
    }


def _gpt2_weights(weights: Weights, config: TransformerConfig) -> Weights:
    """GPT-2 stores linear weights transposed (in, out)."""
    out = {
        "embedding.weight": weights["transformer.wte.weight"],
        "position.weight": weights["transformer.wpe.weight"],
    }
    names = {
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "ln_2": "feed_forward_norm",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.down",
    }
    for layer in range(config.num_layers):
        for theirs, ours in names.items():
            weight = weights[f"transformer.h.{layer}.{theirs}.weight"]
            out[f"blocks.{layer}.{ours}.weight"] = weight if weight.dim() == 1 else weight.t()
            out[f"blocks.{layer}.{ours}.bias"] = weights[f"transformer.h.{layer}.{theirs}.bias"]
    for part in ("weight", "bias"):
        out[f"norm.{part}"] = weights[f"transformer.ln_f.{part}"]
    if not config.tie_head:
        out["head.weight"] = weights["lm_head.weight"]
    return out


def _llama_config(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    _refuse(
        "LLaMA",
        {
            f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
            "attention_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
            "num_key_value_heads < num_attention_heads": config.num_key_value_heads
            != config.num_attention_heads,
            f"rope_type={rope.get('rope_type')}": rope.get("rope_type", "default") != "default",
        },
    )
    return {
        "vocab_size": config.vocab_size,
        "vocab_multiple": 1,
        "block_size": config.max_position_embeddings,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "dim": config.hidden_size,
        "ffn_dim": config.intermediate_size,
        "norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "activation": "swiglu",
        "bias": False,
        "positions": "rope",
        "rope_base": rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0),
        "tie_head": config.tie_word_embeddings,
    }


def _llama_weights(weights: Weights, config: TransformerConfig) -> Weights:
    """Separate query, key, value and gate, up matrices become one each."""
    out = {
        "embedding.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
    }
    names = {
        "input_layernorm": "attention_norm",
        "self_attn.o_proj": "attention.out",
        "post_attention_layernorm": "feed_forward_norm",
        "mlp.down_proj": "feed_forward.down",
    }
    fused = {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for theirs, ours in names.items():
            out[f"blocks.{layer}.{ours}.weight"] = weights[f"{prefix}.{theirs}.weight"]
        for ours, parts in fused.items():
            matrices = [weights[f"{prefix}.{part}.weight"] for part in parts]
            out[f"blocks.{layer}.{ours}.weight"] = torch.cat(matrices)
    if not config.tie_head:
        out["head.weight"] = weights["lm_head.weight"]
    return out


_FAMILIES: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[..., Weights]]] = {
    "gpt2": (_gpt2_config, _gpt2_weights),
    "llama": (_llama_config, _llama_weights),
}
