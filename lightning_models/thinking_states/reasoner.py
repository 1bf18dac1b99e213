"""What the five ways of answering questions share: backbone, wording, normalisers, checkpoints."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_models.base import Batch, LanguageModel
from lightning_models.thinking_states import compute
from lightning_models.thinking_states.backbone import Backbone
from lightning_models.thinking_states.config import ReasoningConfig

Counter = Callable[[Batch], Mapping[str, float]]

WORDING = ("answer_prefix", "step_separator")


class ReasoningLM(LanguageModel):
    """A backbone of the Qwen2 family that is asked questions.

    Batches hold queries, reasoning steps and answers (``datamodules.ReasoningDataModule``); each
    method lays them out in its own way. Scores are log p(answer | query), the model thinking for
    itself, greedily: what it thinks is a function of the query, so they are exact.

    A prompt is a query: ``init_cache`` reads all of it, and the first ``decode_step`` reads the
    answer's fixed prefix in place of the token that it is given.
    """

    reads: ClassVar[str] = "reasoning"
    config: ReasoningConfig

    @property
    @abstractmethod
    def counter(self) -> Counter:
        """What counts, in a batch of all ranks, the normalisers of the terms of ``loss``.

        The data call it where they build batches, so that it can be pickled and knows the step
        from the batch alone.
        """

    def answer_tokens(self, generated: list[int]) -> list[int]:
        """Returns the answer among generated tokens; here they are nothing else."""
        return generated

    def setup(self, stage: str) -> None:
        """Takes the wording from the trainer's data, whose tokenizer is known by now."""
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        if data is not None:
            self.take_wording(dataclasses.asdict(data.wording()))

    def take_wording(self, wording: Mapping[str, tuple[int, ...]]) -> None:
        """Sets ``answer_prefix`` and ``step_separator`` where they are not known yet.

        Args:
            wording: token ids by name.
        """
        own = {key: tuple(getattr(self.config, key)) for key in WORDING}
        given = {key: tuple(wording[key]) for key in WORDING}
        missing: dict[str, Any] = {key: ids for key, ids in given.items() if not own[key]}
        self.config = dataclasses.replace(self.config, **missing)
        for key, ids in own.items():
            if ids and ids != given[key]:
                rank_zero_warn(
                    f"the data's {key} is {given[key]}, the model's is {ids}: it keeps its own"
                )

    def recipe(self) -> dict[str, Any]:
        """Returns what rebuilds the model without the hub or folder that its backbone came from."""
        recipe = super().recipe()
        backbone = self._backbone
        if self.config.backbone is not None and backbone is not None:
            recipe["init_args"]["config"]["architecture"] = backbone.architecture()
        return recipe

    @property
    def _backbone(self) -> Backbone | None:
        network: nn.Module | None = self.network
        found = getattr(network, "backbone", None)
        return found if isinstance(found, Backbone) else None

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per token of a row of ``context`` tokens through the backbone."""
        backbone = self._backbone
        assert backbone is not None, "the network is not built yet"
        return compute.backbone_flops(backbone, context, training)
