"""A model outside the project's packages that breaks on one rank."""

import math
import os

import torch

from lightning_models import TransformerLM

RESTARTS = "TORCHELASTIC_RESTART_COUNT"


class PoisonedLM(TransformerLM):
    """POISON=rank:batch says where its loss is nan, OVERFLOW=rank:step where a weight is lost.

    FAIL=rank:batch says where it raises an error, unless a launcher has restarted it, FAIL=rank:end
    that it does so after the last step, and MUTE=rank which rank cannot write text.
    """

    def configure_model(self):
        super().configure_model()
        spare = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.network.register_parameter("spare", spare)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        if f"{self.global_rank}:{self.global_step}" == os.environ.get("OVERFLOW"):
            with torch.no_grad():
                self.network.spare[-1] = math.inf

    def on_train_end(self):
        if f"{self.global_rank}:end" == os.environ.get("FAIL"):
            raise RuntimeError("as planned at the end")

    def generate_text(self, *args, **kwargs):
        if str(self.global_rank) == os.environ.get("MUTE"):
            raise RuntimeError("no words")
        return super().generate_text(*args, **kwargs)

    def loss(self, batch):
        output = super().loss(batch)
        here = f"{self.global_rank}:{self.trainer.fit_loop.epoch_loop.total_batch_idx}"
        if here == os.environ.get("FAIL") and not int(os.environ.get(RESTARTS, 0)):
            raise RuntimeError(f"as planned at {here}")
        if here == os.environ.get("POISON"):
            nll = output.terms["nll"]
            output.terms["nll"] = nll._replace(sum=nll.sum * math.nan)
        return output
