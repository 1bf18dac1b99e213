"""LightningModule of recurrent depth: objectives, scores, decoding and FLOPs."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_models.flops import TRAINING_FACTOR, attention_flops, linear_flops, training_flops
from lightning_models.layers import KVCache, record, wants
from lightning_models.optim import OptimizerConfig
from lightning_models.output_layer import linear_cross_entropy_each, logits
from lightning_models.outputs import LossOutput, Mean, Term
from lightning_models.ponderlm.baselines.recurrent_depth import config as configs
from lightning_models.ponderlm.baselines.recurrent_depth import decoding, exits
from lightning_models.ponderlm.baselines.recurrent_depth import network as networks
from lightning_models.ponderlm.baselines.recurrent_depth.network import Entered, RecurrentNetwork
from lightning_models.ponderlm.baselines.shared import DepthLM
from lightning_models.runtime import on_device, uncompiled


class LoopedLM(DepthLM):
    """A decoder that applies its blocks n + 1 times (arXiv 2301.13196, 2502.17416).

    Args:
        config: Shape of the network and number of loops.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network's blocks with torch.compile (in place).
    """

    config: configs.LoopedConfig
    network: RecurrentNetwork

    def __init__(
        self,
        config: configs.LoopedConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def shares_prefixes(self) -> bool:
        """Whether ``score`` reads a prefix shared by several rows once, if it reads in parallel."""
        return super().shares_prefixes and not self.config.recurrence.decoding_differs

    @property
    def adaptive(self) -> bool:
        """Whether the number of recurrences of a token depends on the text."""
        return self.config.recurrence.exits_early

    def build_network(self) -> RecurrentNetwork:
        return RecurrentNetwork(self.config)

    # ---- scoring and generation

    def read(self, batch: dict[str, Any], every_depth: bool) -> tuple[Tensor, Tensor]:
        """Returns states and executed steps, see ``DepthLM``.

        If decoding differs from one parallel pass, texts are read token by token as in decoding.
        In this case it records ``flops``, see ``LanguageModel.adaptive``.
        """
        if self.training or not self.config.recurrence.decoding_differs:
            return super().read(batch, every_depth)
        tokens = batch["tokens"]
        valid = batch.get("mask", torch.ones_like(tokens, dtype=torch.bool))
        cache = decoding.RecurrentCache(self.network, *tokens.shape)
        with uncompiled():  # the length of the cache changes with each token
            read = decoding.read_text(self.network, tokens, valid.sum(dim=1), cache, every_depth)
        if wants("flops"):
            flops = self._executed_flops(read.recurrences)
            record("flops", flops=flops, tokens=valid.sum(dim=1))
        states = read.states if read.by_depth is None else read.by_depth
        return states, (read.recurrences - 1).clamp(min=0)

    def init_cache(
        self,
        prompts: Tensor,
        lengths: Tensor,
        max_new_tokens: int,
        streams: Sequence[tuple[int, int]] = (),
    ) -> decoding.RecurrentCache:
        network, shape = self.network, self.config.recurrence
        capacity = prompts.shape[1] + max_new_tokens
        cache = decoding.RecurrentCache(network, len(prompts), capacity)
        tokens, lengths = prompts[:, :-1], lengths - 1
        # NOTE(paper): Huginn's code intends to exclude prompts from exiting, but the index that it
        # checks is overwritten before; Ouro's code runs every recurrence. Here it is an option.
        if shape.exits_early and shape.prompt_exits:
            decoding.read_text(network, tokens, lengths, cache)
        elif tokens.shape[1]:
            network(tokens, cache)
            if shape.cache_lookup in ("mean", "first"):
                real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
                rows, positions = real.nonzero(as_tuple=True)
                recurrences = torch.full_like(rows, self.config.thinking_steps + 1)
                decoding.leave_entries(network, cache, rows, positions, recurrences)
            cache.advance(lengths)
        return cache

    def decode_step(self, cache: KVCache, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns next-token logits (B, V) after ``tokens`` (B,), for which every row is ready.

        With an exit rule, records ``generated_steps``: ``steps`` (B,) int64, the additional steps
        of each token.
        """
        assert isinstance(cache, decoding.RecurrentCache)
        read = decoding.read_token(self.network, cache, tokens)
        if self.adaptive:
            record("generated_steps", steps=read.recurrences - 1)
        h, scores = read.states, read.scores
        if scores is None:
            scores = logits(h, self.network.output_matrix.to(h.dtype))
        else:  # rows that exited early have their logits; the others still need them
            rows = (read.recurrences > self.config.thinking_steps).nonzero()[:, 0]
            last = logits(h[rows], self.network.output_matrix.to(h.dtype))
            scores = scores.index_copy(0, rows, last.to(scores.dtype))
        return scores.float(), torch.ones_like(tokens, dtype=torch.bool)

    # ---- compute

    def flops_of_steps(self, context: int, steps: float) -> dict[str, float]:
        """Returns the forward FLOPs per token by part if tokens take ``steps`` additional steps.

        Prelude, coda and output layer are counted once. Their repetitions for an exit rule are
        counted as ``exits``, and A as ``injection``.
        """
        config, shape = self.config, self.config.recurrence
        parts, recurrences = self.plain_flops(context), 1 + steps  # of core and output matrix
        coda = shape.coda_layers / config.num_layers
        times = recurrences + shape.prelude_layers / config.num_layers + coda
        blocks = {name: flops for name, flops in parts.items() if name != "output"}
        total = {"output": parts["output"]} | {key: times * flops for key, flops in blocks.items()}
        if self.network.adapter is not None:
            total["injection"] = recurrences * linear_flops(self.network.adapter)
        if shape.reads_logits:
            total["exits"] = steps * (parts["output"] + coda * sum(blocks.values()))
        elif shape.exit == "gate" and self.network.gate is not None:
            total["exits"] = recurrences * linear_flops(self.network.gate)
        return total

    def _executed_flops(self, recurrences: Tensor) -> Tensor:
        """Returns the FLOPs (B,) float64 of scoring texts by their tokens' recurrences (B, T).

        A token attends to all earlier ones in each of its recurrences; padding has 0 recurrences.
        Unlike decoding, scoring reads the logits of a token's exit again.
        """
        config, shape = self.config, self.config.recurrence
        base, with_step = (sum(self.flops_of_steps(1, steps).values()) for steps in (0, 1))
        depth = recurrences.double().cpu()
        real = depth > 0
        flops = (base + (with_step - base) * (depth - 1)) * real
        if shape.reads_logits:
            flops += self.plain_flops(1)["output"] * (real & (depth <= config.thinking_steps))
        # the keys of earlier tokens, in each application of a block of prelude, core and coda
        earlier = torch.arange(depth.shape[1], dtype=torch.float64)
        coda = shape.coda_layers * (depth if shape.reads_logits else real)
        stacks = (shape.prelude_layers * real + coda) / config.num_layers + depth
        return (flops + attention_flops(config, 1) * stacks * earlier).sum(dim=1)


