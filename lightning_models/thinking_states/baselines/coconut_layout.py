"""Coconut's rows: latents between question and answer, where the first steps stood."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_models.thinking_states.baselines.layout import (
    ANSWER,
    CHAIN,
    NOTHING,
    PREFIX,
    QUERY,
    THINKING,
    Batch,
    ChainLayout,
    Segment,
    TextRows,
    line_up,
)
from lightning_models.thinking_states.baselines.stages import StepStages, num_steps
from lightning_models.thinking_states.rows import (
    Joined,
    aligned_right,
    answer_of,
    constant,
    query_of,
)


def num_latents(stages: Tensor, steps: Tensor, *, each: int, last: int, pad: bool) -> Tensor:
    """Returns m, the number of latents of each row (B,) int64.

    At stage s there are s times ``each`` of them, whatever the row's number of steps; behind the
    last stage as many as there, or, without padding, those of the steps that the row has.

    Args:
        stages: s of each row (B,) int64.
        steps: reasoning steps of each row (B,) int64.
        each: c, latents for a step.
        last: the last stage with steps of its own.
        pad: whether rows with few steps take the most latents, too.
    """
    most = torch.full_like(steps, last)
    behind = most if pad else torch.minimum(steps, most)
    return torch.where(stages > last, behind, stages) * each


@dataclass(frozen=True, kw_only=True)
class CoconutLayout(ChainLayout):
    """Query, start, latents, end, the steps that are left, answer prefix, answer.

    Rows are padded on the left so that their first latents stand below each other, and on the right
    behind that. Nothing predicts markers and latents.
    """

    stages: StepStages
    """The curriculum."""
    c_thought: int
    """c, latents for a step."""
    pad_latent_to_max: bool
    """See ``num_latents``."""
    start: int
    """Marker in front of the latents."""
    end: int
    """Marker behind them."""
    latent: int
    """What stands where a latent is fed; its embedding is not used."""

    def training(self, batch: Batch, stage: int = 0) -> TextRows:
        """Returns the text to be learned; see the base."""
        stages = self.stages.of_rows(batch, stage)
        latents = num_latents(
            stages,
            num_steps(batch),
            each=self.c_thought,
            last=self.stages.last,
            pad=self.pad_latent_to_max,
        )
        chain, learned = self.stages.kept(batch, stage, self.step_separator)
        prefix = constant(self.answer_prefix, batch["query"])
        return self.thoughtful(batch, latents, (CHAIN, chain), (PREFIX, prefix), learned=learned)

    def scored_with(self, batch: Batch, middle: Segment, latents: int) -> TextRows:
        """Returns the text whose answer is scored, behind so many latents; see ``scored``."""
        count = torch.full_like(batch["query_lengths"], latents)
        return self.thoughtful(batch, count, (PREFIX, middle))

    def thoughtful(
        self,
        batch: Batch,
        latents: Tensor,
        *middle: tuple[int, Segment],
        learned: Tensor | None = None,
    ) -> TextRows:
        """Returns rows with ``latents`` (B,) between the query and ``middle``."""
        query = batch["query"]
        head = line_up((QUERY, query_of(batch)), (THINKING, constant((self.start,), query)))
        thoughts, _ = constant([self.latent] * int(latents.max()), query)
        rest = line_up(
            (THINKING, (thoughts, latents)),
            (THINKING, constant((self.end,), query)),
            *middle,
            (ANSWER, answer_of(batch)),
        )
        return self.predict(_side_by_side(head, rest), learned)


def _side_by_side(head: Joined, rest: Joined) -> Joined:
    """Returns rows whose heads end together and whose rests begin together."""
    tokens, real = aligned_right(head.tokens, head.lengths)
    kinds, _ = aligned_right(head.segment, head.lengths)
    return Joined(
        torch.cat((tokens.masked_fill(~real, 0), rest.tokens), dim=1),
        head.lengths + rest.lengths,
        torch.cat((kinds.masked_fill(~real, NOTHING), rest.segment), dim=1),
    )
