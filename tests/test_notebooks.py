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
    content = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


@each
def test_names_exist(name):
    """Imported names and modules' attributes, methods of a loaded model, and variables."""
    lines = "\n".join("".join(cell["source"]) for cell in cells(name)).splitlines()
    code = ast.parse("\n".join(line for line in lines if not line.startswith("%")))
    defined, modules, used = {*dir(builtins), "display"}, {}, set()
    for node in ast.walk(code):
        match node:
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    assert hasattr(importlib.import_module(module), alias.name), alias.name
                    defined.add(alias.asname or alias.name)
            case ast.Import(names=names):
                modules |= {alias.asname or alias.name: alias.name for alias in names}
            case ast.FunctionDef(name=new) | ast.arg(arg=new) | ast.Name(id=new, ctx=ast.Store()):
                defined.add(new)
            case ast.Name(id=read):
                used.add(read)
    assert used <= defined | set(modules)
    for node in ast.walk(code):
        match node:
            case ast.Attribute(value=ast.Name(id="lm"), attr=attribute):
                assert attribute in LOADED
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if owner in modules:
                assert hasattr(importlib.import_module(modules[owner]), attribute)


@each
def test_outputs_are_small_and_of_one_run(name):
    counts = [cell["execution_count"] for cell in cells(name)]
    outputs = [output for cell in cells(name) for output in cell["outputs"]]
    texts = [(output.get("text"), *output.get("data", {}).values()) for output in outputs]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES
    assert counts == list(range(1, len(counts) + 1))
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
