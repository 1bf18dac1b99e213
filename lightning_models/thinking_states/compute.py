"""FLOPs of the backbone."""

from lightning_models.flops import TRAINING_FACTOR, linear_flops
from lightning_models.thinking_states.backbone import Backbone


def layer_flops(backbone: Backbone, context: float) -> float:
    """Returns the FLOPs of a token in one layer, which sees ``context`` keys."""
    shape = backbone.shape
    width = shape.num_attention_heads * backbone.model.layers[0].self_attn.head_dim
    return linear_flops(backbone.model.layers[0]) + 4.0 * width * context


def head_flops(backbone: Backbone) -> float:
    """Returns the FLOPs of the logits of a token."""
    return 2.0 * backbone.output_matrix.numel()


def backbone_flops(backbone: Backbone, context: int, training: bool = False) -> float:
    """Returns the mean FLOPs of a token of a row of ``context`` tokens, its logits included.

    Gradient checkpointing computes the layers once more.
    """
    layers = backbone.num_layers * layer_flops(backbone, (context + 1) / 2)
    total = layers + head_flops(backbone)
    if not training:
        return total
    again = layers if backbone.checkpointed else 0.0
    return TRAINING_FACTOR * total + again
