"""Analysis of the sentence memory (Thought Gestalt).

The paper is *Modeling Language as a Sequence of Thoughts* (Borazjanizadeh and McClelland).

=============================================  =====================================================
paper                                          code
=============================================  =====================================================
Fig. 6, gradients through working memory       ``reach_lines``
Fig. 7, g_mem over training                    ``gates``, ``GateHistory``
Fig. 8, gradient share of each component       ``gradient_norms``, ``shares``
=============================================  =====================================================

The vector of sentence t - j has age j at sentence t: 1 is the previous sentence.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callbacks.analysis.base import Analysis, Findings, NothingToAnalyseError, Recorder, as_float64
from callbacks.analysis.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    AnalysisReport,
    Draw,
    Tables,
    draw_lines,
    finish,
    panels,
    scalars_of,
    shades,
)
from callbacks.hooks import check_minimum
from callbacks.trainer_state import log_interval

DEFAULT_MEMORY_SIZE = 40
"""Number of sentences that is assumed if the size of the memory is unknown."""

SHOWN_COMPONENTS = {
    "self_attention": ("within-sentence self-attention", BLUE),
    "memory_attention": ("working-memory cross-attention", ORANGE),
    "feed_forward": ("feed-forward (MLP)", GREEN),
}
COMPONENTS = {
    "attention": "self_attention",
    "attention_norm": "self_attention",
    "memory_attention": "memory_attention",
    "memory_norm": "memory_attention",
    "feed_forward": "feed_forward",
    "feed_forward_norm": "feed_forward",
}
"""Component of each sub-module of a block; a norm belongs to the layer that it feeds. In parallel
blocks one norm feeds both attentions and counts as self-attention."""

LayerPart = tuple[int, str]
"""A layer (1-based) and one of its components."""

_GATE = re.compile(r"(?:^|\.)blocks\.(\d+)\.memory_attention\.gate$")
_SUBLAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.(\w+)\.")


class GateAnalysis(Analysis):
    """Analyses how a model learns to use its sentence memory (Thought Gestalt).

    Every few optimiser steps it records the gate g_mem of every layer that reads memory, after the
    step (``gate/layer_<l>``, Fig. 7 of *Modeling Language as a Sequence of Thoughts*), and the
    share of the unclipped gradient in self-attention, memory cross-attention and feed-forward
    layers (``gradient_share/<component>``, Fig. 8; defined in ``shares``).

    After validations, on a few long streams of the first batches, it measures how strongly the loss
    of a sentence depends on earlier sentence vectors, by age and beyond the size of the memory
    (``gradient_reach/...``, Fig. 6 in numbers), and the ages that each layer attends to
    (``memory_attention/...``).

    Files are in ``gate_analysis``. Files about the whole run have no step in their names; their
    rows are saved in checkpoints, so ``validate --ckpt_path best.ckpt`` draws Figs. 7 and 8 up to
    that step. ``callbacks.analysis`` describes what all analyses share.

    Args:
        output: Folder of the files. If null, ``gate_analysis`` in the run's log folder.
        every_n_steps: Optimiser steps between measurements of gates and gradient shares. Null means
            trainer.log_every_n_steps; 0 turns them off.
        num_batches: Number of validation batches to analyse.
        every_n_validations: Analyse every n-th validation during training. If 0, analyse only under
            the verb validate.
        max_sentences: Maximum number of sentences, from the first of a document, whose graphs are
            in memory at once. Null means one more than twice the memory size, for ages up to 2 M.
        max_streams: Maximum number of documents per batch; the longest are kept.
        probes: Number of sentences whose losses are differentiated, evenly spaced in the second
            half of the longest document. Each costs a backward pass.
    """

    tag = "gate_analysis"
    reads = "sentences"
    image_tag = "gate"
    cards = ("gradient_share/memory_attention", "gradient_reach/*")

    def __init__(
        self,
        output: str | None = None,
        every_n_steps: int | None = None,
        num_batches: int = 2,
        every_n_validations: int = 1,
        max_sentences: int | None = None,
        max_streams: int = 4,
        probes: int = 4,
    ) -> None:
        super().__init__(every_n_validations, num_batches, output)
        check_minimum("every_n_steps", every_n_steps, 0)
        check_minimum("max_sentences", max_sentences, 2)
        check_minimum("max_streams", max_streams, 1)
        check_minimum("probes", probes, 1)
        self.every_n_steps = every_n_steps
        self.max_sentences = max_sentences
        self.max_streams = max_streams
        self.probes = probes
        self._gates, self._norms = GateHistory(), GateHistory()
        self._has_gates: bool | None = None
        self._pending: dict[LayerPart, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        rows = {"gates": asdict(self._gates), "gradient_norms": asdict(self._norms)}
        return {**super().state_dict(), **rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._gates = GateHistory(**state_dict["gates"])
        self._norms = GateHistory(**state_dict["gradient_norms"])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._has_gates = None

    # ---- gates and gradients, in training

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step = trainer.global_step
        if not step:  # a new run in this process
            self._gates, self._norms = GateHistory(), GateHistory()
        measures = self._check_gates(pl_module) and self._interval(trainer) > 0
        if measures and not self._gates.rows:
            self._gates.add(step, _sentence_steps(pl_module), gates(pl_module))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # The gradient is accumulated and averaged over ranks here, but not yet clipped.
        interval = self._interval(trainer)
        if interval and (trainer.global_step + 1) % interval == 0 and self._has_gates:
            self._pending = gradient_norms(pl_module)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        norms, self._pending = self._pending, None
        if norms is None:
            return
        step, sentence_steps = trainer.global_step, _sentence_steps(pl_module)
        by_layer, by_component = gates(pl_module), shares(norms)
        self._gates.add(step, sentence_steps, by_layer)
        values = {f"gate/layer_{layer}": value for (layer, _), value in by_layer.items()}
        # without a finite gradient the step is skipped
        if by_component is not None:
            self._norms.add(step, sentence_steps, norms)
            values |= {f"gradient_share/{part}": share for part, share in by_component.items()}
        self._log(trainer, values)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._publish_run(trainer)

    def _interval(self, trainer: L.Trainer) -> int:
        return log_interval(trainer) if self.every_n_steps is None else self.every_n_steps

    def _check_gates(self, pl_module: L.LightningModule) -> bool:
        """Returns whether the model has gates; warns once if not."""
        if self._has_gates is None:
            self._has_gates = bool(gates(pl_module))
            if not self._has_gates:
                self._warn(
                    f"{type(pl_module).__name__} has no memory gates (no sentence memory, or none "
                    "read by cross-attention): gates, gradient shares and attention to memory "
                    "are left out, and so is gradient reach unless sentence vectors are recorded"
                )
        return self._has_gates

    def _publish_run(self, trainer: L.Trainer) -> None:
        """Writes the rows of the run so far, or of the validated checkpoint."""
        if trainer.is_global_zero and (self._gates.rows or self._norms.rows):
            self._publish(trainer, run_report(self._gates, self._norms), "")

    # ---- reach and attention, at validations

    def evaluation_ends(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._findings is not None:
            self._publish_run(trainer)
        super().evaluation_ends(trainer, pl_module)

    def _collect(
        self, tokenizer: Any, pl_module: Any, batch: dict[str, Any], findings: Findings
    ) -> None:
        has_gates, problem = self._check_gates(pl_module), ""
        try:
            self._unable = not self._analyse(pl_module, batch, findings)
            if self._unable and has_gates:
                problem = f"{type(pl_module).__name__} records nothing about its memory"
        except torch.OutOfMemoryError:
            problem = (
                "the graph of the analysed sentences does not fit into memory; lower max_streams "
                f"({self.max_streams}) or max_sentences ({self._sentences(pl_module)})"
            )
        if problem:
            raise NothingToAnalyseError(f"reach and attention are left out: {problem}")

    def _analyse(self, pl_module: Any, batch: dict[str, Any], findings: Findings) -> bool:
        """Scores the batch with autograd; returns whether the model records anything."""
        if "lengths" not in batch:
            return False
        recorder = Recorder("sentences")
        with torch.inference_mode(False):
            part = cut(batch, self.max_streams, self._sentences(pl_module))
            if not part["lengths"].any():
                return True
            attention = attention_consumer(findings)
            pl_module.recorded_loss(part, **recorder.consumers(), memory_attention=attention)
            sentences = recorder.latest("sentences")
            vectors, losses = sentences.get("vectors", ()), sentences.get("nll", ())
            for rows in reach_lines(vectors, losses, self.probes):
                findings.add("reach", rows)
        return bool(vectors) or bool(findings)

    def _sentences(self, pl_module: L.LightningModule) -> int:
        return self.max_sentences or 2 * (_memory_size(pl_module) or DEFAULT_MEMORY_SIZE) + 1

    def _report(self, trainer: L.Trainer, pl_module: Any, findings: Findings) -> AnalysisReport:
        return memory_report(findings, _memory_size(pl_module))

    def _text_report(self, tokenizer: Any, pl_module: Any, findings: Findings) -> AnalysisReport:
        # the tables of memory_report with the gates, which are also a column of attention
        report = memory_report(findings, _memory_size(pl_module))
        by_layer = {layer: value for (layer, _), value in gates(pl_module).items()}
        attention = report.tables["attention"].copy()
        attention["gate"] = attention["layer"].map(by_layer)
        gate_table = pd.DataFrame({"layer": list(by_layer), "gate": list(by_layer.values())})
        tables = {"attention": attention, "reach": report.tables["reach"], "gates": gate_table}
        tables = {name: table for name, table in tables.items() if len(table)}
        figures = {name: report.figures[name] for name in tables if name in report.figures}
        return AnalysisReport(tables=tables, figures=figures)


def _sentence_steps(pl_module: L.LightningModule) -> int:
    return int(getattr(pl_module, "sentence_steps", 0))


def _memory_size(pl_module: L.LightningModule) -> int | None:
    return getattr(getattr(pl_module, "config", None), "memory_size", None)


# ---- gates and gradients


def gates(model: nn.Module) -> dict[LayerPart, float]:
    """Returns g_mem of every layer that reads memory, by layer.

    If parameters are sharded, this is a collective operation that all ranks must call.
    """
    parameters = [
        (int(match[1]) + 1, parameter.detach())
        for name, parameter in model.named_parameters()
        if (match := _GATE.search(name))
    ]
    if not parameters:
        return {}
    values = torch.stack([_whole(gate).reshape(()) for _, gate in parameters]).tolist()
    return {(layer, "gate"): value for (layer, _), value in zip(parameters, values, strict=True)}


def gradient_norms(model: nn.Module) -> dict[LayerPart, float]:
    """Returns the gradient's 2-norm for each component of each layer; 0 without a gradient.

    Components are self-attention within sentences, cross-attention to memory with its gate, and
    the feed-forward layer, each with the norm before it, but not embeddings, sentence head, final
    norm and output matrix. If parameters are sharded, this is a collective operation that all ranks
    must call.
    """
    index_of: dict[LayerPart, int] = {}
    gradients: list[Tensor] = []
    indices: list[int] = []
    for name, parameter in model.named_parameters():
        match = _SUBLAYER.search(name)
        if match is None or match[2] not in COMPONENTS:
            continue
        key = int(match[1]) + 1, COMPONENTS[match[2]]
        index = index_of.setdefault(key, len(index_of))
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            indices.append(index)
    squares = torch.zeros(len(index_of), dtype=torch.float64)
    if gradients:
        norms = _whole(torch.stack(torch._foreach_norm(gradients)))
        squares.index_add_(0, torch.tensor(indices), norms.cpu().double().square())
    return dict(zip(index_of, squares.sqrt().tolist(), strict=True))


def shares(norms: Mapping[LayerPart, float]) -> dict[str, float] | None:
    """Returns each component's share of the gradient, by its name; shares sum to 1.

    A share is the sum of a component's :func:`gradient_norms` over layers, divided by the sum over
    all components. Returns None if no gradient is finite.

    NOTE(paper): Fig. 8 shows the fraction of "gradient magnitude", averaged across layers and over
    training, but not which norm it uses or what it averages first. We take the 2-norm of a layer's
    component before clipping, sum over layers, so that a component in every layer counts more than
    one in every other layer, and give equal weight to all logged steps.
    """
    total = math.fsum(norms.values())
    if not 0 < total < math.inf:
        return None
    return {
        component: math.fsum(norm for (_, part), norm in norms.items() if part == component) / total
        for component in SHOWN_COMPONENTS
    }


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@dataclass
class GateHistory:
    """Values of layers and their components during training, one row per recorded step.

    Attributes:
        places: Layer and component of each value in a row.
        steps: Optimiser step of each row.
        sentence_steps: Sentence steps so far, or 0 if the model does not count them.
        rows: Values of each row, in the order of ``places``.
    """

    places: list[LayerPart] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    sentence_steps: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [(layer, part) for layer, part in self.places]  # older checkpoints have lists

    def add(self, step: int, sentence_steps: int, values: Mapping[LayerPart, float]) -> None:
        """Adds a row, which must have the same layers and components as the others."""
        self.places = list(values)
        self.steps.append(step)
        self.sentence_steps.append(sentence_steps)
        self.rows.append(list(values.values()))

    def table(self) -> pd.DataFrame:
        """Returns ``step``, ``sentence_steps``, ``layer``, ``part`` and ``value`` of each value."""
        clock = zip(self.steps, self.sentence_steps, self.rows, strict=True)
        records = [
            (step, sentence_steps, layer, part, value)
            for step, sentence_steps, row in clock
            for (layer, part), value in zip(self.places, row, strict=True)
        ]
        return pd.DataFrame(records, columns=["step", "sentence_steps", "layer", "part", "value"])

    def shares(self) -> pd.DataFrame:
        """Returns ``step``, ``sentence_steps`` and the share of each component."""
        components = [shares(dict(zip(self.places, row, strict=True))) or {} for row in self.rows]
        table = pd.DataFrame(components, columns=list(SHOWN_COMPONENTS))
        table.insert(0, "step", self.steps)
        table.insert(1, "sentence_steps", self.sentence_steps)
        return table


# ---- reach and attention by age


def attention_consumer(findings: Findings) -> Callable[..., None]:
    """Returns a recording consumer for ``memory_attention``, weights (P, M_t), oldest first.

    It adds rows to ``attention`` by ``layer`` (1-based) and ``age``, with the ``total`` weight and
    the ``count`` of slots, and rows to ``entropy`` with the ``total`` entropy of the slots' weights
    in nats.
    """

    def take(*, layer: int, weights: Tensor, **_: Any) -> None:
        """Adds a layer's attention weights (rows, memory) by age, and their entropy in nats."""
        weights = weights.detach().double()
        total = weights.sum(dim=0).flip(0).cpu().numpy()
        columns = {"layer": layer, "age": np.arange(1, len(total) + 1), "total": total}
        findings.add("attention", pd.DataFrame({**columns, "count": float(len(weights))}))
        entropy = float(torch.special.entr(weights).sum())
        findings.add("entropy", [{"layer": layer, "total": entropy}])

    return take


