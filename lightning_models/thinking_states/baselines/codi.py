"""CODI: a chain of thought distilled into latents (arXiv 2502.21074), and PCCoT (2506.18582).

One model is teacher, on question, chain and answer, and student, on question, latents and answer.
PCCoT computes all latents at once, several times, instead of one after the other.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_models.flops import TRAINING_FACTOR, linear_flops
from lightning_models.optim import OptimizerConfig
from lightning_models.outputs import LossOutput, Term
from lightning_models.thinking_states.adapters import add_adapters
from lightning_models.thinking_states.backbone import (
    AnswerCache,
    HiddenStates,
    backbone_flops,
    head_flops,
    read,
)
from lightning_models.thinking_states.baselines.curricula import num_steps
from lightning_models.thinking_states.baselines.latents import (
    LatentConfig,
    LatentLayout,
    LatentNetwork,
    LatentTextLM,
    refuse_idle,
)
from lightning_models.thinking_states.baselines.text import PREFIX, Batch, TextRows
from lightning_models.thinking_states.rows import constant


@dataclass(frozen=True, kw_only=True)
class CodiConfig(LatentConfig):
    """CODI (Shen et al., 2025), with PCCoT (Wu et al., 2025) as ``passes``.

    Raises:
        ValueError: If a value is out of range.
    """

    num_latents: int = 6
    """K, the number of latents of a question in training (6 in CODI, 24 in PCCoT). With 0 there are
    only the markers."""
    passes: int | None = None
    """T, the number of Jacobi passes over all latents at once (3 in PCCoT). With 0, latents are
    pause tokens. By default, null, latents are computed one by one, as in CODI; T = K gives the
    same."""
    projection: bool = True
    """Whether dropout, linear, GELU, linear and LayerNorm turn a state into a latent. Otherwise it
    is fed back unchanged."""
    projection_dim: int | None = None
    """Width between the two linear layers. The default, null, is D, as in CODI's runs."""
    projection_dropout: float = 0.0
    """Dropout probability before the projection."""
    student_weight: float = 1.0
    """alpha, weight of the student's cross-entropy on the answers."""
    distillation_weight: float = 1.0
    """beta, weight of the distillation (1 on GPT-2, 20 on Llama)."""
    teacher_weight: float = 1.0
    """gamma, weight of the teacher's cross-entropy on chains and answers."""
    distance: Literal["l1", "smooth_l1"] = "l1"
    """Distance of the student's states from the teacher's: L1, as in CODI's paper, or smooth L1, as
    in its code and PCCoT's."""
    distillation_std: Literal["row", "batch"] = "row"
    """States over which the teacher's standard deviation, the divisor of each distance, is taken:
    one question's (row), or the whole micro-batch's (batch, as in the public codes)."""
    drop_last_step: bool = True
    """Whether the teacher's chains end before their last step, which often is the answer."""
    predict_prefix: bool = False
    """Whether the student learns to write the answer prefix, as in the public codes. At inference
    it is given in any case."""
    lora_rank: int | None = None
    """Rank of the LoRA matrices added to every matrix of the layers (128 in CODI). The rest of the
    backbone is frozen, except for the embeddings of added tokens. By default, null, there is no
    LoRA, and all weights are learned."""
    lora_alpha: float = 32.0
    """LoRA's alpha; the products of its matrices are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.1
    """Dropout probability before LoRA's matrices."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        minima = {"num_latents": 0, "passes": 0, "projection_dim": 1, "lora_rank": 1}
        weights = ("student_weight", "distillation_weight", "teacher_weight")
        for key, bound in {**minima, **dict.fromkeys(weights, 0)}.items():
            value = getattr(self, key)
            if value is not None and not bound <= value < math.inf:
                raise ValueError(f"{key} ({value}) must be at least {bound} and finite")
        for key in ("projection_dropout", "lora_dropout"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"{key} ({getattr(self, key)}) must be in [0, 1)")
        if not self.lora_alpha > 0:
            raise ValueError(f"lora_alpha ({self.lora_alpha}) must be above 0")
        if self.lora_rank is not None and self.start_from is not None:
            raise ValueError(
                f"start_from ({self.start_from}) cannot be combined with lora_rank "
                f"({self.lora_rank}), which adapts backbone; set one of them to null"
            )
        if self.step_weight and self.passes == 0:
            raise ValueError(
                f"step_weight ({self.step_weight}) needs latents that depend on the question, and "
                "with passes (0) they do not; set passes to 1 or more, or step_weight to 0"
            )
        refuse_idle(
            self,
            {"lora_rank": ("lora_alpha", "lora_dropout")}
            | {"projection": ("projection_dim", "projection_dropout")},
        )

    @property
    def most_latents(self) -> int:
        return self.num_latents


