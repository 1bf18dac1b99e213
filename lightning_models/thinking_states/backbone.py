"""A transformers causal language model of the Qwen2 family, run layer by layer.

Its modules are called, not copied, so that a state can be added behind one layer and hidden states
be read behind another (eq. 1 and 2), with or without a cache and with its own gradient
checkpointing.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_models.thinking_states.config import ReasoningConfig
from lightning_models.thinking_states.pretrained import (
    architecture,
    build_causal_lm,
    load_causal_lm,
)


class Hidden(NamedTuple):
    """What the backbone computes of tokens.

    Attributes:
        last: Behind the final norm, what the head reads (B, T, D).
        tapped: Behind the layer that was asked for, before any norm (B, T, D); None without.
    """

    last: Tensor
    tapped: Tensor | None


class Backbone(nn.Module):
    """Embedding, layers, final norm and head of a causal language model.

    The embedding is widened to the tokens that the method adds; where weights were trained, their
    rows begin as copies of another token's (``special_rows_from``), else at random.

    Args:
        config: What to build; with ``backbone`` and without ``architecture`` trained weights are
            loaded (never on the meta device).

    Raises:
        ValueError: The backbone cannot be loaded, or is not of the Qwen2 family.
    """

    def __init__(self, config: ReasoningConfig) -> None:
        super().__init__()
        self.shape = architecture(config)
        trained = config.backbone is not None and config.architecture is None
        on_meta = torch.empty(0).device.type == "meta"
        if trained and not on_meta:
            causal: Any = load_causal_lm(config)
            self.shape = causal.config
        else:
            causal = build_causal_lm(config, self.shape)
        self._widen(causal, config)
        if trained and not on_meta:
            self._copy_special_rows(causal, config)
        self.checkpointed = config.gradient_checkpointing
        if self.checkpointed:
            new = hasattr(causal, "activation_checkpointing_enable")
            name = "activation_checkpointing_enable" if new else "gradient_checkpointing_enable"
            getattr(causal, name)({"use_reentrant": False})
        self.model: Any = causal.model
        self.head = None if self.shape.tie_word_embeddings else causal.lm_head

    def _widen(self, causal: Any, config: ReasoningConfig) -> None:
        """Gives every special token a row in embedding and head."""
        first, count = config.vocab_size, len(config.special_tokens)
        rows = self.shape.vocab_size
        if first > rows:
            raise ValueError(
                f"vocab_size ({first}) is more than the {rows} rows of the backbone's embedding; "
                "take the tokenizer that belongs to it (data.tokenizer)"
            )
        if first + count > rows:
            causal.resize_token_embeddings(config.padded_vocab_size, mean_resizing=False)
            self.shape.vocab_size = config.padded_vocab_size

    def _copy_special_rows(self, causal: Any, config: ReasoningConfig) -> None:
        copied_id = config.special_rows_from
        if copied_id is None:
            copied_id = self.shape.eos_token_id
        if not isinstance(copied_id, int):
            raise ValueError(
                f"backbone ({config.backbone}) names no single end-of-text token; set "
                "special_rows_from to the id whose embedding the added tokens begin with"
            )
        first, count = config.vocab_size, len(config.special_tokens)
        with torch.no_grad():
            for layer in {causal.get_input_embeddings(), causal.get_output_embeddings()}:
                layer.weight[first : first + count] = layer.weight[copied_id]

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.shape.num_hidden_layers)

    @property
    def dim(self) -> int:
        """D."""
        return int(self.shape.hidden_size)

    @property
    def output_matrix(self) -> Tensor:
        """The unembedding (V, D)."""
        head = self.model.embed_tokens if self.head is None else self.head
        weight: Tensor = head.weight
        return weight

    def architecture(self) -> dict[str, Any]:
        """Returns plain values from which a backbone of this shape is built again."""
        found: dict[str, Any] = self.shape.to_diff_dict()
        return {key: value for key, value in found.items() if key not in _NOT_SHAPE}

    def copy_of_layer(self, number: int) -> nn.Module:
        """Returns an independent copy of one layer, which caches its keys in the first place."""
        layer: Any = copy.deepcopy(self.model.layers[number])
        layer.self_attn.layer_idx = 0
        layer.gradient_checkpointing = False
        copied: nn.Module = layer
        return copied

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings (..., D) of ids (...)."""
        embeddings: Tensor = self.model.embed_tokens(ids)
        return embeddings

    def rotary(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines (B, T, C) of positions (B, T) in the dtype of ``h``."""
        tables: tuple[Tensor, Tensor] = self.model.rotary_emb(h, positions)
        return tables

    def forward(
        self,
        h: Tensor,
        positions: Tensor,
        *,
        mask: Tensor | None = None,
        cache: Any = None,
        state: Tensor | None = None,
        state_layer: int = 0,
        tap_layer: int | None = None,
    ) -> Hidden:
        """Returns the hidden states of tokens.

        Args:
            h: embeddings (B, T, D).
            positions: (B, T) int64.
            mask: (B, 1, T, N) bool, true where a query may see a key (those of the cache first);
                None: causal, which needs an empty cache or a single query.
            cache: a transformers cache, extended in place; None: no cache.
            state: S, added behind ``state_layer`` layers (B, T, D); None: nothing.
            state_layer: L^in.
            tap_layer: number of layers behind which hidden states are returned, too.
        """
        tables = self.rotary(h, positions)
        tapped = None
        for number in range(self.num_layers + 1):
            if state is not None and number == state_layer:
                h = h + state
            if number == tap_layer:
                tapped = h
            if number < self.num_layers:
                h = self.model.layers[number](
                    h,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=cache is not None,
                    position_embeddings=tables,
                )
        return Hidden(self.model.norm(h), tapped)


_NOT_SHAPE = frozenset(
    {"architectures", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)


def new_cache() -> Any:
    """Returns an empty cache of keys and values."""
    from transformers import DynamicCache

    return DynamicCache()


def causal_mask(real: Tensor, queries: int) -> Tensor:
    """Returns the mask (B, 1, T, N) of the last T of N tokens, padding among them.

    A padding token sees itself, so that no row of the softmax is empty.

    Args:
        real: (B, N) bool, false on padding.
        queries: T.
    """
    keys = torch.arange(real.shape[1], device=real.device)
    rows = keys[-queries:, None]
    seen = (keys <= rows) & real[:, None, :] | (keys == rows)
    return seen[:, None]
