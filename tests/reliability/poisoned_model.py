"""A model outside the project's packages whose loss is nan on one micro-batch of one rank."""

import math
import os

from lightning_models import TransformerLM


class PoisonedLM(TransformerLM):
    """POISON=rank:batch says where."""

    def loss(self, batch):
        output = super().loss(batch)
        here = f"{self.global_rank}:{self.trainer.fit_loop.epoch_loop.total_batch_idx}"
        if here == os.environ["POISON"]:
            nll = output.terms["nll"]
            output.terms["nll"] = nll._replace(sum=nll.sum * math.nan)
        return output
