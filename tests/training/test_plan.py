"""``train.py plan``: sums that are done here by hand, and what a step really allocates."""

import re

import pytest
import torch
from methods import METHODS
from torch.profiler import ProfilerActivity, profile

from tests.programs import ROOT
from training import main
from training.plan import trace_step, training_loss

TRACED = (
    "gpt2",
    "llama",
    "thoughtbubbles",
    "thoughtbubbles-threshold",
    "thought-gestalt-none",
    "ponderlm1",
    "latent-thought-amortised",
    "no-cot",
    "icot",
)
"""One of each kind of step whose trace takes a second or two."""
BY_NAME = {method.name: method for method in METHODS}
TINY = ("-c", str(ROOT / "configs/transformer/tiny.yaml"))
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def number(text):
    """The value of a number with a unit such as ``5.62 M``."""
    value, _, unit = text.partition(" ")
    return float(value) * UNITS[unit]


def planned(capsys, *words):
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    parts = dict(re.findall(r"([\w' ]+?) ([\d.]+ ?[KMGT]?)B[,)]", out.partition("B (")[2]))
    return out, {name.strip(): number(size.strip()) for name, size in parts.items()}


def allocated(model, batch):
    """The most bytes that torch's allocator hands out in a step of a model that has moments."""
    optimizer = torch.optim.AdamW(model.network.parameters(), fused=True)

    def step():
        training_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", TRACED)
def test_parts_are_sums_and_what_the_allocator_hands_out(name):
    method = BY_NAME[name]
    model, batch = method.build(), method.batch()
    outline = method.build()
    outline.network = None
    parts = trace_step(outline, batch, keeps_gradients=True)
    parameters = list(model.network.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    weights = [*parameters, *model.network.buffers()]
    assert parts["weights"] == sum(x.untyped_storage().nbytes() for x in weights)
    assert parts["gradients"] == 4 * trained
    steps = 4 * sum(p.requires_grad for p in parameters)  # each parameter's number of steps
    assert parts["optimizer states"] == 2 * 4 * trained + steps
    fresh = trace_step(outline, batch)
    extra, measured = fresh["gradients"] + fresh["activations"], allocated(model, batch)
    if name == "thoughtbubbles-threshold":  # weights decide how many streams are kept
        assert extra > 0.95 * measured
    else:
        assert extra == pytest.approx(measured, rel=0.15)


def test_the_lines_are_products_of_the_options(capsys):
    words = ("--trainer.devices=8", "--trainer.num_nodes=2", "--trainer.max_steps=100")
    words += ("--trainer.accumulate_grad_batches=3", "--data.batch_size=4", "--data.block_size=64")
    words += ("--trainer.limit_val_batches=5", "--trainer.val_check_interval=60")
    words += ("--data.eval_batch_size=7", "--mfu=0.25", "--gpu=A100")
    out, parts = planned(capsys, *TINY, *words)
    tokens = 4 * 3 * 16 * 64
    assert (
        "global batch 192 rows = 4 micro-batch x 3 accumulated x 16 devices, "
        f"{tokens:,} tokens per step, 100 steps, {100 * tokens:,} tokens in all"
    ) in out
    each, share = re.search(r"\(([\d.]+ \w) per token\), ([\d.]+)% of all FLOPs", out).groups()
    training = number(each) * 100 * tokens
    validation = number(each) / 3 * (5 * 7 * 64 * 16) * (300 // 60)  # forward alone is a third
    assert float(share) == pytest.approx(100 * validation / (training + validation), abs=0.1)
    hours = (training + validation) / (0.25 * 312e12 * 16) / 3600
    assert float(re.search(r"time: (\S+) hours", out)[1]) == pytest.approx(hours, rel=0.02)
    count = int(re.search(r"([\d,]+) parameters", out)[1].replace(",", ""))
    assert parts["gradients"] == parts["DDP's buckets"] == pytest.approx(4 * count, rel=0.01)
    assert parts["optimizer states"] == pytest.approx(8 * count, rel=0.01)


def test_drawn_iterations_cost_their_mean_in_time_and_their_maximum_in_memory(capsys):
    words = ("-c", str(ROOT / "configs/ponderlm/ponderlm2_tiny.yaml"), "--trainer.max_steps=10")
    flops, activations = {}, {}
    for low, high in ((1, 1), (1, 5), (5, 5)):
        chosen = f"--model.init_args.config.jacobi_iterations=[{low},{high}]"
        out, parts = planned(capsys, *words, chosen)
        flops[low, high] = number(re.search(r"\(([\d.]+ \w) per token\)", out)[1])
        activations[low, high] = parts["activations"]
    assert flops[1, 5] == pytest.approx((flops[1, 1] + flops[5, 5]) / 2, rel=0.01)
    assert activations[1, 1] < activations[1, 5] == activations[5, 5]


def test_shards_hold_their_part(capsys):
    fsdp = str(ROOT / "configs/trainer/fsdp.yaml")
    out, parts = planned(capsys, *TINY, "-c", fsdp, "--trainer.devices=4")
    count = int(re.search(r"([\d,]+) parameters", out)[1].replace(",", ""))
    assert parts["weights"] == parts["gradients"] == pytest.approx(count, rel=0.01)
    assert parts["optimizer states"] == pytest.approx(2 * count, rel=0.01)
    assert parts["gathered"] < 4 * count, "blocks are gathered two at a time, in bf16"
    looped = ("-c", str(ROOT / "configs/ponderlm/looped_tiny.yaml"))
    out, parts = planned(capsys, *looped, "-c", fsdp, "--trainer.devices=4")
    count = int(re.search(r"([\d,]+) parameters", out)[1].replace(",", ""))
    assert parts["gathered"] >= 4 * 0.99 * count, "all parameters are gathered before the step"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--mfu=0"], "mfu (0.0)"),
        (["--gpu=Z80"], "gpu"),
        (["--trainer.strategy=foo"], "trainer.strategy (foo)"),
        (["--trainer.strategy=fsdp"], "trainer.strategy (fsdp)"),
        (["--trainer.accelerator=abacus"], "trainer.accelerator (abacus)"),
        (["--trainer.devices=0"], "trainer.devices (0)"),
        (["--model.config.dim=-4"], "dim"),
        (["--trainer.max_step=4"], "max_step"),
        (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt"),
    ],
)
def test_wrong_options_end_with_one_line(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *TINY, *words]) == 2
    error = capsys.readouterr().err
    line = error[error.index("error: ") :]
    assert named in line
    assert len(line.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is written"
