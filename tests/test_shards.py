"""Checkpoints in parts, as one process reads them: whole, lazily, and never others' files.

Several processes write and read them in test_distributed.py and reliability/test_kill.py.
"""

import hashlib
import json
import os
import shutil
import socket

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from callbacks.checkpoint_io import AtomicCheckpointIO
from lightning_models.checkpoint import (
    CheckpointError,
    finding,
    newest_checkpoint,
    read_checkpoint,
    read_whole,
    shards,
    write_file,
    write_model_folder,
)
from tests.programs import ROOT, Program

WEIGHT, MOMENT = torch.arange(15.0).view(5, 3), torch.arange(5.0)
TENSORS = {("state_dict", "w"): WEIGHT, ("optimizer_states", 0, "state", 0, "exp_avg"): MOMENT}
FOLDER = "last.ckpt.shards-0"


@pytest.fixture
def parts(tmp_path):
    """A checkpoint whose rows two processes have written; returns its file."""
    content = {
        "recipe": {"model": {"class_path": "lightning_models.TransformerLM", "init_args": {}}},
        "global_step": 3,
        "state_dict": {"buffer": torch.ones(2)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}],
        shards.KEY: {"folder": FOLDER, "tensors": shards.describe(TENSORS)},
    }
    (tmp_path / FOLDER).mkdir()
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        own = {shards.name_of(place): x[rows].clone() for place, x in TENSORS.items()}
        offsets = {
            name: {SAVED_OFFSETS_KEY: [rows.start, *[0] * (part.dim() - 1)]}
            for name, part in own.items()
        }
        file = tmp_path / FOLDER / f"rank{rank}.safetensors"
        save_file(own, file, metadata={CUSTOM_METADATA_KEY: json.dumps(offsets)})
    AtomicCheckpointIO().save_checkpoint(content, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def rewrite(path, **changes):
    """Changes what the file says about its parts."""
    content = torch.load(path, weights_only=True)
    content[shards.KEY] |= changes
    torch.save(content, path)


def test_weights_are_read_when_they_are_asked_for(parts):
    weights = read_checkpoint(parts).content["state_dict"]
    assert list(weights) == ["buffer", "w"]
    assert torch.equal(weights["w"], WEIGHT)


def test_everything_is_put_back(parts):
    for content in (read_whole(parts), AtomicCheckpointIO().load_checkpoint(parts)):
        assert torch.equal(content["state_dict"]["w"], WEIGHT)
        assert content["optimizer_states"][0]["state"][0].keys() == {"step", "exp_avg"}
        assert torch.equal(content["optimizer_states"][0]["state"][0]["exp_avg"], MOMENT)


@pytest.mark.parametrize("damage", ["rank missing", "rank twice", "file cut off", "folder missing"])
def test_damaged_parts_are_skipped(parts, damage):
    file = parts.parent / FOLDER / "rank0.safetensors"
    if damage == "rank missing":
        file.unlink()
    elif damage == "rank twice":  # as many numbers as there should be
        rows = {shards.name_of(place): x[2:5].clone() for place, x in TENSORS.items()}
        offsets = {n: {SAVED_OFFSETS_KEY: [2, *[0] * (x.dim() - 1)]} for n, x in rows.items()}
        for other in (file, file.with_name("rank1.safetensors")):
            save_file(rows, other, metadata={CUSTOM_METADATA_KEY: json.dumps(offsets)})
        rewrite(
            parts,
            tensors=shards.describe({p: torch.empty(6, *x.shape[1:]) for p, x in TENSORS.items()}),
        )
    elif damage == "file cut off":
        file.write_bytes(file.read_bytes()[:-4])
    else:
        file.parent.rename(parts.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=FOLDER):
        read_checkpoint(parts)
    with pytest.warns(UserWarning, match=FOLDER), pytest.raises(CheckpointError, match="complete"):
        newest_checkpoint([parts.parent])


def test_a_file_that_a_run_removes_meanwhile_is_passed_over(parts, tmp_path, monkeypatch):
    """A run that goes on removes older checkpoints between their opening and their reading."""
    folder = tmp_path / "run"
    folder.mkdir()
    content = {**torch.load(parts, weights_only=True)}
    del content[shards.KEY]
    for step in (1, 2):
        write_file(folder / f"step={step}.ckpt", {**content, "global_step": step})
    opened = finding.open_checkpoint

    def open_and_remove(path):
        checkpoint = opened(path)
        if checkpoint.step == 2:
            path.unlink()
        return checkpoint

    monkeypatch.setattr(finding, "open_checkpoint", open_and_remove)
    with pytest.warns(UserWarning, match=r"step=2\.ckpt"):
        assert newest_checkpoint([folder]).step == 1


def test_a_model_folder_is_read_also_where_files_may_run_code(parts, tmp_path):
    recipe = torch.load(parts, weights_only=True)["recipe"]
    content = {"state_dict": {"w": WEIGHT}, "recipe": recipe, "global_step": 3}
    (tmp_path / "model").mkdir()
    write_model_folder(tmp_path / "model", content)
    for weights_only in (True, False):
        loaded = AtomicCheckpointIO().load_checkpoint(tmp_path / "model", None, weights_only)
        assert torch.equal(loaded["state_dict"]["w"], WEIGHT)


@pytest.fixture
def with_sums(parts):
    """The same checkpoint with the digests of its parts."""
    files = (parts.parent / FOLDER).iterdir()
    rewrite(parts, sums={f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files})
    return parts


READERS = {
    "evaluation": lambda path: dict(read_checkpoint(path).content["state_dict"]),
    "resume": AtomicCheckpointIO().load_checkpoint,
    "export": read_whole,
}


@pytest.mark.parametrize("reader", READERS)
def test_each_bit_of_the_parts_is_verified(with_sums, reader):
    READERS[reader](with_sums)
    for file in sorted((with_sums.parent / FOLDER).iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), 7):
            changed = bytearray(whole)
            changed[place] ^= 1 << place % 8
            file.write_bytes(changed)
            with pytest.raises(ValueError, match=FOLDER):
                READERS[reader](with_sums)
        file.write_bytes(whole)
    READERS[reader](with_sums)


