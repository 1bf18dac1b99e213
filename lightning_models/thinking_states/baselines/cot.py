"""CoT: the reasoning written out between question and answer."""

from dataclasses import dataclass

from torch import Tensor

from lightning_models.optim import OptimizerConfig
from lightning_models.thinking_states.baselines.layout import Batch, ChainLayout, Segment
from lightning_models.thinking_states.baselines.text import ChainConfig, TextLM
from lightning_models.thinking_states.rows import chain_of


@dataclass(frozen=True, kw_only=True)
class CoTConfig(ChainConfig):
    """A backbone that writes its reasoning, then its answer.

    Raises:
        ValueError: if a value is out of its range.
    """


@dataclass(frozen=True)
class WholeChain(ChainLayout):
    """Every step of the reasoning."""

    def chain(self, batch: Batch, stage: int) -> tuple[Segment, Tensor]:
        """Returns the whole chains; all rows learn where theirs ends."""
        chain = chain_of(batch, self.step_separator)
        return chain, chain[1] >= 0


class CoTLM(TextLM):
    """Chain of thought (Wei et al., 2022), fine-tuned: the slow and strong baseline.

    Text: query, then each step behind a separator, answer prefix, answer; all behind the query is
    learned. Scores are of the answer behind the model's own greedy chain: a chain is a function of
    the query, so they are exact.
    """

    config: CoTConfig

    def __init__(
        self,
        config: CoTConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: the backbone, and the longest chain.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    @property
    def layout(self) -> WholeChain:
        """Query, chain, prefix, answer."""
        config = self.config
        return WholeChain(config.answer_prefix, config.step_separator, config.lm_on_query)

    @property
    def writes_chain(self) -> bool:
        """True."""
        return True
