"""Lines of `make bench-gpu`: parsers understand them, and pages keep all but their section."""

import argparse
import importlib
import json
import re

import pytest

from benchmarks import gpu, throughput
from tests.programs import ROOT, ends

LINES = [pytest.param(line, id=f"{line.page}-{n}") for n, line in enumerate(gpu.LINES)]


class Parsed(Exception):
    pass


def parsed(module, words, monkeypatch):
    """The options that a benchmark takes from these words."""
    parse, found = argparse.ArgumentParser.parse_args, []

    def stop(self, *_):
        found.append(parse(self, words))
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed):
        importlib.import_module(module).main()
    return found[0]


@pytest.mark.parametrize("tiny", [False, True], ids=["full", "tiny"])
@pytest.mark.parametrize("line", LINES)
def test_the_parser_of_its_module_understands_a_line(line, tiny, monkeypatch):
    device = "cpu" if tiny else "cuda"
    _, module, *words = line.command(device, tiny=tiny)
    options = parsed(module, words, monkeypatch)
    assert options.device == device
    assert not (tiny and getattr(options, "compile", False))
    for word in (*words, *line.rest.split()):
        assert not word.endswith(".yaml") or (ROOT / word).is_file(), word


@pytest.mark.parametrize("line", [line for line in LINES if line.values[0].rest])
def test_train_py_understands_what_follows(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, module, *words = line.command("cpu")
    program = throughput.program(parsed(module, words, monkeypatch))
    assert program.trainer.precision == "bf16-mixed"


def test_every_page_that_names_a_gpu_has_a_section_and_lines():
    pages = {line.page for line in gpu.LINES}
    for path in gpu.PAGES.glob("*.md"):
        text = path.read_text()
        outside = gpu.MARKS.sub("", text)
        assert len(gpu.MARKS.findall(text)) == (path.stem in pages), path.name
        assert not re.search(r"not measured", outside.replace("counted, not measured", "")) or (
            path.stem == "corpora"
        ), path.name


def test_all_lines_end_in_the_time_that_there_is():
    assert sum(line.minutes for line in gpu.LINES) <= gpu.build_parser().get_default("minutes")


def test_results_go_to_their_pages_and_failures_keep_their_command(monkeypatch, tmp_path, capsys):
    def ended(command, seconds):
        assert 0 < seconds <= 180
        file = command[command.index("--output") + 1]
        rows = {"tables": {"steps": [{"MFU": 0.5}]}, "place": "some GPU"}
        with open(file, "w") as out:
            json.dump(rows, out)
        return int("benchmarks.decoding" in command)

    monkeypatch.setattr(gpu, "exit_code", ended)
    for page in ("foundation", "latent_thought"):
        text = f"before\n\n{gpu.BEGIN}\nold\n{gpu.END}\n\nafter\n"
        (tmp_path / f"{page}.md").write_text(text)
    argv = ["--device", "cpu", "--folder", str(tmp_path), "--only"]
    assert gpu.main([*argv, "latent_thought"]) == 0
    assert gpu.main([*argv, "foundation"]) == 1
    assert "foundation, decoding: exit code 1" in capsys.readouterr().err
    text = (tmp_path / "foundation.md").read_text()
    assert text.startswith(f"before\n\n{gpu.BEGIN}\n")
    assert text.endswith(f"{gpu.END}\n\nafter\n")
    assert "| MFU |\n|--:|\n| 0.5 |" in text
    assert "Not measured (exit code 1): `python -m benchmarks.decoding" in text
    assert "old" not in text


def test_a_line_that_takes_too_long_is_ended_with_what_it_has_started(tmp_path):
    file = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {file}.new; mv {file}.new {file}; wait"]
    seconds = 0.2
    while not file.exists():  # on a busy machine the shell itself may take that long
        assert gpu.exit_code(command, seconds) is None
        seconds *= 2
    assert ends(file.read_text().strip())
    assert gpu.exit_code(["sh", "-c", "exit 3"], 60) == 3
    assert gpu.run_line(gpu.LINES[0], "cpu", tiny=True, left=0.0) == "no time was left"
