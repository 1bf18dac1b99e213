"""Every method and baseline the contract suite runs on: one line adds one.

The first of a class is tested in full. Its variants skip what a mere option hardly changes: that a
batch is learned by heart, that networks compile, that runs resume, are validated and logged, and
that processes agree; unless they say ``full``.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, get_type_hints

import torch
from formats import (
    BLOCK,
    BYTES,
    MARKED_WINDOWS,
    REASONING,
    SENTENCES,
    WINDOWS,
    Reasoning,
    Sentences,
    Windows,
)

from lightning_models import (
    CoconutLM,
    CodiLM,
    CopyLM,
    CoTLM,
    GistLM,
    ICoTLM,
    LanguageModel,
    LatentThoughtLM,
    LoopedLM,
    MoRLM,
    NoCoTLM,
    OptimizerConfig,
    PauseLM,
    PonderLM,
    PonderLM1,
    PonderLM2,
    RecurrentDepthLM,
    ThinkingStatesLM,
    ThoughtbubblesLM,
    ThoughtGestaltLM,
    TransformerLM,
)

__all__ = ["BLOCK", "IN_FULL", "METHODS", "VOCAB", "Method", "window_batch"]

VOCAB = BYTES
SIZES = {"num_layers": 2, "dim": 32, "num_heads": 4}
"""As few layers as show what layers do to each other; a method that needs three says so."""
window_batch = WINDOWS.batch


@dataclass(frozen=True)
class Method:
    """A model class with the configuration it is tested in, at a size that trains in seconds."""

    name: str
    model: type[LanguageModel]
    config: dict[str, Any] = field(default_factory=dict)
    format: Windows | Sentences | Reasoning = WINDOWS
    loss_breaks: str = ""
    """Why the loss does not compile into one graph; then the network (or each of its blocks, where
    it compiles those) does by itself, unless ``network_breaks``."""
    network_breaks: str = ""
    """Why the network does not compile into one graph."""
    warm_up: int = 0
    """Training batches that set running statistics before anything is tested."""
    noise: dict[str, Any] = field(default_factory=lambda: {"dropout": 0.1})
    """What makes every random draw of training count."""
    alone: dict[str, Any] = field(default_factory=dict)
    """What makes the objective of a batch that of its parts, where parts are compared."""
    far_sighted: bool = True
    """Whether a token of a longer context costs more."""
    training_factor: float = 3.0
    """FLOPs of training over those of scoring, at least."""
    guesses: float = 1.0
    """What the objective of a model that guesses is, in multiples of ln V."""
    waits: int = 0
    """How often a training step needs a value of the device on the host."""
    recomputes: bool = True
    """Whether it takes ``gradient_checkpointing``."""
    continues: bool = True
    """Whether a prompt may be any text, so that what it has written may become part of it."""
    starts_at_zero: str = ""
    """End of the names of matrices that start at 0; drawn here, so that what they read counts."""
    full: bool = False
    """Whether it is tested in full though it is not the first of its class: because it trains, or
    is stateful, in a way of its own."""

    @property
    def reads_windows(self) -> bool:
        return isinstance(self.format, Windows)

    @property
    def few(self) -> dict[str, Any]:
        """What ends scoring after few iterations, for tests that need no convergence."""
        return {"eval_iterations": 3} if "eval_iterations" in self.config else {}

    def batch(self, rows: int = 2, length: int = BLOCK, seed: int = 0) -> dict[str, Any]:
        return self.format.batch(rows, length, seed)

    def build(self, seed: int = 0, *, compile: bool = False, **changes: Any) -> LanguageModel:
        """A model with its network, initialised from ``seed``, in training mode."""
        kind = get_type_hints(self.model.__init__)["config"]
        config = kind(**{**SIZES, **self.format.sizes, **self.config, **changes})
        torch.manual_seed(seed)
        optimizer = OptimizerConfig(lr=3e-3, warmup=2)
        model = self.model(config, optimizer, compile)
        model.configure_model()
        for name, parameter in model.network.named_parameters():
            if self.starts_at_zero and name.endswith(self.starts_at_zero):
                torch.nn.init.normal_(parameter, std=config.init_std)
        model.train()
        for step in range(self.warm_up):
            model.loss(self.batch(seed=100 + step))
        return model


LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}
LLAMA3 = LLAMA | {"num_kv_heads": 2, "rope_scaling": (8.0, 1.0, 4.0, 16.0)}
LLAMA3 |= {"qk_norm": True, "head_size": 12}  # as Qwen3's
PYTHIA = {"positions": "rope", "rope_fraction": 0.5, "parallel_residual": True}
FORKS = {"num_layers": 3, "fork_layers": (1, 2), "kappa": "2L"}
BY_THRESHOLD = {"allocation": "threshold"}
BY_WINDOW = {"allocation": "window_topk", "allocation_window": 8}
NUMBER_KEPT = "values decide how many streams a threshold keeps"
HOST_SIZES = "lengths of sentences are read on the host, to pack them"
HOST_DRAWS = "random numbers come from a generator of the host, by seed and step"
HOST_LAYOUT = "rows are laid out from the lengths of texts, which are read on the host"
RAGGED: dict[str, Any] = {"warm_up": 2, "full": True, "waits": 4}
RAGGED |= {"loss_breaks": NUMBER_KEPT, "network_breaks": NUMBER_KEPT}
GESTALT = {
    "num_layers": 3,
    "sentence_layer": 2,
    "memory_size": 3,
    "attention_dropout": 0.0,
    "token_dropout": 0.0,
    "sentence_dropout": 0.0,
}
NOISY = {"dropout": 0.1, "token_dropout": 0.2, "sentence_dropout": 0.2, "warm_in": (20, 40)}
OF_SENTENCES: dict[str, Any] = {
    "format": SENTENCES,
    "noise": NOISY,
    "loss_breaks": HOST_SIZES,
}
LATENT = {
    "window": 16,
    "latents_per_layer": 2,
    "inner_steps": 2,
    "inner_lr": (0.1, 0.12),
    "resample_every": 1,
    "encoder_layers": 2,
}
PONDER = {"thinking_steps": 2, "eval_iterations": None}
ONE_STEP = PONDER | {"thinking_steps": 1}
REPEATED = {"thinking_steps": 2}
HUGINN = {
    "num_layers": 1,
    "prelude_layers": 1,
    "coda_layers": 1,
    "thinking_steps": 3,
    "injection": "concat",
    "state": "noise",
    "norms": "huginn",
    "training_recurrences": "sampled",
    "backprop_recurrences": 2,
    "tie_head": True,
}
KL = {"exit": "kl", "exit_threshold": 0.02}
LATENT_DIFFERENCE = {"exit": "latent", "exit_threshold": 0.5, "state": "zero"}
OURO = {"thinking_steps": 2, "norms": "ouro", "gate": "joint"}
FROZEN: dict[str, Any] = {"training_factor": 1.0, "recomputes": False}
MOR = {"thinking_steps": 3, "capacities": (0.75, 0.5, 0.25)}
PASSES: dict[str, Any] = {
    "training_factor": 0.0,  # iterations to convergence are counted as their limit
    "loss_breaks": HOST_DRAWS,
}
# c_i of the penalty are means of the batch, which decide how many of its tokens are pushed
PENALISED: dict[str, Any] = {**PASSES, "alone": {"penalty_weight": 0.0}}
BOUND: dict[str, Any] = {
    "far_sighted": False,
    "training_factor": 1.0,
    "starts_at_zero": "latent_attention.out.weight",
    "loss_breaks": HOST_DRAWS,
}


ASKED: dict[str, Any] = {
    "format": REASONING,
    "noise": {"attention_dropout": 0.1},
    "continues": False,
}


CHAIN = {"max_chain_tokens": 6}
DRAWN = {"first_stage": 1, "uniform_prob": 0.6}  # stages of rows, and so their latents


def decoder(family: str, dropout: float = 0.0, **sizes: Any) -> dict[str, Any]:
    """The ``architecture`` of a small decoder; heads share keys, except for GPT-2's."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3} | sizes
    sizes |= {"model_type": family, "num_attention_heads": 4, "max_position_embeddings": 192}
    if family == "gpt2":
        return sizes | {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
    sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "attention_dropout": dropout}
    return sizes | ({"head_dim": 12} if family == "qwen3" else {})


