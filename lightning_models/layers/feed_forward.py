"""Position-wise feed-forward layers."""

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.layers.config import DecoderConfig
from lightning_models.layers.init import OutputProjection


class FeedForward(nn.Module):
    """GELU (GPT-2) or SwiGLU (arXiv 2002.05202) layer from (..., D) to (..., D).

    For swiglu the gate and the value share one matrix: its first half is the gate.
    """

    def __init__(self, config: DecoderConfig) -> None:
        """Builds the two projections."""
        super().__init__()
        self.activation = config.activation
        width = config.hidden_dim * (2 if config.activation == "swiglu" else 1)
        self.up = nn.Linear(config.dim, width, bias=config.bias)
        self.down = OutputProjection(config.hidden_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, same shape as ``x`` (..., D)."""
        hidden = self.up(x)
        if self.activation == "swiglu":
            gate, value = hidden.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down(F.gelu(hidden, approximate=approximate))
