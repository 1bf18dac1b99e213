"""The base of every method: loss -> metrics -> optimiser, written once.

A new paper writes ``build_network``, ``loss``, ``score``, the two decoding methods and
``flops_per_token``; steps, logging, normalisation over ranks and accumulated micro-batches,
optimiser, checkpoints and text generation are here.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import lightning as L
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lightning_models.checkpoint import CheckpointError, read_checkpoint
from lightning_models.generation import SamplingConfig, generate
from lightning_models.layers import DecoderConfig, recording
from lightning_models.metrics import StageMetrics, StepMeans
from lightning_models.objective import objective
from lightning_models.optim import OptimizerConfig, build_optimizer, schedule_factor
from lightning_models.outputs import Likelihood, LossOutput, Mean, Scores
from lightning_models.recipe import as_dataclass, plain, public_path
from lightning_models.sharding import shard

Batch = dict[str, Any]


class LanguageModel(L.LightningModule, ABC):
    """A language model that any method of this project derives from."""

    needs_grad_in_eval: ClassVar[bool] = False
    """Whether scoring runs backward passes (inference by gradient)."""
    reads: ClassVar[str] = "windows"
    """What batches hold: windows of tokens, or sentences (see ``datamodules``)."""

    def __init__(
        self, config: DecoderConfig, optimizer: OptimizerConfig, compile: bool = False
    ) -> None:
        """Keeps the configuration; plain dicts, as checkpoints hold them, are accepted.

        Args:
            config: the method's configuration dataclass.
            optimizer: optimiser and schedule.
            compile: whether to compile the network with torch.compile (in place).
        """
        super().__init__()
        self.config = as_dataclass(config, get_type_hints(type(self).__init__)["config"])
        self.optimizer_config = as_dataclass(optimizer, OptimizerConfig)
        self.compile_network = compile
        self.network: nn.Module | None = None
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

    # ---- what a method writes

    @abstractmethod
    def build_network(self) -> nn.Module:
        """Returns a freshly initialised network for ``self.config``."""

    @abstractmethod
    def loss(self, batch: Batch) -> LossOutput:
        """Returns the terms of the training objective for one micro-batch."""

    @abstractmethod
    def score(self, batch: Batch) -> Scores:
        """Returns the log-likelihood of the batch's targets."""

    @abstractmethod
    def init_cache(self, prompts: Tensor, lengths: Tensor, max_new_tokens: int) -> Any:
        """Returns a decoding cache that has consumed all but the last token of each prompt.

        Args:
            prompts: (B, P) int64, padded on the right.
            lengths: (B,) int64, at least 1.
            max_new_tokens: how many tokens will be decoded at most.
        """

    @abstractmethod
    def decode_step(self, cache: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Advances each row by one unit of its own work.

        Args:
            cache: as ``init_cache`` returned it; changed in place.
            tokens: (B,) the last token of each row.

        Returns:
            Next-token logits (B, V) float32, and which rows are ready to be sampled (B,) bool.
            A row that is not ready is stepped again with the same token.
        """

    @abstractmethod
    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns FLOPs per token of a forward pass, or of a training step (with the backward)."""

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        """Returns parameters exempt from weight decay, beside norms and biases."""
        return ()

    # ---- construction and checkpoints

    def configure_model(self) -> None:
        """Builds the network (once), shards it where the strategy asks for it, compiles it."""
        if self.network is not None:
            return
        self.network = self.build_network()
        if getattr(self, "_device_mesh", None) is not None:
            shard(self.network, self.device_mesh)
        if self.compile_network:
            self.network.compile()

    def recipe(self) -> dict[str, Any]:
        """Returns the public class path and plain init arguments that rebuild this model."""
        arguments = {
            "config": plain(self.config),
            "optimizer": plain(self.optimizer_config),
            "compile": self.compile_network,
        }
        return {"class_path": public_path(type(self)), "init_args": arguments}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds plain init arguments and the recipes of model and data, enough to rebuild both."""
        model = self.recipe()
        checkpoint["hyper_parameters"] = model["init_args"]
        data = getattr(self._trainer, "datamodule", None)
        checkpoint["recipe"] = {"model": model, "data": data.recipe() if data is not None else None}

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, *args: Any, weights_only: bool | None = None, **kwargs: Any
    ) -> "LanguageModel":
        """Returns the model of a checkpoint file; see Lightning's method of this name.

        Args:
            checkpoint_path: the file.
            *args: see there.
            weights_only: null and true: only tensors and plain values are unpickled; false runs any
                code that the file brings along.
            **kwargs: see there; init arguments that replace the saved ones.

        Raises:
            CheckpointError: if the file is missing, damaged, or wants to run code.
        """
        if weights_only is not False:
            checkpoint_path = read_checkpoint(checkpoint_path).path
        load: Any = super().load_from_checkpoint
        return load(checkpoint_path, *args, weights_only=weights_only is not False, **kwargs)

    @staticmethod
    def from_checkpoint(path: str | Path) -> "LanguageModel":
        """Returns a checkpoint's model, whatever its method: on the CPU, in eval mode, uncompiled.

        Only methods that are imported already are built; the global random state stays as it is.

        Raises:
            CheckpointError: if the file is missing, damaged, or of an unknown method.
        """
        checkpoint = read_checkpoint(path)
        name = checkpoint.model_recipe["class_path"]
        kind = next((kind for kind in _methods() if public_path(kind) == name), None)
        if kind is None:
            raise CheckpointError(
                f"{path} is of class {name}, which is not known here; import its package first"
            )
        with torch.random.fork_rng(devices=[]):
            model = kind.load_from_checkpoint(checkpoint.path, map_location="cpu", compile=False)
        return model.eval()

    @property
    def context_limit(self) -> int | None:
        """Most tokens of prompt and continuation that fit one trained context; None: no limit."""
        return self.config.block_size

    def check_context(self, length: int) -> None:
        """Raises ValueError if ``length`` tokens do not fit learned positions."""
        if self.config.positions == "learned" and length > self.config.block_size:
            raise ValueError(
                f"prompt and continuation need {length} positions, the model has learned "
                f"{self.config.block_size} (block_size); shorten the prompt or max_new_tokens"
            )

    def check_data(self, data: Any) -> None:
        """Raises ValueError if the rows of a data module are not what this model reads."""
        rows = getattr(data, "rows", self.reads)
        if rows != self.reads:
            raise ValueError(
                f"data ({type(data).__name__}) are {rows}, and {type(self).__name__} reads "
                f"{self.reads}: choose data of that kind (datamodules.Sentences has sentences, "
                "SentenceWindows and the corpora windows)"
            )

    def setup(self, stage: str) -> None:
        """Checks that the trainer's data are what this model reads."""
        self.check_data(getattr(self.trainer, "datamodule", None))

    # ---- steps

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the micro-batch's share of the optimiser step's objective."""
        output = self.loss(batch)
        objective = self._objective(output, batch)
        for name, term in output.terms.items():
            self.train_metrics.add("loss" if name == "nll" else name, term.sum, term.normaliser)
        for name, value in output.stats.items():
            parts = value if isinstance(value, Mean) else (value,)
            self.train_metrics.add(name, *parts)
        if "num_bytes" in batch:
            self.train_metrics.add("nats_per_byte", output.terms["nll"].sum, batch["num_bytes"])
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
        """Logs loss, bits per byte, other terms and statistics of this step over all ranks."""
        for name, value in self.train_metrics.take().items():
            if name == "nats_per_byte":
                self.log("train/bpb", value / math.log(2))
            else:
                self.log(f"train/{name}", value, prog_bar=name == "loss")

    def _evaluation_step(self, batch: Batch, metrics: StageMetrics) -> None:
        with torch.set_grad_enabled(self.needs_grad_in_eval):
            scores = self.score(batch)
        log_prob, count = scores.reported(batch)
        metrics.add(-log_prob, count, batch.get("num_bytes"), -scores.total())

    def _log_evaluation(self, metrics: StageMetrics, stage: str) -> None:
        values = metrics.values(self.likelihood)
        metrics.reset()
        for name, value in values.items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "loss", rank_zero_only=False)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds the batch to the corpus-level sums."""
        self._evaluation_step(batch, self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        """Logs val/loss (nats per token), perplexity by its kind, and val/bpb."""
        self._log_evaluation(self.val_metrics, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds the batch to the corpus-level sums."""
        self._evaluation_step(batch, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        """Logs test/loss (nats per token), perplexity by its kind, and test/bpb."""
        self._log_evaluation(self.test_metrics, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Scores:
        """Returns the scores of the batch."""
        with torch.set_grad_enabled(self.needs_grad_in_eval):
            return self.score(batch)

    def recorded(self, batch: Batch, **consumers: Callable[..., None]) -> Scores:
        """Returns the scores of a batch, while consumers get what the network records.

        Args:
            batch: as ``score`` takes it.
            **consumers: functions by the name of the statistic, see ``layers.recording``.
        """
        grad = torch.set_grad_enabled(self.needs_grad_in_eval)
        with recording(**consumers), self._precision(), grad:
            return self.score(batch)

    def recorded_loss(self, batch: Batch, **consumers: Callable[..., None]) -> LossOutput:
        """Returns the objective's terms with their graph, while consumers get what is recorded.

        Args:
            batch: as ``loss`` takes it.
            **consumers: see ``recorded``; what they get is part of the graph.
        """
        with recording(**consumers), self._precision(), torch.enable_grad():
            return self.loss(batch)

    # ---- optimiser

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns AdamW with its two decay groups and the per-step schedule."""
        config = self.optimizer_config
        assert self.network is not None
        optimizer = build_optimizer(
            self.network,
            config,
            no_decay=self.no_decay_parameters(),
            fused=not _has_scaler(self.trainer),
        )
        factor = schedule_factor(config, self.trainer.estimated_stepping_batches)
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

    def _precision(self) -> contextlib.AbstractContextManager[None]:
        """The trainer's autocast, where there is one."""
        plugin = None if self._trainer is None else self._trainer.precision_plugin
        return contextlib.nullcontext() if plugin is None else plugin.forward_context()

    # ---- text

    def generate_text(
        self,
        prompts: Sequence[str],
        *,
        tokenizer: Any,
        max_new_tokens: int,
        first_row: int = 0,
        **sampling: Any,
    ) -> list[str]:
        """Returns a continuation of each prompt (an empty prompt starts a document).

        The training mode and the global random state are left as they are.

        Args:
            prompts: texts.
            tokenizer: the data's tokenizer (``datamodule.tokenizer``).
            max_new_tokens: upper bound on each continuation, in tokens.
            first_row: number of the first prompt's random stream, where prompts come in several
                calls.
            **sampling: fields of ``SamplingConfig``: temperature, top_k, top_p, seed.
        """
        ids = [tokenizer.prompt_ids(prompt) for prompt in prompts]
        was_training = self.training
        self.eval()
        try:
            with self._precision():
                new = generate(
                    self,
                    ids,
                    max_new_tokens=max_new_tokens,
                    sampling=SamplingConfig(**sampling),
                    eos_id=tokenizer.stop_id,
                    vocab_size=tokenizer.vocab_size,
                    device=self.device,
                    first_row=first_row,
                )
        finally:
            self.train(was_training)
        return [tokenizer.decode([i for i in row if i != tokenizer.stop_id]) for row in new]


def _methods(kind: type[LanguageModel] = LanguageModel) -> Iterator[type[LanguageModel]]:
    """Yields all methods that are imported."""
    for method in kind.__subclasses__():
        yield method
        yield from _methods(method)


def _has_scaler(trainer: L.Trainer) -> bool:
    """Whether the loss is scaled (16-mixed): a fused optimiser would clash with clipping."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None