LAID_OUT: dict[str, Any] = {"loss_breaks": HOST_LAYOUT}
LATENTS: dict[str, Any] = {
    **LAID_OUT,
    "far_sighted": False,
    "recomputes": False,
    "waits": 8,
}


DISTILLED: dict[str, Any] = {**LATENTS, "guesses": 2.0, "waits": 9}
"""The student guesses, and the teacher."""
SAYING: dict[str, Any] = {**DISTILLED, "guesses": 3.0, "waits": 13}
"""The decoder of steps, too."""
STEPS = {"step_weight": 1.0}
LORA = {"lora_rank": 3, "lora_alpha": 6.0, "lora_dropout": 0.0}
PCCOT = {"num_latents": 4, "passes": 2}
PUBLIC_CODI = {"distance": "smooth_l1", "distillation_std": "batch", "predict_prefix": True}


def asked(name: str, model: type[LanguageModel], config: dict[str, Any], **fields: Any) -> Method:
    """A model that is asked questions."""
    return Method(name, model, REASONING.wording | config, **{**ASKED, **fields})


def on(family: str, layers: int = 2, dropout: float = 0.0) -> dict[str, Any]:
    """A backbone of another family, as the config of a model that is asked questions."""
    return {"architecture": decoder(family, dropout, num_hidden_layers=layers)}


