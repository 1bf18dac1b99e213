"""The backbone: a causal language model of ``transformers``, run layer by layer.

Its modules are called, not copied, so that a state can be added after one layer and hidden states
read after another (eq. 1 and 2), with or without a cache and gradient checkpointing. Families
differ in the names of their modules (``architectures.FAMILIES``) and in positions: GPT-2 adds
learned ones to the embeddings, the others rotate queries and keys in layers.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_models.flops import mean_keys, training_flops
from lightning_models.runtime import on_device
from lightning_models.thinking_states.architectures import (
    FAMILIES,
    architecture,
    build_causal_lm,
    load_causal_lm,
)
from lightning_models.thinking_states.config import ReasoningConfig

Tables = tuple[Tensor, Tensor] | None
"""Cosines and sines of positions (B, T, C), or None if positions are learned."""


MAX_ADDED = 0.1
"""Maximum share of a tokenizer's entries that have no row in the backbone's embedding, relative to
its rows. With more of them the tokenizer belongs to another model."""


class HiddenStates(NamedTuple):
    """Hidden states of tokens.

    Attributes:
        last: After the final norm, read by the head (B, T, D).
        tapped: After ``tap_layer`` layers, before any norm (B, T, D), or None without that layer.
        layers: Inputs of all layers at one token of each row, and its state after the final norm
            (L + 1, B, D), or None without such tokens.
        latents: Inputs that were states (B, m, D), or None in rows without latents.
    """

    last: Tensor
    tapped: Tensor | None = None
    layers: Tensor | None = None
    latents: Tensor | None = None


class Backbone(nn.Module):
    """Embedding, layers, final norm and head of a causal language model of ``FAMILIES``.

    The embedding is widened by the tokens that the method adds, and by the few entries that a
    tokenizer may have beyond it. In a trained backbone the added rows are copies of another token's
    row (``special_rows_from``), otherwise they are random.

    Args:
        config: Configuration of the model. With ``backbone`` and without ``architecture``, trained
            weights are loaded (never on the meta device).

    Raises:
        ValueError: If the backbone cannot be loaded, is of another family, or has fewer learned
            positions than rows have tokens.
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
            causal = build_causal_lm(self.shape, config)
        rows = self.shape.vocab_size
        self._widen(causal, config)
        if trained and not on_meta:
            self._copy_rows(causal, config, rows)
        self.window = config.window
        self.config = config
        self.family = FAMILIES[self.shape.model_type]
        self.model: Any = causal.base_model
        longest = config.block_size + config.added_positions
        if self.position_limit is not None and longest > self.position_limit:
            added = f" and {config.added_positions} added ones" if config.added_positions else ""
            fitting = self.position_limit - config.added_positions
            cure = f"set data.block_size to {fitting} or less" if fitting > 0 else ""
            lower = "lower max_chain_tokens or eval_latents" if config.added_positions else ""
            raise ValueError(
                f"block_size ({config.block_size}){added} is more than the {self.position_limit} "
                f"learned positions of the backbone; {', or '.join(filter(None, (cure, lower)))}"
            )
        self.head = None if self.shape.tie_word_embeddings else causal.lm_head

    def _widen(self, causal: Any, config: ReasoningConfig) -> None:
        """Adds rows to embedding and head for tokens that have none.

        These are the special tokens, and entries that were added to a tokenizer but not to its
        model.
        """
        needed, rows = config.vocab_size + len(config.special_tokens), self.shape.vocab_size
        if config.vocab_size > rows * (1 + MAX_ADDED):
            raise ValueError(
                f"vocab_size ({config.vocab_size}) is more than the {rows} rows of the backbone's "
                "embedding; use the tokenizer that belongs to it (data.tokenizer)"
            )
        if needed > rows:
            causal.resize_token_embeddings(config.padded_vocab_size, mean_resizing=False)
            self.shape.vocab_size = config.padded_vocab_size

    def _copy_rows(self, causal: Any, config: ReasoningConfig, trained: int) -> None:
        """Copies the row of one token to all rows added to the trained ones.

        Args:
            causal: The widened model.
            config: Configuration, which names the token.
            trained: Number of rows of the published embedding.
        """
        first, end = config.vocab_size, config.vocab_size + len(config.special_tokens)
        added = slice(min(first, trained), end)
        if added.start == added.stop:
            return
        copied_id = config.special_rows_from
        if copied_id is None:
            copied_id = self.shape.eos_token_id
        if not isinstance(copied_id, int):
            raise ValueError(
                f"backbone ({config.backbone}) names no single end-of-text token; set "
                "special_rows_from to the id whose embedding the added tokens begin with"
            )
        if first > trained:
            warnings.warn(
                f"vocab_size ({first}) is more than the {trained} rows of the backbone's "
                f"embedding: ids {trained} to {first - 1} of the tokenizer begin with the row of "
                f"id {copied_id}, and are learned in training",
                stacklevel=2,
            )
        with torch.no_grad():
            for layer in {causal.get_input_embeddings(), causal.get_output_embeddings()}:
                layer.weight[added] = layer.weight[copied_id]  # (D,) to each row

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        layers: nn.ModuleList = getattr(self.model, self.family.layers)
        return layers

    @property
    def norm(self) -> nn.Module:
        """The final norm."""
        norm: nn.Module = getattr(self.model, self.family.norm)
        return norm

    @property
    def position_limit(self) -> int | None:
        """The number of learned positions, or None if positions are rotary."""
        learned = getattr(self.model, "wpe", None)
        return None if learned is None else int(learned.num_embeddings)

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
        head = self.model.get_input_embeddings() if self.head is None else self.head
        weight: Tensor = head.weight
        return weight

    def architecture(self) -> dict[str, Any]:
        """Returns plain values that rebuild a backbone of this shape."""
        fields = {*type(self.shape).__annotations__, "model_type"} - {"use_cache"}
        settings: dict[str, Any] = self.shape.to_diff_dict()
        return {key: value for key, value in settings.items() if key in fields}

    def copy_of_layer(self, index: int) -> nn.Module:
        """Returns an independent copy of one layer."""
        layer = copy.deepcopy(self.layers[index])
        getattr(layer, self.family.attention).layer_idx = 0  # its index in a one-layer cache
        return layer

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings (..., D) of ids (...)."""
        embeddings: Tensor = self.model.get_input_embeddings()(ids)
        return embeddings

    def enter(self, h: Tensor, positions: Tensor, longest: int | None = None) -> Tensor:
        """Returns the inputs of the first layer: embeddings, plus learned positions if any.

        Args:
            h: Embeddings (B, T, D).
            positions: Positions (B, T) or (1, T) int64.
            longest: Upper bound of the positions plus one, known without a device sync. Defaults to
                T, which holds in rows that begin at position 0.

        Raises:
            ValueError: If a position is beyond the learned ones.
        """
        limit = self.position_limit
        if limit is None:
            return h
        # the bound counts padding too, so that only a row near the limit waits for the device
        if (longest or positions.shape[1]) > limit and int(positions.max()) >= limit:
            raise ValueError(
                f"a context of {int(positions.max()) + 1} tokens is longer than the {limit} "
                "learned positions of the backbone; shorten the question, or lower "
                "max_new_tokens, max_chain_tokens or eval_latents"
            )
        entered: Tensor = self.model.drop(h + self.model.wpe(positions))  # as in its training
        return entered

    def rotary(self, h: Tensor, positions: Tensor) -> Tables:
        """Returns cosines and sines (B, T, C) of positions (B, T), or None if they are learned.

        Under autocast they are float32, otherwise of the dtype of ``h``, as queries and values are.
        """
        if self.position_limit is not None:
            return None
        if torch.is_autocast_enabled(h.device.type):
            h = h.new_empty(0, dtype=torch.promote_types(h.dtype, torch.float32))
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
        at: Tensor | None = None,
    ) -> HiddenStates:
        """Returns the hidden states of tokens.

        Args:
            h: Embeddings (B, T, D).
            positions: Positions (B, T) int64.
            mask: Keys that each query may see (B, 1, T, N) bool, cached keys first. Defaults to
                causal attention, for rows that are padded on the right only and an empty cache.
            cache: Cache of ``transformers``, extended in place. Nothing is cached without it.
            state: S, added after ``state_layer`` layers (B, T, D). Nothing is added by default.
            state_layer: L^in.
            tap_layer: Number of layers after which hidden states are returned as ``tapped``.
            at: Index of the token of each row (B,) int64 whose states are returned as ``layers``.

        Raises:
            ValueError: If a position is beyond the learned ones.
        """
        h = self.enter(h, positions, None if mask is None else mask.shape[-1])  # (B, T, D)
        tables = self.rotary(h, positions)  # the same in all layers
        if mask is None and self.window is not None and self.window < h.shape[1]:
            real = torch.ones(1, h.shape[1], dtype=torch.bool, device=h.device)
            mask = causal_mask(real, h.shape[1], self.window)  # (1, 1, T, T), of all rows
        tapped, picked = None, []
        rows = None if at is None else torch.arange(len(h), device=h.device)
        for index in range(self.num_layers + 1):
            if state is not None and index == state_layer:
                h = h + state  # (B, T, D)
            if index == tap_layer:
                tapped = h  # (B, T, D)
            if index < self.num_layers:
                if rows is not None:
                    picked.append(h[rows, at])  # (B, D)
                h = run_layer(self.layers[index], h, tables, mask, cache)
        last: Tensor = self.norm(h)  # (B, T, D)
        layers = None if rows is None else torch.stack([*picked, last[rows, at]])
        return HiddenStates(last, tapped, layers)


def run_layer(
    layer: nn.Module, h: Tensor, tables: Tables, mask: Tensor | None = None, cache: Any = None
) -> Tensor:
    """Returns the output (B, T, D) of a decoder layer; without a mask it is causal.

    Args:
        layer: Decoder layer of ``transformers``.
        h: Input of the layer (B, T, D).
        tables: Cosines and sines of the positions.
        mask: Keys that each query may see, see `Backbone.forward`.
        cache: Cache of ``transformers``, extended in place.
    """
    out: Tensor = layer(
        h,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=cache is not None,
        position_embeddings=tables,
    )
    return out


def causal_mask(real: Tensor, queries: int, window: int | None = None) -> Tensor:
    """Returns the mask (B, 1, T, N) bool of the last T of N columns, which may be padding.

    Padding sees itself, so that no row of the softmax is empty.

    Args:
        real: Whether each key is a token (B, N) bool, false on padding.
        queries: Number of queries, T.
        window: Maximum number of tokens that a query sees, including itself, without padding.
            Defaults to all tokens before it.
    """
    keys = torch.arange(real.shape[1], device=real.device)  # (N,)
    rows = keys[-queries:, None]  # (T, 1)
    visible = (keys <= rows) & real[:, None, :]  # (B, T, N)
    if window is not None:
        order = real.cumsum(dim=1)  # (B, N), padding repeats the count before it
        visible = visible & (order[:, -queries:, None] - order[:, None, :] < window)
    visible = visible | (keys == rows)
    return visible[:, None]  # (B, 1, T, N), one mask for all heads


ReplaceLatents = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Replaces latents (K, ..., D) before they are fed back, given the batch row of each latent and its
index within that row, both (K,) int64."""


