"""A model outside the project's packages that breaks on one rank."""

import math
import os

import torch

from lightning_models import TransformerLM


class PoisonedLM(TransformerLM):
    """POISON=rank:batch says where its loss is nan, OVERFLOW=rank:step where a weight is lost."""

    def configure_model(self):
        super().configure_model()
        spare = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.network.register_parameter("spare", spare)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        if f"{self.global_rank}:{self.global_step}" == os.environ.get("OVERFLOW"):
            with torch.no_grad():
                self.network.spare[-1] = math.inf

    def loss(self, batch):
        output = super().loss(batch)
        here = f"{self.global_rank}:{self.trainer.fit_loop.epoch_loop.total_batch_idx}"
        if here == os.environ.get("POISON"):
            nll = output.terms["nll"]
            output.terms["nll"] = nll._replace(sum=nll.sum * math.nan)
        return output
