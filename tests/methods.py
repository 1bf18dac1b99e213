"""Every method and baseline the contract suite runs on: one line adds one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch

from lightning_models import LanguageModel, OptimizerConfig, TransformerLM

VOCAB, BLOCK = 257, 32
SIZES = {"vocab_size": VOCAB, "block_size": BLOCK, "num_layers": 3, "dim": 32, "num_heads": 4}


def window_batch(rows: int = 2, length: int = BLOCK, seed: int = 0) -> dict[str, Any]:
    """A batch of random bytes in the windows format."""
    stream = torch.randint(
        0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(seed)
    )
    return {
        "tokens": stream[:, :-1],
        "targets": stream[:, 1:].clone(),
        "mask": torch.ones(rows, length, dtype=torch.bool),
        "sequence_id": torch.arange(rows) + 1000 * seed,
        "num_bytes": torch.full((rows,), length),
    }


@dataclass(frozen=True)
class Method:
    """A model class with the configuration it is tested in, at a size that trains in seconds."""

    name: str
    model: type[LanguageModel]
    config: dict[str, Any] = field(default_factory=dict)
    batch: Callable[..., dict[str, Any]] = window_batch

    def build(self, seed: int = 0, *, compile: bool = False, **changes: Any) -> LanguageModel:
        """A model with its network, initialised from ``seed``, in training mode."""
        kind = get_type_hints(self.model.__init__)["config"]
        config = kind(**{**SIZES, **self.config, **changes})
        torch.manual_seed(seed)
        optimizer = OptimizerConfig(lr=3e-3, warmup=2)
        model = self.model(config, optimizer, compile)
        model.configure_model()
        return model.train()


LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}

METHODS = [
    Method("gpt2", TransformerLM),
    Method("gpt2-rope-nobias", TransformerLM, {"positions": "rope", "bias": False}),
    Method("llama", TransformerLM, LLAMA | {"tie_head": False, "init": "ponderlm"}),
    Method("llama-window", TransformerLM, LLAMA | {"window": 8}),
]
