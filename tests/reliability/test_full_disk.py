"""A disk that runs full: the previous checkpoint stays whole, and the message says so."""

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from callbacks.checkpoint_io import AtomicCheckpointIO
from datamodules import StateTracking
from datamodules.prepare import prepare_store
from datamodules.store import Store, StoreError
from datamodules.tokenizers import BytesTokenizer
from evaluation.cli import main as evaluate_main
from lightning_models.checkpoint import CheckpointError, read_checkpoint
from tests.programs import run
from training import main as train_main

RECIPE = {"model": {"class_path": "lightning_models.TransformerLM", "init_args": {}}}
FULL = r"cannot write the checkpoint .*last\.ckpt \({}\); the previous one is intact\. Make room"


def content(step, megabytes):
    state = {"w": torch.zeros(megabytes * 2**18)}
    return {"state_dict": state, "global_step": step, "recipe": RECIPE}


@pytest.fixture
def limited_files():
    """No file of this process may grow beyond 2 MB: the system refuses the write, as when full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("limited_files")
def test_a_refused_write_leaves_the_previous_one(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(1, 1), path)
    with pytest.raises(CheckpointError, match=FULL.format("File too large")):
        AtomicCheckpointIO().save_checkpoint(content(2, 3), path)
    assert read_checkpoint(path).step == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB, where this machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a size-limited file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_file_system_leaves_the_previous_one(small_disk):
    path = small_disk / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(1, 1), path)
    with pytest.raises(CheckpointError, match=FULL.format("No space left on device")):
        AtomicCheckpointIO().save_checkpoint(content(2, 3), path)
    assert read_checkpoint(path).step == 1
    assert os.listdir(small_disk) == ["last.ckpt"]


def prepare(folder, size):
    """Tokenises `size` bytes of text, in documents of 1000, into shards of a megabyte."""
    prepare_store(
        folder,
        description={},
        documents=lambda first: (
            ("train", f"{i:03d}" + "x" * 997) for i in range(first, size // 1000)
        ),
        make_tokenizer=BytesTokenizer,
    )
    return Store(folder)


NO_ROOM = r"cannot be written \({}\)\. Free some space, or name a cache_dir on another disk"


@pytest.mark.usefixtures("limited_files")
def test_a_refused_write_leaves_no_store(tmp_path):
    with pytest.raises(StoreError, match="s.partial " + NO_ROOM.format("File too large")):
        prepare(tmp_path / "s", 3_000_000)
    assert os.listdir(tmp_path) == [".s.lock"]


@pytest.mark.usefixtures("limited_files")
def test_a_refused_write_leaves_no_store_of_examples(tmp_path):
    data = StateTracking(train_examples=20_000, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(StoreError, match=NO_ROOM.format("File too large")):
        data.prepare_data()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_full_file_system_keeps_finished_shards(small_disk, monkeypatch):
    monkeypatch.setattr("datamodules.encoding.PART_BYTES", 500_000)
    with pytest.raises(StoreError, match=NO_ROOM.format("No space left on device")):
        prepare(small_disk / "s", 4_000_000)
    assert not (small_disk / "s").exists()
    (partial,) = small_disk.glob("s.partial")
    before = partial / "train-00000.tokens"
    stamp = before.stat().st_mtime_ns
    mount = ["mount", "-o", "remount,size=20m", str(small_disk)]
    subprocess.run(mount, check=True)
    assert prepare(small_disk / "s", 4_000_000).counts("train").documents == 4000
    assert (small_disk / "s" / "train-00000.tokens").stat().st_mtime_ns == stamp


PROGRAM = """
import resource, sys
from training import main
real = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), real))
sys.exit(main(sys.argv[2:]))
"""


def test_tokenising_ends_with_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 99_000 + "\n\n" + "y" * 999)
    data = ("--data=datamodules.LocalText", f"--data.data_files={tmp_path}/a.txt")
    cache = f"--data.cache_dir={tmp_path}/cache"
    root = f"--trainer.default_root_dir={tmp_path}/runs"
    options = (*data, "--data.separator=\n\n", "--data.val_fraction=0", "--data.test_fraction=0")
    done = run("-c", PROGRAM, 90000, "fit", *options, cache, root)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path}/cache/" in line
    assert "File too large). Free some space, or name a cache_dir on another disk" in line
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """A folder with a finished run, prompts, a model of transformers and a result."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("trained")
    sizes = ("dim=16", "num_layers=1", "num_heads=2")
    done = train_main(
        [
            *("fit", "--data=datamodules.LocalText", f"--data.data_files={text_file}"),
            *("--data.block_size=32", "--data.batch_size=4", f"--data.cache_dir={folder}/cache"),
            *(f"--model.config.{size}" for size in sizes),
            *("--trainer.accelerator=cpu", "--trainer.max_steps=1", "--name=run"),
            *("--trainer.limit_val_batches=0", f"--trainer.default_root_dir={folder}"),
        ]
    )
    assert done == 0
    shape = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 257}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(folder / "gpt2")
    (folder / "prompts.txt").write_text("The fork\n" * 99)
    rows = [{"nats_per_token": 2.0 + 1 / n, "train_tokens": n, "data": "d"} for n in (1, 2, 3, 4)]
    for n, row in enumerate(rows):
        (folder / f"{n}.json").write_text(json.dumps(row))
    return folder