def dropping(family: str, layers: int = 2) -> dict[str, Any]:
    """What makes draws of such a model's training count."""
    return {"noise": on(family, layers, dropout=0.1)}


def thinking(name: str, family: str | None = None, **changes: Any) -> Method:
    """A variant of Thinking States: a layer below the states, and one between them and the tap."""
    config = {"chunk_size": 4, "max_thought_tokens": 5, **changes}
    if family is None:
        return asked(name, ThinkingStatesLM, config | {"num_layers": 3}, guesses=2.0)
    config |= on(family, layers=3)
    return asked(name, ThinkingStatesLM, config, guesses=2.0, **dropping(family, layers=3))


def latent(name: str, *, full: bool = False, **changes: Any) -> Method:
    """A variant of the Latent-Thought Language Model."""
    return Method(name, LatentThoughtLM, LATENT | changes, full=full, **BOUND)


def depth(name: str, config: dict[str, Any], **fields: Any) -> Method:
    """A variant of recurrent depth."""
    drawn = {"loss_breaks": HOST_DRAWS} if config.get("training_recurrences") == "sampled" else {}
    return Method(name, RecurrentDepthLM, config, **drawn, **fields)


def gestalt(name: str, **changes: Any) -> Method:
    """A variant of Thought Gestalt."""
    far = changes.get("memory") not in ("none", "seeding")
    return Method(
        name, ThoughtGestaltLM, GESTALT | changes, far_sighted=far, waits=1, **OF_SENTENCES
    )


