"""Every command of the README and of the pages that continue it works, shortened, in a folder."""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from task_data import write_folder

import lightning_models
from datamodules.tokenizers import train_bpe
from evaluation.cli import COMMANDS
from evaluation.cli import main as evaluate
from training import LatentCLI
from training import main as train

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = ("training", "evaluation", "studies")
TEXT = "\n".join([README, *((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)])
WORDS = sorted(sys.stdlib_module_names)
SHORT = [
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=2",
    "--trainer.num_sanity_val_steps=0",
    "--samples.max_new_tokens=4",
]
SAYS = {
    "compare": "nats per token",
    "reversal": "margin",
    "scaling": "exponent",
    "quality": "entropy",
    "reason": "accuracy",
}
PARITY = ["fit", "-c", "configs/thinking_states/tiny_parity.yaml"]
FEW = ["--data.train_examples=200", "--data.val_examples=8", "--data.test_examples=8"]
ON_CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]


def commands():
    """The commands in the shell blocks, each once, comments cut off, continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    shown = [line.partition("   #")[0].strip() for line in lines if line.strip()]
    return list(dict.fromkeys(shown))


def split(command):
    words = shlex.split(command.partition(" # ")[0])
    return words[2:] if words[0] == "python" else words


@pytest.fixture(scope="module")
def folder(tmp_path_factory, data_cache):
    """A working folder with the configs, a book, prompts, weights, and a trained demo model."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    data_cache.mkdir(exist_ok=True)
    (folder / "data_cache").symlink_to(data_cache)
    (folder / "books").mkdir()
    for number in range(4):
        words = random.Random(number).choices(WORDS, k=3000)
        (folder / "books" / f"{number}.txt").write_text(" ".join(words))
    (folder / "book.txt").write_text("\n\n".join(map(repr, range(20_000))))
    (folder / "prompts.txt").write_text("A list is\nThe function\n")
    problem = {"question": "Tim has 2 + 3 pears. How many?", "answer": "<<2+3=5>>5\n#### 5"}
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(f"{json.dumps(problem)}\n" * 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        demo = ["fit", "-c", "configs/transformer/tiny.yaml", *SHORT]
        assert train([*demo, "--trainer.default_root_dir", "runs/demo/transformer"]) == 0
    return folder


def named(program):
    return [command for command in commands() if command.startswith(f"python {program}")]


def test_the_readme_names_the_commands():
    assert len(named("train.py fit")) >= 8
    assert len(named("evaluate.py")) >= 10
    shown = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.S))
    for command in ("make demo", "make test", "train.py fit", "evaluate.py compare"):
        assert command in shown


def test_the_readme_is_read():
    assert len(README.split()) <= 1300
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(pictures) >= 2
    assert all((ROOT / name).stat().st_size < 150_000 for name in pictures)


