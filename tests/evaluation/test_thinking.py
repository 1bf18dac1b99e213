"""Additional steps are counted where a model takes any, and cost what its generation costs."""

import json

import pytest
import torch

from datamodules import LocalText
from datamodules.windows import IGNORE
from evaluation.checkpoint.rebuild import build_model
from evaluation.perplexity.command import measure_perplexity
from evaluation.perplexity.thinking import StepCounter, price_steps
from lightning_models.checkpoint import read_checkpoint
from lightning_models.layers import recording
from lightning_models.layers.recording import record

ADDED = ["executed_steps", "generation_flops_per_token", "flops_per_token_6nd"]


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
    assert list(result)[place + 1 : place + 4] == ADDED
    assert "executed steps" in printed
    assert "generation flops per token" in printed


def test_prices_follow_the_steps(ponder_path):
    model = build_model(read_checkpoint(ponder_path))
    size = sum(parameter.numel() for parameter in model.parameters())
    none, some = price_steps(model, 32, 0.0), price_steps(model, 32, 1.5)
    assert (none.flops_6nd, some.flops_6nd) == (6 * size, 15 * size)
    assert some.generation_flops == model.generation_flops(32, 1.5) > none.generation_flops


def test_a_model_without_steps_says_nothing_of_them(score, checkpoint_path):
    result, printed = score(checkpoint_path)
    assert not set(ADDED) & set(result)
    assert "steps" not in printed


def test_prefixes_leave_them_out(score, ponder_path):
    options = ("--mode", "autoregressive", "--positions", 3, "--limit_batches", 1)
    assert not set(ADDED) & set(score(ponder_path, *options)[0])


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
    assert report.thinking is None
    record("thinking_steps", executed=None, most=None)  # nobody is there to fail on it


def test_generation_tells_the_steps_it_took(evaluates, ponder_path, checkpoint_path):
    words = ["--prompt", "a", "--max_new_tokens", "5", "--temperature", "0"]
    out = evaluates("generate", "--ckpt", ponder_path, *words, "--set.tau", "0")
    most = read_checkpoint(ponder_path).model_recipe["init_args"]["config"]["thinking_steps"]
    assert f"--- {most:.2f} additional steps a token" in out
    assert "additional" not in evaluates("generate", "--ckpt", checkpoint_path, *words)