# ---- rows


@dataclass(frozen=True, kw_only=True)
class CodiLayout(LatentLayout):
    """The student's text: query, start, K latents, end, answer prefix, answer."""

    num_latents: int
    """K, the number of latents."""
    drop_last_step: bool
    """See the configuration."""
    predict_prefix: bool
    """See the configuration."""

    def __call__(self, batch: Batch) -> dict[str, float]:
        """Returns the base's normalisers, ``teacher_targets``, and ``rows``, its questions."""
        taught, asked = self.teacher(batch).targets >= 0, questions(batch)
        counts = {"teacher_targets": float(taught.sum()), "rows": float(asked.sum())}
        return {**super().__call__(batch), **counts}

    def training(self, batch: Batch, stage: int = 0) -> TextRows:
        # the student's text
        prefix = constant(self.answer_prefix, batch["query"])
        latents = torch.full_like(batch["query_lengths"], self.num_latents)
        learned = torch.full_like(latents, self.predict_prefix, dtype=torch.bool)
        return self.with_latents(batch, latents, (PREFIX, prefix), learned=learned)

    def teacher(self, batch: Batch) -> TextRows:
        """Returns the teacher's text: query, chain, answer prefix, answer."""
        if self.drop_last_step:
            sizes = batch["step_lengths"]
            order = torch.arange(sizes.shape[1], device=sizes.device)
            last = order == num_steps(batch)[:, None] - 1  # (B, R)
            batch = {**batch, "step_lengths": sizes.masked_fill(last, 0)}
        return super().training(batch)

    def replaced(self, batch: Batch, stage: int) -> tuple[Tensor, Tensor]:
        steps = num_steps(batch)
        return steps, torch.full_like(steps, self.num_latents)


def questions(batch: Batch) -> Tensor:
    """Returns the mask of rows that are questions, not padding of the batch (B,) bool."""
    has_target: Tensor = (batch["targets"] >= 0).any(dim=1)
    return has_target


def answer_starts(rows: TextRows) -> Tensor:
    """Returns the index of the token before each row's answer (B,) int64, 0 without an answer."""
    # NOTE(paper): with Llama and Qwen the public code distils one token later, at a space
    return rows.answers.to(torch.uint8).argmax(dim=1)  # the first maximum