def reach_lines(
    vectors: Sequence[Tensor], losses: Sequence[Tensor], probes: int
) -> list[pd.DataFrame]:
    """Measures how strongly the losses of ``probes`` sentences depend on earlier sentence vectors.

    The probes are evenly spaced in the second half, up to the last sentence, so that each sees
    nearly all ages. The gradient d nll[t] / d s_t-j covers every path: through memory, BOS, and all
    later sentences. ``.grad`` is left unchanged.

    Args:
        vectors: Sentence vectors (A_t, D) of each sentence step, attached to the graph. Later steps
            only have the first rows.
        losses: Summed loss of each sentence step, scalars attached to the graph.
        probes: Number of sentences to differentiate.

    Returns:
        A table for each probe t with ``layer`` (always 0), ``age``, ``total`` (2-norm of the
        gradient in nats per unit of a sentence vector, summed over the streams that have a sentence
        t) and ``count``, the number of these streams.
    """
    last = len(vectors) - 1
    probe_steps = {round(last * (1 + part / probes) / 2) for part in range(1, probes + 1)} - {0}
    tables = []
    for t in sorted(probe_steps) if last > 0 else ():
        gradients = torch.autograd.grad(
            losses[t], list(vectors[:t]), retain_graph=True, materialize_grads=True
        )
        rows = len(vectors[t])
        norms = [gradient[:rows].float().norm(dim=-1).sum() for gradient in gradients]
        total = as_float64(torch.stack(norms).flip(0))
        columns = {"layer": 0, "age": np.arange(1, t + 1), "total": total, "count": float(rows)}
        tables.append(pd.DataFrame(columns))
    return tables