class ReasoningNetwork(nn.Module):
    """A network around a backbone.

    A method that feeds latents back passes each one through ``feed_back``, and returns the latent
    that holds no thought from ``pause_latent``. An evaluation can therefore replace latents by
    setting ``replace_latents``, whose rows are the decoded prompts.

    Args:
        config: The configuration of the backbone.

    Attributes:
        replace_latents: Function that replaces latents. With None, the default, they are unchanged.
    """

    replace_latents: ReplaceLatents | None = None

    def __init__(self, config: ReasoningConfig) -> None:
        super().__init__()
        self.backbone = Backbone(config)

    @property
    def blocks(self) -> nn.ModuleList:
        """The backbone's layers."""
        return self.backbone.layers

    @property
    def attention_dropout(self) -> float:
        """Dropout probability on the backbone's attention weights."""
        return float(getattr(self.backbone.shape, self.backbone.family.attention_dropout))

    @property
    def output_matrix(self) -> Tensor:
        """The backbone's unembedding (V, D)."""
        return self.backbone.output_matrix

    def feed_back(
        self, latents: Tensor, indices: Tensor | int, rows: Tensor | None = None
    ) -> Tensor:
        """Returns latents as they are fed back, replaced if ``replace_latents`` is set.

        Args:
            latents: Latents (K, ..., D).
            indices: The index of each latent within its row, from 0 (K,) int64, or one for all.
            rows: The row of each latent (K,) int64. By default each row has one.
        """
        if self.replace_latents is None:
            return latents
        order = torch.arange(len(latents), device=latents.device)  # (K,)
        indices = torch.as_tensor(indices, device=latents.device).expand_as(order)
        return self.replace_latents(latents, order if rows is None else rows, indices)

    def pause_latent(self) -> Tensor | None:
        """Returns the latent (..., D) that holds no thought, or None if nothing is fed back."""
        return None


