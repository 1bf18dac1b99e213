"""A start where other programs keep the cores busy."""

import os
from pathlib import Path

import pytest
import torch

from evaluation.cli import main as evaluate
from lightning_models.runtime import note_busy_cores
from training import main as train

CKPT = Path(__file__).parent / "fixtures" / "transformer.ckpt"
STARTS = {
    "evaluate.py": (evaluate, f"generate --ckpt {CKPT} --prompt a --max_new_tokens 1"),
    "train.py": (train, "fit -c configs/transformer/tiny.yaml --data.tokenizer none"),
}
"""The second ends at its tokenizer, after the note."""


@pytest.fixture
def machine(monkeypatch):
    """A machine of four cores with a load average, and threads of PyTorch."""

    def fake(load, threads):
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        note_busy_cores.cache_clear()

    yield fake
    note_busy_cores.cache_clear()


@pytest.mark.parametrize("program", STARTS)
def test_a_start_on_busy_cores_says_once_what_to_set(program, machine, capsys):
    main, words = STARTS[program]
    machine(4.1, 4)
    notes = []
    for _ in range(2):
        main(words.split())
        notes += [line for line in capsys.readouterr().err.splitlines() if "load average" in line]
    (note,) = notes
    assert "(load average 4.1)" in note
    assert "4 threads" in note
    assert "OMP_NUM_THREADS=1" in note


@pytest.mark.parametrize(("load", "threads"), [(4.0, 4), (40.0, 1)])
def test_free_cores_and_one_thread_need_no_note(load, threads, machine, capsys):
    machine(load, threads)
    note_busy_cores()
    assert capsys.readouterr().err == ""


def test_an_unknown_load_is_no_error(machine, monkeypatch, capsys):
    def unknown():
        raise OSError

    machine(40.0, 4)
    monkeypatch.setattr(os, "getloadavg", unknown)
    note_busy_cores()
    assert capsys.readouterr().err == ""