METHODS = [
    Method("gpt2", TransformerLM),
    Method("pythia-nobias", TransformerLM, PYTHIA | {"bias": False}),
    Method("llama", TransformerLM, LLAMA | {"tie_head": False, "init": "ponderlm"}),
    Method("llama3-window", TransformerLM, LLAMA3 | {"window": 8}, far_sighted=False),
    Method("copy-3", CopyLM, {"copies": 3}),
    Method("copy-2-shared", CopyLM, {"copies": 2, "copy_positions": "shared"}),
    Method("thoughtbubbles", ThoughtbubblesLM, FORKS),
    Method(
        "thoughtbubbles-residual", ThoughtbubblesLM, FORKS | {"output_average": "residual_norm"}
    ),
    Method("thoughtbubbles-threshold", ThoughtbubblesLM, FORKS | BY_THRESHOLD, **RAGGED),
    Method("thoughtbubbles-window", ThoughtbubblesLM, FORKS | BY_WINDOW, **RAGGED | {"waits": 5}),
    Method("gist", GistLM, format=MARKED_WINDOWS),
    gestalt("thought-gestalt"),
    gestalt("thought-gestalt-serial", layer_type="serial"),
    gestalt("thought-gestalt-parallel", layer_type="parallel"),
    gestalt("thought-gestalt-detached", memory="detached"),
    gestalt("thought-gestalt-none", memory="none"),
    gestalt("thought-gestalt-seeding", memory="seeding"),
    gestalt("thought-gestalt-in-context", memory="in_context"),
    gestalt("thought-gestalt-no-seeding", context_seeding=False),
    Method("ponderlm", PonderLM, PONDER | {"router_init": "uniform"}, **PENALISED),
    Method("ponderlm-sequential", PonderLM, ONE_STEP | {"inference": "sequential"}, **PENALISED),
    Method("ponderlm2", PonderLM2, ONE_STEP | {"prefill": "sequential"}, **PASSES),
    Method("ponderlm1", PonderLM1, REPEATED),
    Method("looped", LoopedLM, REPEATED),
    depth("huginn", HUGINN, full=True, training_factor=2.5),
    depth("huginn-kl", HUGINN | KL, training_factor=1.5),
    depth("huginn-latent", HUGINN | LATENT_DIFFERENCE, training_factor=2.5),
    depth("ouro", OURO, full=True),
    depth("ouro-exits", OURO | {"exit": "gate", "exit_threshold": 0.6, "cache_lookup": "skip"}),
    depth("ouro-gate-alone", OURO | {"gate": "alone"}, guesses=1.08, **FROZEN),
    Method("pause", PauseLM, REPEATED),
    Method("mixture-of-recursions", MoRLM, MOR),
    Method("mixture-of-recursions-topk", MoRLM, MOR | {"eval_routing": "topk"}),
    latent("latent-thought"),
    latent("latent-thought-shared", latents="shared", noise="resampled", latent_positions="spread"),
    latent("latent-thought-trajectory", slow_gradient="trajectory", inner_schedule="cosine"),
    latent("latent-thought-transport", prior="transport"),
    latent("latent-thought-langevin", inference="langevin", full=True),
    latent("latent-thought-amortised", inference="amortised", full=True),
    thinking("thinking-states"),
    thinking("thinking-states-partial", grid="partial", tie_thinking_head=True),
    thinking("thinking-states-absolute", grid="absolute", think_in_decode=True, num_kv_heads=2),
    thinking("thinking-states-sequential", prefill="sequential"),
    thinking("thinking-states-window", window=6),
    thinking("thinking-states-gpt2", "gpt2", input_layer=0),
    thinking("thinking-states-llama", "llama"),
    thinking("thinking-states-qwen3", "qwen3"),
    asked("cot", CoTLM, CHAIN, **LAID_OUT, waits=3),
    asked("cot-llama", CoTLM, CHAIN | on("llama"), **LAID_OUT, **dropping("llama"), waits=3),
    asked("no-cot", NoCoTLM, {}, **LAID_OUT, waits=2),
    asked("icot", ICoTLM, CHAIN | {"removal_smoothing": 0.3}, **LAID_OUT, waits=4),
    asked("icot-qwen3", ICoTLM, CHAIN | on("qwen3"), **LAID_OUT, **dropping("qwen3"), waits=4),
    asked("icot-gone", ICoTLM, {"remove_all_beyond": 0}, **LAID_OUT, waits=4),
    asked("coconut", CoconutLM, CHAIN | {"first_stage": 1, "max_latent_stage": 2}, **LATENTS),
    asked("coconut-window", CoconutLM, CHAIN | DRAWN | {"window": 6}, **LATENTS),
    asked(
        "coconut-gpt2",
        CoconutLM,
        CHAIN | {"first_stage": 1, "max_latent_stage": 2} | on("gpt2"),
        **LATENTS,
        **dropping("gpt2"),
        full=True,
    ),
    asked("coconut-last", CoconutLM, {"first_stage": 3, "max_latent_stage": 2}, **LATENTS),
    asked(
        "coconut-steps",
        CoconutLM,
        CHAIN | {"first_stage": 1, "max_latent_stage": 2} | STEPS,
        **LATENTS | {"guesses": 2.0, "waits": 12},
        full=True,
    ),
    asked("codi", CodiLM, {"num_latents": 3}, **DISTILLED),
    asked(
        "codi-gpt2",
        CodiLM,
        PUBLIC_CODI | on("gpt2"),
        **DISTILLED | {"waits": 11},
        **dropping("gpt2"),
        alone={"distillation_std": "row"},
    ),
    asked("codi-steps", CodiLM, STEPS | on("qwen3"), **SAYING, **dropping("qwen3"), full=True),
    asked("codi-no-latents", CodiLM, {"num_latents": 0}, **DISTILLED),
    asked("pccot", CodiLM, PCCOT, **DISTILLED, full=True),
    asked("pccot-steps", CodiLM, PCCOT | STEPS | on("llama"), **SAYING, **dropping("llama")),
]
if find_spec("peft"):
    METHODS.append(
        asked(
            "codi-lora",
            CodiLM,
            LORA | {"distance": "smooth_l1"} | on("gpt2"),
            **DISTILLED,
            **dropping("gpt2"),
            starts_at_zero="lora_B.default.weight",
        )
    )

FIRST = {method.model: method for method in reversed(METHODS)}
IN_FULL = [method for method in METHODS if method is FIRST[method.model] or method.full]
"""What whole trainings are run on."""
