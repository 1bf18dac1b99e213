"""The sizes and styles that every decoder shares."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from lightning_models.layers.attention import Backend


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """What every model of sequences knows of its data.

    Raises:
        ValueError: If a size is below 1; the message names key and value.
    """

    dials: ClassVar[Mapping[str, str]] = {}
    """Fields that decide how much a trained model computes and leave its weights as they are, with
    the symbol of each: ``evaluate.py sweep`` turns those that are declared here."""

    vocab_size: int
    """V before padding; the command line takes it from the data (``data.vocab_size``)."""
    block_size: int
    """Longest sequence, in tokens; the command line takes it from ``data.block_size``."""
    vocab_multiple: int = 64
    """The vocabulary is padded to a multiple of this (matrix units want 64); 1: no padding."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Whether blocks compute their activations again in the backward pass, to save memory;
    selective: all but matrix products and attention, which are kept."""

    def __post_init__(self) -> None:
        """Checks choices and ranges."""
        check_fields(self)
        for key in ("vocab_size", "block_size", "vocab_multiple"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least 1")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: vocab_size rounded up to vocab_multiple."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def position_limit(self) -> int | None:
        """Most positions that the network has; None: it has no limit of its own."""
        return None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(SequenceConfig):
    """Shape and style of a decoder-only network; methods inherit it and add their own fields.

    Raises:
        ValueError: If sizes do not fit together; the message names key, value and cure.
    """

    num_layers: int = 12
    """L, number of blocks."""
    dim: int = 768
    """D, width of the residual stream."""
    num_heads: int = 12
    """H, attention heads; must divide dim."""
    ffn_dim: int | None = None
    """Hidden width of the feed-forward layer; null: 4 D, for swiglu 8/3 D rounded up to 32."""
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
    """Sliding attention window in tokens, the query included; null: full causal attention."""
    dropout: float = 0.0
    """Dropout probability on embeddings and on what each sub-layer adds."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""
    attention_backend: Backend = "auto"
    """Attention kernel; math is the slow reference the others are tested against."""

    def __post_init__(self) -> None:
        """Checks choices and ranges, and that the sizes fit together."""
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
        """R, channels of each head that rotary positions turn."""
        return self.head_dim

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
        """block_size where positions are learned; None for rotary ones."""
        return self.block_size if self.positions == "learned" else None


def check_fields(config: Any) -> None:
    """Checks the values of a dataclass against their types; numbers are finite, in tuples too.

    A nan passes every comparison that looks for values out of a range.

    Raises:
        ValueError: If a value is none of the choices, of another type, or not finite.
    """
    for key, hint in get_type_hints(type(config)).items():
        fault = _fault(getattr(config, key), hint)
        if fault is not None:
            raise ValueError(f"{key} {fault}")


def _fault(value: Any, hint: Any) -> str | None:
    """Returns value and fault, for messages; None if it is of the type, or that is not checked."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return None if value in parts else f"({value}) is none of {', '.join(map(str, parts))}"
    if origin in (Union, UnionType):
        faults = [_fault(value, part) for part in parts]
        return None if None in faults else faults[0]
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else ()  # how many, the method checks
        return next((fault for item in items if (fault := _fault(item, parts[0]))), None)
    if hint in _TYPES:
        kinds, words = _TYPES[hint]
        belongs = isinstance(value, kinds) and (hint is bool or not isinstance(value, bool))
        finite = hint is not float or not belongs or abs(value) <= sys.float_info.max  # NaN is not
        return None if belongs and finite else f"({value!r}) {words}"
    return None


_TYPES: dict[Any, tuple[Any, str]] = {
    int: (int, "must be a whole number"),
    float: (int | float, "must be a finite number"),
    bool: (bool, "must be true or false"),
    str: (str, "must be a text"),
    NoneType: (NoneType, "must be null"),
}
