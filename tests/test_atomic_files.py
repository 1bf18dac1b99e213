"""Files are the old ones or the new ones, and leave nothing half-written behind."""

import errno
import os

import pytest

from lightning_models.atomic_files import unfinished_path, whole_file, write_whole
from tests.programs import run


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    return path


def test_the_old_file_stays_until_the_new_one_is_whole(old):
    with whole_file(old) as file:
        file.write(b"new")
        assert old.read_text() == "old"
    assert old.read_text() == "new"
    assert list(old.parent.iterdir()) == [old]


def test_an_error_leaves_the_old_file(old):
    def write():
        with whole_file(old) as file:
            file.write(b"half")
            raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        write()
    assert old.read_text() == "old"
    assert list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize("call", ["fsync", "other library"])
def test_a_full_disk_names_the_file(old, monkeypatch, call):
    """Libraries wrap the system's error, or only repeat its number in words."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def library(_):
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    def write():
        with whole_file(old) as file:
            library(file) if call == "other library" else file.write(b"new")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(old))
    assert old.read_text() == "old"
    assert list(old.parent.iterdir()) == [old]


def test_a_folder_that_is_missing_is_named_by_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "a", "")
    assert caught.value.filename == str(tmp_path / "none" / "a")


KILLED = """
import os, signal, sys
from pathlib import Path
from lightning_models.atomic_files import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write(b"half" * 10**6)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_the_old_file_and_its_half_is_removed(old):
    """By the next process that writes alone; another process may be at work on its own half."""
    assert run("-c", KILLED, old).returncode < 0
    assert old.read_text() == "old"
    (half,) = [path for path in old.parent.iterdir() if path != old]
    write_whole(old, "new")
    assert half.exists()
    with whole_file(old, sole=True) as file:
        file.write(b"newer")
    assert old.read_text() == "newer"
    assert list(old.parent.iterdir()) == [old]


def test_two_processes_never_write_the_same_half(old, monkeypatch):
    ours = unfinished_path(old)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert unfinished_path(old) != ours
    assert unfinished_path(old).parent == old.parent  # so that a rename replaces it at once
