"""The line before training: parameters and FLOPs are the model's."""

import pytest
from methods import METHODS

from callbacks.overview import overview, quantity


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_parameters_and_flops_stand_in_one_line(method):
    model = method.build()
    model.network.requires_grad_(True)
    total = sum(parameter.numel() for parameter in model.network.parameters())
    line = overview(model)
    assert "\n" not in line
    assert line.startswith(f"{type(model).__name__}: {total:,} parameters, context of ")
    step = model.flops_per_token(model.config.block_size, training=True)
    assert line.endswith(f"{quantity(step)} training")
    first = next(model.network.parameters()).requires_grad_(False)
    assert f"({first.numel():,} of them frozen)" in overview(model)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1234, "1.23 K"), (999_700, "1 M"), (2e12, "2 T")]
)
def test_quantities(number, text):
    assert quantity(number) == text
