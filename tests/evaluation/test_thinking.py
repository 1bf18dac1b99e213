"""What stands next to every score: FLOPs by both counts, executed steps and wall time."""

import csv

import pytest
import torch
from methods import BLOCK, METHODS

from datamodules import LocalText
from datamodules.text import IGNORE
from evaluation.cost import mean_cost, price
from evaluation.load import build_model
from lightning_models import MoRLM, PonderLM, ThoughtbubblesLM
from lightning_models.checkpoint import read_checkpoint

COST = [
    "flops_per_token",
    "executed_steps",
    "generation_flops_per_token",
    "flops_per_token_6nd",
    "seconds",
]


@pytest.fixture
def score(reports):
    """Runs ``evaluate.py perplexity``; returns the JSON file's content and what was printed."""
    return lambda checkpoint, *options: reports("perplexity", "--ckpt", checkpoint, *options)


def slow_means(path, corpus, **changes):
    """Executed and expected steps, means over all targets of the text, one window at a time."""
    model, data = build_model(read_checkpoint(path), changes), LocalText(**corpus)
    data.prepare_data()
    data.setup("validate")
    source, executed, tails = data.evaluation_source("val"), [], []
    seen = {}
    for number in range(len(source)):
        batch = source.batch(number)
        for row in range(len(batch["tokens"])):
            one = {key: value[row : row + 1] for key, value in batch.items()}
            model.recorded(
                one,
                thinking_steps=lambda executed, most: seen.update(executed=executed),
                router=lambda log_steps, log_tail: seen.update(log_tail=log_tail),
            )
            target = one["targets"] != IGNORE
            executed.append(seen["executed"][target])
            tails.append(seen["log_tail"][target])
    expected = torch.cat(tails).double().exp()[:, 1:].sum(dim=1)
    return torch.cat(executed).double().mean().item(), expected.mean().item()


@pytest.mark.parametrize("tau", [1e-4, 0.788])
def test_the_means_are_those_of_a_slow_loop(score, ponder_path, corpus, tau):
    result, printed = score(ponder_path, "--set.tau", tau)
    executed, expected = slow_means(ponder_path, corpus, tau=tau)
    assert result["executed_steps"] == pytest.approx(executed, abs=1e-12)
    assert result["expected_steps"] == pytest.approx(expected, rel=1e-6)
    assert (executed == 2) == (tau < 0.1)
    assert 1 < expected < 2
    place = list(result).index("flops_per_token")
    assert list(result)[place : place + 6] == [*COST[:4], "expected_steps", COST[4]]
    assert "executed steps" in printed
    assert "generation flops per token" in printed


def test_prices_follow_the_steps(ponder_path):
    model = build_model(read_checkpoint(ponder_path))
    size = sum(parameter.numel() for parameter in model.parameters())
    none, some, planned, two = (price(model, 32, s, 1.0) for s in (0.0, 1.5, None, 2.0))
    assert (none["flops_per_token_6nd"], some["flops_per_token_6nd"]) == (6 * size, 15 * size)
    generated = some["generation_flops_per_token"]
    assert generated == model.generation_flops(32, 1.5) > none["generation_flops_per_token"]
    assert planned == two


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
        # two of three blocks have twice as many streams; all three with a fork before each
        ("thoughtbubbles", {"fork_layers": (1,), "kappa": "2L"}, (1 + 2 + 2) / 3),
        ("thoughtbubbles", {"fork_layers": (0,), "kappa": "1.5L"}, 1.5),
    ],
)
def test_papers_count_passes_times_all_parameters(name, changes, passes):
    (method,) = [method for method in METHODS if method.name == name]
    model = method.build(**changes)
    assert model.passes_per_token(BLOCK) == pytest.approx(passes)
    found = price(model, BLOCK, None, 1.0)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert found["executed_steps"] == pytest.approx(passes - 1)
    assert found["flops_per_token_6nd"] == pytest.approx(6 * size * passes)
    assert found["generation_flops_per_token"] == model.generation_flops(BLOCK)


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


def test_after_prefixes_steps_are_those_of_the_drawn_targets(score, ponder_path):
    options = ("--mode", "autoregressive", "--positions", 3, "--limit_batches", 1)
    all_steps, none = (score(ponder_path, *options, "--set.tau", t)[0] for t in (1e-4, 0.999))
    assert (all_steps["executed_steps"], none["executed_steps"]) == (2, 0)
    assert 0 < all_steps["expected_steps"] < 2


