"""The base of every method: loss -> metrics -> optimiser, written once.

A new paper writes ``build_network``, ``loss``, ``score``, the two decoding methods and
``flops_per_token``. Steps, logging, the optimiser, and normalisation over ranks and accumulated
micro-batches are here; checkpoints and text generation are mixed in.
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
"""Strategies that shard parameters without a device mesh, which are refused."""


class LanguageModel(RestoresItself, ContinuesText, L.LightningModule, ABC):
    """Base class of the language models of all methods.

    ``Trainer.fit`` takes a data module of ``datamodules`` or any DataLoader. Batches are dicts. A
    model that reads windows (all but Thought Gestalt and the models that answer questions) expects:

    - ``tokens``: int64 (B, T), read from left to right, without padding or padded on the right.
    - ``targets``: int64 (B, T), the next token of each, or -100 to predict none.
    - ``mask``: bool (B, T), optional, false on padding.
    - ``num_bytes``: int64 (B,), optional, UTF-8 bytes of each row's targets, for bits per byte.
    - ``sequence_id``: int64 (B,), the index of each row in the data, which noise depends on. Only
      ``LatentThoughtLM``, and ``RecurrentDepthLM`` with an initial state of noise, require it.

    ``input_ids`` and ``labels`` of ``transformers`` are not shifted: from ids (B, T + 1), pass
    ``ids[:, :-1]`` as tokens and ``ids[:, 1:]`` as targets.

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
    """Rows of batches: 'windows' of tokens, 'sentences' or 'reasoning' (see ``datamodules``)."""
    whole_rows: ClassVar[bool] = False
    """Whether a likelihood belongs to a whole row, and is undefined for some of its targets."""
    shards_blocks: ClassVar[bool] = True
    """Whether a training step runs each block once on every rank. FSDP then gathers one block at a
    time, otherwise all parameters for the whole step."""

    def __init__(
        self, config: SequenceConfig, optimizer: OptimizerConfig, compile: bool = False
    ) -> None:
        super().__init__()
        self.config = as_dataclass(config, get_type_hints(type(self).__init__)["config"])
        self.optimizer_config = as_dataclass(optimizer, OptimizerConfig)
        self.compile_network = compile
        self.network: nn.Module | None = None
        self._sharded: ShardedParameters | None = None
        self._gather_depth, self._evaluates = 0, False  # reasons to keep parameters gathered
        self.last_terms: dict[str, Tensor] = {}  # means of the latest training micro-batch
        self.train_metrics = StepMeans()
        self.val_metrics, self.test_metrics = StageMetrics(), StageMetrics()

    # ---- properties of a method

    @property
    def batch_keys(self) -> tuple[str, ...]:
        """Keys that every batch must have."""
        return ("tokens", "targets")

    @property
    def likelihood(self) -> Likelihood:
        """Kind of likelihood that ``score`` returns with this configuration."""
        return "exact"

    @property
    def causal(self) -> bool:
        """Whether the prediction of a token never depends on later tokens."""
        return True

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``score`` reads a prefix shared by several rows once (see there)."""
        return False

    # ---- to be written for each method

    @abstractmethod
    def build_network(self) -> nn.Module:
        """Builds the network for ``self.config`` with initial weights."""

    @abstractmethod
    def loss(self, batch: Batch) -> LossOutput:
        """Returns the terms of the training objective for one micro-batch."""

    @abstractmethod
    def score(self, batch: Batch) -> Scores:
        """Returns the log-likelihood of the batch's targets.

        ``context`` (B,) in the batch is the number of given tokens of each row; a method that
        infers latents for a row infers them from these. If ``shares_prefixes``, a batch may have
        ``prefix`` (C, P), right-padded, ``prefix_lengths`` (C,), at least 2, and ``prefix_row``
        (B,): row b continues prefix ``prefix_row[b]``, whose last token is the first of the row's
        ``tokens``; ``mask`` is then false on their padding.
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
            prompts: Prompts (B, P) int64, padded on the right.
            lengths: Number of tokens of each prompt (B,) int64, at least 1.
            max_new_tokens: Maximum number of tokens that will be decoded.
            streams: Key of each row's random stream, for methods that draw before they decode.
                Defaults to (0, row).
        """

    @abstractmethod
    def decode_step(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Advances each row by one unit of work.

        Args:
            cache: Cache from ``init_cache``, updated in place.
            tokens: The last token of each row (B,) int64.

        Returns:
            Next-token logits (B, V) float32, and the mask of rows that are ready to be sampled (B,)
            bool. A row that is not ready is stepped again with the same token.
        """

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Returns the FLOPs per token of one pass through the network, by part.

        Parts are ``output`` (the output matrix), ``self_attention`` and ``cross_attention``
        (projections, scores and weighted sums), ``feed_forward``, and further ones of the method.

        Raises:
            ValueError: If the method does not count them.
        """
        raise ValueError(f"{type(self).__name__} does not count its FLOPs by part")

    @abstractmethod
    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns FLOPs per token of a forward pass or a training step (with the backward pass)."""

    def generation_flops(self, context: int, steps: float | None = None) -> float:
        """Returns the FLOPs of generating a token in a context of ``context`` tokens.

        Args:
            context: Number of tokens.
            steps: Mean number of additional steps per token, for methods that take them. Defaults
                to the maximum.
        """
        return self.flops_per_token(context)

    @property
    def adaptive(self) -> bool:
        """Whether the compute of scoring depends on the text.

        ``flops_per_token`` is then nominal, and ``score`` records ``flops``: ``flops`` (B,)
        float64, forward FLOPs of each row without its padding, and ``tokens`` (B,) int64.
        """
        return False

    @property
    def adaptive_training(self) -> bool:
        """Whether the compute of a training step depends on the text.

        ``flops_per_token(context, training=True)`` is then the value planned by the configuration.
        """
        return False

    def passes_per_token(self, context: int) -> float:
        """Returns the number of passes of a token through the network, as papers count them.

        This is 1 plus the maximum number of additional steps, ``thinking_steps``, of configs that
        have it; methods with other compute override it. It does not apply to training: papers call
        6 N times this value the inference FLOPs per token.

        Args:
            context: Number of tokens of the sequence.
        """
        return 1.0 + getattr(self.config, "thinking_steps", 0)

    def published_flops_per_token(self, context: int) -> float | None:
        """Returns training FLOPs per token as the paper counts them, or None if counted alike."""
        return None

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        """Returns parameters without weight decay, in addition to norms and biases."""
        return ()

    def target_log_probs(self, h: Tensor, targets: Tensor) -> Tensor:
        """Returns log p(target) (...) in nats for ``score``, 0 for targets of -100.

        Records ``greedy``: ``greedy`` (...) bool, whether a target is the most likely token.

        Args:
            h: Normed states (..., D), before the network's ``output_matrix``.
            targets: Targets (...) int64, or -100 to predict none.
        """
        below = self.config.vocab_size if wants("greedy") else None
        result = token_scores(h, cast(Any, self.network).output_matrix, targets, below)
        if result.greedy is not None:
            record("greedy", greedy=result.greedy)
        return result.log_prob

    # ---- construction

    def configure_model(self) -> None:
        """Builds the network once, shards it if the strategy has a device mesh, and compiles it.

        Raises:
            ValueError: If the strategy shards parameters without a device mesh, or the network to
                be sharded exists already.
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
                "training.FullySharded only (configs/trainer/fsdp.yaml)"
            )
        self.network = self.build_network().train(self.training)
        dropout = getattr(self.config, "attention_dropout", 0.0)
        # published weights have their own dropout, whatever the config's field
        dropout = getattr(self.network, "attention_dropout", dropout)
        checkpoint_blocks(self.network, self.config.gradient_checkpointing, dropout)
        if mesh is not None:
            names = mesh.mesh_dim_names  # Lightning's meshes have an axis of tensor parallelism
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
        """Raises a ValueError if ``length`` tokens exceed the learned positions."""
        limit = self.config.position_limit
        if limit is not None and length > limit:
            raise ValueError(
                f"prompt and continuation need {length} positions, the model has learned "
                f"{limit} (block_size); shorten the prompt or max_new_tokens"
            )

    def check_data(self, data: Any) -> None:
        """Raises a ValueError if this model cannot read or score the rows of a data module."""
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
                "which has no separate likelihood; leave eval_stride out"
            )

    def setup(self, stage: str) -> None:
        self.check_data(getattr(self.trainer, "datamodule", None))

    # ---- steps

    def _check_batch(self, batch: Any) -> None:
        """Raises a ValueError if a batch lacks keys that are read, or has tokens that cannot be.

        The steps check, too, for loops of the user's.
        """
        is_dict = isinstance(batch, Mapping)
        if is_dict and {*self.batch_keys} <= batch.keys():
            if "tokens" in batch:
                self._check_tokens(batch["tokens"])
            return
        has = ", ".join(map(str, batch)) if is_dict else type(batch).__name__
        message = f"batch ({has}): {type(self).__name__} reads dicts with " + ", ".join(
            self.batch_keys
        )
        if self.reads != "windows":
            raise ValueError(f"{message}; take them from a data module with rows '{self.reads}'")
        row = "sequence_id" in self.batch_keys
        ids = " and sequence_id (B,), the index of each row in the data" if row else ""
        raise ValueError(
            f"{message}: int64 (B, T){ids}; to convert input_ids and labels (B, T + 1), use "
            "tokens = input_ids[:, :-1] and targets = labels[:, 1:]"
        )

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.device.type != "cpu" or not tokens.numel():
            return  # a device is not waited for: `on_before_batch_transfer` has seen the batch
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"batch: tokens from {low} to {high} must be at least 0 and below vocab_size "
                f"({self.config.vocab_size}); encode the text with the model's tokenizer"
            )
        limit = self.config.position_limit
        if limit is not None and self.reads == "windows" and tokens.shape[1] > limit:
            raise ValueError(
                f"batch: rows of {tokens.shape[1]} tokens exceed the {limit} learned positions "
                "(block_size); cut the rows"
            )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._check_batch(batch)
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._check_batch(batch)
        if self._sharded is not None:
            self._evaluates = False  # an evaluation may have ended with an error
            return self._sharded.step(self._training_objective, batch)
        return self._training_objective(batch)

    def _training_objective(self, batch: Batch) -> Tensor:
        """Returns the result of ``training_step``, and adds to the means for the log."""
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
        # Logs the learning rate, and this step's loss, bits per byte, other terms and statistics,
        # over all ranks. An empty mean, such as the loss of document ends in a step without any,
        # has no value in the log.
        interval = vars(self.trainer).get("log_every_n_steps")
        # lr is copied to the device, so it is logged only in steps that are written
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
        """Removes the value of an earlier step, which would be written again."""
        for result in self.trainer._results.values() if self.trainer._results else ():
            if result.meta.name == key:
                result.reset()
        connector = self.trainer._logger_connector
        for values in (connector._callback_metrics, connector._logged_metrics):
            values.pop(key, None)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers sharded parameters on every rank; without sharding it has no effect.

        All ranks must enter. Inside, each can score, generate and analyse independently.
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
        """Frees the shards of other ranks, unless they are still needed."""
        if self._sharded is not None and not (self._gather_depth or self._evaluates):
            self._sharded.spread()

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Returns the weights, as shards if they are sharded, even during an evaluation.

        They stay sharded for the optimiser's state; the next ``gathered`` gathers them again.
        """
        if self._sharded is not None:
            self._sharded.spread()
        return super().state_dict(*arguments, **options)

    def on_validation_start(self) -> None:
        # Ranks may run the network differently often, so sharded parameters are gathered first.
        if self._sharded is not None:
            self._evaluates = True
            self._sharded.gather()

    def _evaluation_ends(self) -> None:
        self._evaluates = False
        self._spread()

    on_test_start = on_predict_start = on_validation_start
    on_predict_epoch_end = _evaluation_ends

    def _evaluation_step(self, batch: Batch, metrics: StageMetrics) -> None:
        self._check_batch(batch)
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
        # Logs val/loss (nats per token), the perplexity of the likelihood's kind, and val/bpb.
        self._evaluation_ends()
        self._log_evaluation(self.val_metrics, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluation_step(batch, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        # Logs test/loss (nats per token), the perplexity of the likelihood's kind, and test/bpb.
        self._evaluation_ends()
        self._log_evaluation(self.test_metrics, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Scores:
        self._check_batch(batch)
        with torch.no_grad():
            return self.score(batch)

    def recorded(self, batch: Batch, **consumers: Callable[..., None]) -> Scores:
        """Returns the scores of a batch, and passes recorded statistics to consumers.

        Args:
            batch: Batch, see ``score``.
            **consumers: Functions by the name of the statistic, see ``layers.recording``.
        """
        with self.gathered(), recording(**consumers), self.precision_context(), torch.no_grad():
            return self.score(batch)

    def recorded_loss(self, batch: Batch, **consumers: Callable[..., None]) -> LossOutput:
        """Returns the objective's terms, attached to the graph, and passes statistics to consumers.

        If parameters are sharded, the caller must hold ``gathered()`` for as long as the graph.

        Args:
            batch: Batch, see ``loss``.
            **consumers: See ``recorded``. Their tensors are part of the graph.
        """
        with (
            self.gathered(),
            recording(**consumers),
            self.precision_context(),
            torch.enable_grad(),
        ):
            return self.loss(batch)

    def progress(self, schedule: str) -> float:
        """Returns the fraction of the schedule that is done, in [0, 1], or 1 without a run.

        The schedule is as long as the run or, if set, ``optimizer.horizon``.

        Args:
            schedule: Key and value of the option that follows the schedule, for the message.

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
        """Peak learning rate of the schedule, which Lightning's LearningRateFinder sets."""
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
        # Lightning refuses to clip under bf16, because a fused optimiser might unscale gradients;
        # without a loss scaler there is nothing to unscale.
        plugin = self.trainer.precision_plugin
        if not gradient_clip_val or _has_scaler(self.trainer):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        algorithm = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
        Precision.clip_gradients(plugin, optimizer, gradient_clip_val, algorithm)

    def precision_context(self) -> contextlib.AbstractContextManager[None]:
        """Returns the trainer's autocast context, or an empty one without a trainer."""
        plugin = None if self._trainer is None else self._trainer.precision_plugin
        return contextlib.nullcontext() if plugin is None else plugin.forward_context()


def _has_scaler(trainer: L.Trainer) -> bool:
    """Whether the loss is scaled (16-mixed), where a fused optimiser would clash with clipping."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None
