"""Model families of ``transformers`` that the plain decoder implements: options and tensor names.

Each family has one table for both directions, import from the hub and export to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_models.layers import DecoderConfig
from lightning_models.layers.blocks import embedding_scale
from lightning_models.transformer.network import TransformerConfig

Weights = Mapping[str, Tensor]
Options = dict[str, Any]
_Arrange = Callable[[list[Tensor], DecoderConfig], list[Tensor]]


@dataclass(frozen=True)
class HubFamily:
    """One architecture of ``transformers``."""

    model_type: str
    """Name of the architecture in ``transformers``."""
    to_ours: Callable[[Any], Options]
    """Converts a hub configuration to fields of TransformerConfig. Raises a ValueError that names
    unsupported options."""
    to_theirs: Callable[[TransformerConfig], Options]
    """Converts a TransformerConfig to fields of a hub configuration."""
    modules: Mapping[str, str]
    """Hub name of each module outside the blocks."""
    block: str
    """Format string of a block's name, with a field for its index."""
    block_modules: Mapping[str, tuple[str, ...]]
    """Hub names of each module in a block; the rows of several hub modules are stacked in one."""
    transposed: bool = False
    """Whether the hub stores linear weights of blocks as (in, out)."""
    qkv_by_head: bool = False
    """Whether the hub groups the rows of queries, keys and values by head first."""

    def import_weights(self, hub_weights: Weights, config: DecoderConfig) -> dict[str, Tensor]:
        """Returns the tensors of this project's network that a hub model has.

        Args:
            hub_weights: State dict of the hub model.
            config: Configuration of this project's network.
        """
        weights = {}
        for name, parts in self._names(config):
            for part in ("weight", "bias"):
                tensors = [
                    hub_weights[f"{source}.{part}"]
                    for source in parts
                    if f"{source}.{part}" in hub_weights
                ]
                if tensors:
                    weights[f"{name}.{part}"] = torch.cat([self._turn(name, x) for x in tensors])
                    if self.qkv_by_head and name.endswith(".qkv"):
                        # rows (H, 3, C) become (3, H, C)
                        weights[f"{name}.{part}"] = _swap(tensors[0], config.num_heads, 3)
        return weights

    def export_weights(
        self, weights: Weights, config: DecoderConfig, shapes: Weights
    ) -> dict[str, Tensor]:
        """Returns the hub model's tensors, with zeros for biases that this project's network lacks.

        Args:
            weights: State dict of this project's network.
            config: Configuration of this project's network.
            shapes: State dict of the hub model, on any device.
        """
        hub_weights: dict[str, Tensor] = {}
        for name, parts in self._names(config):
            for part in ("weight", "bias"):
                hub_keys = [f"{source}.{part}" for source in parts if f"{source}.{part}" in shapes]
                if not hub_keys:
                    continue
                tensor = weights.get(f"{name}.{part}")
                if tensor is None:
                    reference = weights["embedding.weight"]
                    hub_weights |= {key: reference.new_zeros(shapes[key].shape) for key in hub_keys}
                    continue
                if self.qkv_by_head and name.endswith(".qkv"):
                    tensor = _swap(tensor, 3, config.num_heads)
                tensor = self._turn(name, tensor)
                rows = [shapes[key].shape[0] for key in hub_keys]
                hub_weights |= dict(zip(hub_keys, tensor.split(rows), strict=True))
        embedding = f"{self.modules['embedding']}.weight"
        # hub models do not scale embeddings, so the factor goes into the weights
        hub_weights[embedding] = hub_weights[embedding] * embedding_scale(config)
        return {key: tensor.contiguous() for key, tensor in hub_weights.items()}

    def _names(self, config: DecoderConfig) -> list[tuple[str, tuple[str, ...]]]:
        """Returns the name of each module, with the hub names of its parts."""
        names: list[tuple[str, tuple[str, ...]]] = [
            (name, (hub_name,))
            for name, hub_name in self.modules.items()
            if name != "head" or not config.tie_head
        ]
        for index in range(config.num_layers):
            for name, hub_name in self.block_modules.items():
                prefix = self.block.format(index)
                names.append((f"blocks.{index}.{name}", tuple(f"{prefix}.{x}" for x in hub_name)))
        return names

    def _turn(self, name: str, tensor: Tensor) -> Tensor:
        turns = self.transposed and name.startswith("blocks.") and tensor.dim() == 2
        return tensor.t() if turns else tensor


