"""Base configurations of all decoders."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from lightning_models.layers.attention import Backend


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """Base configuration of all sequence models.

    Raises:
        ValueError: If a size is below 1. The message names key and value.
    """

    dials: ClassVar[Mapping[str, str]] = {}
    """Fields that change the compute of a trained model but not its weights, with their symbols.
    ``evaluate.py sweep`` can vary the fields declared here."""

    vocab_size: int
    """V before padding. The command line takes it from the data (``data.vocab_size``)."""
    block_size: int
    """Maximum sequence length in tokens. The command line takes it from ``data.block_size``."""
    vocab_multiple: int = 64
    """Multiple that the vocabulary is padded to; matrix units prefer 64, and 1 means no padding."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Whether the backward pass recomputes the activations of blocks to save memory; selective
    keeps the results of matrix products and attention."""

    def __post_init__(self) -> None:
        check_fields(self)
        for key in ("vocab_size", "block_size", "vocab_multiple"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least 1")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: vocab_size rounded up to vocab_multiple."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def position_limit(self) -> int | None:
        """Maximum number of positions of the network, or None if it has no limit."""
        return None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(SequenceConfig):
    """Shape and style of a decoder-only network; methods inherit it and add their own fields.

    Raises:
        ValueError: If sizes do not fit together. The message names key, value and cure.
    """

    num_layers: int = 12
    """L, the number of blocks."""
    dim: int = 768
    """D, width of the residual stream."""
    num_heads: int = 12
    """H, attention heads; must divide dim."""
    ffn_dim: int | None = None
    """Hidden width of the feed-forward layer. If null, 4 D, or for swiglu 8/3 D rounded up to a
    multiple of 32."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm (GPT style) or RMSNorm (LLaMA style), before each sub-layer and at the end."""
    norm_eps: float = 1e-5
    """Added to the variance inside the norms."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Feed-forward non-linearity; gelu_tanh is the approximation GPT-2 was trained with."""
    bias: bool = True
    """Whether linear layers and LayerNorms have biases."""
    positions: Literal["learned", "rope"] = "learned"
    """Learned absolute positions added to the embeddings, or rotary ones inside attention."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    tie_head: bool = True
    """Whether the output head is the embedding matrix."""
    init: Literal["gpt2", "ponderlm"] = "gpt2"
    """gpt2: N(0, init_std), outputs / sqrt(2 L); ponderlm: N(0, 2/(5 D)) cut at 3 sigma, and
    embeddings scaled by sqrt(2.5 D) to unit variance."""
    init_std: float = 0.02
    """Standard deviation of the gpt2 initialisation; unused by ponderlm."""
    window: int | None = None
    """Sliding attention window in tokens, including the query. Null means full causal attention."""
    dropout: float = 0.0
    """Dropout probability on embeddings and on the output of each sub-layer."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""
    attention_backend: Backend = "auto"
    """Attention kernel; math is the slow reference the others are tested against."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("num_layers", "dim", "num_heads"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least 1")
        if self.dim % self.num_heads:
            fix = max(self.num_heads, self.dim // self.num_heads * self.num_heads)
            raise ValueError(
                f"num_heads ({self.num_heads}) must divide dim ({self.dim}); try dim={fix}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            fix = 2 * self.num_heads * max(1, self.head_dim // 2)
            raise ValueError(
                f"dim / num_heads ({self.head_dim}) must be even for positions=rope; try dim={fix}"
            )
        for key in ("ffn_dim", "norm_eps", "rope_base", "init_std"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ValueError(f"{key} ({value}) must be above 0")
        for key in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"{key} ({getattr(self, key)}) must be in [0, 1)")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window ({self.window}) must be at least 1, or null for full attention"
            )

    @property
    def head_dim(self) -> int:
        """C, channels of one attention head."""
        return self.dim // self.num_heads

    @property
    def key_value_heads(self) -> int:
        """G, heads of keys and values."""
        return self.num_heads

    @property
    def rotary_dim(self) -> int:
        """R, the number of rotated channels of each head."""
        return self.head_dim

    @property
    def rotary_scaling(self) -> tuple[float, ...] | None:
        """Numbers of ``blocks.stretched`` for rotary frequencies; None leaves them unchanged."""
        return None

    @property
    def norms_queries(self) -> bool:
        """Whether an RMSNorm over the channels of each head reads queries and keys."""
        return False

    @property
    def projection_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.bias

    @property
    def residual_in_parallel(self) -> bool:
        """Whether attention and feed-forward layer of a block read the same stream."""
        return False

    @property
    def residual_depth(self) -> int:
        """Blocks that write into the residual stream, which sets their initial scale."""
        return self.num_layers

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the feed-forward layer, with the default resolved."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        if self.activation == "swiglu":
            return math.ceil(8 * self.dim / 3 / 32) * 32
        return 4 * self.dim

    @property
    def position_limit(self) -> int | None:
        """block_size for learned positions, None for rotary ones."""
        return self.block_size if self.positions == "learned" else None


def check_fields(config: Any) -> None:
    """Checks the values of a dataclass against their types, and that all numbers are finite.

    This includes numbers in tuples. A nan would pass every comparison with a range.

    Raises:
        ValueError: If a value is not among the choices, has another type or is not finite.
    """
    for key, hint in get_type_hints(type(config)).items():
        fault = _fault(getattr(config, key), hint)
        if fault is not None:
            raise ValueError(f"{key} {fault}")


def _fault(value: Any, hint: Any) -> str | None:
    """Returns the value and its fault for a message, or None if there is no fault."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return None if value in parts else f"({value}) is not one of {', '.join(map(str, parts))}"
    if origin in (Union, UnionType):
        faults = [_fault(value, part) for part in parts]
        return None if None in faults else faults[0]
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else ()  # the method checks their count
        return next((fault for item in items if (fault := _fault(item, parts[0]))), None)
    if hint in _TYPES:
        types, message = _TYPES[hint]
        matches = isinstance(value, types) and (hint is bool or not isinstance(value, bool))
        finite = hint is not float or not matches or abs(value) <= sys.float_info.max  # not for nan
        return None if matches and finite else f"({value!r}) {message}"
    return None


_TYPES: dict[Any, tuple[Any, str]] = {
    int: (int, "must be a whole number"),
    float: (int | float, "must be a finite number"),
    bool: (bool, "must be true or false"),
    str: (str, "must be a text"),
    NoneType: (NoneType, "must be null"),
}