def by_age(rows: pd.DataFrame) -> pd.DataFrame:
    """Sums rows by ``layer`` and ``age``, and derives means.

    Rows have ``layer``, ``age`` (from 1), ``total`` and ``count``, which never grows with age.

    Returns:
        ``layer``, ``age``, ``total``, ``count``, ``mean`` (over slots that have this age) and
        ``spread`` (over all slots, with 0 for those without it).
    """
    if not len(rows):
        rows = pd.DataFrame(columns=["layer", "age", "total", "count"], dtype=float)
    table = rows.groupby(["layer", "age"], as_index=False)[["total", "count"]].sum()
    counts, layer = table["count"], table["layer"]
    longest = counts.groupby(layer).transform("first")
    return table.assign(mean=table["total"] / counts, spread=table["total"] / longest)


def even_weights(table: pd.DataFrame) -> pd.Series:
    """Returns the mean weight of each age under uniform attention over each slot's memory.

    The table has ``layer``, ``age`` and ``slots``, which never grow with age.
    """
    counts, layer = table["slots"], table["layer"]
    # number of slots whose memory ends at this age
    highest = counts - counts.groupby(layer).shift(-1, fill_value=0)
    weights = (highest / table["age"])[::-1]
    return weights.groupby(layer).cumsum() / counts.groupby(layer).transform("first")