def _swap(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Reorders rows (outer * inner * C) to (inner * outer * C)."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def check_importable(family: str, unsupported: Mapping[str, bool]) -> None:
    """Raises a ValueError that names the unsupported options that are present."""
    present = [name for name, is_present in unsupported.items() if is_present]
    if present:
        raise ValueError(f"{family} options that cannot be imported: {', '.join(present)}")


# ---- GPT-2

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_THEIR_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu"}


def _from_gpt2(config: Any) -> Options:
    check_importable(
        "GPT-2",
        {
            f"activation_function={config.activation_function}": config.activation_function
            not in _ACTIVATIONS,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
            "scale_attn_weights=false": not config.scale_attn_weights,
            "add_cross_attention": config.add_cross_attention,
        },
    )
    return {
        "block_size": config.n_positions,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "dim": config.n_embd,
        "ffn_dim": config.n_inner,
        "activation": _ACTIVATIONS[config.activation_function],
        "norm_eps": config.layer_norm_epsilon,
    }


def _to_gpt2(config: TransformerConfig) -> Options:
    return {
        "n_positions": config.block_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.dim,
        "n_inner": config.hidden_dim,
        "activation_function": _THEIR_ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
    }


GPT2 = HubFamily(
    "gpt2",
    _from_gpt2,
    _to_gpt2,
    {
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "transformer.h.{}",
    {
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "feed_forward_norm": ("ln_2",),
        "feed_forward.up": ("mlp.c_fc",),
        "feed_forward.down": ("mlp.c_proj",),
    },
    transposed=True,
)

# ---- LLaMA and Qwen

_TITLES = {"llama": "LLaMA", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Names of the entries of ``rope_scaling`` on the hub."""


def _rope(config: Any) -> Options:
    """Returns the rotary settings from a configuration of ``transformers`` 5 or 4."""
    settings: Options = dict(getattr(config, "rope_parameters", None) or {})
    settings.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    return settings


def _from_llama(config: Any) -> Options:
    rope, name = _rope(config), _TITLES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope_type = rope.get("rope_type", "default")
    check_importable(
        name,
        {
            f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
            f"rope_type={rope_type}": rope_type not in ("default", "llama3"),
            "attention_bias != mlp_bias": getattr(config, "attention_bias", False)
            != getattr(config, "mlp_bias", False),
        },
    )
    usual = head_dim * config.num_attention_heads == config.hidden_size
    return {
        "block_size": config.max_position_embeddings,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "head_size": None if usual else head_dim,
        "num_kv_heads": config.num_key_value_heads,
        "dim": config.hidden_size,
        "ffn_dim": config.intermediate_size,
        "norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "activation": "swiglu",
        "bias": getattr(config, "mlp_bias", False),
        "positions": "rope",
        "rope_base": rope["rope_theta"],
        "rope_scaling": tuple(rope[key] for key in _SCALING) if rope_type == "llama3" else None,
    }


def _from_qwen(config: Any) -> Options:
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    name = _TITLES[config.model_type]
    check_importable(name, {"layers with and without a window": len(layer_types) > 1})
    window = config.sliding_window if layer_types == {"sliding_attention"} else None
    return {**_from_llama(config), "window": window}


def _from_qwen2(config: Any) -> Options:
    return {**_from_qwen(config), "qkv_bias": True}


def _from_qwen3(config: Any) -> Options:
    return {**_from_qwen(config), "qk_norm": True}


def _their_scaling(config: TransformerConfig) -> Options:
    if config.rope_scaling is None:
        return {"rope_type": "default"}
    return {"rope_type": "llama3", **dict(zip(_SCALING, config.rope_scaling, strict=True))}


def _to_llama(config: TransformerConfig) -> Options:
    return {
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.key_value_heads,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_base, **_their_scaling(config)},
        "head_dim": config.head_dim,
        "attention_dropout": config.attention_dropout,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
    }


def _to_qwen(config: TransformerConfig) -> Options:
    options = _to_llama(config)
    del options["attention_bias"], options["mlp_bias"]
    if config.window is None:
        return options
    sliding = {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0}
    return options | sliding


_LLAMA_NAMES: dict[str, Any] = {
    "modules": {
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
    },
    "block": "model.layers.{}",
    "block_modules": {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "feed_forward_norm": ("post_attention_layernorm",),
        "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
        "feed_forward.down": ("mlp.down_proj",),
    },
}
LLAMA = HubFamily("llama", _from_llama, _to_llama, **_LLAMA_NAMES)
QWEN2 = HubFamily("qwen2", _from_qwen2, _to_qwen, **_LLAMA_NAMES)
_QWEN3_NORMS = {f"attention.{part}_norm": (f"self_attn.{part}_norm",) for part in "qk"}
_QWEN3_NAMES = {"block_modules": {**_LLAMA_NAMES["block_modules"], **_QWEN3_NORMS}}
QWEN3 = HubFamily("qwen3", _from_qwen3, _to_qwen, **{**_LLAMA_NAMES, **_QWEN3_NAMES})

# ---- GPT-NeoX (Pythia)


def _from_gpt_neox(config: Any) -> Options:
    rope = _rope(config)
    check_importable(
        "GPT-NeoX",
        {
            f"hidden_act={config.hidden_act}": config.hidden_act not in _ACTIVATIONS,
            f"rope_type={rope.get('rope_type')}": rope.get("rope_type", "default") != "default",
            "attention_bias=false": not config.attention_bias,
        },
    )
    return {
        "block_size": config.max_position_embeddings,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "dim": config.hidden_size,
        "ffn_dim": config.intermediate_size,
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "activation": _ACTIVATIONS[config.hidden_act],
        "bias": True,
        "positions": "rope",
        "rope_base": rope["rope_theta"],
        "rope_fraction": rope.get("partial_rotary_factor", 1.0),
        "parallel_residual": config.use_parallel_residual,
    }


def _to_gpt_neox(config: TransformerConfig) -> Options:
    return {
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": _THEIR_ACTIVATIONS[config.activation],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_base,
            "partial_rotary_factor": config.rope_fraction,
        },
        "use_parallel_residual": config.parallel_residual,
        "hidden_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }


GPT_NEOX = HubFamily(
    "gpt_neox",
    _from_gpt_neox,
    _to_gpt_neox,
    {
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    },
    "gpt_neox.layers.{}",
    {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("attention.query_key_value",),
        "attention.out": ("attention.dense",),
        "feed_forward_norm": ("post_attention_layernorm",),
        "feed_forward.up": ("mlp.dense_h_to_4h",),
        "feed_forward.down": ("mlp.dense_4h_to_h",),
    },
    qkv_by_head=True,
)

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, QWEN2, QWEN3, GPT_NEOX)}


def family_of(config: TransformerConfig) -> HubFamily:
    """Returns the family that computes the same as a plain decoder of this configuration.

    Raises:
        ValueError: If there is none. The message names the fields.
    """
    style = (config.positions, config.norm, config.activation == "swiglu")
    shared = config.key_value_heads != config.num_heads
    missing = {
        "tied head under init=ponderlm": config.tie_head and embedding_scale(config) != 1,
    }
    of_llama = {
        "head_size": config.head_size is not None,
        "qk_norm": config.qk_norm,
        "rope_scaling": config.rope_scaling is not None,
    }
    family = None
    if style == ("learned", "layer", False):
        family = GPT2
        missing |= {"window": config.window is not None, "num_kv_heads": shared, **of_llama}
        missing |= {"parallel_residual": config.parallel_residual}
    elif style == ("rope", "layer", False):
        family = GPT_NEOX
        missing |= {"window": config.window is not None, "num_kv_heads": shared, **of_llama}
    elif style == ("rope", "rms", True):
        plain = config.window is None and config.projection_bias == config.bias
        family = LLAMA if plain else QWEN2
        if config.qk_norm:
            family = QWEN3
            missing |= {"qk_norm next to biases": config.bias or config.projection_bias}
        missing |= {"rope_fraction": config.rope_fraction != 1}
        missing |= {"parallel_residual": config.parallel_residual}
        missing |= {"window or qkv_bias next to bias": not plain and config.bias}
    fields = [name for name, present in missing.items() if present]
    if family is None:
        fields = [f"positions={style[0]}, norm={style[1]}, activation={config.activation} together"]
    if family is None or fields:
        raise ValueError(f"no architecture of transformers has {', '.join(fields)}")
    return family
