"""Tokens per second, FLOPs and peak rates."""

from types import SimpleNamespace

import pytest
import torch

import callbacks.throughput
from callbacks import SaveCheckpoints, Throughput
from callbacks.throughput import (
    context_length,
    known_rate,
    real_tokens,
)
from lightning_models import TransformerLM
from tests.callbacks.conftest import Recorder

SECONDS = {"step": 2.0, "validation": 100.0, "checkpoint": 50.0}


class Clocked(TransformerLM):
    """Takes exactly as long as ``SECONDS`` says, on a clock of its own."""

    now = 0.0

    def training_step(self, batch, batch_idx):
        Clocked.now += SECONDS["step"]
        batch["mask"][:, -2:] = False  # two padding tokens a row
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        Clocked.now += SECONDS["validation"]
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        Clocked.now += SECONDS["checkpoint"]
        super().on_save_checkpoint(checkpoint)


@pytest.fixture
def clocked(make_model, make_data, make_trainer, monkeypatch):
    """Logged rows of a run of six steps with validations and checkpoints in between."""
    clock = SimpleNamespace(perf_counter=lambda: Clocked.now)
    monkeypatch.setattr(callbacks.throughput, "time", clock)
    throughput, recorder = Throughput(peak_tflops=1e-6), Recorder()
    trainer = make_trainer(
        throughput,
        recorder,
        SaveCheckpoints(every_n_train_steps=2),
        max_steps=6,
        val_check_interval=3,
        enable_checkpointing=True,
    )
    model = make_model(Clocked)
    trainer.fit(model, make_data(batch_size=4, block_size=32))
    return throughput, recorder.rows, model


def test_only_training_time_and_real_tokens_count(clocked):
    throughput, rows, _ = clocked
    rates = [row["throughput/tokens_per_second"] for row in rows[1:]]
    assert rates == pytest.approx([4 * (32 - 2) / SECONDS["step"]] * 5)
    assert throughput.tokens_per_second == pytest.approx(rates[-1])


def test_all_tokens_count_as_seen(clocked):
    assert [row["train/tokens"] for row in clocked[1]] == [4 * 30 * step for step in range(1, 7)]


def test_a_resumed_run_goes_on_counting_tokens(make_model, make_data, make_trainer, tmp_path):
    """Also from between two log lines, where tokens are not added up yet."""
    path, recorder = tmp_path / "two.ckpt", Recorder()
    options = {"log_every_n_steps": 3, "accumulate_grad_batches": 2}
    trainer = make_trainer(Throughput(1.0), max_steps=2, **options)
    trainer.fit(make_model(), make_data(batch_size=4, block_size=32))
    trainer.save_checkpoint(path)
    trainer = make_trainer(Throughput(1.0), recorder, max_steps=6, **options)
    trainer.fit(make_model(), make_data(batch_size=4, block_size=32), ckpt_path=path)
    seen = [row["train/tokens"] for row in recorder.rows if "train/tokens" in row]
    assert (seen[0], seen[-1]) == (3 * 2 * 4 * 32, 6 * 2 * 4 * 32)


def test_where_former_processes_did_not_count_nothing_is_said(
    make_model, make_data, make_trainer, tmp_path
):
    path, recorder = tmp_path / "two.ckpt", Recorder()
    trainer = make_trainer(max_steps=2)
    trainer.fit(make_model(), make_data())
    trainer.save_checkpoint(path)
    trainer = make_trainer(Throughput(1.0), recorder, max_steps=4, enable_checkpointing=True)
    trainer.fit(make_model(), make_data(), ckpt_path=path)
    assert len(recorder.rows) == 2
    assert not any("train/tokens" in row for row in recorder.rows)
    trainer.save_checkpoint(path)
    assert "train/tokens" not in torch.load(path, weights_only=True)


def test_another_fit_of_a_trainer_counts_on(make_model, make_data, make_trainer):
    recorder, model = Recorder(), make_model()
    trainer = make_trainer(Throughput(1.0), recorder, max_steps=2)
    for steps in (2, 4):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(model, make_data(batch_size=4, block_size=32))
    assert recorder.rows[-1]["train/tokens"] == 4 * 4 * 32


def test_the_first_step_is_a_warm_up(clocked):
    assert "throughput/tokens_per_second" not in clocked[1][0]


def test_mfu_is_flops_over_peak(clocked):
    _, rows, model = clocked
    flops = model.flops_per_token(32, training=True)
    assert rows[-1]["throughput/flops_per_token"] == pytest.approx(flops)
    rate = rows[-1]["throughput/tokens_per_second"]
    assert rows[-1]["throughput/mfu"] == pytest.approx(rate * flops / 1e6)


def test_windows_follow_log_every_n_steps(make_model, make_data, make_trainer):
    recorder = Recorder()
    trainer = make_trainer(Throughput(1.0), recorder, max_steps=6, log_every_n_steps=3)
    trainer.fit(make_model(), make_data())
    seen = ["throughput/mfu" in row for row in recorder.rows]
    assert seen == [False, False, True, True, True, True]
    assert recorder.rows[2] != recorder.rows[5]


def test_accumulated_batches_are_counted_together(make_model, make_data, make_trainer, monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: Clocked.now)
    monkeypatch.setattr(callbacks.throughput, "time", clock)
    recorder = Recorder()
    trainer = make_trainer(Throughput(1.0), recorder, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(make_model(Clocked), make_data(batch_size=4, block_size=32))
    assert recorder.rows[-1]["throughput/tokens_per_second"] == pytest.approx(4 * 30 / 2.0)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A4000", None),
        ("Some other device", None),
    ],
)
def test_peak_rates_are_known_by_name(name, teraflops):
    assert known_rate(name) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_tokens_of_any_batch_layout():
    tokens = torch.zeros(2, 3, 4, dtype=torch.int64)
    assert real_tokens({"tokens": tokens, "lengths": torch.tensor([[4, 1, 0], [2, 0, 0]])}) == 7
    assert real_tokens({"tokens": tokens}) == 24
    assert context_length({"tokens": tokens}) == 12
    reasoning = {
        "query": tokens[:, 0],
        "query_lengths": torch.tensor([4, 2]),
        "steps": tokens,
        "step_lengths": torch.tensor([[2, 3, 0], [1, 0, 0]]),
        "targets": torch.tensor([[5, 6], [7, -100]]),
    }
    assert real_tokens(reasoning) == 6 + 6 + 3
    assert context_length(reasoning) == 4 + 5 + 2


def test_a_cpu_has_neither_a_peak_rate_nor_gpu_memory(make_model, make_data, make_trainer):
    recorder = Recorder()
    make_trainer(Throughput(), recorder, max_steps=2).fit(make_model(), make_data())
    logged = {name for name in recorder.rows[-1] if name.startswith("throughput/")}
    assert logged == {"throughput/tokens_per_second", "throughput/flops_per_token"}
