"""Building blocks of every network, in plain PyTorch and independent of any method.

Letters used in shapes and formulas throughout the project:

====== =========================================================================
B      batch (rows)
T      tokens of a row (queries of an attention)
N      keys of an attention; residual streams in Thoughtbubbles
D      width of the residual stream (``dim``)
H      attention heads
G      heads of keys and values (H unless queries share them)
C      channels of one head (D / H)
V      vocabulary (padded, see ``SequenceConfig.padded_vocab_size``)
L      layers
K      thinking steps
S      sentences
M      memory slots
Z      latent vectors
====== =========================================================================
"""

from lightning_models.layers.attention import Backend, attend
from lightning_models.layers.blocks import (
    Block,
    FeedForward,
    OutputProjection,
    Rope,
    SelfAttention,
    apply_rope,
    initialise,
    make_norm,
    rope_tables,
    segment_logsumexp,
    segment_max,
    segment_sum,
)
from lightning_models.layers.branches import Branches, first_alike
from lightning_models.layers.config import DecoderConfig, SequenceConfig
from lightning_models.layers.kv_cache import KVCache, LayerCache
from lightning_models.layers.recording import record, recording, wants

__all__ = [
    "Backend",
    "Block",
    "Branches",
    "DecoderConfig",
    "FeedForward",
    "KVCache",
    "LayerCache",
    "OutputProjection",
    "Rope",
    "SelfAttention",
    "SequenceConfig",
    "apply_rope",
    "attend",
    "first_alike",
    "initialise",
    "make_norm",
    "record",
    "recording",
    "rope_tables",
    "segment_logsumexp",
    "segment_max",
    "segment_sum",
    "wants",
]