@pytest.mark.parametrize("kept", [[], ["rank0.safetensors"]], ids=["none", "one of two"])
@pytest.mark.parametrize("reader", READERS)
def test_a_record_that_lacks_parts_is_refused(with_sums, reader, kept):
    sums = torch.load(with_sums, weights_only=True)[shards.KEY]["sums"]
    rewrite(with_sums, sums={name: sums[name] for name in kept})
    with pytest.raises(ValueError, match=FOLDER):
        READERS[reader](with_sums)


@pytest.mark.parametrize("reader", READERS)
def test_parts_of_another_checkpoint_are_refused(with_sums, reader):
    folder = with_sums.parent / FOLDER
    shutil.copy(folder / "rank0.safetensors", folder / "rank2.safetensors")
    with pytest.raises(ValueError, match=FOLDER):
        READERS[reader](with_sums)


RANK_OF_TWO = """
import sys
import torch.distributed as dist
from callbacks.checkpoint_io import AtomicCheckpointIO
from lightning_models.checkpoint import CheckpointError, shards

dist.init_process_group("gloo")
read, digest = [], shards.digest
shards.digest = lambda path: (read.append(path.name), digest(path))[1]
try:
    weight = AtomicCheckpointIO().load_checkpoint(sys.argv[1])["state_dict"]["w"].sum().item()
except CheckpointError as error:
    weight = f"{error} {error.agreed}"
print(*read, weight, sep="|")
"""


def on_two_ranks(path):
    """Returns the parts that each rank has read against their digests, and what it then has."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    place |= {"PYTHONPATH": str(ROOT)}
    ranks = [
        Program("-c", RANK_OF_TWO, path, env={**os.environ, **place, "RANK": str(rank)})
        for rank in range(2)
    ]
    return [rank.communicate(60)[0].strip().split("|") for rank in ranks]


def test_ranks_that_load_whole_tensors_verify_a_share_each(with_sums):
    """As in a resume with DDP; each learns what the others have found."""
    own = "rank0.safetensors", "rank1.safetensors"
    assert on_two_ranks(with_sums) == [[name, str(WEIGHT.sum().item())] for name in own]
    damaged = with_sums.parent / FOLDER / own[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    first, second = on_two_ranks(with_sums)
    assert (first[0], second[0]) == own
    assert first[1] == second[1]
    assert str(damaged) in first[1]
    assert first[1].endswith("True")


@pytest.mark.parametrize(
    "changes",
    [
        {"folder": f"../{FOLDER}"},
        {"folder": "."},
        {"tensors": {"x": {"place": ["state_dict", "x"], "shape": [-1], "dtype": "float32"}}},
        {"tensors": {"x": {"place": ["state_dict", "x"], "shape": [1], "dtype": "load"}}},
        {"tensors": {"x": {"place": ["state_dict", "x"], "shape": [1], "dtype": "float32"}}},
        {"tensors": {"x": {"place": ["state_dict"]}}},
        {"tensors": [1]},
        {"sums": [1]},
    ],
)
def test_what_the_file_says_is_not_trusted(parts, changes):
    rewrite(parts, **changes)
    with pytest.raises(CheckpointError, match="last.ckpt"):
        read_checkpoint(parts)


def test_a_place_that_there_is_not(parts):
    content = torch.load(parts, weights_only=True)
    entry = next(iter(content[shards.KEY]["tensors"].values()))
    entry["place"] = ["recipe", 7, "w"]
    torch.save(content, parts)
    with pytest.raises(CheckpointError, match="where none fits"):
        read_whole(parts)


def test_replaced_and_removed_with_their_parts(parts):
    writer, folder = AtomicCheckpointIO(), parts.parent / FOLDER
    writer.save_checkpoint({**torch.load(parts, weights_only=True), "global_step": 4}, parts)
    assert folder.is_dir()
    writer.save_checkpoint({"state_dict": {}}, parts)
    assert not folder.exists()
    folder.mkdir()
    writer.remove_checkpoint(parts)
    assert not folder.exists()
    assert not parts.exists()
