"""The command line: quick help, one line for errors, and checkpoints that outlive moved files."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from evaluation.cli import COMMANDS, main
from tests.programs import ROOT, run

LIGHT = "import sys; from evaluation.cli import build_parser; build_parser(['--help']); "


def test_help_imports_nothing_heavy():
    heavy = "('torch', 'lightning', 'transformers', 'lm_eval', 'datamodules')"
    code = f"{LIGHT} print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--output" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "evaluate.py needs a verb"),
        (["--ckpt", "none.ckpt"], "The verbs are perplexity"),
        (["perplexty", "--ckpt", "none.ckpt"], "Did you mean perplexity?"),
        (["ppl"], "python evaluate.py perplexity --ckpt"),
    ],
)
def test_a_command_line_without_a_verb_gets_one(fails, argv, expected):
    assert expected in fails(*argv)


@pytest.mark.parametrize("package", ["evaluation.cli", "training"])
def test_installed_scripts_name_themselves(package, monkeypatch, capsys):
    """Usage and hints of an installed script name no file of the repository."""
    script = {"evaluation.cli": "latent-evaluate", "training": "latent-train"}[package]
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{script}"])
    program = importlib.import_module(package).main
    assert program(["fitt"]) == 2
    hint = capsys.readouterr().err
    assert re.search(rf"(?<!python ){script} (perplexity --ckpt|fit -c) ", hint)
    with pytest.raises(SystemExit):
        program(["list", "--help"] if package == "training" else ["--help"])
    usage = capsys.readouterr().out
    assert usage.split()[:2] == ["usage:", script]
    assert not re.search(r"(?<!/)(train|evaluate)\.py", hint + usage)


def test_debug_shows_the_traceback(monkeypatch):
    command = ["generate", "--ckpt", "none.ckpt", "--prompt", "a"]
    with pytest.raises(ValueError, match="there is no checkpoint"):
        main([*command, "--debug"])
    monkeypatch.setenv("DEBUG", "1")
    with pytest.raises(ValueError, match="there is no checkpoint"):
        main(command)


def test_defects_keep_their_traceback(checkpoint_path, monkeypatch):
    def break_down(*args, **kwargs):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("evaluation.perplexity.measure_perplexity", break_down)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        main(["perplexity", "--ckpt", str(checkpoint_path)])


def test_ctrl_c_ends_with_130(checkpoint_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("evaluation.perplexity.measure_perplexity", interrupt)
    assert main(["perplexity", "--ckpt", str(checkpoint_path)]) == 130


@pytest.fixture
def moved_tree(tmp_path):
    """A copy of the project in which the module files have other names."""
    tree = tmp_path / "moved"
    tree.mkdir()
    for package in ("lightning_models", "datamodules", "evaluation", "training", "callbacks"):
        shutil.copytree(ROOT / package, tree / package)
    shutil.copy(ROOT / "evaluate.py", tree)
    moves = {
        "lightning_models.transformer.module": "lightning_models.transformer.plain_decoder",
        "datamodules.local_corpora": "datamodules.files_of_yours",
    }
    for old, new in moves.items():
        source = tree / (old.replace(".", "/") + ".py")
        source.rename(tree / (new.replace(".", "/") + ".py"))
    for file in tree.rglob("*.py"):
        text = file.read_text()
        for old, new in moves.items():
            text = text.replace(old, new)
        file.write_text(text)
    return tree


def test_a_checkpoint_outlives_moved_files(moved_tree, checkpoint_path, evaluates, tmp_path):
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    command = ("perplexity", "--ckpt", checkpoint_path, "--output")
    evaluates(*command, here)
    done = run("evaluate.py", *command, there, cwd=moved_tree)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(path.read_text()) for path in (here, there))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert (moved_tree / "lightning_models/transformer/plain_decoder.py").is_file()


def test_the_program_ends_with_code_2(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "DEBUG"}
    command = (ROOT / "evaluate.py", "perplexity", "--ckpt", tmp_path / "none.ckpt")
    done = run(*command, env=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: there is no checkpoint at {tmp_path / 'none.ckpt'}\n"
