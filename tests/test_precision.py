"""Clipping under bf16, where Lightning refuses fused optimisers without need."""

import lightning as L
import pytest
import torch
from methods import METHODS
from quiet import quiet_trainer


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(make_data, tmp_path, precision, algorithm):
    largest = []

    class Watch(L.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            if gradients:
                norm = torch.nn.utils.get_total_norm(gradients).item()
                peak = max(gradient.abs().max().item() for gradient in gradients)
                largest.append(norm if algorithm == "norm" else peak)

    clipped = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
    steps = {"max_steps": 2, "limit_val_batches": 0, "enable_checkpointing": False}
    trainer = quiet_trainer(tmp_path, Watch(), precision=precision, **clipped, **steps)
    model = METHODS[0].build()
    trainer.fit(model, make_data())
    assert largest
    assert max(largest) == pytest.approx(1e-3, rel=1e-3)
    assert trainer.optimizers[0].defaults["fused"]