def beyond(reach: pd.DataFrame, memory_size: int | None) -> float:
    """Returns the share in [0, 1] of the reach (``by_age``) at ages beyond ``memory_size``.

    It is a share of the sum of mean norms. It is nan if the memory size is unknown, no age exceeds
    it, or all gradients are 0.
    """
    means = reach["mean"]
    if memory_size is None or len(means) <= memory_size or not means.any():
        return math.nan
    return float(means[reach["age"] > memory_size].sum() / means.sum())


def attention_summary(attention: pd.DataFrame, entropy: pd.DataFrame) -> pd.DataFrame:
    """Returns the ``mean_age`` and the ``entropy`` in nats of the attention of each ``layer``.

    The age, in sentences, is weighted by attention. The entropy of the weights over memory, which
    are averaged over heads, is a mean over slots.

    ``attention`` comes from ``by_age``, ``entropy`` from ``attention_consumer``.
    """
    if not len(attention):
        return pd.DataFrame(columns=["layer", "mean_age", "entropy"])
    ages = (attention["age"] * attention["spread"]).groupby(attention["layer"]).sum()
    slots = attention.groupby("layer")["count"].first()
    entropies = entropy.groupby("layer")["total"].sum() / slots
    return pd.DataFrame({"mean_age": ages, "entropy": entropies}).reset_index()


