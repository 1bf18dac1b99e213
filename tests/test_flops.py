"""The formulas count what torch's own counter counts."""

import re
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from formats import marked_documents
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from lightning_models import (
    ThoughtbubblesLM,
    ThoughtGestaltLM,
    TransformerConfig,
    TransformerLM,
)
from lightning_models.flops import TRAINING_FACTOR, attention_flops, head_flops, linear_flops
from tests.reference.attention import sees

STYLES = {
    "gpt2": {},
    "untied": {"tie_head": False},
    "llama": {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False},
    "shared heads": {"num_kv_heads": 1},
    "wide": {"ffn_dim": 70},
}
B, T = 2, 12


@pytest.fixture(params=STYLES)
def model(request):
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "block_size": T, "num_layers": 3, "dim": 24, "num_heads": 2}
    config = TransformerConfig(**sizes, **STYLES[request.param], attention_backend="math")
    model = TransformerLM(config)
    model.configure_model()
    return model


def uncounted(model):
    config = model.config
    return config.num_layers * 4 * config.dim * B * (T * T - T * (T + 1) // 2)


def logits(model):
    tokens = torch.arange(B * T).view(B, T)
    return model.network(tokens) @ model.network.output_matrix.t()


def test_a_forward_pass(model):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits(model)
    expected = counter.get_total_flops() - uncounted(model)
    assert model.flops_per_token(T) * B * T == expected


def test_a_training_step(model):
    assert TRAINING_FACTOR == 3
    with FlopCounterMode(display=False) as counter:
        logits(model).sum().backward()
    expected = counter.get_total_flops() - 3 * uncounted(model)
    assert model.flops_per_token(T, training=True) * B * T == expected


def test_blocks_are_computed_again(model):
    again = TransformerLM(replace(model.config, gradient_checkpointing=True))
    again.configure_model()
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        logits(again.train()).sum().backward()
    expected = counter.get_total_flops() - (TRAINING_FACTOR + 1) * uncounted(model)
    assert again.flops_per_token(T, training=True) * B * T == expected


def product_flops(into, left, right, out_shape=None, **_):
    return 2 * left[0] * left[1] * right[1]


def test_the_loss_adds_no_hidden_work(model):
    batch = {"tokens": torch.arange(B * T).view(B, T), "targets": torch.arange(B * T).view(B, T)}
    in_place = {torch.ops.aten.addmm_: product_flops}  # torch counts only the other form
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        model.loss(batch).terms["nll"].sum.backward()
    expected = counter.get_total_flops() - 3 * uncounted(model)
    assert model.flops_per_token(T, training=True) * B * T == expected


def test_parts_add_up(model):
    config, network = model.config, model.network
    whole = linear_flops(network.blocks) + attention_flops(config, T) + head_flops(config)
    assert model.flops_per_token(T) == whole
    assert head_flops(config) == 2 * 24 * 128
    hidden = {70: 70, None: 64 if config.activation == "swiglu" else 96}[config.ffn_dim]
    matrices = 3 if config.activation == "swiglu" else 2
    shared = 24 * config.key_value_heads // config.num_heads
    attention = 2 * 24**2 + 2 * 24 * shared
    assert linear_flops(network.blocks) == 3 * 2 * (attention + matrices * 24 * hidden)


@pytest.mark.parametrize("window", [None, 1, 4, 7, 30])
@pytest.mark.parametrize("context", [1, 4, 7, 20])
def test_attention_counts_the_keys_that_are_seen(window, context):
    sizes = {"vocab_size": 8, "block_size": 64, "num_layers": 2, "dim": 6, "num_heads": 1}
    config = TransformerConfig(**sizes, window=window)
    pairs = sum(
        sees(query, key, context, context, True, window)
        for query in range(context)
        for key in range(context)
    )
    expected = 2 * (2 * 2 * 6) * pairs / context  # layers * (scores, sums) * multiply-adds * width
    assert attention_flops(config, context) == pytest.approx(expected, rel=1e-12)


def test_a_module_used_twice_is_counted_once():
    layer = torch.nn.Linear(3, 5)
    assert linear_flops(torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(5, 2))) == 50
    assert linear_flops(torch.nn.ModuleList([layer, layer])) == 30


FORKS = {"fork_layers": (1, 2), "kappa": "2L"}
VARIANTS = {
    "forks": (ThoughtbubblesLM, FORKS),
    "decoded once": (ThoughtbubblesLM, FORKS | {"output_average": "residual_norm"}),
    "fork first": (ThoughtbubblesLM, {"fork_layers": (0,), "kappa": "1.5L"}),
    "memory": (ThoughtGestaltLM, {"memory_size": 2}),
    "memory, serial": (ThoughtGestaltLM, {"memory_size": 2, "layer_type": "serial"}),
    "memory in context": (ThoughtGestaltLM, {"memory_size": 2, "memory": "in_context"}),
    "seeding": (ThoughtGestaltLM, {"memory": "seeding"}),
    "no memory": (ThoughtGestaltLM, {"memory": "none"}),
}
SLOTS, SENTENCES = 27, 4


@pytest.fixture(params=VARIANTS)
def method(request):
    kind, changes = VARIANTS[request.param]
    own = {"sentence_layer": 3} if kind is ThoughtGestaltLM else {}
    sizes = {"vocab_size": 100, "block_size": SLOTS, "num_layers": 4, "dim": 24, "num_heads": 2}
    torch.manual_seed(0)
    model = kind(get_type_hints(kind.__init__)["config"](**sizes, **own, **changes))
    model.configure_model()
    return model.eval()


def scored(model):
    """A batch whose sizes are those that the formulas take for the average, and its tokens."""
    if model.reads == "sentences":
        lengths = [[SLOTS - 2] * (SENTENCES - 1) + [SLOTS - 3]]
        return marked_documents(lengths, 97, 100, SLOTS), SLOTS * SENTENCES
    tokens = torch.arange(B * SLOTS).view(B, SLOTS)
    return {"tokens": tokens, "targets": tokens}, SLOTS


def counted(model):
    """What torch counts while a batch is scored, by the name of the module that it is in."""
    batch, tokens = scored(model)
    with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad():
        model.score(batch)
    rows = B if model.reads == "windows" else 1
    sums = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    return {name: flops / rows / tokens for name, flops in sums.items()}, tokens


MODULES = {
    "feed_forward": r".*\.feed_forward",
    "forking": r".*\.forks\.\d+",
    "sentence_head": "SentenceHead",
}
"""Names under which torch counts what is a part."""


@pytest.mark.parametrize("part", MODULES)
def test_a_part_is_what_modules_of_its_name_compute(method, part):
    found, tokens = counted(method)
    expected = sum(flops for name, flops in found.items() if re.fullmatch(MODULES[part], name))
    assert method.flops_by_part(tokens).get(part, 0.0) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("context", [1, SLOTS, 1000])
def test_the_parts_of_every_variant_add_up(method, context):
    parts = method.flops_by_part(context)
    assert sum(parts.values()) == pytest.approx(method.flops_per_token(context), rel=1e-12)
    training = method.flops_per_token(context, training=True)
    assert training == pytest.approx(TRAINING_FACTOR * sum(parts.values()), rel=1e-12)
    assert min(parts.values()) > 0 or method.reads == "sentences"
