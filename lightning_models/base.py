"""The base of every method: loss -> metrics -> optimiser, written once.

A new paper writes ``build_network``, ``loss``, ``score``, the two decoding methods and
``flops_per_token``; steps, logging, normalisation over ranks and accumulated micro-batches,
and optimiser are here; checkpoints and text generation are mixed in.
"""

import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast, get_type_hints

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lightning_models.checkpoint import RestoresItself
from lightning_models.generation import ContinuesText
from lightning_models.layers import SequenceConfig, record, recording, wants
from lightning_models.optim import OptimizerConfig, build_optimizer, schedule_factor
from lightning_models.output_layer import token_scores
from lightning_models.outputs import (
    Likelihood,
    LossOutput,
    Mean,
    Scores,
    StageMetrics,
    StepMeans,
    objective,
)
from lightning_models.recipe import as_dataclass
from lightning_models.runtime import ShardedParameters, checkpoint_blocks

Batch = dict[str, Any]

OTHER_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy")
"""Strategies that shard parameters without a device mesh."""


class LanguageModel(RestoresItself, ContinuesText, L.LightningModule, ABC):
    """A language model that any method of this project derives from.

    ``Trainer.fit`` takes a data module of ``datamodules`` or any DataLoader. Batches are dicts; a
    model that reads windows (all but Thought Gestalt and the models that answer questions) has:

    - ``tokens``: int64 (B, T), read from left to right, without padding or padded on the right.
    - ``targets``: int64 (B, T), the next token of each, -100 where nothing is predicted.
    - ``mask``: bool (B, T), optional: whether a token is no padding.
    - ``num_bytes``: int64 (B,), optional: UTF-8 bytes of each row's targets, for bits per byte.

    ``transformers`` has ``input_ids`` and ``labels``, which are not shifted: of ids (B, T + 1) the
    tokens are ``ids[:, :-1]`` and the targets ``ids[:, 1:]``.

    ```python
    import lightning
    import torch
    from lightning_models import OptimizerConfig, TransformerConfig, TransformerLM

    ids = torch.randint(0, 320, (64, 17))  # (rows, T + 1), from a tokenizer
    rows = [{"tokens": row[:-1], "targets": row[1:]} for row in ids]
    config = TransformerConfig(vocab_size=320, block_size=16, num_layers=2, dim=32, num_heads=2)
    model = TransformerLM(config, OptimizerConfig(lr=1e-3))
    trainer = lightning.Trainer(max_steps=8, accelerator="cpu", logger=False)
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=8))
    ```

    Args:
        config: The method's configuration dataclass.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network with torch.compile (in place).
    """

    reads: ClassVar[str] = "windows"
    """What batches hold: windows of tokens, or sentences (see ``datamodules``)."""
    whole_rows: ClassVar[bool] = False
    """Whether a likelihood belongs to a whole row, so that a part of its targets has none."""
    shards_blocks: ClassVar[bool] = True
    """Whether a training step runs each block once, on every rank: FSDP then gathers one block at
    a time; otherwise all parameters for the whole step."""

    def __init__(
        self, config: SequenceConfig, optimizer: OptimizerConfig, compile: bool = False
    ) -> None:
        super().__init__()
        self.config = as_dataclass(config, get_type_hints(type(self).__init__)["config"])
        self.optimizer_config = as_dataclass(optimizer, OptimizerConfig)
        self.compile_network = compile
        self.network: nn.Module | None = None
        self._sharded: ShardedParameters | None = None
        self._gather_depth, self._evaluates = 0, False  # who asks for whole parameters
        self.last_terms: dict[str, Tensor] = {}  # means of the latest training micro-batch
        self.train_metrics = StepMeans()
        self.val_metrics, self.test_metrics = StageMetrics(), StageMetrics()

    # ---- what a method says of itself

    @property
    def likelihood(self) -> Likelihood:
        """What ``score`` returns with this configuration."""
        return "exact"

    @property
    def causal(self) -> bool:
        """Whether the prediction of a token never depends on later tokens."""
        return True

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``score`` reads what several rows begin with once (see there)."""
        return False

    # ---- what a method writes

    @abstractmethod
    def build_network(self) -> nn.Module:
        """Returns a freshly initialised network for ``self.config``."""

    @abstractmethod
    def loss(self, batch: Batch) -> LossOutput:
        """Returns the terms of the training objective for one micro-batch."""

    @abstractmethod
    def score(self, batch: Batch) -> Scores:
        """Returns the log-likelihood of the batch's targets.

        ``context`` (B,) in the batch says how many tokens of each row are given: a method that
        infers something of a row as a whole infers it from those. Where ``shares_prefixes``, a
        batch may have ``prefix`` (C, P), right-padded, ``prefix_lengths`` (C,), at least 2, and
        ``prefix_row`` (B,): row b goes on from prefix ``prefix_row[b]``, whose last token is the
        first of the row's ``tokens``; ``mask`` then says which of those are no padding.
        """

    @abstractmethod
    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """Returns a decoding cache that has consumed all but the last token of each prompt.

        Args:
            prompts: (B, P) int64, padded on the right.
            lengths: (B,) int64, at least 1.
            max_new_tokens: How many tokens will be decoded at most.
            streams: What the random draws of each row are a function of, for methods that draw
                before they decode; empty: (0, row).
        """

    @abstractmethod
    def decode_step(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Advances each row by one unit of work.

        Args:
            cache: Cache from ``init_cache``, updated in place.
            tokens: (B,) the last token of each row.

        Returns:
            Next-token logits (B, V) float32, and which rows are ready to be sampled (B,) bool.
            A row that is not ready is stepped again with the same token.
        """

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the FLOPs per token of one pass through the network, by what they are spent on.

        ``output`` (the output matrix), ``self_attention`` and ``cross_attention`` (projections,
        scores and weighted sums) and ``feed_forward``; a method leaves out what it has not, and
        names what is its own.

        Raises:
            ValueError: If the method does not count them.
        """
        raise ValueError(f"{type(self).__name__} does not count its FLOPs by part")

    @abstractmethod
    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns FLOPs per token of a forward pass, or of a training step (with the backward)."""

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of generating a token in a context of ``context`` tokens.

        Args:
            context: Tokens.
            steps: Additional steps that a token takes on average, for methods whose tokens take
                them; None: the most.
        """
        return self.flops_per_token(context)

    @property
    def adaptive(self) -> bool:
        """Whether texts decide how much scoring computes for them.

        Then ``flops_per_token`` is nominal, and ``score`` records ``flops``: ``flops`` (B,)
        float64, forward FLOPs of each row without its padding, and ``tokens`` (B,) int64.
        """
        return False

    @property
    def adaptive_training(self) -> bool:
        """Whether texts decide how much a training step computes for them.

        Then ``flops_per_token(context, training=True)`` is what the configuration plans.
        """
        return False

    def passes_per_token(self, context: int) -> float:
        """Returns how often a token goes through the network, as papers count.

        1, and the additional steps ``thinking_steps`` of configs that have it, the most that a
        token takes; methods that compute more in another way say so. Outside of training: 6 N
        times this is what papers call inference FLOPs per token.

        Args:
            context: Tokens of the sequence.
        """
        return 1.0 + getattr(self.config, "thinking_steps", 0)

    def published_flops_per_token(self, context: int) -> float | None:
        """Returns training FLOPs per token as the method's paper counts, where that differs."""
        return None

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        """Returns parameters exempt from weight decay, besides norms and biases."""
        return ()

    def target_log_probs(self, h: Tensor, targets: Tensor) -> Tensor:
        """Returns log p(target) (...) in nats for ``score``, 0 where nothing is predicted.

        Records ``greedy``: ``greedy`` (...) bool, whether a target is the most likely token.

        Args:
            h: Normed states (..., D), before the network's ``output_matrix``.
            targets: int64 (...), -100 where nothing is predicted.
        """
        below = self.config.vocab_size if wants("greedy") else None
        result = token_scores(h, cast(Any, self.network).output_matrix, targets, below)
        if result.greedy is not None:
            record("greedy", greedy=result.greedy)
        return result.log_prob

    # ---- construction

    def configure_model(self) -> None:
        """Builds the network (once), shards it where the strategy asks for it, compiles it.

        Raises:
            ValueError: If the strategy shards parameters in a way of its own, or a network that is
                there already.
        """
        mesh = getattr(self, "_device_mesh", None)
        if self.network is not None:
            if mesh is not None and self._sharded is None:
                raise ValueError(
                    f"{type(self).__name__} has its network already, which is not sharded: give "
                    "the trainer a model without one, and weights as ckpt_path"
                )
            return
        strategy = "" if self._trainer is None else type(self._trainer.strategy).__name__
        if strategy in OTHER_SHARDING:
            raise ValueError(
                f"trainer.strategy ({strategy}): parameters are sharded by "
                "training.FullySharded alone (configs/trainer/fsdp.yaml)"
            )
        self.network = self.build_network().train(self.training)
        dropout = getattr(self.config, "attention_dropout", 0.0)
        # Published weights bring another one than the config's field.
        dropout = getattr(self.network, "attention_dropout", dropout)
        checkpoint_blocks(self.network, self.config.gradient_checkpointing, dropout)
        if mesh is not None:
            names = mesh.mesh_dim_names  # Lightning's own have an axis of tensor parallelism
            mesh = mesh["data_parallel"] if "data_parallel" in names else mesh
            dtype = getattr(self.trainer.strategy, "gathered_dtype", None)
            self._sharded = ShardedParameters(
                self.network, mesh, by_block=self.shards_blocks, gathered_dtype=dtype
            )
        if self.compile_network:
            self.network.compile()

    @property
    def context_limit(self) -> int | None:
        """Maximum number of tokens of prompt and continuation, or None without a limit."""
        return self.config.block_size

    def check_context(self, length: int) -> None:
        """Raises ValueError if ``length`` tokens do not fit learned positions."""
        limit = self.config.position_limit
        if limit is not None and length > limit:
            raise ValueError(
                f"prompt and continuation need {length} positions, the model has learned "
                f"{limit} (block_size); shorten the prompt or max_new_tokens"
            )

    def check_data(self, data: Any) -> None:
        """Raises ValueError if this model cannot read or score the rows of a data module."""
        rows = getattr(data, "rows", self.reads)
        if rows != self.reads:
            raise ValueError(
                f"data ({type(data).__name__}) are {rows}, and {type(self).__name__} reads "
                f"{self.reads}: choose data of that kind (datamodules.Sentences has sentences, "
                "SentenceWindows and the corpora windows)"
            )
        stride = getattr(data, "eval_stride", None)
        if self.whole_rows and stride is not None:
            raise ValueError(
                f"eval_stride ({stride}): {type(self).__name__} scores whole windows, a part of "
                "which has no likelihood of its own; leave eval_stride out"
            )

    def setup(self, stage: str) -> None:
        self.check_data(getattr(self.trainer, "datamodule", None))

    # ---- steps

    def _check_batch(self, batch: Any) -> None:
        """Raises a ValueError that names what a batch of somebody else's DataLoader lacks."""
        is_dict = isinstance(batch, Mapping)
        if self.reads == "windows" and not (is_dict and "tokens" in batch):
            keys = ", ".join(map(str, batch)) if is_dict else type(batch).__name__
            raise ValueError(
                f"batch ({keys}): {type(self).__name__} reads dicts with tokens and targets, int64 "
                "(B, T); of input_ids and labels (B, T + 1) make tokens = input_ids[:, :-1] and "
                "targets = labels[:, 1:]"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._check_batch(batch)

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._check_batch(batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self._sharded is not None:
            self._evaluates = False  # also of an evaluation that an error has ended
            return self._sharded.step(self._training_objective, batch)
        return self._training_objective(batch)

    def _training_objective(self, batch: Batch) -> Tensor:
        """Returns the result of ``training_step`` and records means for the log."""
        output = self.loss(batch)
        objective = self._objective(output, batch)
        nats = output.terms["nll"].sum.detach() + output.sequence_nats
        for name, term in output.terms.items():
            if name == "nll":
                self.train_metrics.add("loss", nats, term.normaliser)
            else:
                self.train_metrics.add(name, term.sum, term.normaliser)
        for name, value in output.stats.items():
            parts = value if isinstance(value, Mean) else (value,)
            self.train_metrics.add(name, *parts)
        if "num_bytes" in batch:
            self.train_metrics.add("nats_per_byte", nats, batch["num_bytes"])
        self.last_terms = {
            name: term.sum.detach() / term.normaliser for name, term in output.terms.items()
        }
        return objective

    def _objective(self, output: LossOutput, batch: Batch) -> Tensor:
        """Returns the value whose mean over ranks and micro-batches is the step's objective."""
        trainer = self._trainer
        return objective(
            output,
            batch.get("step_normalisers", {}),
            accumulate=1 if trainer is None else trainer.accumulate_grad_batches,
            world_size=1 if trainer is None else trainer.world_size,
            device=self.device,
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs the learning rate, and loss, bits per byte, other terms and statistics of this step.

        They cover all ranks. A row of the log has no value for a mean of nothing, such as
        the loss of the ends of documents in a step without any.
        """
        interval = vars(self.trainer).get("log_every_n_steps")  # copied to the device each time
        writes = bool(interval and (self.trainer.global_step + 1) % interval == 0)
        if writes:
            self.log("lr", optimizer.param_groups[0]["lr"])
        for name, value in self.train_metrics.take(wait=writes).items():
            key = "train/bpb" if name == "nats_per_byte" else f"train/{name}"
            if value is None:
                self._unlog(key)
            else:
                value = value / math.log(2) if name == "nats_per_byte" else value
                self.log(key, value, prog_bar=name == "loss")

    def _unlog(self, key: str) -> None:
        """Forgets the value of an earlier step, which would be written again."""
        for result in self.trainer._results.values() if self.trainer._results else ():
            if result.meta.name == key:
                result.reset()
        connector = self.trainer._logger_connector
        for values in (connector._callback_metrics, connector._logged_metrics):
            values.pop(key, None)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Keeps sharded parameters whole on every rank; without sharding does nothing.

        All ranks must enter. Inside, each may score, generate and analyse what it likes.
        """
        if self._sharded is None:
            yield
            return
        self._gather_depth += 1
        self._sharded.gather()
        try:
            yield
        finally:
            self._gather_depth -= 1
            self._spread()

    def _spread(self) -> None:
        """Frees parts of other ranks, unless they are asked for."""
        if self._sharded is not None and not (self._gather_depth or self._evaluates):
            self._sharded.spread()

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Returns the weights; sharded ones as they are spread, also amid an evaluation.

        They stay so for the optimiser's state; the next ``gathered`` gathers them again.
        """
        if self._sharded is not None:
            self._sharded.spread()
        return super().state_dict(*arguments, **options)

    def on_validation_start(self) -> None:
        # Gathers sharded parameters: ranks may differ in how often they run the network.
        if self._sharded is not None:
            self._evaluates = True
            self._sharded.gather()

    def _evaluation_ends(self) -> None:
        self._evaluates = False
        self._spread()

    on_test_start = on_predict_start = on_validation_start
    on_predict_epoch_end = _evaluation_ends

    def _evaluation_step(self, batch: Batch, metrics: StageMetrics) -> None:
        with self.gathered(), torch.no_grad():
            scores = self.score(batch)
        log_prob, count = scores.reported(batch)
        metrics.add(
            -log_prob,
            count,
            batch.get("num_bytes"),
            all_nats=-scores.total(),
            sequence_nats=-scores.sequence_total(),
        )

    def _log_evaluation(self, metrics: StageMetrics, stage: str) -> None:
        values = metrics.values(self.likelihood)
        metrics.reset()
        for name, value in values.items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "loss", rank_zero_only=False)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluation_step(batch, self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        # Logs val/loss (nats per token), perplexity by its kind, and val/bpb.
        self._evaluation_ends()
        self._log_evaluation(self.val_metrics, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluation_step(batch, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        # Logs test/loss (nats per token), perplexity by its kind, and test/bpb.
        self._evaluation_ends()
        self._log_evaluation(self.test_metrics, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Scores:
        with torch.no_grad():
            return self.score(batch)

    def recorded(self, batch: Batch, **consumers: Callable[..., None]) -> Scores:
        """Returns the scores of a batch, while consumers get what the network records.

        Args:
            batch: As ``score`` takes it.
            **consumers: Functions by the name of the statistic, see ``layers.recording``.
        """
        with self.gathered(), recording(**consumers), self.precision_context(), torch.no_grad():
            return self.score(batch)

    def recorded_loss(self, batch: Batch, **consumers: Callable[..., None]) -> LossOutput:
        """Returns the objective's terms with their graph, while consumers get what is recorded.

        Where parameters are sharded the caller holds ``gathered()`` for as long as the graph.

        Args:
            batch: As ``loss`` takes it.
            **consumers: See ``recorded``; what they get is part of the graph.
        """
        with (
            self.gathered(),
            recording(**consumers),
            self.precision_context(),
            torch.enable_grad(),
        ):
            return self.loss(batch)

    def progress(self, schedule: str) -> float:
        """Returns how much of the schedule is done, in [0, 1]; 1 without a run.

        The schedule is as long as the run, or ``optimizer.horizon``.

        Args:
            schedule: Key and value of what needs to know, for the message.

        Raises:
            ValueError: If the run has no end.
        """
        if self._trainer is None:
            return 1.0
        steps = self.optimizer_config.horizon or self._trainer.estimated_stepping_batches
        if math.isinf(steps):
            raise ValueError(
                f"{schedule} follows the run, which has no end; set trainer.max_steps, "
                "trainer.max_epochs or optimizer.horizon"
            )
        return min(1.0, self._trainer.global_step / steps)

    # ---- optimiser

    @property
    def lr(self) -> float:
        """The highest learning rate of the schedule, which Lightning's LearningRateFinder sets."""
        return self.optimizer_config.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer_config = dataclasses.replace(self.optimizer_config, lr=value)
        for config in [] if self._trainer is None else self._trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            scheduler.base_lrs = [value] * len(scheduler.base_lrs)
            for group in scheduler.optimizer.param_groups:
                group["initial_lr"] = value

    def configure_optimizers(self) -> OptimizerLRScheduler:
        config = self.optimizer_config
        assert self.network is not None
        optimizer = build_optimizer(
            self.network,
            config,
            no_decay=self.no_decay_parameters(),
            fused=not _has_scaler(self.trainer),
        )
        steps = self.trainer.estimated_stepping_batches
        factor = schedule_factor(config, steps)
        if config.warmup >= max(1.0, steps):
            rank_zero_warn(
                f"optimizer.warmup ({config.warmup:g}) is not shorter than the run ({steps:g} "
                f"steps): the learning rate reaches lr ({config.lr:g}) at its end or never"
            )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips under bf16 too, where Lightning refuses because the fused optimiser might unscale.

        bf16 has no loss scaler, so there is nothing to unscale.
        """
        plugin = self.trainer.precision_plugin
        if not gradient_clip_val or _has_scaler(self.trainer):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)

    def precision_context(self) -> contextlib.AbstractContextManager[None]:
        """The trainer's autocast, where there is one."""
        plugin = None if self._trainer is None else self._trainer.precision_plugin
        return contextlib.nullcontext() if plugin is None else plugin.forward_context()


def _has_scaler(trainer: L.Trainer) -> bool:
    """Whether the loss is scaled (16-mixed): a fused optimiser would clash with clipping."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None
