"""A tiny random Qwen2 and tiny Thinking States, far from where training starts."""

from typing import Any

import torch
from torch import Tensor

from tests.reference import qwen2
from tests.reference.qwen2 import Shape
from tests.reference.thinking_states import Row, Setup, with_blocks

VOCAB, EOS = 19, 0
THOUGHT_EOS, SEPARATOR, PAD = 16, 17, 18

ROWS = [
    Row([0, 3, 4, 7, 9, 11, 2, 8], [[1, 2], [3], [4, 5, 6, 7]], [1, 3, 7], [12, 13, EOS]),
    Row([0, 9, 4, 4], [[8]], [2], [2, EOS]),
]
"""Two examples; in chunks of three from the right the first has three of them, the second two."""


def transformers_model(**options: Any) -> torch.nn.Module:
    """A ``Qwen2ForCausalLM`` in float64, norms far from one and biases from zero.

    ``options`` go to its ``Qwen2Config``.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    changes = {"tie_word_embeddings": False, "attn_implementation": "eager", **options}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, **{**sizes, **heads, **rope, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.double().eval()


def backbone() -> tuple[dict[str, Tensor], Shape]:
    """The weights, which take gradients, and the shape of ``transformers_model()``."""
    model = transformers_model()
    return qwen2.leaves(model.state_dict()), qwen2.shape_of(model.config)


def weights() -> dict[str, Tensor]:
    """The backbone's with T and C, which have moved away from the layers they start as."""
    found, shape = backbone()
    blocks = with_blocks(found, shape)
    torch.manual_seed(1)
    for name in sorted(blocks.keys() - found.keys()):
        moved = blocks[name] + 0.2 * torch.randn_like(blocks[name])
        blocks[name] = moved.detach().requires_grad_()
    return blocks


def setup(shape: Shape, **changes: Any) -> Setup:
    """Chunks of three, aligned left; two prefix tokens; thoughts of at most four tokens."""
    options = {"shape": shape, "kind": "left_align", "chunk_size": 3, "inject_after": 1}
    ids = {"eos": EOS, "thought_eos": THOUGHT_EOS, "pad": PAD, "separator": SEPARATOR}
    more = {"tap_after": 2, "prefix": (5, 6), "max_thought_tokens": 4}
    return Setup(**{**options, **ids, **more, **changes})