SCORE = ("--limit_batches=1", "--device=cpu")
WRITERS = {
    "perplexity": ("result.json", "perplexity", "--ckpt=run", *SCORE),
    "generate": ("texts.jsonl", "generate", "--ckpt=run", "--prompt=Forks", "--max_new_tokens=9"),
    "sweep": ("sweep.svg", "sweep", "--ckpts=run", *SCORE),
    "compare": ("report", "compare", "run", *SCORE),
    "import": ("new.ckpt", "import", "--hf=gpt2", "--tokenizer=bytes"),
    "export for transformers": ("exported", "export", "--ckpt=run"),
    "export of a folder": ("exported", "export", "--ckpt=run", "--format=folder"),
    "export of a file": ("whole.ckpt", "export", "--ckpt=run"),
}


@pytest.fixture
def tiny_files(monkeypatch):
    """No file of this process may grow beyond 50 bytes; Python would cut off what it compiles."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", WRITERS)
def test_no_writer_leaves_half(case, trained, tmp_path, monkeypatch, capsys, tiny_files):
    shutil.copytree(trained, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    target, *argv = WRITERS[case]
    if "." in target:
        (tmp_path / "place" / target).write_text("old")
    before = contents(tmp_path / "place")
    tiny_files()
    assert evaluate_main([*argv, f"--output={target}"]) == 2
    errors = capsys.readouterr().err
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert target.partition(".")[0] in line
    assert "File too large" in line
    assert "Traceback" not in errors
    assert contents(tmp_path / "place") == before


def test_predictions_end_with_one_line(trained, tmp_path):
    (tmp_path / "predicted.jsonl").write_text("old")
    argv = ("predict", f"--ckpt_path={trained}/run", f"--data.predict_file={trained}/prompts.txt")
    output = f"--predictions.output={tmp_path}/predicted.jsonl"
    done = run("-c", PROGRAM, 9000, *argv, "--trainer.accelerator=cpu", output)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path}/predicted.jsonl cannot be written (File too large)" in line
    assert contents(tmp_path) == {tmp_path / "predicted.jsonl": b"old"}


@pytest.mark.slow
def test_a_run_ends_with_one_line_and_can_go_on(text_file, tmp_path):
    """Four steps, then four more in which no checkpoint can be written, then again with room."""
    from tests.reliability.runs import Run, differences, finished

    schedule = (
        "--trainer.max_steps=8",
        "--checkpoint.every_n_train_steps=2",
        "--model.optimizer.schedule=constant",
    )
    whole = Run(text_file, tmp_path / "whole", *schedule)
    broken = Run(text_file, tmp_path / "broken", *schedule)
    finished(whole.start())
    finished(broken.start("--trainer.max_steps=4"))
    before = broken.last.read_bytes()
    program = ("-c", PROGRAM, len(before) // 2, *broken.command[1:], "--ckpt_path=last")
    done = run(*program, env=broken.environment)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "the previous one is intact" in line
    assert "Traceback" not in done.stderr
    assert broken.last.read_bytes() == before
    finished(broken.resume())
    assert differences(broken, whole, 8) == []
