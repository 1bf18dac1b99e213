"""What is shown, on a terminal and elsewhere."""

import re
import sys

import lightning as L
import pytest

from callbacks import Progress, SaveCheckpoints, Throughput


@pytest.fixture
def shown(make_model, make_data, make_trainer, capsys):
    """Runs a few steps and returns what stood on standard output."""

    def run(**options):
        options = {"max_steps": 6, "val_check_interval": 3, **options}
        callbacks = (Throughput(1.0), Progress())
        make_trainer(*callbacks, enable_progress_bar=True, **options).fit(make_model(), make_data())
        return capsys.readouterr().out

    return run


def test_lines_where_there_is_no_terminal(shown):
    lines = shown(log_every_n_steps=2).splitlines()
    steps = [line for line in lines if re.match(r"step \d+/6: ", line)]
    assert [line.split(":")[0] for line in steps] == ["step 2/6", "step 4/6", "step 6/6"]
    assert re.search(r"train/loss \d\.\d+, tok/s [\d,]+, left 0:00:00", steps[-1])
    validations = [line for line in lines if re.match(r"step \d: val/loss ", line)]
    assert [line[:7] for line in validations] == ["step 3:", "step 6:"]
    assert all("val/ppl" in line and "val/bpb" in line for line in validations)


def test_a_bar_of_all_steps_on_a_terminal(shown, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output = shown(accumulate_grad_batches=2)
    last = output.split("\r")[-1]
    assert "Training: 100%" in last
    assert "6/6" in last
    assert "left=0:00:00" in last
    assert "v_num" not in output
    assert "step 6: val/loss" in output


def test_nothing_is_shown_when_switched_off(make_model, make_data, make_trainer, capsys):
    trainer = make_trainer(Progress(refresh_rate=0), enable_progress_bar=True, max_steps=3)
    trainer.fit(make_model(), make_data())
    assert "step" not in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True])
def test_the_end_names_the_checkpoint_and_what_to_do(
    make_model, make_data, make_trainer, tmp_path, monkeypatch, capsys, terminal
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    writer = SaveCheckpoints(dirpath=str(tmp_path / "a run"))
    options = {"enable_progress_bar": True, "enable_checkpointing": True, "max_steps": 2}
    make_trainer(Progress(), writer, **options).fit(make_model(), make_data())
    line = capsys.readouterr().out.splitlines()[-1]
    name = "'a run/last.ckpt'"
    assert line == f"checkpoint: {name} (python evaluate.py perplexity --ckpt {name})"


def test_the_end_names_no_checkpoint_where_there_is_none(shown):
    assert "checkpoint" not in shown()


def test_the_end_of_another_kind_names_no_checkpoint(
    make_model, make_data, make_trainer, tmp_path, capsys
):
    class Fails(L.Callback):
        def on_train_end(self, *_):
            raise RuntimeError

    writer = SaveCheckpoints(dirpath=str(tmp_path), every_n_train_steps=1)
    options = {"enable_progress_bar": True, "enable_checkpointing": True, "max_steps": 2}
    with pytest.raises(RuntimeError):
        make_trainer(Progress(), Fails(), writer, **options).fit(make_model(), make_data())
    assert (tmp_path / "last.ckpt").is_file()
    assert "checkpoint:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("max_steps", "max_time", "expected"),
    [
        (1_000_000, "00:00:10:00", (1, 600)),
        (-1, "00:00:10:00", (1, 600)),
        (6, "10:00:00:00", (0, 1)),
    ],
)
def test_time_left_is_the_sooner_end(
    make_model, make_data, make_trainer, max_steps, max_time, expected
):
    progress = Progress()
    trainer = make_trainer(
        progress,
        Stop(5),
        enable_progress_bar=True,
        max_steps=max_steps,
        max_epochs=-1,
        max_time=max_time,
    )
    trainer.fit(make_model(), make_data())
    low, high = expected
    assert low <= progress.seconds_left(trainer) <= high


class Stop(L.Callback):
    """Ends the run after a few batches."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx + 1 >= self.batches