def cut(batch: Mapping[str, Any], max_streams: int, max_sentences: int) -> dict[str, Any]:
    """Returns the first sentences of the longest streams in a batch.

    Tensors (B, S, ...) are cut in both dimensions, tensors (B, ...) in the first one; other values
    are unchanged. Cut tensors are copies, which can be part of graphs even if the batch was made in
    inference mode. ``lengths`` (B, S) are 0 after a stream's last sentence.
    """
    lengths: Tensor = batch["lengths"]
    counts = (lengths > 0).sum(dim=1)
    rows = counts.argsort(descending=True, stable=True)[:max_streams]
    sentences = min(max_sentences, int(counts.max()))

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[:1] != lengths.shape[:1]:
            return value
        chosen = value[rows]
        return chosen[:, :sentences] if value.shape[1:2] == lengths.shape[1:] else chosen

    return {key: part(value) for key, value in batch.items()}


# ---- reports


def memory_report(findings: Findings, memory_size: int | None) -> AnalysisReport:
    """Returns the report of a validation.

    Scalars are ``memory_attention/layer_<l>/mean_age`` (sentences) and ``.../entropy`` (nats),
    ``gradient_reach/age_1`` (nats per unit of a sentence vector) and
    ``gradient_reach/beyond_memory``, the share of the reach beyond the memory's size.

    ``findings`` has ``reach``, ``attention`` and ``entropy``, each of which may be empty.
    ``memory_size`` is None if unknown.
    """
    reach, attention = by_age(findings["reach"]), by_age(findings["attention"])
    summary = attention_summary(attention, findings["entropy"])
    tag = "memory_attention/layer_{layer}/{name}"
    scalars = scalars_of(summary, tag, ("mean_age", "entropy"))
    if len(reach):
        scalars["gradient_reach/age_1"] = reach["mean"].iloc[0]
        scalars["gradient_reach/beyond_memory"] = beyond(reach, memory_size)
    in_memory = "" if memory_size is None else (reach["age"] <= memory_size).astype(int)
    names = {"spread": "weight", "mean": "weight_if_there", "count": "slots"}
    columns = ["layer", "age", "weight", "weight_if_there", "slots"]
    tables = {
        "reach": reach.assign(
            gradient_norm=reach["mean"], streams=reach["count"].astype(int), in_memory=in_memory
        )[["age", "gradient_norm", "streams", "in_memory"]],
        "attention": attention.rename(columns=names).astype({"slots": int})[columns],
    }
    figures = {name: FIGURES[name] for name in tables}
    return AnalysisReport(scalars=scalars, tables=tables, figures=figures)