def distil(student: Tensor, teacher: Tensor, has_target: Tensor, config: CodiConfig) -> Tensor:
    """Returns the distance between the student's and the teacher's states, summed over questions.

    The distance is the mean over layers and channels of d(teacher, student) / std(teacher), where
    std is unbiased. No gradient flows to the teacher.

    Args:
        student: States of one token of each row in all layers (L + 1, B, D).
        teacher: States of the teacher (L + 1, B, D).
        has_target: Mask of the rows that are questions (B,) bool.
        config: Configuration with the distance and the standard deviation to use.
    """
    # NOTE(paper): the public codes take the standard deviation over the batch (distillation_std),
    # so that a question's gradient depends on its neighbours, and have smooth L1 (distance).
    # PCCoT's leaves out the embedding, the first of the L + 1 states.
    acc_dtype = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(acc_dtype), teacher.detach().to(acc_dtype)
    if config.distillation_std == "row":
        scale = teacher.std(dim=2, keepdim=True)  # (L + 1, B, 1)
    else:
        # without any question the distance is masked out, so any finite scale will do
        measured = teacher[:, has_target] if has_target.any() else teacher
        scale = measured.flatten(1).std(dim=1)[:, None, None]  # (L + 1, 1, 1)
    distance = F.l1_loss if config.distance == "l1" else F.smooth_l1_loss
    per_row = (distance(student, teacher, reduction="none") / scale).mean(dim=(0, 2))  # (B,)
    return (per_row * has_target).sum()


# ---- network


