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


def test_half_an_hour_has_tests_speed_and_memory_of_every_method():
    """What compiles may take longer than it computes, and has the time for it."""
    compiles = [bool({"--compile", "compile"} & {*line.arguments.split()}) for line in gpu.LINES]
    assert compiles == sorted(compiles)
    assert all(line.minutes >= 7 for line, last in zip(gpu.LINES, compiles, strict=True) if last)
    first = [line for line, last in zip(gpu.LINES, compiles, strict=True) if not last]
    assert gpu.TEST_MINUTES + sum(line.minutes for line in first) <= 30
    fast = ["--no_memory" in line.arguments for line in first if line.module == "throughput"]
    assert fast == sorted(fast, reverse=True), "memory comes after speed"
    configs = {word for line in first for word in line.arguments.split() if "/" in word}
    for line in gpu.LINES:
        named = any(f"configs/{line.page}/" in word for word in configs)
        assert named or line.page in ("throughput", "foundation", "thinking_states"), line.page
    assert any(line.module == "thinking" for line in first)


def test_a_line_is_kept_as_soon_as_it_is_measured(monkeypatch, tmp_path):
    pages = {}
    for name in {line.page for line in gpu.LINES}:
        text = (gpu.PAGES / f"{name}.md").read_text()
        pages[name] = tmp_path / f"{name}.md"
        pages[name].write_text(text)
    ran = []

    def measure(line, *_, **__):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(line)
        return {"tables": {"speed": [{"MFU": len(ran) / 4}]}, "place": "some GPU"}

    monkeypatch.setattr(gpu, "run_line", measure)
    argv = ["--device", "cpu", "--folder", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        gpu.main(argv)
    text = pages["throughput"].read_text()
    assert "| 0.25 |" in text
    assert "| 0.5 |" in text
    monkeypatch.setattr(gpu, "run_line", lambda *_, **__: "ended after 1.0 minutes")
    assert gpu.main(argv) == 1
    text = pages["throughput"].read_text()
    assert "| 0.25 |" in text, "what was measured before stays"
    assert text.count("Not measured (ended after 1.0 minutes)") == 3


@pytest.mark.parametrize(("code", "outcome"), [(0, 0), (1, 1), (None, 1)])
def test_the_tests_come_first_and_decide_the_exit_code(code, outcome, monkeypatch, tmp_path):
    (tmp_path / "ponderlm.md").write_text((gpu.PAGES / "ponderlm.md").read_text())
    asked = []

    def ended(command, _):
        asked.append("pytest" in command)
        return code

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu, "exit_code", ended)
    monkeypatch.setattr(gpu, "run_line", lambda *_, **__: {"tables": {}, "place": "some GPU"})
    assert gpu.main(["--folder", str(tmp_path), "--only", "ponderlm"]) == outcome
    assert asked == [True]


def test_results_go_to_their_pages_and_failures_keep_their_command(monkeypatch, tmp_path, capsys):
    def ended(command, seconds):
        assert 0 < seconds <= 60 * max(line.minutes for line in gpu.LINES)
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
