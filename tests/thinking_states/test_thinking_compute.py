"""FLOPs of thinking, as counted by hand and by what is executed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_models.thinking_states.backbone import causal_mask, head_flops, layer_flops
from lightning_models.thinking_states.baselines.text import TextRows
from lightning_models.thinking_states.network import chunk_flops, thought_flops
from tests.methods import decoder
from tests.thinking_states import questions
from tests.thinking_states.cases import build, reasoning_batch


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "qwen3"])
def test_the_work_of_T_and_C_is_what_is_executed(family):
    """Thoughts that are, with their ends, as long as chunks; attention is a small part of it."""
    sizes = decoder(family, vocab_size=500, hidden_size=64)
    model = build(chunk_size=8, vocab_size=500, architecture=sizes)
    batch = reasoning_batch((64,), (3,), steps=8, size=7)
    batch["step_lengths"] = torch.full((1, 8), 7)
    batch["step_places"] = torch.arange(8)[None] * 8
    network, rows = model.network, model.layout.rows(batch)
    h = torch.randn(1, rows.tokens.shape[1], 64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network._injected(rows.states, h)
        spoken = network._think(h, rows.thinking)
        spoken[0, rows.thoughts.where[0, rows.thoughts.valid[0]]] @ network.thinking_matrix.t()
    counted = 64 * chunk_flops(network) + thought_flops(network, 64)
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.1)


def test_flops_count_thinking():
    model = build()
    plain = super(type(model), model)
    for training in (False, True):
        assert model.flops_per_token(16, training) > plain.flops_per_token(16, training)
    assert model.flops_per_token(16, training=True) == 3 * model.flops_per_token(16)
    again = build(gradient_checkpointing=True)
    assert again.flops_per_token(16, training=True) > model.flops_per_token(16, training=True)


def test_flops_count_the_keys_in_the_window():
    """Of 32 queries those before the eighth see less than eight keys."""
    model, narrow = build(), build(window=8)
    backbone = narrow.network.backbone
    key = layer_flops(backbone, 1.0) - layer_flops(backbone, 0.0)
    seen = causal_mask(torch.ones(1, 32, dtype=torch.bool), 32, 8).sum() / 32
    fewer = backbone.num_layers * key * (33 / 2 - float(seen))
    assert narrow.flops_per_token(32) == pytest.approx(model.flops_per_token(32) - fewer)
    assert narrow.flops_per_token(8, training=True) == model.flops_per_token(8, training=True)
    answering = model.generation_flops(32) - narrow.generation_flops(32)
    assert answering == backbone.num_layers * key * (32 - 8)


def test_answers_cost_thoughts_where_they_are_thought_about():
    model, thinking = build(), build(think_in_decode=True)
    assert thinking.generation_flops(16) > model.generation_flops(16)
    assert thinking.generation_flops(16, steps=0.0) > model.generation_flops(16)
    assert model.generation_flops(16, steps=2.0) > model.generation_flops(16)
    assert model.generation_flops(32) > model.generation_flops(16)


# ---- latents

K = 4
LAST = {"c_thought": 1, "max_latent_stage": K, "first_stage": K + 1}
PCCOT = {"num_latents": K, "passes": 2}
LATENTS = {
    "Coconut": ("coconut", LAST),
    "Coconut on GPT-2": ("coconut", LAST | {"architecture": decoder("gpt2", vocab_size=500)}),
    "CODI": ("codi", {"num_latents": K}),
    "CODI, no teacher": ("codi", {"num_latents": K, "projection": False, "teacher_weight": 0.0}),
    "CODI, untied": ("codi", {"num_latents": K, "tie_head": False, "distillation_weight": 0.0}),
    "PCCoT": ("codi", PCCOT),
    "pause tokens": ("codi", PCCOT | {"passes": 0}),
    "SIM-CoT on Coconut": ("coconut", LAST | {"step_weight": 1.0}),
    "SIM-CoT on CODI": ("codi", {"num_latents": K, "step_weight": 1.0}),
    "SIM-CoT on PCCoT": ("codi", PCCOT | {"step_weight": 1.0, "projection_dim": 5}),
}


@pytest.fixture(params=LATENTS)
def latent(request):
    """A model whose output layer costs more than its layers, and predicts queries, too."""
    name, changes = LATENTS[request.param]
    changes = changes | {"predict_prefix": True} if name == "codi" else changes
    model = questions.build(name, double=False, vocab_size=500, lm_on_query=True, **changes)
    assert head_flops(model.network.backbone) > layer_flops(model.network.backbone, 30)
    return model


def product_flops(into, left, right, out_shape=None, **_):
    return 2 * left[0] * left[1] * right[1]


def executed(work):
    """What torch counts of matrix products; attention, in one kernel on a CPU, is not among it."""
    in_place = {torch.ops.aten.addmm_: product_flops}  # torch counts only the other form
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        work()
    products = {f"aten.{name}" for name in ("mm", "addmm", "addmm_")}
    assert {str(op) for op in counter.get_flop_counts()["Global"]} <= products
    return counter.get_total_flops()


def attention_of(model, *rows):
    """Scores and sums of causal rows of these lengths, each query with the keys up to its own."""
    backbone = model.network.backbone
    key = layer_flops(backbone, 1.0) - layer_flops(backbone, 0.0)
    return backbone.num_layers * key * sum(length * (length + 1) / 2 for length in rows)


def again(model, before):
    """Scores and sums of the latents that Jacobi passes read once more, after so many tokens."""
    longer = attention_of(model, before + K) - attention_of(model, before)
    return (getattr(model.config, "passes", None) or 0) * longer


def assert_counts(model, declared, counted):
    """Equal, but for the keys of latents that are read again: the mean of the row's are counted."""
    assert declared == pytest.approx(counted, rel=1e-2 if again(model, 1) else 1e-12)


