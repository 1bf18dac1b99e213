"""Values that no configuration takes: refused in one line that names the key and its value."""

import itertools
import math
import re

import pytest

import lightning_models as models
from datamodules.reasoning.teacher import EndpointConfig
from lightning_models.generation import SamplingConfig
from lightning_models.layers import DecoderConfig

NAN, INF = math.nan, math.inf
SIZES = {"vocab_size": 100, "block_size": 8, "num_layers": 2, "dim": 12, "num_heads": 2}
ENDPOINT = {"url": "https://host/v1", "model": "m"}
TRAJECTORY = {"slow_gradient": "trajectory"}


def each(key, *values):
    return [{key: value} for value in values]


COUNTS = ("vocab_size", "block_size", "num_layers", "dim", "num_heads", "vocab_multiple")
CHOICES = ("norm", "activation", "positions", "init", "attention_backend")
DECODER = [
    *(change for key in COUNTS for change in each(key, 0, -1)),
    *(change for key in CHOICES for change in each(key, "nonsense")),
    *each("num_layers", 1.5),
    *each("num_heads", 5),
    *each("ffn_dim", 0, -4, "wide"),
    *each("window", 0, -1),
    *each("dropout", -0.1, 1.0, 1.5, True),
    *each("attention_dropout", -0.1, 1.0, 1.5),
    *each("norm_eps", -1e-5, "small"),
    *each("rope_base", 0.0, -1.0, INF, 10**309),
    *each("init_std", -0.02, NAN),
    *each("bias", 3),
]
TRANSFORMER = [
    *each("num_kv_heads", 3, 0),
    *each("rope_fraction", 0.0),
    {"rope_fraction": 0.5, "positions": "rope"},
    *each("head_size", 0, 1.5),
    {"head_size": 5, "positions": "rope"},
    *each("qk_norm", 1),
    *each("rope_scaling", (8.0, 1.0, 4.0, 16.0)),  # positions are learned
    *(
        {"rope_scaling": scaling, "positions": "rope"}
        for scaling in ((8.0, 1.0, 4.0), (8.0, 4.0, 1.0, 16.0), (0.0, 1.0, 4.0, 16.0))
    ),
]
GESTALT = [
    *each("sentence_layer", 0, 3),
    *({key: 0} for key in ("sentence_head_depth", "memory_size")),
    *({key: rate} for key in ("token_dropout", "sentence_dropout") for rate in (1.0, -0.1)),
    *each("warm_in", (2, 1), (1, 2, 3)),
    *({"layer_type": "serial", "memory": kind} for kind in ("none", "seeding", "in_context")),
    {"context_seeding": False, "memory": "seeding"},
    *each("positions", "rope"),
    *each("block_size", 3),
    *each("eos_weight", -1.0),
]
LATENT_THOUGHT = [
    *each("positions", "learned"),
    *each("init", "ponderlm"),
    *each("window", 0),
    *each("latents", "stacked"),
    *each("latents_per_layer", 0),
    *each("latent_positions", "learned"),
    {"latent_positions": "public", "block_size": 5, "latents_per_layer": 3},
    *each("prior", "flow"),
    *each("prior_layers", 0),
    *each("encoder_layers", -1),
    *each("inference", "mcmc"),
    *each("inner_steps", 2.5, -1),
    *each("inner_lr", 0.3, (0.3,), (0.3, 0.0), (0.3, NAN)),
    *each("inner_schedule", "linear"),
    *each("inner_betas", (0.9,), (0.9, 1.0), (NAN, 0.9)),
    *each("inner_scaling", "layer"),
    *each("inner_weight_decay", -0.1, NAN),
    *each("init_log_variance", INF),
    *each("init_mean_std", -0.1, INF),
    *each("noise", "none"),
    *each("bound_noise", "outer"),
    *each("slow_gradient", "all"),
    *each("langevin_step_size", 0.0, NAN),
    *each("kl_annealing", 1.5, NAN, 0.5),
    *each("resample_every", 0, 2.5),
    *({**TRAJECTORY, "inference": inference} for inference in ("langevin", "amortised")),
]
THOUGHTBUBBLES = [
    *each("kappa", "0.5L", 5, 0, "abc", "nanL", ".5e"),
    *each("fork_layers", (1, 4), (-1,), (1, 1)),
    *each("window", 8),
    *each("positions", "learned"),
    *each("allocation", "topk"),
    *each("eval_allocation", "topk"),
    *each("bias_scale", "2"),
    *each("output_average", "mean"),
    *each("budget", "some"),
    *each("allocation_window", 0),
    *each("threshold_decay", 1.0, -0.1, NAN),
]
COPIES = [
    *each("copies", 0),
    *each("window", 4),
    *each("positions", "learned"),
    *each("copy_positions", "own"),
]
RECURSIONS = [
    *each("capacities", (0.9, 0.8), (0.8, 0.9, 0.7), (1.1, 0.9, 0.7), (0.9, 0.9, 0.0)),
    *each("router_weight", -1.0),
    *each("eval_routing", "both"),
    *each("positions", "learned"),
]
ICOT = [
    *each("remove_per_epoch", 0),
    *each("removal_smoothing", 0.0),
    *each("pretrain_epochs", -1),
    *each("uniform_prob", 0.3),
    *each("first_stage", 1),
    {"first_stage": 5, "removal": "steps"},
    {"uniform_prob": 1.5, "removal": "steps"},
    *each("epochs_per_stage", 0),
]
COCONUT = [
    *each("gradient_checkpointing", True),
    *each("c_thought", 0),
    *each("eval_latents", -1),
    *each("first_stage", 6),
    *each("reset", "batch"),
    {"step_weight": 1.0, "max_latent_stage": 0},
]
CODI = [
    *({key: -1} for key in ("num_latents", "passes", "eval_latents", "distillation_weight")),
    *({key: -0.5} for key in ("student_weight", "teacher_weight", "step_weight")),
    *({key: NAN} for key in ("student_weight", "distillation_weight", "step_weight")),
    *({key: 0} for key in ("lora_rank", "projection_dim", "lora_alpha")),
    *each("projection_dropout", 1.0),
    *each("lora_dropout", -0.1),
    *each("distance", "l2"),
    *each("distillation_std", "layer"),
    *each("step_loss", "sum"),
    *each("gradient_checkpointing", True),
    {"step_weight": 1.0, "num_latents": 0},
    {"step_weight": 1.0, "num_latents": 2, "passes": 0},
    *({key: 0.5} for key in ("lora_alpha", "lora_dropout")),  # lora_rank is null
    {"projection_dropout": 0.5, "projection": False},
    {"projection_dim": 4, "projection": False},
    {"step_loss": "token_sum"},
]
RATES = ("lr", "warmup", "weight_decay", "eps", "min_lr_ratio", "decay_fraction")
OPTIMIZER = [
    *({key: value} for key, value in itertools.product(RATES, (NAN, INF, -INF))),
    *each("lr", 0, -1e-3),
    *each("warmup", -1),
    *each("weight_decay", -0.1),
    *each("eps", -1e-8, 0.0),  # an embedding row without gradient would become 0 / 0
    *each("min_lr_ratio", 1.1, -0.1),
    *each("decay_fraction", 1.5),
    *each("horizon", 0),
    *each("betas", (0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, NAN), (INF, 0.9)),
]
SAMPLING = [*each("temperature", -0.1), *each("top_k", 0), *each("top_p", 0.0, 1.01)]
TEACHER = [
    *each("url", "api.openai.com", "https://me:word@host/v1"),
    *each("model", ""),
    *each("retries", -1),
    *each("timeout", 0.0),
    *each("max_tokens", 0),
]
REFUSED = [
    (DecoderConfig, SIZES, DECODER),
    (models.TransformerConfig, SIZES, TRANSFORMER),
    (models.ThoughtGestaltConfig, {**SIZES, "sentence_layer": 1}, GESTALT),
    (models.LatentThoughtConfig, {**SIZES, "latents_per_layer": 2}, LATENT_THOUGHT),
    (
        models.ThoughtbubblesConfig,
        {**SIZES, "num_layers": 4, "fork_layers": (1, 2)},
        THOUGHTBUBBLES,
    ),
    (models.CopyConfig, SIZES, COPIES),
    (models.GistConfig, SIZES, [*each("window", 4), *each("vocab_size", 3)]),
    (models.MoRConfig, {**SIZES, "thinking_steps": 3}, RECURSIONS),
    (models.PonderLM1Config, {**SIZES, "thinking_steps": 0}, each("multiply_embedding", True)),
    (models.CoTConfig, SIZES, each("max_chain_tokens", -1)),
    (models.ICoTConfig, SIZES, ICOT),
    (models.CoconutConfig, SIZES, COCONUT),
    (models.CodiConfig, SIZES, CODI),
    (models.OptimizerConfig, {}, OPTIMIZER),
    (SamplingConfig, {}, SAMPLING),
    (EndpointConfig, ENDPOINT, TEACHER),
]
ROWS = [(kind, sizes, change) for kind, sizes, changes in REFUSED for change in changes]


@pytest.mark.parametrize(
    ("kind", "sizes", "change"), ROWS, ids=[f"{kind.__name__}-{change}" for kind, _, change in ROWS]
)
def test_the_key_is_named_with_its_value(kind, sizes, change):
    """Where a configuration is impossible as a whole, the first key is the one to name."""
    kind(**sizes)  # nothing else is wrong with it
    with pytest.raises(ValueError) as error:
        kind(**{**sizes, **change})
    key = next(iter(change))
    assert re.search(rf"\b{key}( \(|=| must)", str(error.value))
    assert "\n" not in str(error.value)
