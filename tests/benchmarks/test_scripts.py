"""Benchmarks run at small sizes, and lines that need a GPU are understood."""

import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import data, harness, memory, step, throughput
from datamodules import local_corpora
from tests.programs import ROOT, run
from training import LatentCLI

SMALL = "--config dim=32 num_layers=4 num_heads=2 --rounds 1 --rows 2 --length 32 --vocab 64"
SMALL += " --prompt 8 --new 4 --steps 4 --thoughts 16 --what train score decode"
LINES = [line for line in (ROOT / "benchmarks/gpu.txt").read_text().splitlines() if line[0] != "#"]
SCRIPTS = {"step": step, "throughput": throughput}


def rows_of(words):
    return list(step.rows(step.build_parser().parse_args(words.split())))


@pytest.mark.parametrize(
    ("model", "against"),
    [
        ("TransformerLM", "transformers"),
        (
            "ThoughtbubblesLM --model_config fork_layers=[0] init_std=2e-2",
            "TransformerLM --equal_flops",
        ),
        ("ThoughtGestaltLM --model_config sentence_layer=1", "GistLM"),
        (  # Fig. 6 of Thinking States is a loop over this
            "ThinkingStatesLM --model_config chunk_size=8",
            "CoconutLM --against_config c_thought=1 max_latent_stage=4 first_stage=5",
        ),
    ],
)
def test_methods_are_timed_against_each_other(model, against):
    rows = rows_of(f"--model {model} --against {against} {SMALL}")
    assert [row["step"] for row in rows] == ["train", "score", "decode"]
    for row in rows:
        assert row["ratio"] > 0
        assert row["tokens/s"] > 0
    if "equal_flops" in against or against == "transformers":
        assert rows[0]["FLOPs/token ratio"] == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize(("layers", "expected"), [(1, 1), (5, 5)])
def test_a_rival_of_equal_flops_is_as_deep(layers, expected):
    options = step.build_parser().parse_args([])
    model = step.outline("TransformerLM", [f"num_layers={layers}", "dim=16"], options)
    assert step.equal_layers(step.flops(model, 24), model, 24) == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--model NoLM --against CoTLM", "NoLM"),
        ("--model CoTLM --against CoTLM --config depth=3", "depth"),
        ("--model CoTLM --against CoTLM --config dim", "config (dim)"),
        ("--model CoTLM --against NoCoTLM --length 32 --steps 5", "steps (5)"),
    ],
)
def test_wrong_options_are_named(words, named):
    with pytest.raises(ValueError) as caught:
        rows_of(f"{words} --rounds 1 --vocab 64")
    assert named in str(caught.value)


def test_a_config_is_measured_with_options_of_fit(text_file, data_cache):
    parser = throughput.build_parser()
    options = parser.parse_args(["-c", str(ROOT / "configs/latent_thought/tiny.yaml")])
    options.others = ["--data=datamodules.LocalText", f"--data.data_files={text_file}"]
    options.others += ["--data.tokenizer=bytes", f"--data.cache_dir={data_cache}"]
    options.others += ["--model.config.dim=32", "--data.batch_size=2", "--data.block_size=32"]
    options.rounds = 2
    (row,) = throughput.rows(options)
    assert row["MFU"] is None  # a CPU has no peak in the table
    assert 0 < row["waits for data"] < 1
    assert row["GFLOP/s"] == pytest.approx(row["tokens/s"] * row["MFLOP/token"] / 1e3)


def test_preparation_and_loading_are_measured(monkeypatch):
    """On the topics of ``help()`` alone; processes are forked, with their libraries loaded."""
    monkeypatch.setattr(local_corpora, "module_documents", lambda min_length: ())
    forked = SimpleNamespace(PIPE=None, run=lambda words, **_: run(*words[1:]))
    monkeypatch.setattr(harness, "subprocess", forked)
    options = data.build_parser().parse_args(
        ["--megabytes", "0.3", "--rounds", "1", "--tokenizers", "bytes"]
    )
    (row,) = data.rows(options)
    assert row["MB"] == pytest.approx(0.3, rel=0.2)
    assert all(value > 0 for value in row.values() if isinstance(value, float))


@pytest.mark.slow
def test_predicted_memory_is_that_of_the_process():
    config = str(memory.CONFIGS / "transformer/tiny.yaml")
    (row,) = memory.rows(memory.build_parser().parse_args(["--config", config]))
    assert row["weights MB"] >= 200
    assert row["predicted / measured"] == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("line", LINES)
def test_a_line_for_a_gpu_is_understood(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    script, *words = shlex.split(line)
    options, rest = SCRIPTS[script].build_parser().parse_known_args([*words, "--device", "cuda"])
    if script == "step":
        assert not rest
        step.outline(options.model, [*options.config, *options.model_config], options)
    else:
        configs = [f"--config={path}" for path in options.config]
        here = ["--trainer.accelerator=cpu", "--trainer.strategy=auto", "--trainer.devices=1"]
        cli = LatentCLI([*configs, *rest, *here], run=False)
        assert cli.trainer.precision == "bf16-mixed"


def test_every_method_has_speed_before_memory_before_compilation():
    stages = [("--peak" in line) + 2 * ("--compile" in line) for line in LINES]
    assert stages == sorted(stages)
    first = " ".join(line for line, stage in zip(LINES, stages, strict=True) if not stage)
    for method in ("thoughtbubbles/", "thought_gestalt/", "ponderlm/", "latent_thought/"):
        assert f"configs/{method}" in first
    assert "ThinkingStatesLM" in first


def test_the_loop_keeps_each_line_in_one_file(tmp_path):
    lines, out = tmp_path / "lines.txt", tmp_path / "out" / "bench.md"
    lines.write_text(
        "# comment\nno_benchmark --rounds 1\n"
        f"step --model CoTLM --against NoCoTLM {SMALL.replace(' score decode', '')}\n"
    )
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(
        f'#!/bin/sh\n[ "$2" = pytest ] || exec {sys.executable} "$@"\n'
    )
    (venv / "bin" / "python").chmod(0o755)
    (venv / ".installed").touch()
    words = ["make", "-o", str(venv / ".installed"), "bench-gpu", f"VENV={venv}", "DEVICE=cpu"]
    words += [f"BENCH={out}", f"BENCH_LINES={lines}"]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=300)
    text = out.read_text()
    assert "Not measured: `no_benchmark --rounds 1`" in text
    assert "| train |" in text
    assert text.index("Not measured") < text.index("| train |")
