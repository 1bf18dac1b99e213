"""Every method and baseline the contract suite runs on: one line adds one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch

from lightning_models import (
    CopyLM,
    LanguageModel,
    OptimizerConfig,
    ThoughtbubblesLM,
    TransformerLM,
)

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
    fixed_shapes: bool = True
    """Whether shapes never depend on values, so that the network compiles into one graph."""
    warm_up: int = 0
    """Training batches that set running statistics before anything is tested."""

    def build(self, seed: int = 0, *, compile: bool = False, **changes: Any) -> LanguageModel:
        """A model with its network, initialised from ``seed``, in training mode."""
        kind = get_type_hints(self.model.__init__)["config"]
        config = kind(**{**SIZES, **self.config, **changes})
        torch.manual_seed(seed)
        optimizer = OptimizerConfig(lr=3e-3, warmup=2)
        model = self.model(config, optimizer, compile)
        model.configure_model()
        model.train()
        for step in range(self.warm_up):
            model.loss(self.batch(seed=100 + step))
        return model


LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}
FORKS = {"fork_layers": (1, 2), "kappa": "2L"}
BY_THRESHOLD = {"allocation": "threshold"}
BY_WINDOW = {"allocation": "window_topk", "allocation_window": 8}
RAGGED = {"fixed_shapes": False, "warm_up": 2}

METHODS = [
    Method("gpt2", TransformerLM),
    Method("gpt2-rope-nobias", TransformerLM, {"positions": "rope", "bias": False}),
    Method("llama", TransformerLM, LLAMA | {"tie_head": False, "init": "ponderlm"}),
    Method("llama-window", TransformerLM, LLAMA | {"window": 8}),
    Method("copy-3", CopyLM, {"copies": 3}),
    Method("copy-2-shared", CopyLM, {"copies": 2, "copy_positions": "shared"}),
    Method("thoughtbubbles", ThoughtbubblesLM, FORKS),
    Method(
        "thoughtbubbles-residual", ThoughtbubblesLM, FORKS | {"output_average": "residual_norm"}
    ),
    Method("thoughtbubbles-threshold", ThoughtbubblesLM, FORKS | BY_THRESHOLD, **RAGGED),
    Method("thoughtbubbles-window", ThoughtbubblesLM, FORKS | BY_WINDOW, **RAGGED),
]
