"""Finding and writing checkpoint files."""

import errno
import os
import re
import shutil
import warnings

import pytest
import torch
from tokenizer_files import begun, byte_level

from callbacks.checkpoint_io import AtomicCheckpointIO
from lightning_models.checkpoint import CheckpointError, find_checkpoint, read_checkpoint
from tests.training.conftest import checkpoint_folder, load


def save(path, step, time=None, run=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    recipe = {"model": {"class_path": "lightning_models.TransformerLM", "init_args": {}}}
    content = {"state_dict": {"w": torch.zeros(64)}, "global_step": step, "recipe": recipe}
    if run is not None:
        content["run"] = {"id": run, "log_folder": None}
    torch.save(content, path)
    if time is not None:
        os.utime(path, (time, time))
    return path


def cut_off(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_last_is_the_newest_file_below_the_folder(tmp_path):
    save(tmp_path / "a" / "last.ckpt", 90, time=1000)
    newest = save(tmp_path / "b" / "deep" / "last.ckpt", 10, time=2000)
    assert find_checkpoint("last", [tmp_path]).path == newest


def test_within_a_folder_the_highest_step_is_last(tmp_path):
    """Copying a run may turn its files' times around."""
    furthest = save(tmp_path / "last.ckpt", 90, time=1000)
    save(tmp_path / "best.ckpt", 50, time=1001)
    assert find_checkpoint("last", [tmp_path]).path == furthest


def test_two_runs_in_a_folder_are_not_one(tmp_path):
    """The newer run is shorter; its own furthest file is not the one that was written last."""
    save(tmp_path / "last.ckpt", 90, time=1000, run="a")
    furthest = save(tmp_path / "last-v1.ckpt", 20, time=2000, run="b")
    save(tmp_path / "best.ckpt", 10, time=2001, run="b")
    assert find_checkpoint("last", [tmp_path]).path == furthest
    assert read_checkpoint(tmp_path).path == furthest  # as evaluate.py asks


def test_a_run_is_as_new_as_its_newest_whole_file(tmp_path):
    save(tmp_path / "a" / "step=8.ckpt", 8, time=1000, run="a")
    cut_off(save(tmp_path / "a" / "last.ckpt", 9, run="a"))
    newest = save(tmp_path / "b" / "last.ckpt", 4, time=2000, run="b")
    with pytest.warns(UserWarning, match="damaged"):
        assert find_checkpoint("last", [tmp_path]).path == newest


def test_files_without_an_id_are_a_run_of_their_own(tmp_path):
    """Written by an older version; a run of today goes on in their folder."""
    old = save(tmp_path / "best.ckpt", 90, time=1000)
    newest = save(tmp_path / "last.ckpt", 20, time=2000, run="b")
    assert find_checkpoint("last", [tmp_path]).path == newest
    newest.unlink()
    assert find_checkpoint("last", [tmp_path]).path == old


@pytest.mark.parametrize("run", [7, "text", {"id": 7}, {"id": ["x"], "log_folder": 3}])
def test_a_broken_entry_counts_as_none(tmp_path, run):
    path = save(tmp_path / "last.ckpt", 4)
    torch.save({**load(path), "run": run}, path)
    checkpoint = find_checkpoint("last", [tmp_path])
    assert (checkpoint.run_id, checkpoint.log_folder) == (None, None)


def test_a_cut_off_file_is_named_and_skipped(tmp_path):
    whole = save(tmp_path / "step=4.ckpt", 4)
    cut_off(save(tmp_path / "last.ckpt", 6))
    with pytest.warns(UserWarning, match=r"last\.ckpt .*is truncated"):
        assert find_checkpoint("last", [tmp_path]).path == whole


def punch_hole(path):
    """Zeroes bytes in the middle of a tensor, as a copy that was interrupted may have."""
    content = bytearray(path.read_bytes())
    place = content.find(torch.ones(16).numpy().tobytes())
    assert place > 0
    content[place : place + 64] = bytes(64)
    path.write_bytes(content)


def test_a_hole_is_named_and_passed_over(tmp_path):
    whole = save(tmp_path / "step=4.ckpt", 4)
    last = save(tmp_path / "last.ckpt", 6)
    content = torch.load(last, weights_only=True)
    content["state_dict"]["w"] = torch.ones(64)
    torch.save(content, last)
    punch_hole(last)
    assert not torch.load(last, weights_only=True)["state_dict"]["w"].all()  # torch does not see it
    with pytest.raises(CheckpointError, match=r"last\.ckpt is damaged: the checksum of .*data/0"):
        read_checkpoint(last)
    with pytest.warns(UserWarning, match="checksum"):
        assert find_checkpoint("last", [tmp_path]).path == whole


def test_a_folder_of_damaged_files_gives_way_to_an_older_one(tmp_path):
    whole = save(tmp_path / "a" / "last.ckpt", 4, time=1000)
    cut_off(save(tmp_path / "b" / "last.ckpt", 6))
    with pytest.warns(UserWarning, match="damaged"):
        assert find_checkpoint("last", [tmp_path]).path == whole


def test_no_checkpoint_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint under") as error:
        find_checkpoint("last", [tmp_path])
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_other_files_are_not_checkpoints(tmp_path, content):
    path = tmp_path / "x.ckpt"
    if content is None:
        torch.save({"something": 1}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a checkpoint|no recipe"):
        read_checkpoint(path)


def test_last_resumes_the_whole_file_in_the_same_folder(fit, own_run):
    folder = checkpoint_folder(own_run)
    cut_off(folder / "last.ckpt")
    cut_off(folder / "step=6.ckpt")
    with pytest.warns(UserWarning, match="damaged"):
        assert fit(own_run, "--ckpt_path=last", "--trainer.max_steps=8", bare=True) == 0
    assert [path.name for path in (own_run / "TransformerLM").iterdir()] == ["version_0"]
    assert max(load(path)["global_step"] for path in whole(folder)) == 8
    assert (folder.parent / "config_4.yaml").exists()


def whole(folder):
    import zipfile

    return [path for path in folder.glob("*.ckpt") if zipfile.is_zipfile(path)]


def test_best_is_the_best_of_the_newest_run(fit, tmp_path):
    assert fit(tmp_path, "--trainer.max_steps=6", "--trainer.val_check_interval=2") == 0
    (best,) = checkpoint_folder(tmp_path).glob("best-*.ckpt")
    assert find_checkpoint("best", [tmp_path]).path == best
    found = read_checkpoint(tmp_path, "best")  # as evaluate.py asks
    assert (found.path, found.which) == (best, "best")
    moved = tmp_path.with_name("moved")
    shutil.move(tmp_path, moved)
    assert find_checkpoint("best", [moved]).path == checkpoint_folder(moved) / best.name


@pytest.mark.parametrize("states", [None, {"a": 3}, {"a": {"best_model_path": 3}}])
def test_best_without_a_best_says_what_is_needed(tmp_path, states):
    path = save(tmp_path / "last.ckpt", 4)
    torch.save({**load(path), "callbacks": states}, path)
    with pytest.raises(CheckpointError, match="save_top_k"):
        find_checkpoint("best", [tmp_path])


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch, wrapped):
    path = save(tmp_path / "last.ckpt", 4)

    def fails(content, file):
        file.write(b"half")
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            if wrapped:  # as torch does
                raise RuntimeError("PytorchStreamWriter failed writing file") from None
            raise

    monkeypatch.setattr(torch, "save", fails)
    expected = r"cannot write .*last\.ckpt \(No space left on device\); the previous one is intact"
    with pytest.raises(CheckpointError, match=expected):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, path)
    monkeypatch.undo()
    assert read_checkpoint(path).step == 4
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_defect_while_writing_stays_a_defect(tmp_path, monkeypatch):
    path = save(tmp_path / "last.ckpt", 4)

    def fails(content, file):
        raise RuntimeError("a defect")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(RuntimeError, match="a defect"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, path)
    monkeypatch.undo()
    assert read_checkpoint(path).step == 4


def test_what_a_killed_writer_left_is_removed(tmp_path):
    left = tmp_path / ".last.ckpt.123.partial"
    other = tmp_path / ".best.ckpt.123.partial"
    left.write_bytes(b"half")
    other.write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "last.ckpt"]


