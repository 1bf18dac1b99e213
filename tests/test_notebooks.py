"""The notebooks: their code, their outputs and, marked slow, that they run."""

import ast
import builtins
import importlib
import json
import re

import pytest

from evaluation.api import LoadedModel
from tests.programs import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PLACES = re.compile(r"/(home|root|work|tmp|Users|opt|usr)/")
"""Paths of the machine that the outputs come from."""
MOST_BYTES = 300_000
LOADED = {"checkpoint", "model", "tokenizer", "precision"} | set(vars(LoadedModel))

each = pytest.mark.parametrize("name", NOTEBOOKS)


def cells(name):
    """The code cells of a notebook."""
    content = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def tree(name):
    """The syntax tree of a notebook's code, magics aside."""
    lines = "\n".join("".join(cell["source"]) for cell in cells(name)).splitlines()
    return ast.parse("\n".join(line for line in lines if not line.startswith("%")))


def test_there_are_three():
    assert NOTEBOOKS == ["analyse", "compare", "first"]


@each
def test_names_exist(name):
    """Imported names and modules' attributes, methods of a loaded model, and variables."""
    known, modules = {*dir(builtins), "display"}, {}
    code = tree(name)
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            known |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            known |= {node.name}
        elif isinstance(node, ast.arg):
            known |= {node.arg}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known |= {node.id}
    used = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}
    assert used <= known | set(modules)
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                assert hasattr(importlib.import_module(modules[node.value.id]), node.attr)
            if node.value.id == "lm":
                assert node.attr in LOADED


@each
def test_outputs_are_small_and_of_one_run(name):
    path = FOLDER / f"{name}.ipynb"
    outputs = [output for cell in cells(name) for output in cell["outputs"]]
    texts = [
        text
        for output in outputs
        for text in (output.get("text"), *output.get("data", {}).values())
    ]
    assert path.stat().st_size < MOST_BYTES
    assert [cell["execution_count"] for cell in cells(name)] == list(range(1, len(cells(name)) + 1))
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert not PLACES.search(json.dumps(texts))


@pytest.mark.slow
@each
def test_it_runs(name, session_folder, monkeypatch):
    """In a folder that all have in common, so that the text is prepared once."""
    nbformat, nbclient = (pytest.importorskip(module) for module in ("nbformat", "nbclient"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = session_folder / "notebooks"
    folder.mkdir(exist_ok=True)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert len(outputs) >= 5
    assert not PLACES.search(json.dumps([output.get("text") for output in outputs]))
