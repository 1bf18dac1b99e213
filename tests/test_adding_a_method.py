"""The page on adding a method, done: its files in a copy of the project, and its commands."""

import re
import shlex
import shutil

import pytest

from tests.programs import ROOT, run

PAGE = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"""^```(?P<language>\w+)(?: behind="(?P<mark>[^"]+)")?"""
    r"(?: (?P<way>file|append)=(?P<name>\S+))?\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
COPIED = ("lightning_models", "datamodules", "callbacks", "training", "evaluation", "tests")
BLOCKS = [found.groupdict() for found in BLOCK.finditer(PAGE)]
FILES = [block for block in BLOCKS if block["way"]]
COMMANDS = [
    line for block in BLOCKS if block["language"] == "bash" for line in block["text"].splitlines()
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory, data_cache):
    """The project with the page's files, and the text that the session has prepared."""
    folder = tmp_path_factory.mktemp("project")
    data_cache.mkdir(exist_ok=True)
    (folder / "data_cache").symlink_to(data_cache)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "evaluate.py", "pyproject.toml"):
        shutil.copyfile(ROOT / name, folder / name)
    for block in FILES:
        path = folder / block["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(written(before, block), encoding="utf-8")
    return folder


def written(before, block):
    """A file with what a block of the page adds to it."""
    if block["mark"]:
        assert before.count(block["mark"]) == 1
        return before.replace(block["mark"], f"{block['mark']}\n{block['text'].rstrip()}")
    assert bool(before) == (block["way"] == "append")
    return f"{before}\n{block['text']}" if before else block["text"]


def execute(command, folder):
    done = run(*shlex.split(command)[1:], cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_page_has_files_and_commands():
    assert len(FILES) == 7
    assert [line.split()[1] for line in COMMANDS] == ["train.py", "evaluate.py", "-m"]


def test_it_trains_and_is_evaluated(copy):
    execute(COMMANDS[0], copy)
    saved = list(copy.glob("runs/**/last.ckpt"))
    assert len(saved) == 1
    assert "bits per byte" in execute(COMMANDS[1], copy)


def test_files_are_as_linters_want_them(copy):
    found = execute("python -m ruff check lightning_models/refiner tests/methods.py", copy)
    assert "All checks passed" in found


def test_the_contract_suite_runs_on_it(copy):
    told = execute(f"{COMMANDS[2]} -q -p no:cacheprovider", copy)
    passed = re.search(r"(\d+) passed", told)
    assert passed is not None
    assert int(passed[1]) >= 15
    assert "failed" not in told


def test_without_refinements_it_is_the_plain_decoder(copy):
    """What the page says of the degenerate case."""
    told = execute(f"python -c {shlex.quote(DEGENERATE)}", copy)
    assert float(told) == 0.0


DEGENERATE = """
import torch
from lightning_models import RefinerConfig, RefinerLM, TransformerConfig, TransformerLM
shape = {"num_layers": 2, "dim": 16, "num_heads": 2, "vocab_size": 11, "block_size": 8}
refined = RefinerLM(RefinerConfig(**shape, refinements=0))
plain = TransformerLM(TransformerConfig(**shape))
refined.configure_model(), plain.configure_model()
refined.load_state_dict(plain.state_dict(), strict=False)
tokens = torch.arange(8)[None]
print(float((refined.eval().network(tokens) - plain.eval().network(tokens)).abs().max()))
"""