# ---- cache of keys and values


def new_cache() -> Any:
    """Returns an empty cache of keys and values."""
    from transformers import DynamicCache

    return DynamicCache()


class AnswerCache:
    """Keys and values of everything read so far; rows are padded on the left.

    Attributes:
        past: Cache of ``transformers``.
        real: Mask of the cached columns that hold a token (B, N) bool.
        lengths: Number of tokens read by each row, the position of the next one (B,) int64.
        pending: Tokens (P,) that are read once before any chosen ones: the answer's prefix.
    """

    def __init__(self, rows: int, device: torch.device, pending: tuple[int, ...] = ()) -> None:
        self.past: Any = new_cache()
        self.real = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.pending = on_device(pending, device, torch.int64)

    def select(self, rows: Tensor) -> None:
        """Keeps only ``rows`` (int64 indices), in that order."""
        self.past.batch_select_indices(rows)
        self.real, self.lengths = self.real[rows], self.lengths[rows]

    def drop(self, columns: int) -> None:
        """Removes the last ``columns`` columns, at least 1."""
        self.past.crop(-columns)
        self.lengths = self.lengths - self.real[:, -columns:].sum(dim=1)
        self.real = self.real[:, :-columns]

    def append(self, real: Tensor, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Appends the next t columns.

        Args:
            real: Mask of the columns that hold a token (B, t) bool.
            window: Maximum number of tokens that a query sees, see ``causal_mask``.

        Returns:
            Positions (B, t) int64, and the mask (B, 1, t, N + t) of `Backbone.forward`.
        """
        # (B, t): padding takes no position, it repeats the position of the token before it
        positions = (self.lengths[:, None] + real.cumsum(dim=1) - 1).clamp(min=0)
        self.real = torch.cat((self.real, real), dim=1)  # (B, N + t)
        self.lengths = self.lengths + real.sum(dim=1)  # (B,)
        return positions, causal_mask(self.real, real.shape[1], window)

    def next_inputs(self, tokens: Tensor) -> Tensor:
        """Returns the next inputs (B, t): the prefix in the first call, then the tokens (B,)."""
        if not len(self.pending):
            return tokens[:, None]
        pending, self.pending = self.pending, self.pending[:0]
        return pending.expand(len(tokens), -1)  # (B, P)


def read(
    backbone: Backbone, cache: AnswerCache, h: Tensor, real: Tensor | None = None, **taps: Any
) -> HiddenStates:
    """Returns the hidden states of the next t columns, and caches their keys and values.

    Args:
        backbone: The backbone of any method.
        cache: Keys and values read so far, extended in place.
        h: Embeddings (B, t, D).
        real: Mask of the columns that hold a token (B, t) bool. By default all do.
        **taps: State and layers, see `Backbone.forward`.
    """
    if real is None:
        real = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
    positions, mask = cache.append(real, backbone.window)
    hidden: HiddenStates = backbone(h, positions, mask=mask, cache=cache.past, **taps)
    return hidden


# ---- FLOPs


def layer_flops(backbone: Backbone, context: float) -> float:
    """Returns the FLOPs of one layer for a token that sees ``context`` keys."""
    layer = backbone.layers[0]
    attention: Any = getattr(layer, backbone.family.attention)
    width = backbone.shape.num_attention_heads * attention.head_dim
    # every matrix of a layer multiplies each token once; GPT-2's are not nn.Linear
    matrices = sum(weight.numel() for weight in layer.parameters() if weight.ndim == 2)
    return 2.0 * matrices + 4.0 * width * context


def head_flops(backbone: Backbone) -> float:
    """Returns the FLOPs of the logits of a token."""
    return 2.0 * backbone.output_matrix.numel()


def backbone_flops(
    backbone: Backbone,
    context: int,
    training: bool = False,
    silent: float = 0.0,
    reads: float = 1.0,
) -> float:
    """Returns the mean FLOPs per token of a row of ``context`` tokens, including its logits.

    In training, frozen matrices have no weight gradients.

    Args:
        backbone: The backbone whose sizes count.
        context: Number of tokens in the row.
        training: Whether to count a training step, with its backward pass.
        silent: Number of further positions, which have no logits.
        reads: Mean number of passes over these.
    """
    passes = 1.0 + silent * reads / context  # of a position through the layers, for each token
    keys = mean_keys(context + silent, backbone.window)
    layers = passes * backbone.num_layers * layer_flops(backbone, keys)
    total = layers + head_flops(backbone)
    if not training:
        return total
    frozen = passes * _frozen_flops(*backbone.layers.parameters())
    frozen += _frozen_flops(backbone.output_matrix)
    return training_flops(total, layers, backbone.config) - frozen


def _frozen_flops(*weights: Tensor) -> float:
    """Returns the FLOPs per position of the weight gradients that frozen matrices save."""
    return 2.0 * sum(
        weight.numel() for weight in weights if weight.ndim == 2 and not weight.requires_grad
    )
