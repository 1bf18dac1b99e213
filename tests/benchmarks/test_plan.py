"""The planner's command has a row for each strategy, with what each shards and sends."""

import sys

import pytest

from benchmarks import plan

SMALL = "model.init_args.config"
TINY = ["--config", "configs/transformer/tiny.yaml", "--set", f"{SMALL}.dim=64"]
"""Four layers; embeddings are most of the parameters."""


def rows_of(monkeypatch, capsys, *words):
    """The rows of the table that the command prints, by the first column, and what follows it."""
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    plan.main()
    lines = capsys.readouterr().out.splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    names, *rows = table
    below = lines[max(n for n, line in enumerate(lines) if line.startswith("| ")) + 1 :]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}, "\n".join(below)


def held(row, *parts):
    return sum(float(row[f"{part} GiB"]) for part in parts)


def test_one_node_has_replicas_and_shards(monkeypatch, capsys):
    rows, below = rows_of(monkeypatch, capsys, *TINY, "--gpus", "8", "--gpu", "h100")
    ddp, fsdp = rows["ddp"], rows["fsdp"]
    assert [*rows] == ["ddp", "fsdp"]
    parts = ("weights", "optimiser")
    assert held(fsdp, *parts) == pytest.approx(held(ddp, *parts) / 8, rel=0.02)
    gradient = float(ddp["all_reduce GB/step"]) / 2  # a ring's two rounds; one for a reduction
    assert float(fsdp["reduce_scatter GB/step"]) == pytest.approx(gradient, rel=0.01)
    # in bf16 before each pass; the root (embeddings) stays gathered in between, as torch has it
    assert gradient / 2 < float(fsdp["all_gather GB/step"]) <= gradient
    assert float(fsdp["all_reduce GB/step"]) == 0
    assert "Strategy: ddp" in below
    # 16 windows of 128 tokens, shared by eight; 1200 steps
    assert (
        "global batch 16 rows = 2 micro-batch x 1 accumulated x 8 devices, 2,048 tokens a step, "
        "1,200 steps, 2,457,600 tokens in all"
    ) in below


def test_layers_are_gathered_in_both_passes():
    """Without the root that stays gathered: twice the parameters, in bf16, and their gradients."""
    found = {}
    for layers in (2, 6):
        words = [f"--{TINY[-1]}", f"--{SMALL}.num_layers={layers}"]
        run = plan.read_run([f"--config={TINY[1]}", *words], None, None)
        sharded = plan.plan(run, plan.Strategy("fsdp", (8,)), 8, plan.GPUS["h100"], 0.4)
        found[layers] = sharded.sent_by, sharded.step.parameters
    more = {name: found[6][0][name] - found[2][0][name] for name in found[2][0]}
    size = 4 * (found[6][1] - found[2][1]) * 7 / 8
    assert more["all_gather"] == pytest.approx(size, rel=0.01)  # two passes, two bytes
    assert more["reduce_scatter"] == pytest.approx(size, rel=0.01)


def test_two_nodes_have_hybrid_shards_and_a_largest_micro_batch(monkeypatch, capsys):
    gpu = plan.GPUS["h100"]._replace(memory=64e6)  # some rows of this model
    monkeypatch.setitem(plan.GPUS, "h100", gpu)
    words = ["data.block_size=32", f"{SMALL}.num_layers=2"]
    rows, _ = rows_of(monkeypatch, capsys, *TINY, *words, "--gpus", "16", "--largest")
    assert [*rows] == ["ddp", "hsdp", "fsdp"]
    ddp, hsdp, fsdp = rows.values()
    assert held(hsdp, "weights") == pytest.approx(2 * held(fsdp, "weights"), rel=0.05)
    shard = float(hsdp["reduce_scatter GB/step"]) / 7  # of 8 in a node
    assert float(hsdp["all_reduce GB/step"]) == pytest.approx(shard, rel=0.02)
    assert float(ddp["peak GiB"]) > float(fsdp["peak GiB"])
    most = int(ddp["largest micro-batch"])
    run = plan.read_run(
        [f"--config={TINY[1]}", *(f"--{w}" for w in (TINY[-1], *words))], None, None
    )
    fits = [
        plan.plan(run, plan.Strategy("ddp", ()), 16, gpu, 0.4, rows=count).fits(gpu)
        for count in (most, most + 2)
    ]
    assert fits == [True, False]


def test_shards_are_chosen_where_replicas_do_not_fit(monkeypatch, capsys):
    """The smallest GPU on which a shard fits, and weights, gradients and moments do not."""
    small = plan.GPUS["h100"]._replace(memory=0.0)
    run = plan.read_run([f"--config={TINY[1]}", f"--{TINY[-1]}"], None, None)
    peaks = [plan.plan(run, each, 8, small, 0.4).memory for each in plan.strategies(8)]
    assert peaks[1] < peaks[0]
    between = small._replace(memory=sum(peaks) / 2 / plan.USABLE)
    monkeypatch.setitem(plan.GPUS, "h100", between)
    rows, below = rows_of(monkeypatch, capsys, *TINY, "--gpus", "8")
    assert [row["fits"] for row in rows.values()] == ["no", "yes"]
    assert "Strategy: fsdp, as replicas do not fit" in below


def test_a_table_of_named_configs(monkeypatch, capsys):
    words = ["--table", "--config", "configs/transformer/tiny.yaml"]
    rows, _ = rows_of(monkeypatch, capsys, *words)
    row = rows["transformer/tiny"]
    assert row["strategy"] == "ddp"
    assert float(row["GPU-hours"]) > 0
    for name in plan.PAPERS:
        assert (plan.CONFIGS / f"{name}.yaml").is_file()


@pytest.mark.parametrize("gradient", ["final", "trajectory"])
def test_inner_steps_are_on_a_straight_line(gradient):
    words = ["--config=configs/latent_thought/tiny.yaml", f"--{SMALL}.inner_steps=7"]
    words.append(f"--{SMALL}.slow_gradient={gradient}")
    run = plan.read_run(words, None, None)
    alone = plan.Strategy("one GPU", ())
    assert run.inner_steps == 7 > max(plan.TRACED_STEPS)
    found = plan.traced(run, 2, alone, plan.GPUS["h100"], keeps_gradients=False)
    whole = plan.estimate(run.build, run.batch(2))
    assert found.peak == pytest.approx(whole.peak, rel=0.01)
    assert found.floor == pytest.approx(whole.floor, rel=1e-3)