def test_the_command_line_writes_atomically(fit, tmp_path, monkeypatch):
    written = []
    original = AtomicCheckpointIO.save_checkpoint

    def note(self, checkpoint, path, storage_options=None):
        written.append(str(path))
        original(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", note)
    assert fit(tmp_path, "--trainer.max_steps=2") == 0
    assert written == [str(checkpoint_folder(tmp_path) / "last.ckpt")]


@pytest.mark.parametrize("case", ["whole", "torn", "copied", "torn copy"])
def test_a_resumed_run_has_one_last(fit, own_run, tmp_path, case):
    """Resumed twice; also in a copied folder, and where a copy was cut off."""
    root = own_run
    if "cop" in case:
        root = tmp_path / "copy"
        shutil.copytree(own_run, root)
    folder = checkpoint_folder(root)
    if "torn" in case:
        (folder / "last.ckpt").write_bytes((folder / "last.ckpt").read_bytes()[:3000])
        for step in (4, 6):  # what is left was written before the first last.ckpt
            (folder / f"step={step}.ckpt").unlink()
    for steps in (8, 10):
        arguments = ("--ckpt_path=last", f"--trainer.max_steps={steps}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the damaged one
            assert fit(root, *arguments, bare=True) == 0
        assert load(folder / "last.ckpt")["global_step"] == steps
    assert [path.name for path in folder.glob("last*")] == ["last.ckpt"]


def test_an_older_checkpoint_does_not_go_on_with_other_special_tokens(
    fit, model_arguments, text_file, tmp_path, capsys
):
    """Texts began with no BOS and ended with ``</s>``; the folder now says otherwise."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    begun(byte_level("<s>", "</s>", "<|stop|>"), "<s>").save(str(folder / "tokenizer.json"))
    before = folder / "special_tokens.json"  # what versions without such a file did
    before.write_text('{"bos": null, "eos": ["</s>"]}')
    data = ["--data=datamodules.LocalText", "--data.block_size=32", "--data.batch_size=4"]
    data += [f"--data.data_files={text_file}", f"--data.tokenizer={folder}/tokenizer.json"]
    data += [f"--data.cache_dir={tmp_path}/cache"]
    root = tmp_path / "runs"
    assert fit(root, *data, *model_arguments, "--trainer.max_steps=4", bare=True) == 0
    path = checkpoint_folder(root) / "last.ckpt"
    whole = load(path)
    assert "special" not in whole["LocalText"]["tokenizer"]
    before.unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 257]}')

    resumed = ("--ckpt_path=last", "--trainer.max_steps=6")
    capsys.readouterr()
    assert fit(root, *resumed, bare=True) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"error: tokenizer='{folder}/tokenizer.json' has BOS '<s>' (256), EOS ")
    assert "'<|stop|>' (258), '</s>' (257), but the checkpoint was trained with no BOS, EOS" in line
    (cure,) = re.findall(r"--data\.tokenizer \S+ --on_conflict typed", line)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The checkpoint was trained on the data")
        assert fit(root, *resumed, *cure.split(), bare=True) == 0
    after = load(path)
    assert after["global_step"] == 6
    assert after["LocalText"]["fingerprint"] == whole["LocalText"]["fingerprint"]
