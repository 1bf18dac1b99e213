"""No CoT: the answer right behind the question."""

from dataclasses import dataclass

from lightning_models.optim import OptimizerConfig
from lightning_models.thinking_states.baselines.layout import TextLayout
from lightning_models.thinking_states.baselines.text import TextLM
from lightning_models.thinking_states.config import ReasoningConfig


@dataclass(frozen=True, kw_only=True)
class NoCoTConfig(ReasoningConfig):
    """A backbone that answers without reasoning; it adds no fields.

    Raises:
        ValueError: if a value is out of its range.
    """


class NoCoTLM(TextLM):
    """Fine-tuning on questions and their answers alone, the first baseline of Thinking States.

    Text: query, answer prefix, answer. The prefix is given, never predicted.
    """

    config: NoCoTConfig

    def __init__(
        self,
        config: NoCoTConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        """Takes the configuration; the network is built by ``configure_model``.

        Args:
            config: the backbone.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__(config, optimizer, compile)

    @property
    def layout(self) -> TextLayout:
        """Query, prefix, answer."""
        return TextLayout(self.config.answer_prefix, lm_on_query=self.config.lm_on_query)
