"""The command line of studies."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import studies.__main__ as command_line
from studies.processes import CommandError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pretend(study, commands, results, monkeypatch, tmp_path):
    """Runs the command line on the pretended study; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "find_study", lambda name, operations: study)
    monkeypatch.setattr(command_line, "collect", lambda study, folder: results())
    real = command_line.run_study
    monkeypatch.setattr(
        command_line, "run_study", lambda *args, **kw: real(*args, **{**kw, "execute": commands})
    )

    def run(*words, output="report.md"):
        named = [f"--output={output}"] if output else []
        return command_line.main(["pretended", *named, *words])

    return run


def test_a_study_runs_and_reports(pretend, commands, tmp_path, capsys):
    assert pretend("--seeds=0", "--only=plain", "--steps=7") == 0
    assert commands.kinds == ["fit plain-seed0", "perplexity plain-seed0"]
    assert "--steps 7 --seeds 0" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "runs/studies/pretended/python_docs-7-steps/plain-seed0").is_dir()
    assert "1 runs of 224 tokens (7 steps of 32)" in capsys.readouterr().out


def test_own_text_is_found_from_any_folder(pretend, commands, tmp_path):
    (tmp_path / "a.txt").touch()
    assert pretend("--text", "*.txt", "--text_name=novels", "--only=plain") == 0
    (config,) = tmp_path.rglob("plain-seed0/config.yaml")
    assert f"- {tmp_path}/*.txt" in config.read_text()
    assert "novels" in (tmp_path / "report.md").read_text()


def test_the_report_of_a_trial_does_not_replace_that_of_the_study(pretend, tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    published = tmp_path / "docs" / "results" / "pretended.md"
    published.parent.mkdir(parents=True)
    assert pretend("--steps=7", output=None) == 0
    assert (tmp_path / "runs/studies/pretended/python_docs-7-steps/report.md").is_file()
    assert not published.exists()
    assert pretend(output=None) == 0
    assert published.is_file()


def test_a_failed_command_ends_with_1(pretend, commands, tmp_path, capsys):
    (tmp_path / "log").write_text("the last line\n")
    commands.failing = {"copy-seed0": CommandError(["train.py"], 3, tmp_path / "log")}
    assert pretend() == 1
    errors = capsys.readouterr().err
    assert "ended with code 3" in errors
    assert "| the last line" in errors
    assert not (tmp_path / "report.md").exists()


def test_the_report_of_a_variant_names_it_and_replaces_nothing(pretend, monkeypatch, tmp_path):
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    declared = command_line.find_study

    def variant(name, operations):
        return replace(declared(name, None), typed=f"--operations {operations}")

    monkeypatch.setattr(command_line, "find_study", variant)
    assert pretend("--operations=20", output=None) == 0
    report = tmp_path / "runs/studies/pretended/python_docs-2-steps/report.md"
    assert "studies pretended --operations 20 --steps 2" in report.read_text()
    assert not list((tmp_path / "docs" / "results").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "no/*.txt"], r"text \(no/\*\.txt\): there is no such file"),
        (["--only", "nothing"], r"only \(nothing\): the runs are"),
        (["--steps", "0"], r"steps \(0\)"),
        (["--epochs", "2"], "this study counts steps; use --steps"),
        (["--output", "missing/a.md"], "does not exist; create it"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(pretend, commands, capsys, words, message):
    assert pretend(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{message}", line)
    assert commands.seen == []


def test_interrupting_ends_with_130(pretend, commands, capsys):
    commands.failing = {"plain-seed0": KeyboardInterrupt()}
    assert pretend() == 130
    assert "go on from here" in capsys.readouterr().err


def test_make_passes_options_on_and_quotes_patterns():
    typed = [
        "METHOD=thoughtbubbles",
        "TEXT=a/*.txt b.txt",
        "TEXT_NAME=some novels",
        "OPERATIONS=20",
    ]
    listed = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "--dry-run",
            "--always-make",
            "study",
            f"VENV={sys.prefix}",
            *typed,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MAKEFLAGS": ""},
    ).stdout
    assert listed.splitlines()[-1].endswith(
        "-m studies thoughtbubbles "
        "--text 'a/*.txt' 'b.txt' --text_name 'some novels' --operations 20"
    )