class RecurrentDepthLM(LoopedLM):
    """A decoder of recurrent depth, such as Huginn (arXiv 2502.05171) or Ouro (arXiv 2510.25741).

    Args:
        config: Shape of the network, its recurrences and exit rule.
        optimizer: Optimiser and schedule.
        compile: Whether to compile the network's blocks with torch.compile (in place).
    """

    config: configs.RecurrentDepthConfig
    _loaded = False  # whether the weights are from a checkpoint

    def __init__(
        self,
        config: configs.RecurrentDepthConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),
        compile: bool = False,
    ) -> None:
        super().__init__(config, optimizer, compile)

    @property
    def batch_keys(self) -> tuple[str, ...]:
        draws = self.config.state == "noise" and self.training
        return (*super().batch_keys, "sequence_id") if draws else super().batch_keys

    def build_network(self) -> RecurrentNetwork:
        network = super().build_network()
        if self.config.gate == "alone":
            network.requires_grad_(False)
            assert network.gate is not None
            network.gate.requires_grad_(True)
        return network

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._loaded = True

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.config.gate == "alone" and not self._loaded:
            warnings.warn(
                "gate (alone) trains the exit gate of a network that no checkpoint was loaded for; "
                "pass an export of a run with gate=joint as --ckpt_path",
                stacklevel=2,
            )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, index: int) -> Any:
        # Adds the rows' indices as a list for drawing noise on the host, without a device sync.
        moved = super().transfer_batch_to_device(batch, device, index)
        drawn = "sequence_id" in self.batch_keys
        return {**moved, "numbers": batch["sequence_id"].tolist()} if drawn else moved

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        """Returns the cross-entropy after the last recurrence, or the gate's objective.

        Logs ``recurrences`` of the step; with ``log_states`` ``token_similarity`` (mean cosine of
        the last states of two tokens of a row), ``state_change`` (relative change in the last
        recurrence) and ``depth_0/nll`` (loss after one recurrence); with a gate the loss after each
        recurrence and ``expected_recurrences``.
        """
        config, network, targets = self.config, self.network, batch["targets"]
        recurrences, trained = self._recurrences()
        frozen, gated = config.gate == "alone", config.gate != "none"
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            entered = network.enter(batch["tokens"])
            states = network.recur(
                entered,
                network.first_state(entered, self._noise(batch, entered)),
                every=gated,
                recurrences=recurrences,
                trained=trained,
            )
        if gated:
            output = self._gate_loss(states, entered, targets)
        else:
            nll = self._nll(states[-1], entered, targets)[0]
            output = LossOutput({"nll": Term(nll, (targets >= 0).sum(), "targets")})
        output.stats["recurrences"] = on_device(float(recurrences), targets.device)
        if config.log_states:
            self._log_states(states, entered, targets, output)
        return output

    def _recurrences(self) -> tuple[int, int | None]:
        """Returns r of this step, and the number of last recurrences that keep their graph."""
        trained = self.config.backprop_recurrences
        if not self.training or self.config.training_recurrences == "fixed":
            return self.config.thinking_steps + 1, trained
        return networks.draw_recurrences(self.config, self._step()), trained

    def _step(self) -> int:
        return 0 if self._trainer is None else self._trainer.global_step

    def _noise(self, batch: dict[str, Any], entered: Entered) -> Tensor | None:
        """Returns normals (B, T, D) by seed, step, row and position in training, otherwise None."""
        if self.config.state != "noise" or not self.training:
            return None
        numbers = batch["numbers"] if "numbers" in batch else batch["sequence_id"].tolist()
        count, dim = entered.e.shape[1:]
        key = self.config.seed, self._step()
        rows = [networks.draw_noise((*key, index), count, dim)[:count] for index in numbers]
        return on_device(torch.stack(rows), entered.e.device)

    def _nll(
        self, s: Tensor, entered: Entered, targets: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the results of ``linear_cross_entropy_each`` for states s (B, T, D)."""
        h = self.network.read_out(s, entered)
        return linear_cross_entropy_each(h, self.network.output_matrix, targets, weights)

    def _gate_loss(self, states: Sequence[Tensor], entered: Entered, targets: Tensor) -> LossOutput:
        """Returns the terms of stage I or II and the statistics that both log."""
        config, valid = self.config, targets >= 0
        count = valid.sum()
        gate = torch.stack([self.network.exit_logits(s) for s in states], dim=-1)  # (B, T, r)
        p = exits.log_exits(gate.detach())[0].exp()
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.gate == "joint"):
            pairs = [
                self._nll(s, entered, targets, p[..., depth]) for depth, s in enumerate(states)
            ]
        weighted, losses = sum(pair[0] for pair in pairs), torch.stack([x for _, x in pairs], -1)
        nll, entropy, times = exits.expected_loss(gate, torch.as_tensor(weighted), losses, valid)
        if config.gate == "joint":
            more = {"entropy": -config.entropy_weight * entropy}
        else:  # the expected loss is only reported, and the gate learns from gains
            nll, more = nll.detach(), {"gate": exits.gain_loss(gate, losses, valid)}
        terms = {key: Term(total, count, "targets") for key, total in {"nll": nll, **more}.items()}
        output = LossOutput(terms, {"expected_recurrences": Mean(times, count)})
        if config.training_recurrences == "fixed":  # otherwise the logged names would vary by step
            for depth, total in enumerate(losses.sum(dim=(0, 1))):
                output.stats[f"depth_{depth}/nll"] = Mean(total, count)
        return output

    @torch.no_grad()
    def _log_states(
        self, states: Sequence[Tensor], entered: Entered, targets: Tensor, output: LossOutput
    ) -> None:
        """Logs the signs of collapse of Huginn's two failed runs, and the convergence of states."""
        valid = targets >= 0
        last, count = states[-1].float(), valid.sum(dim=1).float()
        # |sum of n unit vectors|^2 = n + the sum of the cosines of all ordered pairs
        total = (F.normalize(last, dim=-1) * valid[..., None]).sum(dim=1).square().sum(dim=1)
        pairs = (count * (count - 1)).clamp(min=1)
        similarity, several = (total - count) / pairs, count > 1
        output.stats["token_similarity"] = Mean((similarity * several).sum(), several.sum())
        if len(states) > 1:
            change = (last - states[-2].float()).norm(dim=-1) / last.norm(dim=-1)
            output.stats["state_change"] = Mean((change * valid).sum(), valid.sum())
        if "depth_0/nll" not in output.stats:
            first = self._nll(states[0], entered, targets)[0]
            output.stats["depth_0/nll"] = Mean(first, valid.sum())

    def flops_per_token(self, context: int, training: bool = False) -> float:
        """Returns the FLOPs per token, averaged over steps in training.

        Recurrences outside the graph and frozen networks only cost a forward pass.
        """
        if not training:
            return super().flops_per_token(context)
        config, parts = self.config, self.plain_flops(context)
        mean, trained = networks.mean_recurrences(config)
        run, kept = (self.flops_of_steps(context, r - 1) for r in (mean, trained))
        forward, graph = (sum(x.values()) - x.get("exits", 0.0) for x in (run, kept))
        coda = sum(parts.values()) - parts["output"]
        read_out = parts["output"] + config.coda_layers / config.num_layers * coda
        gated = self.network.gate is not None
        more = (mean - 1) * read_out if gated else 0.0
        gate = mean * linear_flops(self.network.gate) if self.network.gate is not None else 0.0
        logged = read_out if config.log_states and not gated else 0.0
        if config.gate == "alone":
            return forward + more + 2 * gate  # no gradient goes to the states
        again = training_flops(0.0, graph - parts["output"], config)
        return forward - graph + TRAINING_FACTOR * (graph + more + gate) + again + logged
