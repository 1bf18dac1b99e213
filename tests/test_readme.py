"""Every command of the README and of the pages that continue it works, shortened, in a folder."""

import ast
import inspect
import json
import random
import re
import shlex
import sys
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import torch
from task_data import write_folder
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from datamodules.tokenizers import train_bpe
from evaluation.api import LoadedModel
from evaluation.cli import COMMANDS as VERBS
from evaluation.cli import main as evaluate
from lightning_models import LanguageModel, load
from tests.programs import ROOT
from training import LatentCLI
from training import main as train

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
PAGES = ("training", "evaluation", "studies")
TEXT = "\n".join([README, *((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)])
SHELL = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.S)).replace("\\\n", " ")
COMMAND = re.compile(
    r"^(?:DATA=tasks )?python ((?:train|evaluate)\.py (?!list).*?) *(?:  #.*)?$", re.M
)
COMMANDS = list(dict.fromkeys(COMMAND.findall(SHELL)))
SHORT = [
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=2",
    "--trainer.num_sanity_val_steps=0",
    "--samples.max_new_tokens=4",
]
FEW = ["--data.train_examples=200", "--data.val_examples=8", "--data.test_examples=8"]
RUNS = {
    "runs/demo/transformer": ["-c", "configs/transformer/tiny.yaml"],
    "runs/demo/thoughtbubbles": ["-c", "configs/thoughtbubbles/tiny.yaml"],
    "runs/parity/one": ["-c", "configs/thinking_states/tiny_parity.yaml", *FEW],
}
"""Runs that commands read."""
ADDED = {
    "reason": ["--data.test_examples", "4", "--rounds", "null"],
    "sweep": ["--limit_batches", "1"],
    "compare": ["--limit_batches", "1"],
    "tasks": ["--output", "tasks.json"],
}
SAYS = {
    "compare": "nats per token",
    "generate": "The function",
    "quality": "entropy",
    "reason": "accuracy",
    "reversal": "margin",
    "scaling": "exponent",
    "tasks": "lambada_local",
    "think": "nats per token",
}
"""Words of what verbs print."""


