"""The formulas count what torch's own counter counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_models import PonderConfig, PonderLM, PonderLM2, PonderLM2Config
from lightning_models.generation import SamplingConfig, generate

B, T, K, V = 2, 6, 2, 64
SIZES = {"vocab_size": V, "block_size": T, "num_layers": 2, "dim": 16, "num_heads": 2}


def build(adaptive=True, **changes):
    torch.manual_seed(0)
    options = {"thinking_steps": K, "jacobi_iterations": (1, 1), "attention_backend": "math"}
    kind, config = (PonderLM, PonderConfig) if adaptive else (PonderLM2, PonderLM2Config)
    model = kind(config(**SIZES, **{**options, **changes}))
    model.configure_model()
    return model


def batch():
    tokens = torch.arange(B * T).view(B, T)
    return {"tokens": tokens, "targets": tokens + 1}


def hidden_pairs(slots):
    """FLOPs of a batch that the math kernel spends on keys a causal query does not see."""
    n = T * slots
    return SIZES["num_layers"] * 4 * SIZES["dim"] * B * (n * n - n * (n + 1) // 2)


def passes(iterations):
    return [1, 2, *[3] * (iterations + 1)]


def product_flops(into, left, right, out_shape=None, **_):
    return 2 * left[0] * left[1] * right[1]


def count(run):
    in_place = {torch.ops.aten.addmm_: product_flops}  # torch counts only the other form
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("iterations", [0, 3])
def test_scoring(adaptive, iterations):
    model = build(adaptive, eval_iterations=iterations).eval()
    unseen = sum(map(hidden_pairs, passes(iterations)))
    assert model.flops_per_token(T) * B * T == count(lambda: model.score(batch())) - unseen


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        ({"penalty_weight": 0.0}, [3] * 4),
        ({"penalty_weight": 0.0, "log_depth_losses": True}, [3] * 4),
        ({"penalty": "expected_steps"}, [3] * 4),
        ({}, [3] * 4),
        ({"depth_losses_every": 3}, [3] * 4),
        ({"penalty_weight": 0.0, "grad_last_passes": 2}, [1, 1, 3, 3]),
        ({"penalty_weight": 0.0, "grad_last_passes": 9}, [3] * 4),
        ({"penalty_weight": 0.0, "checkpoint_passes": True}, [4, 4, 4, 3]),
    ],
)
def test_a_training_step(changes, factors):
    model = build(**changes)
    unseen = sum(n * hidden_pairs(s) for n, s in zip(factors, passes(1), strict=True))

    def step():
        terms = model.loss(batch()).terms.values()
        sum(term.sum / term.normaliser for term in terms).backward()

    counted = count(step) - unseen
    assert model.flops_per_token(T, training=True) * B * T == pytest.approx(counted, rel=1e-3)


def test_generation_counts_the_steps_that_are_taken():
    model = build()
    full, none = model.generation_flops(T), model.generation_flops(T, 0)
    plain = build(thinking_steps=0)
    assert none == plain.generation_flops(T) + 2 * 16 * 2  # the router's other columns
    assert none < model.generation_flops(T, 0.5) < model.generation_flops(T, 1) < full
    assert full == model.generation_flops(T, K)


def test_a_generated_token_costs_its_slots():
    model = build(False).eval()
    before, after = (
        count(
            lambda n=n: generate(
                model, [[1]], max_new_tokens=n, sampling=SamplingConfig(temperature=0)
            )
        )
        for n in (3, 4)
    )
    attention = SIZES["num_layers"] * 4 * 16 * (K + 1) * (K + 2) / 2
    # torch does not count the kernel of a single query; its FLOPs are those of one token's slots
    assert after - before == pytest.approx(model.generation_flops(1) - attention)


def test_parts_add_up_to_a_pass_over_all_slots():
    model = build(thinking_steps=0)
    assert sum(model.flops_by_part(T).values()) == pytest.approx(model.flops_per_token(T))
