"""A model outside the project's packages with a long validation that draws random numbers."""

import os
import time

import torch

from lightning_models import TransformerLM


class SlowValidationLM(TransformerLM):
    """Validation batches print that they have begun, add noise, and take a second at step PAUSE."""

    def validation_step(self, batch, batch_idx):
        step = self.trainer.global_step
        print(f"validating {step}:{batch_idx}", flush=True)
        if str(step) == os.environ["PAUSE"]:
            time.sleep(1)
        noise = torch.rand(()) * batch_idx  # of the rank's global stream
        scores = self.score(batch)
        nats = -scores.total() * (1 + noise)
        self.val_metrics.add(nats, scores.num_targets.sum(), batch.get("num_bytes"))
