"""The table before training: parts add up, methods name their own, FLOPs are the counter's."""

import pytest
from methods import METHODS

from callbacks.overview import overview, quantity

OWN = {
    "thoughtbubbles": "fork scorers",
    "thought-gestalt": "attention to memory",
    "ponderlm": "router",
    "mixture-of-recursions": "routers",
    "latent-thought": "attention to latent vectors",
    "thinking-states": "thinking block",
}
COMMON = {"embedding", "blocks", "final norm", "output head"}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_parts_add_up_and_have_names(method):
    model = method.build()
    parts = model.parameters_by_part()
    assert sum(parts.values()) == sum(p.numel() for p in model.network.parameters())
    assert COMMON - {"output head"} <= parts.keys()
    assert OWN.get(method.name, "blocks") in parts
    assert parts.keys() - COMMON <= {*type(model).parts.values(), "pause"}


def test_an_output_head_of_its_own_is_counted_and_a_shared_one_is_named():
    by_name = {method.name: method for method in METHODS}
    own, shared = by_name["ponderlm"].build(), by_name["gpt2"].build()
    size = own.network.head.weight.numel()
    assert own.parameters_by_part()["output head"] == size
    assert "output head" not in shared.parameters_by_part()
    assert f"output head {size:,}" in " ".join(overview(own).split())
    assert "output head the embedding's" in " ".join(overview(shared).split())
    step = shared.flops_per_token(shared.config.block_size, training=True)
    assert f"{quantity(step)} training" in overview(shared)
    next(shared.network.parameters()).requires_grad_(False)
    assert "of them are frozen" in overview(shared)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1234, "1.23 K"), (999_700, "1 M"), (2e12, "2 T")]
)
def test_quantities(number, text):
    assert quantity(number) == text