pytestmark = pytest.mark.usefixtures("little_documentation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with the configs and all that commands name, but for runs."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    for name in ("books", "pages", "runs"):
        (folder / name).mkdir()
    names, rows = sorted(sys.stdlib_module_names), []
    for seed in range(4):
        text = " ".join(random.Random(seed).choices(names, k=3000))
        (folder / "books" / f"{seed}.txt").write_text(text)
        rows += [{"text": text[first : first + 500]} for first in range(0, len(text), 500)]
    (folder / "pages" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "book.txt").write_text("\n\n".join(map(repr, range(20_000))))
    (folder / "prompts.txt").write_text("A list is\nThe function\n")
    problem = {"question": "Tim has 2 + 3 pears. How many?", "answer": "<<2+3=5>>5\n#### 5"}
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(f"{json.dumps(problem)}\n" * 200)
    write_folder(folder / "tasks")
    for name, factor in (("plain", 1.0), ("gestalt", 0.9)):  # as ``evaluate.py perplexity`` writes
        for tokens in (1000, 8000):
            result = {"nats_per_token": factor * 9 / tokens**0.1, "parameters": 5, "tokens": 9}
            result |= {"train_tokens": tokens, "model": name, "likelihood": "exact", "data": {}}
            (folder / "runs" / f"{name}_{tokens}.json").write_text(json.dumps(result))
    return folder


def save_gpt2(path):
    """A model of ``transformers`` with a tokenizer that knows a few names."""
    bpe = train_bpe("bpe:288", ["The son of James is John. The father of Mark is Paul."])
    inner = tokenizers.Tokenizer.from_str(bpe.json_text)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(path)
    sizes = {"vocab_size": 288, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(path)


def train_runs(named):
    for run, options in RUNS.items():
        if any(fnmatch(run, word) for word in named) and not Path(run).exists():
            assert train(["fit", *options, *SHORT, "--trainer.default_root_dir", run]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DATA", str(folder / "tasks"))
    program, verb, *words = shlex.split(command)
    if verb == "fit":
        check_fit(command, words, capsys)
        return
    if "FOLDER_OR_HUB_NAME" in words and not Path("FOLDER_OR_HUB_NAME").exists():
        save_gpt2("FOLDER_OR_HUB_NAME")
    train_runs(words)
    words += ADDED.get(verb, [])
    capsys.readouterr()
    assert {"train.py": train, "evaluate.py": evaluate}[program]([verb, *words]) == 0
    assert SAYS.get(verb, "") in capsys.readouterr().out
    assert verb in SAYS or "--output" in words or "--predictions.output" in words
    for option, name in pairwise(words):
        if option in ("--output", "--plot", "--predictions.output"):
            page = {"export": "model.safetensors", "compare": "report.html"}.get(verb, "")
            assert (Path(name) / page).stat().st_size > 0
    if verb == "predict":
        assert len(Path(words[-1]).read_text().splitlines()) == 2


def check_fit(command, words, capsys):
    if "--help" in words or "--print_config=comments" in words:
        with pytest.raises(SystemExit) as stop:
            train(["fit", *words])
        assert stop.value.code == 0
        assert "ckpt_path" in capsys.readouterr().out
    elif "configs/trainer/" in command:
        cli = LatentCLI([*words, "--trainer.accelerator=cpu", "--trainer.devices=1"], run=False)
        assert cli.trainer.precision == "bf16-mixed"
        assert cli.model.config.num_layers >= 16
    else:
        small = ["--data.tokenizer=bytes"] if "gsm8k" in command else []
        assert train(["fit", *words, *SHORT, *small, *(FEW if "parity" in command else [])]) == 0


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/api/index.md"])
def test_the_python_of_a_page(page, folder, monkeypatch, capsys):
    (block,) = BLOCK.findall((ROOT / page).read_text())
    monkeypatch.chdir(folder)
    train_runs(["runs/demo/thoughtbubbles"])
    (folder / "thoughts.html").unlink(missing_ok=True)
    capsys.readouterr()
    exec(compile(block, page, "exec"), {})
    assert "noncausal" in capsys.readouterr().out
    assert (folder / "thoughts.html").stat().st_size > 0


EXAMPLES = {
    f"{owner.__qualname__} {number}": inspect.cleandoc(block)
    for owner in (LanguageModel, LoadedModel, *vars(LoadedModel).values())
    for number, block in enumerate(BLOCK.findall(inspect.getdoc(owner) or ""))
}
"""Python in docstrings of the main classes, which the reference shows."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_python_of_a_docstring(name, folder, monkeypatch):
    """Expressions have values that are not empty, and the trainer takes its steps."""
    monkeypatch.chdir(folder)
    train_runs(["runs/demo/thoughtbubbles"])
    names = {"lm": load("runs/demo/thoughtbubbles"), "torch": torch}
    values = []
    for line in ast.parse(EXAMPLES[name]).body:
        if isinstance(line, ast.Expr):
            values.append(eval(compile(ast.Expression(line.value), name, "eval"), names))
        else:
            exec(compile(ast.Module([line], []), name, "exec"), names)
    if "trainer" in names:  # of the user's own batches
        assert names["trainer"].global_step == 8
    else:
        assert values
        assert all(value is not None and len(str(value)) > 0 for value in values)


def test_the_main_api_has_examples():
    owners = {name.split(" ")[0].removeprefix("LoadedModel.") for name in EXAMPLES}
    assert owners >= {"LanguageModel", "generate", "score", "__call__"}


def test_verbs_pictures_and_paths_of_the_readme_are_there():
    assert [v for v in VERBS if not re.search(rf"`{v}`|evaluate\.py {v}\b", TEXT)] == []
    linked = re.findall(r"\]\((?!http)([^)#]+)", README)
    shown = re.findall(r"`((?:configs|docs|lightning_models|tests)/[\w./]*)`", TEXT)
    assert len(linked) > 20
    assert sorted(name for name in {*shown, *linked} if not (ROOT / name).exists()) == []
