"""Models and batches of this package in the words of the float64 reference, and the other way."""

from contextlib import ExitStack, contextmanager

import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_models import output_layer
from tests.reference import qwen2
from tests.reference.double import in_double
from tests.reference.thinking_states import Row, Setup

LOSS = {"rtol": 0, "atol": 1e-9}
GRADIENT = {"rtol": 0, "atol": 1e-8}


@contextmanager
def in_float64():
    """Within it models are built and run, and scores are returned, without float32."""
    from transformers.models.qwen2 import modeling_qwen2

    with ExitStack() as stack:
        for module in (modeling_qwen2, output_layer):
            stack.enter_context(in_double(module))
        yield


def name_of(name):
    """A parameter's name in the reference."""
    name = name.removeprefix("backbone.")
    return "lm_head.weight" if name == "head.weight" else name


def weights_of(model):
    """The reference's weights, which take gradients of their own, and its shape."""
    named = {name_of(name): value for name, value in model.network.state_dict().items()}
    return qwen2.leaves(named), qwen2.shape_of(model.network.backbone.shape, model.config.window)


def moved(model, seed=0, size=0.2):
    """The model in float64, all its weights moved: norms away from one, copies from each other."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return model.double().eval()


def assert_same_gradients(model, weights, least=8, **tolerance):
    """The gradients of all parameters are those of the reference, and most are not zero."""
    touched = 0
    for name, parameter in model.network.named_parameters():
        expected = weights[name_of(name)].grad
        expected = torch.zeros_like(parameter) if expected is None else expected
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            found, expected, msg=lambda m, n=name: f"{n}: {m}", **{**GRADIENT, **tolerance}
        )
        touched += bool(expected.abs().max() > 1e-4)
    assert touched >= least


def setup_of(model, **changes):
    """The reference's setup of a Thinking States model."""
    config, shape = model.config, qwen2.shape_of(model.network.backbone.shape, model.config.window)
    into, out = config.layers(shape.layers)
    options = {
        "shape": shape,
        "kind": config.grid,
        "chunk_size": config.chunk_size,
        "inject_after": into,
        "tap_after": out,
        "eos": 0,
        "thought_eos": config.special_id("thought_end"),
        "separator": config.special_id("step"),
        "pad": config.special_id("thought_pad"),
        "prefix": tuple(config.answer_prefix),
        "max_thought_tokens": config.max_thought_tokens,
        "think_in_decode": config.think_in_decode,
        "lm_on_query": config.lm_on_query,
        "trivial_weight": config.trivial_weight,
        "chunk_sum": config.thought_loss == "chunk_sum",
    }
    return Setup(**{**options, **changes})


def draw(shapes, words, seed=0, eos=0):
    """Random rows: tokens of the query, (place, tokens) of each step, tokens of the answer."""
    generator = torch.Generator().manual_seed(seed)

    def some(count):
        return torch.randint(1, words, (count,), generator=generator).tolist()

    return [
        Row(
            [eos, *some(query - 1)],
            [some(size) for _, size in steps],
            [place for place, _ in steps],
            [*some(answer - 1), eos],
        )
        for query, steps, answer in shapes
    ]


def batch_of(rows, filling=False):
    if filling:
        rows = [*rows, Row([0], [], [], [])]

    def padded(lists, value):
        return pad_sequence(
            [torch.tensor(one, dtype=torch.int64) for one in lists],
            batch_first=True,
            padding_value=value,
        )

    most = max([1, *(len(row.steps) for row in rows)])
    width = max([1, *(len(step) for row in rows for step in row.steps)])
    steps = torch.zeros(len(rows), most, width, dtype=torch.int64)
    lengths = torch.zeros(len(rows), most, dtype=torch.int64)
    places = torch.full((len(rows), most), -1)
    for number, row in enumerate(rows):
        for r, (step, place) in enumerate(zip(row.steps, row.places, strict=True)):
            steps[number, r, : len(step)] = torch.tensor(step)
            lengths[number, r], places[number, r] = len(step), place
    return {
        "query": padded([row.query for row in rows], 0),
        "query_lengths": torch.tensor([len(row.query) for row in rows]),
        "steps": steps,
        "step_lengths": lengths,
        "step_places": places,
        "targets": padded([row.answer for row in rows], -100),
        "sequence_id": torch.arange(len(rows)),
        "group": torch.zeros(len(rows), dtype=torch.int64),
        "num_bytes": torch.ones(len(rows), dtype=torch.int64),
    }