class CodiNetwork(LatentNetwork):
    """The backbone with a projection of states to latents, one by one or in Jacobi passes.

    Args:
        config: Configuration of the backbone and its latents.

    Raises:
        ValueError: If ``lora_rank`` is set, and ``peft`` is not installed.
    """

    def __init__(self, config: CodiConfig) -> None:
        super().__init__(config)
        self.passes, self.first_added = config.passes, config.vocab_size
        dim, width = self.backbone.dim, config.projection_dim or self.backbone.dim
        # NOTE(paper): the public code projects one state more than there are latents, and discards
        # the last one.
        self.projection: nn.Module | None = None
        if config.projection and config.most_latents and config.passes != 0:
            self.projection = nn.Sequential(
                nn.Dropout(config.projection_dropout),
                nn.Linear(dim, width),
                nn.GELU(),
                nn.Linear(width, dim),
                nn.LayerNorm(dim),
            )
        self.added: nn.Parameter | None = None
        if config.lora_rank is None:
            return
        matrix = self.backbone.model.get_input_embeddings().weight
        # NOTE(paper): the public code freezes the markers with the embedding, at random values.
        end = self.first_added + len(config.special_tokens)
        self.added = nn.Parameter(matrix[self.first_added : end].detach().clone())
        add_adapters(
            self.backbone,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        h = super().embed(tokens)
        if self.added is None:
            return h
        # rows of added tokens are learned, the frozen embedding has all others
        index = (tokens - self.first_added).clamp(0, len(self.added) - 1)
        return torch.where((tokens >= self.first_added)[..., None], self.added[index], h)

    def project(self, state: Tensor) -> Tensor:
        if self.projection is None:
            return state
        latent: Tensor = self.projection(state)
        return latent

    def pause_latent(self) -> Tensor | None:
        return None if self.passes == 0 else super().pause_latent()

    def think(
        self, cache: AnswerCache, state: Tensor, h: Tensor, real: Tensor, latent: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        # Jacobi passes: inputs begin as the embedding of the latent token, and in each pass the
        # input of latent j becomes the projected state of latent j - 1. After j passes it equals
        # the sequential one.
        if self.passes is None:
            return super().think(cache, state, h, real, latent)
        rows, count, dim = h.shape
        indices = torch.arange(rows * count, device=h.device)  # (B K,)
        for _ in range(min(self.passes, count)):  # after K passes each latent is final
            states = read(self.backbone, cache, h, real).last  # (B, K, D)
            cache.drop(count)  # the next pass reads the same columns again
            before = torch.cat((state[:, None], states[:, :-1]), dim=1)  # (B, K, D), shifted by one
            flat = self.project(before).flatten(0, 1)  # (B K, D)
            h = self.feed_back(flat, indices % count, indices // count).view(rows, count, dim)
        fed = list(h.unbind(dim=1))  # recorded one by one, in the graph
        return fed, [read(self.backbone, cache, torch.stack(fed, dim=1), real).last]


# ---- model


class CodiLM(LatentTextLM):
    """Distils its own chain of thought into latents (arXiv 2502.21074, 2506.18582).

    The student's text: query, start marker, K latents, end marker, answer prefix, answer. The
    teacher, with the same weights, reads query, chain, answer prefix, answer. The student's states
    of the token before the answer are drawn to the teacher's in all layers.

    Args:
        config: Configuration of the backbone, its latents, and the weights of the objective.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    config: CodiConfig
    network: CodiNetwork

    def __init__(
        self,
        config: CodiConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    def build_network(self) -> CodiNetwork:
        return CodiNetwork(self.config)

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        # without passes the latent token's row is never read, and decay alone would shrink it
        return () if self.network.added is None else (self.network.added,)

    @property
    def layout(self) -> CodiLayout:
        """Query, latents between markers, prefix, answer."""
        config = self.config
        return CodiLayout(
            config.answer_prefix,
            config.step_separator,
            config.lm_on_query,
            num_latents=config.num_latents,
            drop_last_step=config.drop_last_step,
            predict_prefix=config.predict_prefix,
            **self.markers(),
        )

    @property
    def trained_latents(self) -> int:
        return self.config.num_latents

    def reads_per_latent(self, latents: float) -> float:
        return 1.0 + min(self.config.passes or 0, latents)

    def loss(self, batch: Batch) -> LossOutput:
        """Returns the cross-entropies of student and teacher, and the distillation.

        The weighted terms are ``nll``, ``teacher``, ``distillation`` and, with a step decoder,
        ``steps``. Terms of weight 0 are skipped, and with them the teacher if it has no term.
        Statistics: ``answer_nll`` and ``teacher_answer_nll``, nats per token of the answer.
        """
        config, layout = self.config, self.layout
        rows, distils = layout.training(batch), bool(config.distillation_weight)
        hidden = self.states(rows, answer_starts(rows) if distils else None)
        output = self.losses(batch, rows, hidden)
        nll, weight = output.terms["nll"], config.student_weight
        output.terms["nll"] = nll._replace(sum=weight * nll.sum)
        output.sequence_nats = (1.0 - weight) * nll.sum.detach()  # train/loss has no weight
        if not (config.teacher_weight or distils):
            return output
        taught = layout.teacher(batch)
        # NOTE(paper): the public code computes the teacher twice, with gradient for its loss and
        # without for the distillation, each with different dropout; here one pass serves both.
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.teacher_weight > 0):
            teacher: HiddenStates = self.network(
                taught.tokens, at=answer_starts(taught) if distils else None
            )
        if config.teacher_weight:
            term, answers = self.cross_entropy(taught, teacher.last)
            total = config.teacher_weight * term.sum
            output.terms["teacher"] = Term(total, term.normaliser, "teacher_targets")
            output.stats["teacher_answer_nll"] = answers
        if distils:
            assert hidden.layers is not None
            assert teacher.layers is not None
            asked = questions(batch)
            total = config.distillation_weight * distil(
                hidden.layers, teacher.layers, asked, config
            )
            output.terms["distillation"] = Term(total, asked.sum(), "rows")
        return output

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per token of a row of ``context`` tokens; see the base.

        A training step also has the teacher's row, with logits if the teacher learns. The student's
        row is counted as if it were as long, though it has no chain.
        """
        flops, backbone = super().flops_per_token(context, training), self.network.backbone
        if training and self.config.teacher_weight:
            flops += backbone_flops(backbone, context, training)
        elif training and self.config.distillation_weight:
            flops += backbone_flops(backbone, context) - head_flops(backbone)
        return flops

    def _flops(self, context: int, latents: float, training: bool) -> float:
        flops = super()._flops(context, latents, training)
        if self.network.projection is None:
            return flops
        # a latent is projected once, or in each of its passes
        times = latents * max(self.reads_per_latent(latents) - 1.0, 1.0)
        factor = TRAINING_FACTOR if training else 1.0
        return flops + factor * linear_flops(self.network.projection) * times / context
