"""Every analysis the contract suite runs on: one line adds one."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import lightning as L
from methods import METHODS

from callbacks import (
    ForkAnalysis,
    GateAnalysis,
    PosteriorAnalysis,
    RecallAnalysis,
    StepAllocation,
    ThoughtTrace,
)
from callbacks.analysis.base import Analysis
from callbacks.analysis.forks import MEASURES
from callbacks.analysis.report import Draw

BY_NAME = {method.name: method for method in METHODS}
COMPONENTS = "self_attention memory_attention feed_forward"
LOSSES = "nll kl"
SCORED = "nll_other kl_floor"
GRADIENTS = "mean_gradient log_variance_gradient"


@dataclass(frozen=True)
class Case:
    """An analysis, a small model that it is made for, and what it writes."""

    kind: type[Analysis]
    method: str
    """Of ``methods.METHODS``."""
    prefix: str
    """How tags of its scalars begin."""
    tables: dict[str, str]
    """CSV files of a validation within training, ``scalars`` aside: their columns."""
    swept: dict[str, str] = field(default_factory=dict)
    """Those that only a standalone validation adds."""
    of_run: dict[str, str] = field(default_factory=dict)
    """Those of the training so far, without a step in their names."""
    more: frozenset[str] = frozenset()
    """Other files of a validation."""
    undrawn: frozenset[str] = frozenset()
    """Tables without a figure of that name."""
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration."""
    data: str = "make_data"
    """Fixture that makes its data."""
    without: str = "gpt2"
    """A method that records nothing of what it looks for, with data of ``data_without``."""
    data_without: str = "make_data"
    steady: dict[str, float] = field(default_factory=dict)
    """Scalars that half precision changes by less than that share."""
    least: dict[str, int] = field(default_factory=dict)
    """Arguments of its own, and their least values."""

    @property
    def figures(self) -> dict[str, Draw]:
        """Functions that draw from its tables."""
        figures: dict[str, Draw] = import_module(self.kind.__module__).FIGURES
        return figures

    @property
    def name(self) -> str:
        """Of the files' folder."""
        return self.kind.tag

    def make(self, **options: Any) -> Analysis:
        """The analysis, of one batch."""
        return self.kind(**{"num_batches": 1, **self.options, **options})

    def build(self, **changes: Any) -> L.LightningModule:
        """The model."""
        sizes = {"num_layers": 3, "dim": 16, "num_heads": 2}
        return BY_NAME[self.method].build(**{**sizes, **self.changes, **changes})

    def files(self, tables: dict[str, str], drawn: bool = True) -> set[str]:
        """Names of the files that hold these tables, and of their figures."""
        figures = tables.keys() - self.undrawn if drawn else ()
        return {f"{name}.csv" for name in tables} | {f"{name}.png" for name in figures}


STREAMS = "streams_layer1 streams_layer2"
CASES = [
    Case(
        ForkAnalysis,
        "thoughtbubbles",
        "forks/",
        {
            "windows": "entropy forks normalised",
            "tokens": f"row place id text {STREAMS} score_original score_forks entropy",
            "layers": f"layer {' '.join(MEASURES)}",
            "streams": "layer streams share",
        },
        more=frozenset({"entropy.png"}),
        undrawn=frozenset({"windows", "streams"}),
        steady={"forks/entropy/mean": 0.02, "forks/per_token": 1e-6},
        least={"shown_rows": 0},
    ),
    Case(
        GateAnalysis,
        "thought-gestalt",
        "memory_attention/ gradient_reach/",
        {
            "reach": "age gradient_norm streams in_memory",
            "attention": "layer age weight weight_if_there slots",
        },
        of_run={
            "gates": "step sentence_steps layer gate",
            "gradient_norms": "step sentence_steps layer component norm",
            "gradient_share": f"step sentence_steps {COMPONENTS}",
        },
        undrawn=frozenset({"gradient_norms"}),
        data="make_sentences",
        options={"every_n_steps": 1},
        steady={"gradient_reach/age_1": 0.15},
        changes={"num_layers": 4, "memory_size": 2},
        least={"every_n_steps": 0, "max_sentences": 2, "max_streams": 1, "probes": 1},
    ),
    Case(
        PosteriorAnalysis,
        "latent-thought",
        "posterior/",
        {
            "inner_steps": f"step sample elbo {LOSSES} {GRADIENTS} {SCORED}",
            "layers": "layer kl active_vectors vectors active_coordinates coordinates",
        },
        swept={"sweep": f"steps flops_per_token loss {LOSSES} {SCORED}"},
        options={"steps": (0, 1)},
        steady={f"posterior/{name}": 0.02 for name in ("nll", "kl", "sweep/steps_1")},
        least={"sweep_every_n_validations": 0},
    ),
    Case(
        RecallAnalysis,
        "thought-gestalt",
        "recall/",
        {"distance": "distance questions accuracy nats"},
        data="make_sentences",
        options={"pattern": "(?P<key>.)(?P<answer>.)"},
        steady={"recall/nats": 0.02},
        changes={"memory_size": 2},
    ),
    Case(
        StepAllocation,
        "ponderlm",
        "steps/",
        {
            "steps": "steps tokens share step0_loss loss",
            "tokens": "id text count mean_steps pruned",
            "words": "steps internal internal_share final final_share",
            "utility": "bucket tokens from to step0_loss loss mean_steps step_1 step_2",
        },
        swept={
            "sweep": "alpha bucket tokens mean_steps loss loss_change",
            "convergence": "iteration rmse fit fitted",
        },
        steady={"steps/mean": 0.1},
        options={"alphas": (-1,), "convergence_rows": 1, "convergence_tokens": 8},
        changes=BY_NAME["ponderlm"].few,
        least={
            "top_tokens": 0,
            "sweep_every_n_validations": 0,
            "convergence_rows": 0,
            "convergence_tokens": 1,
            "convergence_iterations": 1,
        },
    ),
    Case(
        ThoughtTrace,
        "thinking-states",
        "thoughts/",
        {
            "chunks": "chunk rows accuracy trivial gold_trivial first_wrong first_wrong_share",
            "thoughts": "thought rows accuracy",
            "rounds": "rounds rows share nontrivial",
            "groups": "group rows accuracy accuracy_nontrivial all_right rounds nontrivial",
        },
        more=frozenset({"text.txt"}),
        options={"num_batches": 2},
        data="make_reasoning",
        without="no-cot",
        data_without="make_reasoning",
        steady={"thoughts/gold_trivial": 1e-6},
        least={"shown_rows": 0},
    ),
]