def test_latents_cost_in_training_what_is_executed(latent):
    """The only step is not in the teacher's chain, and as long as the row that the decoder reads.

    So all rows have the length that is asked for, and logits but for a few tokens.
    """
    query, answer = 22, 5
    context = query + len(questions.PREFIX) + answer + 1
    batch = questions.questions([(query, [context - 1], answer)], epochs=0.0)
    config, layout, head = latent.config, latent.layout, head_flops(latent.network.backbone)

    def train():
        sum(term.sum for term in latent.loss(batch).terms.values()).backward()

    counted = (
        executed(train) + 3 * attention_of(latent, context + K + 2) + 3 * again(latent, query + 1)
    )
    rows: list[TextRows] = [layout.training(batch)]
    if getattr(config, "teacher_weight", 0):
        counted += 3 * attention_of(latent, context)
        rows.append(layout.teacher(batch))
    elif getattr(config, "distillation_weight", 0):
        counted += attention_of(latent, context)
    if config.step_weight:
        counted += 3 * attention_of(latent, context)
    silent = sum(context - int((row.targets >= 0).sum()) for row in rows)
    assert silent <= 6
    declared = latent.flops_per_token(context, training=True) * context
    assert_counts(latent, declared, counted + 3 * head * silent)


@torch.no_grad()
def test_latents_cost_in_generation_what_is_executed(latent):
    query, steps = torch.arange(22)[None] % 16, 9
    context = query.shape[1] + len(questions.PREFIX) + steps - 1

    def write():
        cache = latent.init_cache(query, torch.tensor([query.shape[1]]), steps)
        for _ in range(steps):
            latent.decode_step(cache, torch.tensor([7]))

    counted = executed(write) + attention_of(latent, context + K + 2) + again(latent, 23)
    counted += (context - steps) * head_flops(latent.network.backbone)  # logits of what is given
    assert_counts(latent, latent.generation_flops(context) * context, counted)
    assert latent.generation_flops(context) == latent.flops_per_token(context)
    assert latent.generation_flops(context, steps=K + 1) > latent.generation_flops(context)