def test_several_texts_cost_the_mean_of_their_tokens():
    rows = ((10, 0, 20, 30, 1.0), (40, 3, 50, 60, 2.5), (20, 1, 30, 40, 3.5))
    *costs, mean = (dict(zip(COST, row, strict=True)) for row in rows)
    assert mean_cost(costs, [2, 1]) == mean
    assert mean_cost(costs, [0, 0])["flops_per_token"] == 25


def test_generation_prints_the_steps_it_took(evaluates, ponder_path, checkpoint_path):
    words = ["--prompt", "a", "--max_new_tokens", "5", "--temperature", "0"]
    out = evaluates("generate", "--ckpt", ponder_path, *words, "--set.tau", "0")
    most = read_checkpoint(ponder_path).model_recipe["init_args"]["config"]["thinking_steps"]
    assert f"--- {most:.2f} additional steps per token" in out
    assert "additional" not in evaluates("generate", "--ckpt", checkpoint_path, *words)


# ---- where texts decide what runs


BUBBLES = {"num_layers": 4, "fork_layers": (1, 2), "allocation": "threshold"}
FEW = ("--limit_batches", 2)


@pytest.fixture(scope="module")
def bubbles_path(corpus, train_checkpoint, tmp_path_factory):
    """A checkpoint of Thoughtbubbles whose thresholds let fewer streams pass than the budget."""
    path = tmp_path_factory.mktemp("bubbles") / "bubbles.ckpt"
    train_checkpoint(path, LocalText(**corpus), ThoughtbubblesLM, **BUBBLES)
    content = torch.load(path, weights_only=True)
    generator = torch.Generator().manual_seed(1)
    for key, value in content["state_dict"].items():
        if key.endswith("score.weight"):  # scores that differ by token
            value.copy_(torch.randn(value.shape, generator=generator))
        if key.endswith("threshold"):
            value.fill_(-0.8)
    torch.save(content, path)
    return path


def windows_of(corpus, number=None):
    """The validation windows one by one, of that many batches."""
    data = LocalText(**corpus)
    data.prepare_data()
    data.setup("validate")
    source = data.evaluation_source("val")
    for n in range(len(source) if number is None else number):
        batch = source.batch(n)
        for row in range(len(batch["tokens"])):
            yield {key: value[row : row + 1] for key, value in batch.items()}


def streams_that_run(model, window):
    """Streams of each token (T,) in each block, from what the fork layers report."""
    counts = []

    def count(after, **_):
        own = after.token[..., None] == torch.arange(after.num_tokens)
        counts.append(own.sum(dim=(0, 1)))

    model.recorded(window, fork=count)
    forks = dict(zip(model.config.fork_layers, counts, strict=True))
    streams, found = window["mask"][0].long(), []
    for block in range(model.config.num_layers):
        streams = forks.get(block, streams)
        found.append(streams)
    return found