def run_report(gate_rows: GateHistory, norm_rows: GateHistory) -> AnalysisReport:
    """Returns the report of a run: gates, gradient norms and shares, with Figs. 7 and 8."""
    tables = {
        "gates": gate_rows.table().drop(columns="part").rename(columns={"value": "gate"}),
        "gradient_norms": norm_rows.table().rename(columns={"part": "component", "value": "norm"}),
        "gradient_share": norm_rows.shares(),
    }
    figures = {name: FIGURES[name] for name in ("gates", "gradient_share")}
    return AnalysisReport(tables=tables, figures=figures)


def _clock(table: pd.DataFrame) -> tuple[str, str]:
    """Returns the column for the x axis of figures, and its label."""
    if table["sentence_steps"].any():
        return "sentence_steps", "sentence steps"
    return "step", "optimiser steps"


def gates_figure(tables: Tables) -> Any:
    """Draws g_mem of every layer over training (Fig. 7)."""
    values = tables["gates"]
    figure, (ax,) = panels(6.4, 4.0, 1)
    clock, label = _clock(values)
    layers = list(values.groupby("layer"))
    for color, (layer, part) in zip(shades(len(layers)), layers, strict=True):
        draw_lines(ax, part, clock, {"gate": (f"layer {layer}", color)}, _style(part))
    ax.axhline(1.0, color=GREY, linewidth=1, linestyle=":", zorder=0)
    finish(ax, label, "memory gate $g_{mem}$")
    return figure


