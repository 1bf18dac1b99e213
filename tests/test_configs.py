"""Every YAML parses, builds at its own size on the meta device, and trains two steps when tiny."""

import re
from pathlib import Path

import pytest
import torch

from training import LatentCLI, main

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(
    path
    for room in (
        "transformer",
        "thoughtbubbles",
        "thought_gestalt",
        "latent_thought",
        "ponderlm",
        "thinking_states",
    )
    for path in (ROOT / "configs" / room).iterdir()
)
TINY = [
    "--model.config.num_layers=1",
    "--model.config.dim=16",
    "--model.config.num_heads=2",
    "--model.config.ffn_dim=32",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_steps=2",
    "--trainer.accumulate_grad_batches=1",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=2",
    "--trainer.num_sanity_val_steps=0",
    "--samples.max_new_tokens=4",
]

OF_MODEL = {
    "ThinkingStatesLM": [
        "--model.config.input_layer=0",
        "--model.config.output_layer=1",
        "--model.config.max_thought_tokens=2",
    ],
    "ThoughtbubblesLM": ["--model.config.fork_layers=[0]"],
    "ThoughtGestaltLM": ["--model.config.sentence_layer=1"],
}
"""What one layer needs beside TINY."""

WINDOWS = ["--data.block_size=16", "--data.batch_size=2"]
QUESTIONS = [
    "--data.tokenizer=bytes",
    "--data.block_size=400",
    "--data.batch_size=2",
]
OF_DATA = {
    "PythonDocs": ["--data.tokenizer=bytes", *WINDOWS],
    "SentenceWindows": ["--data.corpus.tokenizer=bytes", *WINDOWS],
    "Sentences": ["--data.corpus.tokenizer=bytes", "--data.batch_size=2"],
    "StateTracking": [
        "--data.operations=[1,2]",
        "--data.test_operations=[3]",
        *(f"--data.{split}_examples=4" for split in ("train", "val", "test")),
        *QUESTIONS,
    ],
    "ReasoningGSM8K": ["--data.val_fraction=0.2", "--data.test_fraction=0.2", *QUESTIONS],
    "TwoHop": [
        *(f"--data.{kind}=6" for kind in ("works", "people", "companies", "cities", "countries")),
        *QUESTIONS,
    ],
}
"""Small data of each kind."""


def ids(path):
    return f"{path.parent.name}-{path.stem}"


def stated_parameters(path):
    """The number in the file's heading, in millions, and whether it leaves embeddings out."""
    heading = " ".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    found = re.search(r"([\d.]+) M (non-embedding )?parameters", heading)
    assert found, f"{path.name} does not say how many parameters it has"
    return found[1], bool(found[2])


@pytest.mark.parametrize("path", CONFIGS, ids=ids)
def test_its_own_size_has_the_stated_parameters(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cpu = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
    model = LatentCLI([f"--config={path}", *cpu], run=False).model
    with torch.device("meta"):
        model.configure_model()
    stated, without_embeddings = stated_parameters(path)
    count = sum(parameter.numel() for parameter in model.network.parameters())
    if without_embeddings:
        embeddings = (model.network.embedding, model.network.position)
        count -= sum(table.weight.numel() for table in embeddings)
    decimals = len(stated.partition(".")[2])
    assert round(count / 1e6, decimals) == float(stated)
    assert model.config.vocab_size > 0
    assert model.flops_per_token(model.config.block_size) > 2 * count * 0.5


def commands():
    """What the headings of configs and the pages of the methods tell people to train."""
    texts = [(path, path.read_text()) for path in CONFIGS]
    texts += [(path, path.read_text()) for path in sorted((ROOT / "docs").glob("*.md"))]
    for path, text in texts:
        lines = re.findall(r"^(?:#   )?python train\.py fit ([^#\n]+)", text, re.MULTILINE)
        for number, line in enumerate(lines):
            yield pytest.param(line, id=f"{path.parent.name}-{path.stem}-{number}")


@pytest.mark.parametrize("command", list(commands()))
def test_the_commands_that_texts_name_are_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = command.replace(" DATA", " configs/data/openwebtext.yaml").split()
    one_cpu = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]
    program = LatentCLI([*words, *one_cpu], run=False)
    if " DATA" in command:
        assert type(program.datamodule).__name__ == "OpenWebText"


@pytest.mark.parametrize("path", CONFIGS, ids=ids)
def test_it_trains_two_steps_when_tiny(path, data_cache, tmp_path):
    text = path.read_text()
    model, data = (
        re.search(rf"class_path: {package}\.(\w+)", text)[1]
        for package in ("lightning_models", "datamodules")
    )
    cache = "data.corpus.cache_dir" if "corpus:" in text else "data.cache_dir"
    folders = [f"--trainer.default_root_dir={tmp_path}", f"--{cache}={data_cache}"]
    small = [*TINY, *OF_MODEL.get(model, []), *OF_DATA[data]]
    if "backbone: Qwen" in text:  # null is understood in files only
        random = tmp_path / "random.yaml"
        random.write_text("model: {init_args: {config: {backbone: null}}}\n")
        small.insert(0, f"--config={random}")
    if data == "ReasoningGSM8K":
        problems = tmp_path / "problems.txt"
        problems.write_text("Anna has 2 + 3 pears. How many?||<<2+3=5>> #### 5\n" * 12)
        small.append(f"--data.data_files={problems}")
    assert main(["fit", f"--config={path}", *small, *folders]) == 0
    (last,) = tmp_path.rglob("last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 2