@pytest.mark.parametrize("command", named("train.py fit"))
def test_training_commands(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = split(command)
    if "--help" in words or "--print_config=comments" in words:
        with pytest.raises(SystemExit) as stop:
            train(words)
        assert stop.value.code == 0
        assert "ckpt_path" in capsys.readouterr().out
    elif "configs/trainer/" in command:
        cli = LatentCLI([*words[1:], *ON_CPU], run=False)
        assert cli.trainer.precision == "bf16-mixed"
        assert cli.model.config.num_layers >= 16
    else:
        few = FEW if "parity" in command else []
        small = ["--data.tokenizer=bytes"] if "gsm8k" in command else few
        assert train([*words, *SHORT, *small]) == 0


@pytest.mark.parametrize("command", named("train.py predict") + named("evaluate.py"))
def test_evaluation_commands(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = split(command)
    entries = 288 if words[0] == "reversal" else 257
    words = [save_gpt2(folder, entries) if word == "FOLDER_OR_HUB_NAME" else word for word in words]
    if words[0] == "import":
        words += ["--tokenizer", "bytes"]
    if words[0] == "scaling":
        save_results(folder)
    if words[0] == "reason":
        words += ["--data.test_examples", "4", "--rounds", "null"]
        where = ["--trainer.default_root_dir", "runs/parity/one"]
        assert (folder / "runs/parity").exists() or train([*PARITY, *SHORT, *FEW, *where]) == 0
    if "runs/demo/thoughtbubbles" in words:
        train_thoughtbubbles(folder)
    if words[0] in ("sweep", "compare"):
        words += ["--limit_batches", "1"]
    run = train if words[0] == "predict" else evaluate
    assert run(words) == 0
    if "--output" in words:
        written = folder / words[words.index("--output") + 1]
        page = "model.safetensors" if words[0] == "export" else "report.html"
        assert (written / page if written.is_dir() else written).stat().st_size > 0
    elif "--predictions.output" in words:
        assert len(Path(words[-1]).read_text().splitlines()) == 2
    elif words[0] in SAYS:
        assert SAYS[words[0]] in capsys.readouterr().out
    else:
        assert "The function" in capsys.readouterr().out


@pytest.mark.skipif("load" not in lightning_models.__all__, reason="lightning_models has no load")
def test_the_python_of_the_readme(folder, monkeypatch, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    monkeypatch.chdir(folder)
    train_thoughtbubbles(folder)
    capsys.readouterr()
    exec(compile(block, "README.md", "exec"), {})
    assert "noncausal" in capsys.readouterr().out
    assert (folder / "thoughts.png").stat().st_size > 0


def train_thoughtbubbles(folder):
    """Trains the demo's other model, once; in the folder that is the working one."""
    if not (folder / "runs/demo/thoughtbubbles").exists():
        demo = ["fit", "-c", "configs/thoughtbubbles/tiny.yaml", *SHORT]
        assert train([*demo, "--trainer.default_root_dir", "runs/demo/thoughtbubbles"]) == 0


def save_gpt2(folder, entries=257):
    """A model of ``entries``, and a tokenizer of so many that knows a few names."""
    import tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    place = folder / f"gpt2-{entries}"
    sizes = {"vocab_size": entries, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(place)
    if entries > 257:
        bpe = train_bpe(f"bpe:{entries}", ["The son of James is John. The father of Mark is Paul."])
        inner = tokenizers.Tokenizer.from_str(bpe.json_text)
        fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
        fast.save_pretrained(place)
    return str(place)


def save_results(folder):
    """Results of two runs each, as ``evaluate.py perplexity`` writes them."""
    for name, factor in (("plain", 1.0), ("gestalt", 0.9)):
        for tokens in (1000, 8000):
            result = {"nats_per_token": factor * 9 / tokens**0.1, "parameters": 5, "tokens": 9}
            result |= {"train_tokens": tokens, "model": name, "likelihood": "exact", "data": {}}
            path = folder / "runs" / f"{name}_{tokens}.json"
            path.write_text(json.dumps(result))


@pytest.mark.parametrize("target", ["demo", "demo-full", "test", "docs"])
def test_make_targets_name_existing_files(target):
    listed = subprocess.run(
        ["make", "--dry-run", "--always-make", target, f"VENV={sys.prefix}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    used = re.findall(r"\b(train\.py|evaluate\.py|configs/\S+\.yaml|docs/\S+\.txt)", listed)
    assert {"test": "pytest", "docs": "mkdocs"}.get(target, "evaluate.py compare") in listed
    assert all((ROOT / name).is_file() for name in used)


def test_paths_in_the_readme_exist():
    shown = re.findall(r"`((?:configs|docs|lightning_models|tests)/[\w./]*)`", TEXT)
    linked = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert len(linked) > 20
    assert sorted(name for name in {*shown, *linked} if not (ROOT / name).exists()) == []


def test_tasks_of_local_data(folder, monkeypatch, capsys):
    """The command that begins with a variable."""
    (command,) = [line for line in commands() if " evaluate.py tasks " in line]
    (variable, *words) = shlex.split(command)
    name, _, place = variable.partition("=")
    monkeypatch.chdir(folder)
    write_folder(folder / place)
    monkeypatch.setenv(name, str(folder / place))
    assert evaluate([*words[2:], "--output", "tasks.json"]) == 0
    assert "lambada_local" in capsys.readouterr().out
    assert "lambada_local" in (folder / "tasks.json").read_text()


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_of_evaluation_is_in_the_readme(verb):
    assert re.search(rf"`{verb}`|evaluate\.py {verb}\b", TEXT)