def shares_figure(tables: Tables) -> Any:
    """Draws the gradient share of each component over training, with its mean (Fig. 8)."""
    by_component = tables["gradient_share"]
    figure, (over,) = panels(6.4, 4.0, 1)
    columns = {
        name: (f"{label}, mean {by_component[name].mean():.0%}", color)
        for name, (label, color) in SHOWN_COMPONENTS.items()
        if by_component[name].any()
    }
    clock, label = _clock(by_component)
    draw_lines(over, by_component, clock, columns, _style(by_component))
    over.set_ylim(0, 1)
    finish(over, label, "share of the gradient")
    return figure


def _style(table: pd.DataFrame) -> str:
    """Returns a line's style: a marker if there is only one point."""
    return "o" if len(table) == 1 else "-"


def reach_figure(tables: Tables) -> Any:
    """Draws how far back the gradient of a sentence's loss reaches (Fig. 6 in numbers)."""
    reach = tables["reach"]
    figure, (ax,) = panels(6.4, 4.0, 1)
    means, last = reach["gradient_norm"], len(reach)
    if means.any():
        ax.set_yscale("log")
        means = means.where(means > 0)  # gradients of exactly zero have no logarithm
    ax.plot(reach["age"], means, "o-", color=BLUE, markersize=3)
    if (reach["in_memory"] == 0).any():  # empty if the memory's size is unknown
        memory_size = int(reach["in_memory"].sum())
        label = f"beyond memory (M = {memory_size})"
        ax.axvspan(memory_size + 0.5, last + 0.5, color=GREY, alpha=0.15, linewidth=0, label=label)
    exactly = "" if means.any() else ", all exactly 0"
    finish(ax, "age j of the sentence", "norm of d nll$_t$ / d s$_{t-j}$" + exactly)
    return figure


def attention_figure(tables: Tables) -> Any:
    """Draws the attention weight of each age by layer, as a heat map and as lines."""
    attention = tables["attention"].assign(even=even_weights(tables["attention"]))
    grid = attention.pivot(index="layer", columns="age", values="weight").fillna(0)
    layers, max_age = len(grid), int(grid.columns.max())
    figure, (ax, lines) = panels(12, 1.8 + 0.35 * max(6, layers), 2)
    extent = (0.5, max_age + 0.5, layers - 0.5, -0.5)
    image = ax.imshow(grid.to_numpy(), cmap="Blues", vmin=0, aspect="auto", extent=extent)
    ax.set_yticks(range(layers), [f"layer {layer}" for layer in grid.index])
    figure.colorbar(image, ax=ax, label="attention weight")
    ages = (attention["age"] * attention["weight"]).groupby(attention["layer"]).sum()
    for color, (layer, part) in zip(shades(layers), attention.groupby("layer"), strict=True):
        label = f"layer {layer}, mean age {ages[layer]:.1f}"
        draw_lines(lines, part, "age", {"weight": (label, color)}, ".-")
    first = attention[attention["layer"] == grid.index[0]]
    draw_lines(lines, first, "age", {"even": ("uniform over the memory", GREY)}, ":")
    lines.set_ylim(bottom=0)
    finish(lines, "age of the sentence in memory", "attention weight")
    finish(ax, "age of the sentence in memory")
    return figure


FIGURES: dict[str, Draw] = {
    "gates": gates_figure,
    "gradient_share": shares_figure,
    "reach": reach_figure,
    "attention": attention_figure,
}
