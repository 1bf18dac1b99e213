"""Configurations: the backbone of all methods that answer questions, and Thinking States."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_models.layers import SequenceConfig

Scalar = bool | int | float | str | None
Setting = Scalar | list[Scalar] | dict[str, Scalar]
"""A value in a backbone's own configuration; never an object, so nothing in it is instantiated."""
GridMode = Literal["left_align", "partial", "absolute"]


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig(SequenceConfig):
    """A causal language model that answers questions.

    With ``backbone``, shape and weights come from a trained model and the size fields are ignored.
    Without it, the model is a Qwen2 of these sizes with random weights.

    Raises:
        ValueError: If the sizes do not fit together. The message names key, value and cure.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Tokens that the method adds, with the ids vocab_size, vocab_size + 1, ..."""

    backbone: str | None = None
    """Trained GPT-2, Llama, Qwen2 or Qwen3 to start from: a name on the Hugging Face hub, or a
    folder that ``save_pretrained`` wrote. Its dropout acts in training. By default, null, weights
    are random."""
    architecture: dict[str, Setting] | None = None
    """The backbone's configuration in ``transformers``, which checkpoints keep to rebuild it
    without hub or folder. Without ``backbone``, weights are random."""
    special_rows_from: int | None = None
    """Id of the token whose trained embedding initialises the added tokens. The default, null, is
    the backbone's EOS."""
    num_layers: int = 4
    """L, decoder layers."""
    dim: int = 128
    """D, width of the residual stream."""
    num_heads: int = 4
    """H, attention heads; must divide dim."""
    num_kv_heads: int | None = None
    """Heads of keys and values; must divide num_heads. The default, null, is num_heads."""
    ffn_dim: int | None = None
    """Hidden width of the feed-forward layer. The default, null, is 4 D."""
    tie_head: bool = True
    """Whether the output head shares the embedding matrix."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies (1e6 in Qwen2.5, for long contexts)."""
    norm_eps: float = 1e-6
    """Epsilon added to the mean square inside the norms."""
    init_std: float = 0.02
    """Standard deviation of random weights."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""
    window: int | None = None
    """Sliding attention window of the backbone in tokens, including the query, so that texts longer
    than in training have no new distances. The default, null, is full causal attention. T and C
    always see their whole chunk and thought."""
    lm_on_query: bool = False
    """Whether the query's tokens are also predicted in training."""
    answer_prefix: tuple[int, ...] = ()
    """Unscored tokens that begin every answer; taken from the data (``data.answer_prefix``)."""
    step_separator: tuple[int, ...] = ()
    """Tokens before each step of a chain; taken from the data (``data.step_separator``)."""

    def __post_init__(self) -> None:
        """Checks choices and ranges, and that the sizes fit together."""
        super().__post_init__()
        for key in ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "window"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least 1")
        for key in ("rope_base", "norm_eps", "init_std"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} ({getattr(self, key)}) must be above 0")
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"dim ({self.dim}) must be a multiple of 2 num_heads ({2 * self.num_heads}): "
                "rotary positions turn pairs of a head's channels"
            )
        if self.num_heads % self.key_value_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})"
            )
        if not 0.0 <= self.attention_dropout < 1.0:
            raise ValueError(f"attention_dropout ({self.attention_dropout}) must be in [0, 1)")

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values, with the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def added_positions(self) -> int:
        """Maximum number of positions that a method adds to a row beyond the tokens of its text."""
        return 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of a new embedding: the tokenizer's ids and the special tokens, rounded up."""
        rows = self.vocab_size + len(self.special_tokens)
        return -(-rows // self.vocab_multiple) * self.vocab_multiple

    def special_id(self, name: str) -> int:
        """Returns the id of one of ``special_tokens``."""
        return self.vocab_size + self.special_tokens.index(name)


@dataclass(frozen=True, kw_only=True)
class ThinkingStatesConfig(ReasoningConfig):
    """Thinking States (Latent Reasoning with Supervised Thinking States), in the paper's symbols.

    Raises:
        ValueError: If a layer does not exist, or as in ``ReasoningConfig``.
    """

    dials: ClassVar[Mapping[str, str]] = {"think": "thoughts", "max_thought_tokens": "thought"}
    special_tokens: ClassVar[tuple[str, ...]] = ("thought_end", "step", "thought_pad")
    """End of a thought, separator of two steps in a chunk, padding of thoughts below c tokens."""

    chunk_size: int = 8
    """c, tokens per chunk (8 was best on GSM8K)."""
    input_layer: int = 1
    """L^in, the number of layers after which the state is added."""
    output_layer: int | None = None
    """L^out, the number of layers after which T reads hidden states. The default, null, is L - 1,
    as in the paper."""
    grid: GridMode = "left_align"
    """How a query is divided if c does not divide its length: its first chunk is short
    (left_align), its last chunk is short (partial), or the answer's tokens fill up the last chunk
    (absolute, the paper's text)."""
    think_in_decode: bool = False
    """Whether chunks of the answer's tokens also think."""
    tie_thinking_head: bool = False
    """Whether T shares the backbone's unembedding. Otherwise it trains a copy."""
    thought_loss: Literal["token_mean", "chunk_sum"] = "token_mean"
    """L_T: the mean over all thought tokens, or the sum over a query's chunks of eq. 6."""
    thought_weight: float = 1.0
    """Weight of L_T, which is added to the loss of the answer."""
    trivial_weight: float = 1.0
    """Weight of trivial thoughts, the most frequent ones, within L_T."""
    prefill: Literal["speculative", "sequential"] = "speculative"
    """How the query is read at inference; both give the same result."""
    think: bool = True
    """Whether the model thinks at inference. Otherwise every thought is trivial, and T is not
    computed."""
    max_thought_tokens: int = 16
    """Maximum number of tokens of a thought at inference, its end not counted; longer ones are
    cut."""

    def __post_init__(self) -> None:
        """Checks choices, ranges and layers."""
        super().__post_init__()
        for key in ("chunk_size", "max_thought_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} ({getattr(self, key)}) must be at least 1")
        for key in ("thought_weight", "trivial_weight"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} ({getattr(self, key)}) must not be negative")
        if self.backbone is None and self.architecture is None:
            self.layers(self.num_layers)

    def layers(self, num_layers: int) -> tuple[int, int]:
        """Returns L^in and L^out for a backbone of ``num_layers`` layers.

        Raises:
            ValueError: Unless 0 <= L^in < L^out <= num_layers.
        """
        last = num_layers - 1 if self.output_layer is None else self.output_layer
        if not 0 <= self.input_layer < last <= num_layers:
            raise ValueError(
                f"input_layer ({self.input_layer}) must be at least 0 and below output_layer "
                f"({last}), which is at most the number of layers ({num_layers})"
            )
        return self.input_layer, last
