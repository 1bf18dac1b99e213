"""The first look at the command line."""

import pytest

from training.arguments import look


def test_the_last_value_counts(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("ckpt_path: a.ckpt\ntrainer: {default_root_dir: here}\n")
    given = look(["fit", "-c", str(path), "--ckpt_path", "b.ckpt"])
    assert (given.subcommand, given.ckpt_path) == ("fit", "b.ckpt")
    assert [str(folder) for folder in given.folders] == ["here"]
    assert look(["fit", "--ckpt_path=b.ckpt", f"--config={path}"]).ckpt_path == "a.ckpt"


def test_a_config_in_front_of_the_verb_counts(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("fit: {ckpt_path: a.ckpt}\ntest: {ckpt_path: b.ckpt}\n")
    assert look([f"--config={path}", "fit"]).ckpt_path == "a.ckpt"
    assert look(["-c", str(path), "test"]).ckpt_path == "b.ckpt"


def test_references_are_resolved(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("trainer: {default_root_dir: here}\nckpt_path: ${trainer.default_root_dir}/x\n")
    assert look(["fit", f"-c={path}"]).ckpt_path == "here/x"


@pytest.mark.parametrize("argv", [["--ckpt_path=null"], ["--ckpt_path", "null"], [], ["--config"]])
def test_no_checkpoint_is_none(argv):
    assert look(["fit", *argv]).ckpt_path is None


def test_references_to_nothing_are_left_to_the_parser(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("ckpt_path: ${nowhere}")
    assert look(["fit", f"--config={path}", "--config=text"]).ckpt_path is None


@pytest.mark.parametrize("argv", [["--loggers+=csv"], ["--loggers+", "csv"], ["--loggers=csv"]])
def test_what_is_added_is_given_too(argv):
    assert look(["fit", *argv]).values["loggers"] == "csv"


def test_checkpoints_may_have_a_folder_of_their_own():
    given = look(["fit", "--checkpoint.dirpath=there"])
    assert [str(folder) for folder in given.folders] == ["runs", "there"]


@pytest.mark.parametrize("length", [10, 300, 5000])
def test_a_config_may_be_given_in_place(length):
    """Also where it is longer than the name of a file may be."""
    text = f"{{ckpt_path: a.ckpt, trainer: {{default_root_dir: {'x' * length}}}}}"
    assert look(["fit", "-c", text]).ckpt_path == "a.ckpt"
