"""Bytes between processes are counted, and are those that the plan says."""

import sys

import pytest

from benchmarks import scaling
from benchmarks.planned_run import read_run

SMALL = "--model.init_args.config"
WORDS = ["--config=configs/transformer/tiny.yaml", f"{SMALL}.dim=32", f"{SMALL}.num_layers=2"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bytes_are_counted_and_planned(strategy):
    run = read_run(WORDS, None, None)
    found = scaling.measure({"words": WORDS, "strategy": strategy, "rows": 2, "rounds": 1}, 2)
    parameters = sum(p.numel() for p in run.build().network.parameters())
    assert found["seconds"] > 0
    assert found["sent"] == scaling.planned(run, strategy, 2, 2)
    if strategy == "ddp":  # a ring's two rounds of half of the gradient
        assert found["sent"] == 4 * parameters


def test_more_gpus_are_predicted_to_take_less_time_and_more_of_it(monkeypatch, capsys):
    words = ["--set", *(word.removeprefix("--") for word in WORDS[1:])]
    config = ["--config", "configs/transformer/tiny.yaml"]
    gpus = ["--gpus", "8", "16", "--only", "predicted"]
    monkeypatch.setattr(sys, "argv", ["scaling", *config, *words, *gpus])
    scaling.main()
    *_, names, _, strong8, strong16, weak8, weak16 = capsys.readouterr().out.splitlines()
    cells = [
        dict(zip(names.split(" | "), row.split(" | "), strict=True))
        for row in (strong8, strong16, weak8, weak16)
    ]
    assert [row["GPUs"] for row in cells] == ["8", "16"] * 2
    steps = [float(row["step s"]) for row in cells]
    assert steps[1] <= steps[0]
    assert steps[3] >= steps[2]
    assert float(cells[3]["tokens/s"]) > float(cells[2]["tokens/s"])
