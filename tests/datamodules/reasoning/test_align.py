"""The command that places steps, by rule or by a teacher."""

import pytest

from datamodules.reasoning import align
from datamodules.reasoning.align import main
from datamodules.reasoning.gsm8k import MarkedProblems
from tests.datamodules.reasoning.endpoint_server import PROBLEMS, rows


@pytest.fixture
def train_file(tmp_path):
    path = tmp_path / "train.txt"
    lines = (f"{p.question}||{' '.join(p.equations)} #### {p.answer}\n" for p in PROBLEMS)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_the_command_asks_and_goes_on(server, train_file, tmp_path, capsys):
    output = tmp_path / "aligned.jsonl"
    argv = ["teacher", f"--files={train_file}", f"--output={output}", "--model=m"]
    argv += [f"--url={server.url}"]
    assert main([*argv, "--limit=3"]) == 0
    assert capsys.readouterr().out == "kept  3\n"
    assert main(argv) == 0
    assert capsys.readouterr().out.split() == ["already", "done", "3", "kept", "5"]
    assert len(rows(output)) == 8


def test_the_command_places_by_rule(train_file, tmp_path, capsys):
    output = tmp_path / "rule.jsonl"
    assert main(["rule", f"--files={train_file}", f"--output={output}", "--at=clause"]) == 0
    assert MarkedProblems(output).find(PROBLEMS[5]) == (PROBLEMS[5].question.index(".") + 1,)
    printed = dict(line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {name.strip(): int(n) for name, n in printed.items()}["problems"] == 8


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["rule", "--files=none.txt"], "none.txt: no such file"),
        (["rule", "--limit=0"], "limit=0 must be at least 1"),
        (["rule", "--at=word"], "at"),
        (["teacher", "--files=a.txt"], "required"),
        (["teacher", "--output=a", "--url=x", "--model=m"], "url='x' must be a base URL"),
        (["other"], "other"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["rule", "teacher"])
@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("no/a", "output (no/a): the folder no does not exist; create it first"),
        ("here", "output (here) is a folder; name a file in it"),
        ("/proc/a", "output (/proc/a): the folder /proc is not writable"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_the_work(
    command, output, expected, capsys, tmp_path, monkeypatch
):
    def work(settings):
        raise AssertionError

    monkeypatch.setattr(align, "_problems", work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    endpoint = ["--url=http://localhost", "--model=m", "--key_variable=null"]
    assert main([command, f"--output={output}", *(endpoint if command == "teacher" else [])]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
