"""What stands beside every score: FLOPs by both counts, executed steps and wall time."""

import json

import pytest
import torch
from methods import BLOCK, METHODS

from datamodules import LocalText
from datamodules.windows import IGNORE
from evaluation.checkpoint.rebuild import build_model
from evaluation.cost import Cost, StepCounter, Thinking, mean_cost, price, price_steps
from evaluation.perplexity.command import measure_perplexity
from lightning_models.checkpoint import read_checkpoint
from lightning_models.layers import recording
from lightning_models.layers.recording import record

COST = [
    "flops_per_token",
    "executed_steps",
    "generation_flops_per_token",
    "flops_per_token_6nd",
    "seconds",
]


@pytest.fixture
def score(evaluates, tmp_path):
    """Runs ``evaluate.py perplexity``; returns the JSON file's content and what was printed."""

    def run(checkpoint, *options):
        target = tmp_path / "result.json"
        out = evaluates("perplexity", "--ckpt", checkpoint, "--output", target, *options)
        return json.loads(target.read_text()), out

    return run


def slow_mean(path, corpus, **changes):
    """Mean steps over all targets of the validation text, one window at a time."""
    model, data = build_model(read_checkpoint(path), changes), LocalText(**corpus)
    data.prepare_data()
    data.setup("validate")
    source, found = data.evaluation_source("val"), []
    for number in range(len(source)):
        batch = source.batch(number)
        for row in range(len(batch["tokens"])):
            one = {key: value[row : row + 1] for key, value in batch.items()}
            model.recorded(one, thinking_steps=lambda executed, most: found.append(executed))
            found[-1] = found[-1][one["targets"] != IGNORE]
    return torch.cat(found).double().mean().item()


@pytest.mark.parametrize("tau", [1e-4, 0.788])
def test_the_mean_is_that_of_a_slow_loop(score, ponder_path, corpus, tau):
    result, printed = score(ponder_path, "--set.tau", tau)
    expected = slow_mean(ponder_path, corpus, tau=tau)
    assert result["executed_steps"] == pytest.approx(expected, abs=1e-12)
    assert (expected == 2) == (tau < 0.1)
    place = list(result).index("flops_per_token")
    assert list(result)[place : place + 5] == COST
    assert "executed steps" in printed
    assert "generation flops per token" in printed


def test_prices_follow_the_steps(ponder_path):
    model = build_model(read_checkpoint(ponder_path))
    size = sum(parameter.numel() for parameter in model.parameters())
    none, some = price_steps(model, 32, 0.0), price_steps(model, 32, 1.5)
    assert (none.flops_6nd, some.flops_6nd) == (6 * size, 15 * size)
    assert some.generation_flops == model.generation_flops(32, 1.5) > none.generation_flops
    assert price_steps(model, 32, None) == price_steps(model, 32, 2.0)


@pytest.mark.parametrize(
    ("name", "changes", "passes"),
    [
        ("gpt2", {}, 1),
        ("copy-3", {}, 3),
        ("looped", {"thinking_steps": 2}, 3),
        ("pause", {"thinking_steps": 1}, 2),
        ("latent-thought", {"inner_steps": 5}, 6),
        ("latent-thought-amortised", {"inner_steps": 5}, 1),
        ("thought-gestalt", {}, 1),
        ("thinking-states", {}, 1),
        ("coconut", {}, 1),
        # two of three blocks have twice as many streams; all three with a fork in front of each
        ("thoughtbubbles", {"fork_layers": (1,), "kappa": "2L"}, (1 + 2 + 2) / 3),
        ("thoughtbubbles", {"fork_layers": (0,), "kappa": "1.5L"}, 1.5),
    ],
)
def test_papers_count_passes_times_all_parameters(name, changes, passes):
    (method,) = [method for method in METHODS if method.name == name]
    model = method.build(**changes)
    assert model.passes_per_token(BLOCK) == pytest.approx(passes)
    found = price_steps(model, BLOCK, None)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert found.executed_steps == pytest.approx(passes - 1)
    assert found.flops_6nd == pytest.approx(6 * size * passes)
    assert found.generation_flops == model.generation_flops(BLOCK)


def test_a_plain_model_takes_no_additional_steps(score, checkpoint_path):
    result, printed = score(checkpoint_path)
    model = build_model(read_checkpoint(checkpoint_path))
    size = sum(parameter.numel() for parameter in model.parameters())
    assert [result[key] for key in COST[:4]] == [
        model.flops_per_token(32),
        0,
        model.generation_flops(32),
        6 * size,
    ]
    assert 0 < result["seconds"] < 600
    assert all(key.replace("_", " ") in printed for key in COST)


def test_behind_prefixes_steps_are_those_of_the_drawn_targets(score, ponder_path):
    options = ("--mode", "autoregressive", "--positions", 3, "--limit_batches", 1)
    assert score(ponder_path, *options)[0]["executed_steps"] == 2
    assert score(ponder_path, *options, "--set.tau", "0.999")[0]["executed_steps"] == 0


def test_several_texts_cost_the_mean_of_their_tokens():
    costs = [Cost(10, Thinking(0, 20, 30), 1.0), Cost(40, Thinking(3, 50, 60), 2.5)]
    assert mean_cost(costs, [2, 1]) == Cost(20, Thinking(1, 30, 40), 3.5)
    assert mean_cost(costs, [0, 0]).flops_per_token == 25


def test_people_read_all_of_it(checkpoint_path):
    model = build_model(read_checkpoint(checkpoint_path))
    cells = price(model, 32, None, 1.25).as_cells()
    assert cells["seconds"] == "1.25"
    assert cells["FLOPs/token"] == f"{model.flops_per_token(32):.4g}"
    assert len(cells) == len(COST)


def test_only_targets_count():
    counter, batches = StepCounter(), []
    for first in (5, 7):
        targets = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, first]])
        batches.append({"targets": targets})
    assert counter.mean is None
    with recording(thinking_steps=counter.count):
        for batch in counter.watch(batches):
            record("thinking_steps", executed=batch["targets"].abs(), most=9)
    assert counter.mean == (1 + 2 + 5 + 1 + 2 + 7) / 6


def test_measuring_asks_for_nothing_afterwards(checkpoint_path, corpus):
    checkpoint, data = read_checkpoint(checkpoint_path), LocalText(**corpus)
    data.prepare_data()
    data.setup("validate")
    report = measure_perplexity(checkpoint, build_model(checkpoint), data, limit_batches=1)
    assert report.cost.thinking.executed_steps == 0
    record("thinking_steps", executed=None, most=None)  # nobody is there to fail on it


def test_generation_tells_the_steps_it_took(evaluates, ponder_path, checkpoint_path):
    words = ["--prompt", "a", "--max_new_tokens", "5", "--temperature", "0"]
    out = evaluates("generate", "--ckpt", ponder_path, *words, "--set.tau", "0")
    most = read_checkpoint(ponder_path).model_recipe["init_args"]["config"]["thinking_steps"]
    assert f"--- {most:.2f} additional steps a token" in out
    assert "additional" not in evaluates("generate", "--ckpt", checkpoint_path, *words)