def flops_of(model, streams):
    """FLOPs of a window by hand: products with weights, pairs of streams, forks, logits."""
    dim, block = model.config.dim, model.network.blocks[0]
    weights = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    totals = [int(count.sum()) for count in streams]
    flops = sum(2 * weights * n + 4 * dim * n * (n + 1) // 2 for n in totals)
    flops += sum(2 * 2 * dim * totals[layer - 1] for layer in model.config.fork_layers)
    return flops + 2 * dim * model.config.padded_vocab_size * totals[-1]


@pytest.mark.parametrize("allocation", ["threshold", "window_topk", "global_topk"])
def test_streams_are_counted(score, bubbles_path, corpus, allocation):
    chosen = ("--set.eval_allocation", allocation)
    result, printed = score(bubbles_path, *chosen)
    model = build_model(read_checkpoint(bubbles_path), {"eval_allocation": allocation})
    extra = flops = tokens = 0
    for window in windows_of(corpus):
        streams = streams_that_run(model, window)
        targets = window["targets"][0] != IGNORE
        extra += sum(int((count - 1)[targets].sum()) for count in streams)
        flops += flops_of(model, streams)
        tokens += int(window["mask"].sum())
    steps = extra / result["tokens"] / len(streams)
    assert result["executed_steps"] == pytest.approx(steps, abs=1e-12)
    assert result["flops_per_token"] == pytest.approx(flops / tokens, rel=1e-12)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert result["flops_per_token_6nd"] == pytest.approx(6 * size * (1 + steps))
    assert result["generation_flops_per_token"] == model.generation_flops(
        32, result["executed_steps"]
    )
    adaptive = allocation != "global_topk"
    assert ("nominal_steps" in result) == ("nominal flops per token" in printed) == adaptive
    if adaptive:
        assert result["nominal_steps"] == 0.75 != pytest.approx(steps, abs=0.01)
        assert result["nominal_flops_per_token"] == model.flops_per_token(32)
    for size in (1, 7):
        again = score(bubbles_path, *chosen, "--batch_size", size)[0]
        for key in COST[:4]:
            assert again[key] == pytest.approx(result[key], rel=1e-12)


def test_streams_of_drawn_targets_are_counted(score, bubbles_path, corpus):
    """All targets after their prefixes: under a causal rule as many streams as in windows."""
    options = ("--mode", "autoregressive", "--positions", "null", *FEW)
    found, whole = score(bubbles_path, *options)[0], score(bubbles_path, *FEW)[0]
    for key in COST[:4]:
        assert found[key] == pytest.approx(whole[key], rel=1e-12)
    topk = ("--set.eval_allocation", "global_topk")
    found = score(bubbles_path, *options, *topk, "--set.budget", "fixed")[0]
    model = build_model(
        read_checkpoint(bubbles_path), {"eval_allocation": "global_topk", "budget": "fixed"}
    )
    extra = []
    for window in windows_of(corpus, FEW[1]):
        for length in range(1, 1 + int(window["mask"].sum())):
            prefix = {key: window[key][:, :length] for key in ("tokens", "targets", "mask")}
            last = [int(count[-1]) for count in streams_that_run(model, prefix)]
            extra.append(sum(last) / len(last) - 1)
    assert found["executed_steps"] == pytest.approx(sum(extra) / len(extra), abs=1e-12)
    assert found["executed_steps"] > whole["executed_steps"]


def test_every_command_reports_the_counted_costs(
    score, reports, evaluates, bubbles_path, corpus, tmp_path
):
    alone = score(bubbles_path)[0]
    evaluates("sweep", "--ckpts", bubbles_path, "--output", tmp_path / "sweep.svg")
    (row,) = csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())
    assert [float(row[key]) for key in COST[:4]] == pytest.approx([alone[k] for k in COST[:4]])
    evaluates("compare", bubbles_path, "--output", tmp_path / "report")
    (row,) = csv.DictReader((tmp_path / "report" / "runs.csv").read_text().splitlines())
    assert float(row["executed_steps"]) == pytest.approx(alone["executed_steps"])
    assert float(row["scoring_flops_per_token"]) == pytest.approx(alone["flops_per_token"])
    files = ("--sets", "ptb", "--files.ptb", corpus["data_files"], "--text_field", "text")
    whole, _ = reports("zero_shot", "--ckpt", bubbles_path, *files, *FEW)
    for key in (*COST[:4], "nominal_steps", "nominal_flops_per_token"):
        assert whole[key] == pytest.approx(whole["sets"]["ptb"][key])
    assert whole["executed_steps"] != pytest.approx(whole["nominal_steps"], abs=0.01)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (MoRLM, {"thinking_steps": 2, "capacities": (0.75, 0.5)}),
        (PonderLM, {"thinking_steps": 2, "tau": 0.4, "inference": "sequential"}),
    ],
)
def test_flops_of_other_methods_follow_their_steps(
    kind, changes, score, corpus, train_checkpoint, tmp_path
):
    path = train_checkpoint(tmp_path / "own.ckpt", LocalText(**corpus), kind, **changes)
    result, model = score(path, *FEW)[0], build_model(read_checkpoint(path))
    assert result["nominal_flops_per_token"] == model.flops_per_token(32)
    assert result["nominal_steps"] == 2
    flops = tokens = 0
    for window in windows_of(corpus, FEW[1]):
        found = {}
        model.recorded(
            window, thinking_steps=lambda executed, most, to=found: to.update(e=executed)
        )
        executed, real = found["e"][0], window["mask"][0]
        tokens += int(real.sum())
        flops += by_hand(model, executed[real])
    assert result["flops_per_token"] == pytest.approx(flops / tokens, rel=1e-12)


def by_hand(model, executed):
    """FLOPs of a window whose tokens (T,) took ``executed`` additional steps."""
    config, network = model.config, model.network
    weights = sum(p.numel() for p in network.blocks.parameters() if p.dim() == 2)
    taken = [int((executed >= step).sum()) for step in range(config.thinking_steps + 1)]
    routers = 2 * config.dim * config.thinking_steps * len(executed)  # MoR's
    if isinstance(model, PonderLM):  # one sequence of slots, and a router of K + 1 outputs
        taken, routers = [sum(taken)], 2 * network.router.weight.numel() * len(executed)
    pairs = config.num_layers * sum(4 * config.dim * n * (n + 1) // 2 for n in taken)
    head = 2 * config.dim * config.padded_vocab_size * len(executed)
    return 2 * weights * sum(taken) + pairs + routers + head
